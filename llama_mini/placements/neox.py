"""GPT-NeoX, Pythia (Black et al. 2022, arXiv:2204.06745): attention and FFN side by side, two norms.

    x = ffn(norm2(x)) + attention(norm1(x)) + x

Both sublayers read the same stream, so they can run at once. With `use_parallel_residual` false one
follows the other, as in Llama. Beside it: LayerNorm with bias (not RMSNorm, as some articles say), biases,
a quarter of each head rotated, no gate. The files hold q, k and v as one matrix, head by head.
"""

from dataclasses import dataclass
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from .. import model
from ..config import LlamaConfig
from .family import Family
from .files import names
from .keys import SHARED, read, renamed
from .parts import ACTIVATIONS, MLP, Decoder, FamilyConfig, PartlyRotated


@dataclass(frozen=True)
class NeoXConfig(FamilyConfig):
    use_parallel_residual: bool = True


class Block(model.Block):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = PartlyRotated(config, norm)
        self.ffn = MLP(config, ACTIVATIONS[config.hidden_act], bias=True)

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        attention = self.attention(self.pre_attention_norm(x), *how)
        return self.ffn(self.pre_ffn_norm(x)) + attention + x  # sums round: in this order


class SequentialBlock(Block):
    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = self.attention(self.pre_attention_norm(x), *how) + x
        return self.ffn(self.pre_ffn_norm(x)) + x


class GPTNeoX(Decoder):
    def __init__(self, config: NeoXConfig) -> None:
        block = Block if config.use_parallel_residual else SequentialBlock
        super().__init__(config, nn.LayerNorm, block)


KEYS = {
    "layer_norm_eps": "rms_norm_eps",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
}
READ = (SHARED - {"num_key_value_heads", "head_dim"}) | frozenset(
    "attention_bias hidden_act partial_rotary_factor use_parallel_residual".split()
)


def _config(given: dict[str, Any]) -> NeoXConfig:
    return read(
        NeoXConfig,
        renamed(given, KEYS),
        READ,
        rms_norm_eps=1e-5,
        attention_bias=True,
        hidden_act="gelu",
        partial_rotary_factor=0.25,
    )


def split(name: str, tensor: Tensor, config: LlamaConfig) -> dict[str, Tensor]:
    """q, k and v of a matrix or bias whose rows are those of head 0's q, k, v, then of head 1's."""
    h, d = config.num_attention_heads, config.head_dim
    if ".qkv_proj." not in name or tensor.shape[0] != 3 * h * d:
        return {name: tensor}
    q, k, v = rearrange(tensor, "(h three d) ... -> three (h d) ...", h=h, three=3)
    return {
        name.replace("qkv", letter): rows for letter, rows in zip("qkv", (q, k, v), strict=True)
    }


FAMILY = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    model=GPTNeoX,
    config=_config,
    keys=READ | KEYS.keys(),
    reads=frozenset({"classifier_dropout", "hidden_dropout", "is_decoder"}),
    names=names(
        "gpt_neox.layers.N",
        {
            "pre_attention_norm": "input_layernorm",
            "attention.qkv_proj": "attention.query_key_value",
            "attention.o_proj": "attention.dense",
            "pre_ffn_norm": "post_attention_layernorm",
            "ffn.up_proj": "mlp.dense_h_to_4h",
            "ffn.down_proj": "mlp.dense_4h_to_h",
        },
        embed="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        lm_head="embed_out",
    ),
    split=split,
    constant=r"gpt_neox\.layers\.[0-9]+\.attention\.bias",
)
