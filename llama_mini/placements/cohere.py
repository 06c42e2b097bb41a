"""Command R (Cohere 2024): attention and FFN side by side behind one norm.

    n = norm(x)
    x = x + attention(n) + ffn(n)

Beside it: LayerNorm without bias; logits times a constant; a tied head; heads turn in float32, in pairs
that stand side by side; optionally a norm on q and k with weights of its own for every head.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .attention import Interleaved
from .base import FamilyBlock, WindowConfig, Windowed
from .family import family
from .files import llama_names
from .norms import GainLayerNorm


@dataclass(frozen=True)
class CohereConfig(WindowConfig):
    logit_scale: float = 0.0625


class Attention(Interleaved):
    own_gains = True

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rotate(x.float(), cos, sin).to(x.dtype)


class Block(FamilyBlock):
    norms, attention_class = ("pre_attention_norm",), Attention

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        n = self.pre_attention_norm(x)
        return x + self.attention(n, *how) + self.ffn(n)


class Cohere(Windowed):
    config: CohereConfig

    def forward(self, *inputs: Any, **how: Any) -> Tensor:
        return super().forward(*inputs, **how) * self.config.logit_scale


MODEL = (Cohere, GainLayerNorm, Block, CohereConfig)
DEFAULTS: Any = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
FAMILY = family(
    "cohere",
    "CohereForCausalLM",
    *MODEL,
    keys={"attention_bias", "logit_scale", "qk_norm"},
    renames={"layer_norm_eps": "rms_norm_eps", "use_qk_norm": "qk_norm"},
    names=llama_names({"pre_ffn_norm": None}),
    rope_theta=500000.0,
    **DEFAULTS,
)
