"""BLOOM (2022, arXiv:2211.05100): pre-norm, and a norm on the embedding, so that training stays stable.

    x = norm(embed(tokens))
    x = x + attention(norm(x))
    x = x + ffn(norm(x))

Beside it: LayerNorm, biases; positions as a bias on the scores that grows with distance (ALiBi,
arXiv:2108.12409); no gate; q, k and v as one matrix, head by head. With
`apply_residual_connection_post_layernorm` the stream is the norm's output: n = norm(x), x = n + f(n).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .base import EmbedNorm, FamilyBlock, UnturnedConfig
from .family import family
from .ffn import BloomMLP
from .files import BLOOM, head_by_head
from .gpt import BIASES, BLOOM_KEYS, UNTURNED, four_times_hidden_size
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


class Bloom(EmbedNorm):
    def __init__(self, config: BloomConfig, norm: type[nn.Module], block: type[nn.Module]) -> None:
        after = config.apply_residual_connection_post_layernorm
        super().__init__(config, norm, PostBlock if after else block)


FAMILY = family(
    "bloom",
    "BloomForCausalLM",
    Bloom,
    nn.LayerNorm,
    Block,
    BloomConfig,
    keys={"apply_residual_connection_post_layernorm"},
    unshared={"intermediate_size"} | UNTURNED,
    renames=BLOOM_KEYS,
    fields=four_times_hidden_size,
    reads={"hidden_dropout", "slow_but_exact"},
    names=BLOOM,
    split=head_by_head,
    tie_word_embeddings=True,
    **BIASES,
)
