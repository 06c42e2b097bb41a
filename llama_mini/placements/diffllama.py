"""DiffLlama (Differential Transformer, 2024, arXiv:2410.05258): a norm on the difference of two attentions.

    x = x + attention(norm(x))      attention: o_proj((1 - c) * norm(heads1 - l * heads2))
    x = x + ffn(norm(x))

Heads come in pairs that read the same v, and the second is subtracted, l times: what both see cancels. The
norm, over each pair, has no gain; l is learned, and starts at c, which grows with depth.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import FamilyAttention
from .base import FamilyBlock, FamilyConfig
from .family import family
from .files import DIFFERENCE, LAMBDAS


class Attention(FamilyAttention):
    start = 0.2  # c

    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        if (g := config.num_key_value_heads) % 2:
            raise ValueError(f"num_key_value_heads is {g}: heads come in pairs, so make it even")
        super().__init__(config, norm)
        self.eps = config.rms_norm_eps
        for name in LAMBDAS:
            self.register_parameter(name, nn.Parameter(torch.zeros(config.head_dim)))

    def heads(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        halves = (half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=1))
        heads = torch.cat([self.attend(q, k, half, mask) for half in halves], dim=-1)
        first, second = heads.chunk(2, dim=1)
        q1, k1, q2, k2 = map(self.get_parameter, LAMBDAS)
        one, two = ((q * k).sum(-1, dtype=torch.float32).exp() for q, k in ((q1, k1), (q2, k2)))
        heads = first - (one.to(q.dtype) - two.to(q.dtype) + self.start) * second
        return (1 - self.start) * F.rms_norm(heads, heads.shape[-1:], eps=self.eps)


class Block(FamilyBlock):
    attention: Attention
    attention_class = Attention

    def at_depth(self, n: int, config: FamilyConfig) -> None:
        self.attention.start = 0.8 - 0.6 * math.exp(-0.3 * n)


FAMILY = family(
    "diffllama",
    "DiffLlamaForCausalLM",
    block=Block,
    keys={"attention_bias"},
    reads={"hidden_act", "lambda_std_dev"},
    names=DIFFERENCE,
    rms_norm_eps=1e-5,
)
