"""What families change in model.Attention: how far heads turn, which pairs, and its steps."""

import torch
from einops import rearrange
from torch import Tensor, nn

from .. import model
from ..cache import BlockCache
from ..config import LlamaConfig
from ..rope import rotate


def add_biases(module: nn.Module, *names: str) -> None:
    """Give a bias to each linear layer of `module` that is named."""
    for name in names:
        linear = module.get_submodule(name)
        weight = linear.get_parameter("weight")
        linear.bias = nn.Parameter(weight.new_zeros(weight.shape[0]))


def rotate_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first numbers of each head, as many as there are angles for, and leave the others."""
    turned = 2 * cos.shape[-1]
    return torch.cat((rotate(x[..., :turned], cos, sin), x[..., turned:]), dim=-1)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_part` for pairs that stand side by side: x[2i], x[2i + 1]."""
    turned = 2 * cos.shape[-1]
    halves = rotate(rearrange(x[..., :turned], "... (i two) -> ... (two i)", two=2), cos, sin)
    pairs = rearrange(halves, "... (two i) -> ... (i two)", two=2)
    return torch.cat((pairs, x[..., turned:]), dim=-1)


class FamilyAttention(model.Attention):
    """model.Attention in steps, each of which a family may change; it turns as much of each head as there
    are angles for, in the dtype of the angles.
    """

    inner: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # what reads x
    own_gains = False  # whether norms of q and k have a gain for each head

    def __init__(self, config: LlamaConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        if config.qk_norm and self.own_gains:
            d, eps = config.head_dim, config.rms_norm_eps
            self.q_norm = norm((config.num_attention_heads, d), eps)
            self.k_norm = norm((config.num_key_value_heads, d), eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: BlockCache | None
    ) -> Tensor:
        q, k, v = self.project(x)
        q, k = self.place(q, k, cos, sin)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.o_proj(rearrange(self.heads(q, k, v, mask), "b h t d -> b t (h d)"))

    def project(self, x: Tensor) -> list[Tensor]:
        """q (b, h, t, d), k and v (b, g, t, d)."""
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return [rearrange(part, "b t (h d) -> b h t d", d=self.head_dim) for part in parts]

    def place(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """q and k normed, where they are, and turned."""
        return self.rotate(self.q_norm(q), cos, sin), self.rotate(self.k_norm(k), cos, sin)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate_part(x, cos, sin).to(x.dtype)

    def heads(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """What o_proj reads, (b, h, t, d)."""
        return self.attend(q, k, v, mask)


class Interleaved(FamilyAttention):
    """Attention whose pairs stand side by side."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate_interleaved(x, cos, sin).to(x.dtype)


class FusedAttention(FamilyAttention):
    """Attention whose q, k and v come of one matrix, as in the files: apart, some take another kernel.

    Its rows are those of q, then k, then v, or with `by_head` head 0's q, k and v, then head 1's.
    """

    inner = ("qkv_proj",)
    by_head = False

    def __init__(self, config: LlamaConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        h, g, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.sizes = (h * d, g * d, g * d)
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        del self.q_proj, self.k_proj, self.v_proj

    def project(self, x: Tensor) -> list[Tensor]:
        if self.by_head:
            qkv = rearrange(self.qkv_proj(x), "b t (h d) -> b h t d", d=3 * self.head_dim)
            return list(qkv.chunk(3, dim=-1))
        parts = self.qkv_proj(x).split(self.sizes, dim=-1)
        return [rearrange(part, "b t (h d) -> b h t d", d=self.head_dim) for part in parts]


class FusedByHead(FusedAttention):
    by_head = True


class Unrotated(FusedAttention):
    """`FusedAttention` without rotary positions."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x
