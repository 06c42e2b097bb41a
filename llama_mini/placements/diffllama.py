"""DiffLlama (Differential Transformer, 2024, arXiv:2410.05258): a norm on the difference of two attentions.

    x = x + attention(norm(x))      attention: o_proj((1 - c) * norm(heads1 - l * heads2))
    x = x + ffn(norm(x))

Heads come in pairs that read the same v, and the second is subtracted, l times: what both see cancels. The
norm, over each pair, has no gain; l is learned, and starts at c, which grows with depth.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .. import model
from ..cache import BlockCache
from .family import Family
from .files import llama_names
from .keys import SHARED, read
from .parts import Decoder, FamilyConfig

LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class Attention(model.Attention):
    start = 0.2  # c

    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        for name in LAMBDAS:
            self.register_parameter(name, nn.Parameter(torch.zeros(config.head_dim)))
        self.eps = config.rms_norm_eps

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: BlockCache | None
    ) -> Tensor:
        q = rearrange(self.q_proj(x), "b t (h d) -> b h t d", d=self.head_dim)
        k = rearrange(self.k_proj(x), "b t (g d) -> b g t d", d=self.head_dim)
        v = rearrange(self.v_proj(x), "b t (g d) -> b g t d", d=self.head_dim)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.append(k, v)
        halves = (half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=1))
        heads = torch.cat([self.attend(q, k, half, mask) for half in halves], dim=-1)
        first, second = heads.chunk(2, dim=1)
        grown = self.growth("1", x.dtype) - self.growth("2", x.dtype)
        heads = first - (grown + self.start) * second
        heads = (1 - self.start) * F.rms_norm(heads, heads.shape[-1:], eps=self.eps)
        return self.o_proj(rearrange(heads, "b h t d -> b t (h d)"))

    def growth(self, number: str, dtype: torch.dtype) -> Tensor:
        q, k = self.get_parameter(f"lambda_q{number}"), self.get_parameter(f"lambda_k{number}")
        return torch.exp(torch.sum(q * k, dim=-1, dtype=torch.float32)).to(dtype)


class Block(model.Block):
    attention: Attention

    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = Attention(config, norm)


class DiffLlama(Decoder):
    def __init__(self, config: FamilyConfig) -> None:
        super().__init__(config, model.RMSNorm, Block)
        for n, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            block.attention.start = 0.8 - 0.6 * math.exp(-0.3 * n)


READ = SHARED | {"attention_bias"}


def _config(given: dict[str, Any]) -> FamilyConfig:
    config = read(FamilyConfig, given, READ, rms_norm_eps=1e-5)
    if config.num_key_value_heads % 2:
        raise ValueError(
            f"num_key_value_heads is {config.num_key_value_heads}: heads come in pairs, so make it even"
        )
    return config


FAMILY = Family(
    model_type="diffllama",
    architecture="DiffLlamaForCausalLM",
    model=DiffLlama,
    config=_config,
    keys=READ,
    reads=frozenset({"hidden_act", "lambda_std_dev"}),
    names=llama_names({f"attention.{name}": f"self_attn.{name}" for name in LAMBDAS}),
)
