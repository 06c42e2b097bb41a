"""OLMo (Groeneveld et al. 2024, arXiv:2402.00838): pre-norm by LayerNorm without any weight.

    x = x + attention(norm(x))
    x = x + ffn(norm(x))          norm(x) = (x - mean(x)) / std(x)

Beside it: heads turn in float32; q, k and v may be clipped.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from .attention import FamilyAttention
from .base import FamilyBlock, FamilyConfig
from .family import family
from .norms import BareLayerNorm


@dataclass(frozen=True)
class OlmoConfig(FamilyConfig):
    clip_qkv: float | None = None


class Attention(FamilyAttention):
    def __init__(self, config: OlmoConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.limit = config.clip_qkv

    def project(self, x: Tensor) -> list[Tensor]:
        parts = super().project(x)
        if self.limit is None:
            return parts
        return [part.clamp(-self.limit, self.limit) for part in parts]


class Block(FamilyBlock):
    attention_class = Attention


FAMILY = family(
    "olmo",
    "OlmoForCausalLM",
    norm=BareLayerNorm,
    block=Block,
    config=OlmoConfig,
    keys={"attention_bias", "clip_qkv"},
    float32_angles=True,
)
