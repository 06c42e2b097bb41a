"""BLOOM (2022, arXiv:2211.05100): pre-norm, and a norm on the embedding, so that training stays stable.

    x = norm(embed(tokens))
    x = x + attention(norm(x))
    x = x + ffn(norm(x))

Beside it: LayerNorm, biases, no gate; positions as a bias on the scores (ALiBi, arXiv:2108.12409). With
`apply_residual_connection_post_layernorm` the stream is the norm's output: n = norm(x), x = n + f(n).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .base import EmbedNorm, FamilyBlock, UnturnedConfig
from .family import family
from .ffn import BloomMLP
from .files import BLOOM
from .gpt import BLOOM_KEYS, TIED, UNTURNED, four_times_hidden_size
from .scores import Alibi


@dataclass(frozen=True)
class BloomConfig(UnturnedConfig):
    apply_residual_connection_post_layernorm: bool = False


class Block(FamilyBlock):
    attention_class, ffn_class = Alibi, BloomMLP


class PostBlock(Block):
    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = self.pre_attention_norm(x)
        x = x + self.attention(x, *how)
        x = self.pre_ffn_norm(x)
        return x + self.ffn(x)


def block(config: BloomConfig, norm: type[nn.Module]) -> Block:
    return (PostBlock if config.apply_residual_connection_post_layernorm else Block)(config, norm)


FAMILY = family(
    "bloom",
    "BloomForCausalLM",
    EmbedNorm,
    nn.LayerNorm,
    block,
    BloomConfig,
    keys={"apply_residual_connection_post_layernorm"},
    unshared={"intermediate_size"} | UNTURNED,
    renames=BLOOM_KEYS,
    fields=four_times_hidden_size,
    reads={"hidden_dropout", "slow_but_exact"},
    names=BLOOM,
    **TIED,
)
