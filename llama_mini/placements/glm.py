"""GLM-4, GLM-Edge (Zhipu 2024, arXiv:2406.12793): Llama with half of each head rotated.

    x = x + attention(norm(x))
    x = x + ffn(norm(x))

Beside it: biases in q, k and v; the pairs that turn stand side by side. The files hold gate and up as one
matrix. GLM-4-0414 added norms behind the sublayers: see glm4.py.
"""

from typing import Any

from torch import Tensor, nn

from .. import model
from ..config import SIZES
from .family import Family
from .files import llama_names
from .keys import SHARED, read
from .parts import Decoder, FamilyConfig, FusedGLU, rotate_interleaved


class Attention(model.Attention):
    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate_interleaved(x, cos, sin)


class Block(model.Block):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = Attention(config, norm)
        self.ffn = FusedGLU(config)


class Glm(Decoder):
    def __init__(self, config: FamilyConfig, block: type[nn.Module] = Block) -> None:
        super().__init__(config, model.RMSNorm, block)


READ = SHARED | {"attention_bias", "partial_rotary_factor"}


def glm_config(given: dict[str, Any]) -> FamilyConfig:
    return read(
        FamilyConfig,
        given,
        READ,
        required=(*SIZES, "num_key_value_heads"),
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1.5625e-7,
        attention_bias=True,
        o_proj_bias=False,
        partial_rotary_factor=0.5,
    )


NAMES = llama_names({"ffn.gate_up_proj": "mlp.gate_up_proj"})
FAMILY = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    model=Glm,
    config=glm_config,
    keys=READ,
    reads=frozenset({"hidden_act"}),
    names=NAMES,
)
