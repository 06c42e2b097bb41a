"""OLMo 2 (2024, arXiv:2501.00656): norms behind each sublayer, inside the residual; QK-norm over all heads.

    x = x + norm(attention(x))      q = rotate(split(norm(q))), k = rotate(split(norm(k)))
    x = x + norm(ffn(x))            norm(x) = x / rms(x) * weight

Llama's two norms stand in front of the sublayers, and these behind: a sublayer reads the stream as it is,
and the norm sets the size of its delta. Beside it: the norm multiplies by its weight before it rounds, and
heads turn in float32.
"""

from typing import Any

from torch import Tensor, nn

from .attention import FamilyAttention
from .base import FamilyBlock, FamilyConfig
from .family import family
from .files import BEHIND
from .norms import AllHeads, LateCastRMSNorm


class Attention(FamilyAttention):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.q_norm = AllHeads(self.q_proj.out_features, config.rms_norm_eps)
        self.k_norm = AllHeads(self.k_proj.out_features, config.rms_norm_eps)


class Block(FamilyBlock):
    attention_class = Attention
    norms = ("post_attention_norm", "post_ffn_norm")

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = x + self.post_attention_norm(self.attention(x, *how))
        return x + self.post_ffn_norm(self.ffn(x))


FAMILY = family(
    "olmo2",
    "Olmo2ForCausalLM",
    norm=LateCastRMSNorm,
    block=Block,
    keys={"attention_bias"},
    names=BEHIND,
    rms_norm_eps=1e-5,
    float32_angles=True,
)
