"""Multi-head latent attention (MLA, DeepSeek V2, arXiv:2405.04434), of Youtu and DeepSeek V3.

q comes out of a narrow latent, k and v out of another, and each latent has a norm. One key for all heads is
rotated and joins every k. The cache keeps the normed latent and that key.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn

from .. import model
from ..cache import BlockCache
from ..config import require_positive, short
from .base import FamilyConfig


@dataclass(frozen=True)
class LatentConfig(FamilyConfig):
    """`head_dim` is that of q and k: `qk_nope_head_dim` + `qk_rope_head_dim`."""

    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True

    def __post_init__(self) -> None:
        for key in ("qk_nope_head_dim", "qk_rope_head_dim"):
            require_positive(key, getattr(self, key), int)
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim {self.qk_rope_head_dim} is odd, and RoPE turns pairs"
            )
        whole = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.head_dim not in (None, self.qk_rope_head_dim, whole):
            raise ValueError(
                f"head_dim is {short(self.head_dim)}, and qk_rope_head_dim {self.qk_rope_head_dim}: with "
                "latent attention both say how many numbers of each head turn"
            )
        object.__setattr__(self, "head_dim", whole)
        super().__post_init__()
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}: latent attention has as many as "
                f"num_attention_heads, {self.num_attention_heads}"
            )

    def cached(self) -> tuple[int, int, int]:
        return 1, self.kv_lora_rank, self.qk_rope_head_dim

    def turned(self) -> int:
        return self.qk_rope_head_dim


# What null says of a key is not what it means to leave the key out.
NULLABLE = frozenset({"q_lora_rank", "rope_interleave"})


class LatentAttention(nn.Module):
    def __init__(self, config: LatentConfig, norm: type[nn.Module]) -> None:
        super().__init__()
        m, h, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
        self.config, bias = config, config.attention_bias
        if rank is None:
            self.q_proj = nn.Linear(m, h * config.head_dim, bias=False)
        else:
            self.q_down = nn.Linear(m, rank, bias)
            self.q_latent_norm = norm(rank, 1e-6)  # not the config's eps
            self.q_up = nn.Linear(rank, h * config.head_dim, bias=False)
        self.kv_down = nn.Linear(m, config.kv_lora_rank + config.qk_rope_head_dim, bias)
        self.kv_latent_norm = norm(config.kv_lora_rank, 1e-6)
        out = config.qk_nope_head_dim + config.v_head_dim
        self.kv_up = nn.Linear(config.kv_lora_rank, h * out, bias=False)
        self.o_proj = nn.Linear(h * config.v_head_dim, m, bias)
        self.attend = model.Attend()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: BlockCache | None
    ) -> Tensor:
        still, turned = self.config.qk_nope_head_dim, self.config.qk_rope_head_dim
        low = self.config.q_lora_rank is not None
        q = self.q_up(self.q_latent_norm(self.q_down(x))) if low else self.q_proj(x)
        q = rearrange(q, "b t (h d) -> b h t d", d=still + turned)
        q = torch.cat((q[..., :still], self.rotate(q[..., still:], cos, sin)), dim=-1)
        latent, key = self.kv_down(x).unsqueeze(1).split((self.config.kv_lora_rank, turned), dim=-1)
        latent, key = self.kv_latent_norm(latent), self.rotate(key, cos, sin)
        if cache is not None:
            latent, key = cache.append(latent, key)
        kv = rearrange(self.kv_up(latent), "b 1 s (h d) -> b h s d", h=q.shape[1])
        k, v = kv.split((still, self.config.v_head_dim), dim=-1)
        k = torch.cat((k, key.expand(-1, q.shape[1], -1, -1)), dim=-1)
        return self.o_proj(rearrange(self.attend(q, k, v, mask), "b h t d -> b t (h d)"))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Interleaved pairs in, half-split pairs out: a dot product does not care."""
        if self.config.rope_interleave:
            x = rearrange(x, "... (i two) -> ... (two i)", two=2)
        return model.rotate(x, cos, sin)


class LatentBlock(model.Block):
    """model.Block with latent attention."""

    def __init__(self, config: LatentConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.add_module("attention", LatentAttention(config, norm))
