"""ERNIE 4.5 (Baidu 2025): Llama whose heads turn in float32, in pairs that stand side by side.

x = x + attention(norm(x))
x = x + ffn(norm(x))
"""

from typing import Any

import torch
from torch import Tensor, nn

from .. import model
from .family import Family
from .keys import SHARED, read
from .llama import NAMES
from .parts import Decoder, FamilyConfig, rotate_interleaved


class Attention(model.Attention):
    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate_interleaved(x.float(), cos, sin).to(x.dtype)


class Block(model.Block):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = Attention(config, norm)


class Ernie(Decoder):
    def __init__(self, config: FamilyConfig) -> None:
        super().__init__(config, model.RMSNorm, Block)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return super().angles(positions, torch.float32)


def _config(given: dict[str, Any]) -> FamilyConfig:
    bias = given.get("use_bias", False)
    return read(
        FamilyConfig,
        given,
        theta=500000.0,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=bias,
        mlp_bias=bias,
    )


FAMILY = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    model=Ernie,
    config=_config,
    keys=SHARED | {"use_bias"},
    reads=frozenset({"hidden_act"}),
    names=NAMES,
)
