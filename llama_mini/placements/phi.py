"""Phi-1, 1.5 and 2 (Li et al. 2023, arXiv:2309.05463): attention and FFN side by side behind one norm.

    n = norm(x)
    x = attention(n) + ffn(n) + x

Beside it: LayerNorm, optionally on q and k too; biases, in the head too; half of each head turns; no gate.
"""

from typing import Any

from torch import Tensor, nn

from .attention import add_biases
from .base import Decoder, FamilyBlock, FamilyConfig
from .family import family
from .ffn import MLP
from .files import PHI
from .gpt import BIASES


class Block(FamilyBlock):
    norms, ffn_class = ("pre_attention_norm",), MLP

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        n = self.pre_attention_norm(x)
        return self.attention(n, *how) + self.ffn(n) + x  # sums round: in this order


class Phi(Decoder):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module], block: type[nn.Module]) -> None:
        if config.turned() % 2:
            raise ValueError(
                f"partial_rotary_factor {config.partial_rotary_factor}: {config.turned()} numbers of each "
                "head would turn, and RoPE turns pairs"
            )
        super().__init__(config, norm, block)
        add_biases(self, "lm_head")


FAMILY = family(
    "phi",
    "PhiForCausalLM",
    Phi,
    nn.LayerNorm,
    Block,
    keys={"hidden_act", "partial_rotary_factor", "qk_norm"},
    renames={"layer_norm_eps": "rms_norm_eps", "qk_layernorm": "qk_norm"},
    reads={"embd_pdrop", "resid_pdrop"},
    nullable={"partial_rotary_factor"},
    names=PHI,
    hidden_act="gelu_new",
    partial_rotary_factor=0.5,
    **BIASES,
)
