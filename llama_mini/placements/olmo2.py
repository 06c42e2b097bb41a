"""OLMo 2 (2024, arXiv:2501.00656): norms behind each sublayer, inside the residual; QK-norm over all heads.

    x = x + norm(attention(x))      q = rotate(split(norm(q))), k = rotate(split(norm(k)))
    x = x + norm(ffn(x))

A sublayer reads the stream as it is, and the norm sets the size of its delta. Beside it: the norm
multiplies by its weight before it rounds, and heads turn in float32.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from .. import model
from .family import Family
from .files import llama_names
from .keys import SHARED, read
from .parts import Decoder, FamilyConfig, LateCastRMSNorm


class AllHeads(LateCastRMSNorm):
    """A norm over all heads at once, of heads already split: (b, h, t, d)."""

    def forward(self, x: Tensor) -> Tensor:
        normed = super().forward(rearrange(x, "b h t d -> b t (h d)"))
        return rearrange(normed, "b t (h d) -> b h t d", d=x.shape[-1])


class Attention(model.Attention):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.q_norm = AllHeads(self.q_proj.out_features, config.rms_norm_eps)
        self.k_norm = AllHeads(self.k_proj.out_features, config.rms_norm_eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rotate(x, cos, sin).to(x.dtype)


class Block(model.Block):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = Attention(config, norm)
        self.post_attention_norm, self.post_ffn_norm = self.pre_attention_norm, self.pre_ffn_norm
        del self.pre_attention_norm, self.pre_ffn_norm

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = x + self.post_attention_norm(self.attention(x, *how))
        return x + self.post_ffn_norm(self.ffn(x))


class Olmo2(Decoder):
    def __init__(self, config: FamilyConfig) -> None:
        super().__init__(config, LateCastRMSNorm, Block)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return super().angles(positions, torch.float32)


READ = SHARED | frozenset({"attention_bias"})


def _config(given: dict[str, Any]) -> FamilyConfig:
    return read(FamilyConfig, given, READ, rms_norm_eps=1e-5)


FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    model=Olmo2,
    config=_config,
    keys=READ,
    reads=frozenset({"hidden_act"}),
    names=llama_names(
        {
            "pre_attention_norm": None,
            "post_attention_norm": "post_attention_layernorm",
            "pre_ffn_norm": None,
            "post_ffn_norm": "post_feedforward_layernorm",
        }
    ),
)
