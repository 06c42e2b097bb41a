"""What several families share: norms, feed-forward networks, partial rotation, positions, windows.

Each file beside this one is a family: what differs from `model.py`, under its formula. The order of casts
and of sums is transformers', so that every bit agrees.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .. import model
from ..cache import KVCache
from ..config import LlamaConfig, RopeConfig, require_positive, short
from ..rope import cos_sin, rotate
from .keys import FULL, NOPE, SLIDING

# Norms, made as norm(dim, eps), as model.RMSNorm is. nn.LayerNorm is one of them.


class LateCastRMSNorm(model.RMSNorm):
    """RMSNorm that multiplies by the weight in float32, then rounds; Llama rounds first (OLMo 2)."""

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed).to(x.dtype)


class OnePlusRMSNorm(model.RMSNorm):
    """RMSNorm with a gain of 1 + weight, in float32, rounded last (Gemma): weight decay pulls it to 1."""

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype)


class BareRMSNorm(nn.Module):
    """RMSNorm without a gain (nanochat)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


# Feed-forward networks


def gelu_new(x: Tensor) -> Tensor:
    """GELU by tanh, operation by operation as in GPT-2: the fused form rounds otherwise."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3.0))))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": gelu_new,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


class MLP(nn.Module):
    """down(act(up(x))): a feed-forward network without a gate, (b, t, m) -> (b, t, m)."""

    def __init__(self, config: LlamaConfig, act: Callable[[Tensor], Tensor], bias: bool) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.up_proj(x)))


class GLU(model.SwiGLU):
    """down(act(gate(x)) * up(x)): SwiGLU with another activation."""

    def __init__(self, config: LlamaConfig, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__(config)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class FusedGLU(nn.Module):
    """SwiGLU with gate and up as one matrix, as the files have it.

    Two matrices would do, but the activation then meets whole rows: at some widths the last bit differs.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Expert(model.SwiGLU):
    """SwiGLU as one of many, bit for bit `FusedGLU`, which transformers makes of the files' matrices."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.cat((self.gate_proj(x), self.up_proj(x)), dim=-1).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


def mixture(experts: nn.ModuleList, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of what each token's experts make of it, in the weights' dtype: tokens (n, m), and
    for each the numbers and weights of its k experts (n, k) -> (n, m).
    """
    deltas = weights.new_zeros(*chosen.shape, tokens.shape[-1])
    for n, expert in enumerate(experts):
        token, place = torch.where(chosen == n)
        deltas[token, place] = expert(tokens[token]) * weights[token, place, None]
    return deltas.sum(1).to(tokens.dtype)


# Attention


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


class PartlyRotated(model.Attention):
    """Attention that turns as much of each head as there are angles for."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate_part(x, cos, sin)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_part` for pairs that stand side by side: x[2i], x[2i + 1]."""
    turned = 2 * cos.shape[-1]
    halves = rotate(rearrange(x[..., :turned], "... (i two) -> ... (two i)", two=2), cos, sin)
    pairs = rearrange(halves, "... (two i) -> ... (i two)", two=2)
    return torch.cat((pairs, x[..., turned:]), dim=-1)


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), which lies within (-cap, cap); None caps nothing."""
    return x if cap is None else torch.tanh(x / cap) * cap


def causal(q: Tensor, k: Tensor) -> Tensor:
    """The mask that None stands for, written out: (1, 1, t, s), the last query sees all keys."""
    t, s = q.shape[2], k.shape[2]
    return torch.ones(1, 1, t, s, dtype=torch.bool, device=q.device).tril(s - t)


# Configs and models


@dataclass(frozen=True)
class FamilyConfig(LlamaConfig):
    """A `LlamaConfig` and what more a family's config.json says, under the same names."""

    attention_bias: bool = False
    o_proj_bias: bool = True  # whether o_proj has a bias where q, k and v have
    mlp_bias: bool = False
    hidden_act: str = "silu"
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        base = {field.name for field in dataclasses.fields(LlamaConfig)}
        for field in dataclasses.fields(self):
            text = field.type.__name__ if isinstance(field.type, type) else str(field.type)
            value, kind = getattr(self, field.name), text.removesuffix(" | None")
            if field.name in base or (value is None and kind != text):
                continue
            if kind == "bool" and not isinstance(value, bool):
                raise ValueError(f"{field.name} must be true or false, not {short(value)}")
            if kind in ("int", "float"):
                require_positive(field.name, value, *((int, float) if kind == "float" else (int,)))
        if self.partial_rotary_factor > 1:
            raise ValueError(f"partial_rotary_factor is {self.partial_rotary_factor}: above 1")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act is {short(self.hidden_act)}: it must be one of {', '.join(ACTIVATIONS)}"
            )


class Decoder(model.Llama):
    """`Llama` with what any family may have: biases in attention, and heads that rotate in part."""

    config: FamilyConfig

    def __init__(self, config: FamilyConfig, norm: type[nn.Module], block: type[nn.Module]) -> None:
        super().__init__(config, norm, block)
        attention = ["q_proj", "k_proj", "v_proj"] + ["o_proj"] * config.o_proj_bias
        for layer in self.blocks:
            if config.attention_bias:
                add_biases(layer.get_submodule("attention"), *attention)
            if config.mlp_bias:
                add_biases(layer.get_submodule("ffn"), "gate_proj", "up_proj", "down_proj")

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        turned = int(self.config.head_dim * self.config.partial_rotary_factor)
        return cos_sin(self.config.rope, turned, positions, dtype)


@dataclass(frozen=True)
class LearnedConfig(FamilyConfig):
    """A config whose positions are rows of a table, and end with it."""

    def require_in_window(self, length: int) -> None:
        if length > self.max_position_embeddings:
            raise ValueError(
                f"{length} positions: this checkpoint has learned max_position_embeddings = "
                f"{self.max_position_embeddings}; use a shorter prompt or fewer new tokens"
            )


class LearnedPositions(Decoder):
    """A decoder that adds a learned vector for each position to the embedding, and rotates nothing."""

    def __init__(self, config: FamilyConfig, block: type[nn.Module]) -> None:
        super().__init__(config, nn.LayerNorm, block)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def embedding(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embed(tokens) + self.positions(positions)


@dataclass(frozen=True)
class WindowConfig(FamilyConfig):
    """A config with a kind for each block, by turns: those of `SLIDING` see the last `sliding_window` keys
    only, and rotate by `local_rope` where there is one; those whose kind begins with `NOPE` do not rotate.
    """

    layer_types: tuple[str, ...] = (FULL,)
    local_rope: RopeConfig | None = None

    def context(self) -> int:
        return self.max_position_embeddings

    def require_in_window(self, length: int) -> None:
        """Nothing to require: what is beyond the window is hidden."""


class Windowed(Decoder):
    """A decoder whose blocks are of several kinds, with a mask and angles for each kind."""

    config: WindowConfig

    def through_blocks(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        x, kinds = self.embedding(tokens, positions), self.config.layer_types
        keys = tokens.shape[1] + (0 if cache is None else cache.length)
        local = within(self.config.sliding_window, mask, tokens.shape[1], keys, x.device)
        seen = {
            kind: (
                *self.kind_angles(kind, positions, x.dtype),
                local if kind.endswith(SLIDING) else mask,
            )
            for kind in set(kinds)
        }
        for n, block in enumerate(self.blocks):
            x = block(x, *seen[kinds[n % len(kinds)]], None if cache is None else cache[n])
        return x

    def kind_angles(
        self, kind: str, positions: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine for the blocks of a kind: of no pair at all where they do not rotate."""
        rope = self.config.local_rope if kind == SLIDING else None
        turned = int(self.config.head_dim * self.config.partial_rotary_factor)
        cos, sin = cos_sin(rope or self.config.rope, turned, positions, dtype)
        return (cos[..., :0], sin[..., :0]) if kind.startswith(NOPE) else (cos, sin)


def within(
    window: int | None, mask: Tensor | None, t: int, s: int, device: torch.device
) -> Tensor | None:
    """The mask for t queries over s keys with all keys hidden but the last `window` of each query."""
    if window is None or s <= window:
        return mask
    ones = torch.ones(1, 1, t, s, dtype=torch.bool, device=device)
    return (ones.tril(s - t) if mask is None else mask) & ones.triu(s - t - window + 1)
