"""BitNet b1.58 (2024, arXiv:2402.17764): one more norm in each sublayer, in front of its last projection.

    x = x + attention(norm(x))      attention: o_proj(norm(heads))
    x = x + ffn(norm(x))            ffn: down_proj(norm(relu(gate)^2 * up))

The norm keeps what is quantised next in a known range. Here the weights are plain ones: the packed ternary
files are refused.
"""

from torch import Tensor, nn

from .base import FamilyBlock, FamilyConfig
from .family import family
from .ffn import GLU
from .files import llama_names


class NormedLinear(nn.Linear):
    """A linear layer that reads its input through a norm."""

    def __init__(self, like: nn.Linear, norm: nn.Module) -> None:
        super().__init__(like.in_features, like.out_features, like.bias is not None)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Block(FamilyBlock):
    ffn_class = GLU

    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        heads, inner = self.attention.o_proj, self.ffn.get_submodule("down_proj")
        assert isinstance(inner, nn.Linear)
        self.attention.o_proj = NormedLinear(heads, norm(heads.in_features, config.rms_norm_eps))
        self.ffn.down_proj = NormedLinear(inner, norm(inner.in_features, config.rms_norm_eps))


FAMILY = family(
    "bitnet",
    "BitNetForCausalLM",
    block=Block,
    keys={"attention_bias", "hidden_act"},
    reads=set(),
    names=llama_names(
        {
            "attention.o_proj.norm": "self_attn.attn_sub_norm",
            "ffn.down_proj.norm": "mlp.ffn_sub_norm",
        }
    ),
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    hidden_act="relu2",
)
