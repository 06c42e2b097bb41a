"""ERNIE 4.5 (Baidu 2025): Llama whose heads turn in float32, in pairs that stand side by side.

x = x + attention(norm(x))
x = x + ffn(norm(x))
"""

from typing import Any

from ..config import require_bool
from .attention import Interleaved
from .base import FamilyBlock
from .family import family


class Block(FamilyBlock):
    attention_class = Interleaved


def biases(given: dict[str, Any]) -> dict[str, Any]:
    bias = given.get("use_bias", False)
    require_bool("use_bias", bias)
    return {"attention_bias": bias, "mlp_bias": bias}


FAMILY = family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    block=Block,
    keys={"use_bias"},
    fields=biases,
    nullable={"head_dim"},
    rope_theta=500000.0,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    float32_angles=True,
)
