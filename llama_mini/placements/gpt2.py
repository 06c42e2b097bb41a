"""GPT-2 (Radford et al. 2019): pre-norm, before RMSNorm. The norms stand where Llama's do.

    x = x + attention(norm(x))
    x = x + ffn(norm(x))

Beside it: LayerNorm, biases everywhere, learned positions, no gate in the FFN. The files hold q, k and v as
one matrix, and every matrix of a block transposed.
"""

from dataclasses import dataclass

from torch import nn

from . import files
from .attention import Unrotated
from .base import FamilyBlock, LearnedConfig, LearnedPositions
from .family import family
from .ffn import MLP
from .gpt import GPT_KEYS, GPT_MASK, GPT_UNUSED, TIED, UNTURNED, four_times_hidden_size
from .keys import declared


@dataclass(frozen=True)
class GPT2Config(LearnedConfig):
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False


class Block(FamilyBlock):
    attention_class, ffn_class = Unrotated, MLP

    def at_depth(self, n: int, config: GPT2Config) -> None:
        scale = config.head_dim**-0.5 if config.scale_attn_weights else 1.0
        divisor = n + 1 if config.scale_attn_by_inverse_layer_idx else 1
        self.attention.attend.scale = scale / divisor


FAMILY = family(
    "gpt2",
    "GPT2LMHeadModel",
    LearnedPositions,
    nn.LayerNorm,
    Block,
    GPT2Config,
    keys=declared(GPT2Config) | {"hidden_act"},
    unshared=UNTURNED,
    renames={**GPT_KEYS, "n_inner": "intermediate_size", "activation_function": "hidden_act"},
    fields=four_times_hidden_size,
    reads=GPT_UNUSED | {"add_cross_attention", "reorder_and_upcast_attn"},
    names=files.GPT2,
    split=files.transposed,
    constant=GPT_MASK,
    hidden_act="gelu_new",
    max_position_embeddings=1024,
    **TIED,
)
