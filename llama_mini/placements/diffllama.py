"""DiffLlama (Differential Transformer, 2024, arXiv:2410.05258): a norm on the difference of two attentions.

    x = x + attention(norm(x))      attention: o_proj((1 - c) * norm(heads1 - l * heads2))
    x = x + ffn(norm(x))

Heads come in pairs that read the same v, and the second is subtracted, l times: what both see cancels. The
norm, over each pair, has no gain; l is learned, and starts at c, which grows with depth.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import FamilyAttention
from .base import Decoder, FamilyBlock, FamilyConfig
from .family import family
from .files import llama_names

LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


@dataclass(frozen=True)
class DiffConfig(FamilyConfig):
    def __post_init__(self) -> None:
        super().__post_init__()
        if (g := self.num_key_value_heads) % 2:
            raise ValueError(f"num_key_value_heads is {g}: heads come in pairs, so make it even")


class Attention(FamilyAttention):
    start = 0.2  # c

    def __init__(self, config: DiffConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.eps = config.rms_norm_eps
        for name in LAMBDAS:
            self.register_parameter(name, nn.Parameter(torch.zeros(config.head_dim)))

    def heads(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        halves = (half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=1))
        heads = torch.cat([self.attend(q, k, half, mask) for half in halves], dim=-1)
        first, second = heads.chunk(2, dim=1)
        grown = self.growth("1", q.dtype) - self.growth("2", q.dtype)
        heads = first - (grown + self.start) * second
        return (1 - self.start) * F.rms_norm(heads, heads.shape[-1:], eps=self.eps)

    def growth(self, number: str, dtype: torch.dtype) -> Tensor:
        q, k = self.get_parameter(f"lambda_q{number}"), self.get_parameter(f"lambda_k{number}")
        return torch.exp(torch.sum(q * k, dim=-1, dtype=torch.float32)).to(dtype)


class Block(FamilyBlock):
    attention: Attention
    attention_class = Attention


class DiffLlama(Decoder):
    def __init__(self, config: DiffConfig, norm: type[nn.Module], block: type[nn.Module]) -> None:
        super().__init__(config, norm, block)
        for n, layer in enumerate(self.blocks):
            assert isinstance(layer, Block)
            layer.attention.start = 0.8 - 0.6 * math.exp(-0.3 * n)


FAMILY = family(
    "diffllama",
    "DiffLlamaForCausalLM",
    DiffLlama,
    block=Block,
    config=DiffConfig,
    keys={"attention_bias"},
    reads={"hidden_act", "lambda_std_dev"},
    names=llama_names({f"attention.{name}": f"self_attn.{name}" for name in LAMBDAS}),
    rms_norm_eps=1e-5,
)
