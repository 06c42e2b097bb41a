"""OLMo (Groeneveld et al. 2024, arXiv:2402.00838): pre-norm by LayerNorm without any weight.

    x = x + attention(norm(x))
    x = x + ffn(norm(x))          norm(x) = (x - mean(x)) / std(x)

Beside it: heads turn in float32; q, k and v may be clipped.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import model
from .family import Family
from .keys import SHARED, read
from .llama import NAMES
from .parts import Decoder, FamilyConfig


@dataclass(frozen=True)
class OlmoConfig(FamilyConfig):
    clip_qkv: float | None = None


class BareLayerNorm(nn.Module):
    """LayerNorm without weight and bias, in float32. The eps is no key of the config."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.shape = (dim,)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.shape, eps=1e-5).to(x.dtype)


class Clipped(nn.Linear):
    """A linear layer without bias whose outputs lie within `limit` of 0."""

    def __init__(self, like: nn.Linear, limit: float) -> None:
        super().__init__(like.in_features, like.out_features, bias=False)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-self.limit, self.limit)


class Attention(model.Attention):
    def __init__(self, config: OlmoConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        if config.clip_qkv is not None:
            self.q_proj = Clipped(self.q_proj, config.clip_qkv)
            self.k_proj = Clipped(self.k_proj, config.clip_qkv)
            self.v_proj = Clipped(self.v_proj, config.clip_qkv)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rotate(x, cos, sin).to(x.dtype)


class Block(model.Block):
    def __init__(self, config: OlmoConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = Attention(config, norm)


class Olmo(Decoder):
    def __init__(self, config: OlmoConfig) -> None:
        super().__init__(config, BareLayerNorm, Block)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return super().angles(positions, torch.float32)


READ = SHARED | frozenset({"attention_bias", "clip_qkv"})


def _config(given: dict[str, Any]) -> OlmoConfig:
    return read(OlmoConfig, given, READ)


FAMILY = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    model=Olmo,
    config=_config,
    keys=READ,
    reads=frozenset({"hidden_act"}),
    names=NAMES,
)
