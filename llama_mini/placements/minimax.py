"""MiniMax-Text-01 (2025, arXiv:2501.08313): a norm on the stream, in front of both its branches.

    x = norm(x)
    x = x * a + attention(x) * b
    x = norm(x)
    x = x * c + experts(x) * d

The stream is the norm's output, and its scale never grows. Beside it: experts; linear attention is refused.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .base import FamilyBlock, WindowConfig, Windowed
from .experts import UNUSED, TopExperts
from .family import family
from .files import MINIMAX
from .keys import declared, only_full


@dataclass(frozen=True)
class MiniMaxConfig(WindowConfig):
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    full_attn_alpha_factor: float = 1.0
    full_attn_beta_factor: float = 1.0
    mlp_alpha_factor: float = 1.0
    mlp_beta_factor: float = 1.0


class Block(FamilyBlock):
    ffn_class = TopExperts

    def at_depth(self, n: int, config: MiniMaxConfig) -> None:
        self.a, self.b = config.full_attn_alpha_factor, config.full_attn_beta_factor
        self.c, self.d = config.mlp_alpha_factor, config.mlp_beta_factor

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = self.pre_attention_norm(x)
        x = x * self.a + self.attention(x, *how) * self.b
        x = self.pre_ffn_norm(x)
        return x * self.c + self.ffn(x) * self.d


FAMILY = family(
    "minimax",
    "MiniMaxForCausalLM",
    Windowed,
    block=Block,
    config=MiniMaxConfig,
    keys=declared(MiniMaxConfig) | {"layer_types", "sliding_window"},
    required=("num_key_value_heads",),
    fields=only_full,
    reads=UNUSED | {"hidden_act", "linear_attn_alpha_factor", "linear_attn_beta_factor"},
    names=MINIMAX,
    rope_theta=1e6,
    rms_norm_eps=1e-5,
)
