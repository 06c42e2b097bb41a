"""Phi-1, 1.5 and 2 (Li et al. 2023, arXiv:2309.05463): attention and FFN side by side behind one norm.

    n = norm(x)
    x = attention(n) + ffn(n) + x

Beside it: LayerNorm, biases everywhere, in the head too, half of each head rotated, no gate; optionally
LayerNorm on q and k.
"""

from typing import Any

from torch import Tensor, nn

from . import neox
from .family import Family
from .files import llama_names
from .keys import SHARED, read, renamed
from .parts import Decoder, FamilyConfig, add_biases


class Block(neox.Block):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        del self.pre_ffn_norm

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        n = self.pre_attention_norm(x)
        return self.attention(n, *how) + self.ffn(n) + x  # sums round: in this order


class Phi(Decoder):
    def __init__(self, config: FamilyConfig) -> None:
        super().__init__(config, nn.LayerNorm, Block)
        add_biases(self, "lm_head")


KEYS = {"layer_norm_eps": "rms_norm_eps", "qk_layernorm": "qk_norm"}
READ = SHARED | frozenset({"hidden_act", "partial_rotary_factor", "qk_norm"})


def _config(given: dict[str, Any]) -> FamilyConfig:
    return read(
        FamilyConfig,
        renamed(given, KEYS),
        READ,
        attention_bias=True,
        hidden_act="gelu_new",
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-5,
    )


FAMILY = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    model=Phi,
    config=_config,
    keys=READ | KEYS.keys(),
    reads=frozenset({"embd_pdrop", "resid_pdrop"}),
    names=llama_names(
        {
            "attention.o_proj": "self_attn.dense",
            "attention.q_norm": "self_attn.q_layernorm",
            "attention.k_norm": "self_attn.k_layernorm",
            "pre_ffn_norm": None,
            "ffn.up_proj": "mlp.fc1",
            "ffn.down_proj": "mlp.fc2",
        },
        final_norm="model.final_layernorm",
    ),
)
