"""GPT-2 (Radford et al. 2019): pre-norm, before RMSNorm. The norms stand where Llama's do.

    x = attention(norm(x)) + x
    x = x + ffn(norm(x))

Beside it: LayerNorm, biases everywhere, learned positions, no gate in the FFN. The files hold q, k and v as
one matrix, and every matrix of a block transposed.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .. import model
from ..config import LlamaConfig, require_positive
from .family import Family
from .files import chunks, names
from .keys import SHARED, read, renamed
from .parts import ACTIVATIONS, MLP, LearnedConfig, LearnedPositions


@dataclass(frozen=True)
class GPT2Config(LearnedConfig):
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False


class Attention(model.Attention):
    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x


class Block(model.Block):
    def __init__(self, config: GPT2Config, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = Attention(config, norm)
        self.ffn = MLP(config, ACTIVATIONS[config.hidden_act], bias=True)

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = self.attention(self.pre_attention_norm(x), *how) + x
        return x + self.ffn(self.pre_ffn_norm(x))


class GPT2(LearnedPositions):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config, Block)
        scale = config.head_dim**-0.5 if config.scale_attn_weights else 1.0
        for n, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            depth = n + 1 if config.scale_attn_by_inverse_layer_idx else 1
            block.attention.attend.scale = scale / depth


KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
# For training, and for heads that are not the language model's.
UNUSED = frozenset(
    "attn_pdrop embd_pdrop resid_pdrop summary_type summary_use_proj summary_activation "
    "summary_proj_to_labels summary_first_dropout".split()
)
READ = SHARED | frozenset({"hidden_act", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"})


def four_times_hidden_size(given: dict[str, Any]) -> int:
    """The width of the FFN, where no key says it."""
    require_positive("hidden_size", given.get("hidden_size"), int)
    return 4 * given["hidden_size"]


def _config(given: dict[str, Any]) -> GPT2Config:
    given = renamed(given, KEYS)
    return read(
        GPT2Config,
        {"intermediate_size": four_times_hidden_size(given), **given},
        READ,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        hidden_act="gelu_new",
        tie_word_embeddings=True,
        attention_bias=True,
    )


def split(name: str, tensor: Tensor, config: LlamaConfig) -> dict[str, Tensor]:
    """Every matrix of a block turned round, and q, k and v apart: views, since a copy moves bits."""
    if name.startswith("blocks.") and tensor.dim() == 2:
        tensor = tensor.t()
    return chunks(name, tensor, "qkv_proj", ("q_proj", "k_proj", "v_proj"))


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    model=GPT2,
    config=_config,
    keys=READ | KEYS.keys(),
    reads=UNUSED | {"add_cross_attention", "reorder_and_upcast_attn"},
    names=names(
        "transformer.h.N",
        {
            "pre_attention_norm": "ln_1",
            "attention.qkv_proj": "attn.c_attn",
            "attention.o_proj": "attn.c_proj",
            "pre_ffn_norm": "ln_2",
            "ffn.up_proj": "mlp.c_fc",
            "ffn.down_proj": "mlp.c_proj",
        },
        embed="transformer.wte",
        positions="transformer.wpe",
        final_norm="transformer.ln_f",
        lm_head="lm_head",
    ),
    split=split,
    constant=r"(transformer\.)?h\.[0-9]+\.attn\.bias",
)
