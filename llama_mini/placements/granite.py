"""Granite 3 (IBM 2024): Llama's pre-norm, every delta scaled by a constant.

    x = x + attention(norm(x)) * c
    x = x + ffn(norm(x)) * c

Beside it: constants on the embedding, the scores and the logits too, so that one learning rate serves
models of every width (muP, arXiv:2203.03466).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .base import Decoder, FamilyBlock, FamilyConfig
from .family import family
from .keys import declared


@dataclass(frozen=True)
class GraniteConfig(FamilyConfig):
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0


class Block(FamilyBlock):
    def __init__(self, config: GraniteConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention.attend.scale = config.attention_multiplier
        self.c = config.residual_multiplier

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = x + self.attention(self.pre_attention_norm(x), *how) * self.c
        return x + self.ffn(self.pre_ffn_norm(x)) * self.c


class Granite(Decoder):
    config: GraniteConfig

    def embedding(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embed(tokens) * self.config.embedding_multiplier

    def forward(self, *inputs: Any, **how: Any) -> Tensor:
        return super().forward(*inputs, **how) / self.config.logits_scaling


FAMILY = family(
    "granite",
    "GraniteForCausalLM",
    Granite,
    block=Block,
    config=GraniteConfig,
    keys=declared(GraniteConfig) | {"attention_bias", "mlp_bias"},
)
