"""Command R (Cohere 2024): attention and FFN side by side behind one norm.

    n = norm(x)
    x = x + attention(n) + ffn(n)

Beside it: LayerNorm without bias; logits times a constant; a tied head; heads turn in float32, in pairs
that stand side by side; optionally a norm on q and k with weights of its own for every head.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import model
from .family import Family
from .files import llama_names
from .keys import SHARED, read, renamed
from .parts import WindowConfig, Windowed, rotate_interleaved


@dataclass(frozen=True)
class CohereConfig(WindowConfig):
    logit_scale: float = 0.0625


class GainLayerNorm(nn.Module):
    """LayerNorm with a weight and no bias, operation by operation in float32; `dim` may be (heads, d)."""

    def __init__(self, dim: int | tuple[int, ...], eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 - x32.mean(-1, keepdim=True)
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        gain = self.weight if self.weight.dim() == 1 else self.weight[:, None]  # (h, 1, d)
        return (gain.float() * normed).to(x.dtype)


class Attention(model.Attention):
    def __init__(self, config: CohereConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        if config.qk_norm:
            d, eps = config.head_dim, config.rms_norm_eps
            self.q_norm = GainLayerNorm((config.num_attention_heads, d), eps)
            self.k_norm = GainLayerNorm((config.num_key_value_heads, d), eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate_interleaved(x.float(), cos, sin).to(x.dtype)


class Block(model.Block):
    def __init__(self, config: CohereConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = Attention(config, norm)
        del self.pre_ffn_norm

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        n = self.pre_attention_norm(x)
        return x + self.attention(n, *how) + self.ffn(n)


class Cohere(Windowed):
    config: CohereConfig

    def __init__(self, config: CohereConfig) -> None:
        super().__init__(config, GainLayerNorm, Block)

    def forward(self, *inputs: Any, **how: Any) -> Tensor:
        return super().forward(*inputs, **how) * self.config.logit_scale


KEYS = {"layer_norm_eps": "rms_norm_eps", "use_qk_norm": "qk_norm"}
READ = SHARED | {"attention_bias", "logit_scale", "qk_norm"}
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def _config(given: dict[str, Any]) -> CohereConfig:
    kinds = ("full_attention",)
    return read(
        CohereConfig, renamed(given, KEYS), READ, theta=500000.0, layer_types=kinds, **DEFAULTS
    )


NAMES = llama_names({"pre_ffn_norm": None})
FAMILY = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    model=Cohere,
    config=_config,
    keys=READ | KEYS.keys(),
    reads=frozenset({"hidden_act"}),
    names=NAMES,
)
