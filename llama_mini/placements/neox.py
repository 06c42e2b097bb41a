"""GPT-NeoX, Pythia (Black et al. 2022, arXiv:2204.06745): attention and FFN side by side, two norms.

    x = ffn(norm2(x)) + attention(norm1(x)) + x

Both sublayers read the same stream, so they can run at once. With `use_parallel_residual` false one
follows the other. Beside it: LayerNorm with bias, not RMSNorm; biases; no gate; a quarter of a head turns.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .attention import FusedByHead
from .base import Decoder, FamilyBlock, FamilyConfig
from .family import family
from .ffn import MLP
from .files import NEOX
from .gpt import NEOX_DEFAULTS, NEOX_KEYS, NEOX_MASK


@dataclass(frozen=True)
class NeoXConfig(FamilyConfig):
    use_parallel_residual: bool = True


class Block(FamilyBlock):
    attention_class, ffn_class = FusedByHead, MLP

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        attention = self.attention(self.pre_attention_norm(x), *how)
        return self.ffn(self.pre_ffn_norm(x)) + attention + x  # sums round: in this order


class SequentialBlock(Block):
    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = self.attention(self.pre_attention_norm(x), *how) + x
        return self.ffn(self.pre_ffn_norm(x)) + x


def block(config: NeoXConfig, norm: type[nn.Module]) -> Block:
    return (Block if config.use_parallel_residual else SequentialBlock)(config, norm)


FAMILY = family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    Decoder,
    nn.LayerNorm,
    block,
    NeoXConfig,
    keys={"attention_bias", "hidden_act", "partial_rotary_factor", "use_parallel_residual"},
    unshared={"num_key_value_heads"},
    renames=NEOX_KEYS,
    reads={"classifier_dropout", "hidden_dropout", "is_decoder"},
    names=NEOX,
    constant=NEOX_MASK,
    **NEOX_DEFAULTS,
)
