"""BitNet b1.58 (2024, arXiv:2402.17764): one more norm in each sublayer, in front of its last projection.

    x = x + attention(norm(x))      attention: o_proj(norm(heads))
    x = x + ffn(norm(x))            ffn: down_proj(norm(relu(gate)^2 * up))

The norm keeps what is quantised next in a known range. Here the weights are plain ones: the packed ternary
files are refused.
"""

from typing import Any

from torch import Tensor, nn

from .. import model
from .family import Family
from .files import llama_names
from .keys import SHARED, read
from .parts import ACTIVATIONS, GLU, Decoder, FamilyConfig


class NormedLinear(nn.Linear):
    """A linear layer that reads its input through a norm."""

    def __init__(self, like: nn.Linear, norm: nn.Module) -> None:
        super().__init__(like.in_features, like.out_features, bias=False)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Block(model.Block):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        heads = self.attention.o_proj
        self.attention.o_proj = NormedLinear(heads, norm(heads.in_features, config.rms_norm_eps))
        self.ffn = GLU(config, ACTIVATIONS[config.hidden_act])
        inner = norm(config.intermediate_size, config.rms_norm_eps)
        self.ffn.down_proj = NormedLinear(self.ffn.down_proj, inner)


class BitNet(Decoder):
    def __init__(self, config: FamilyConfig) -> None:
        super().__init__(config, model.RMSNorm, Block)


READ = SHARED | {"attention_bias", "hidden_act"}


def _config(given: dict[str, Any]) -> FamilyConfig:
    return read(FamilyConfig, given, READ, theta=500000.0, rms_norm_eps=1e-5, hidden_act="relu2")


FAMILY = Family(
    model_type="bitnet",
    architecture="BitNetForCausalLM",
    model=BitNet,
    config=_config,
    keys=READ,
    reads=frozenset(),
    names=llama_names(
        {
            "attention.o_proj.norm": "self_attn.attn_sub_norm",
            "ffn.down_proj.norm": "mlp.ffn_sub_norm",
        }
    ),
)
