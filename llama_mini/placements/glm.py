"""GLM-4, GLM-Edge (Zhipu 2024, arXiv:2406.12793): Llama with half of each head rotated.

    x = x + attention(norm(x))
    x = x + ffn(norm(x))

Beside it: biases in q, k and v; the pairs that turn stand side by side. The files hold gate and up as one
matrix. GLM-4-0414 added norms behind the sublayers: see glm4.py.
"""

from typing import Any

from .attention import Interleaved
from .base import FamilyBlock
from .family import family
from .ffn import FusedGLU
from .files import llama_names


class Block(FamilyBlock):
    attention_class, ffn_class = Interleaved, FusedGLU


# What the two share.
KEYS = {"attention_bias", "partial_rotary_factor"}
DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "o_proj_bias": False,
    "partial_rotary_factor": 0.5,
}
FAMILY = family(
    "glm",
    "GlmForCausalLM",
    block=Block,
    keys=KEYS,
    required=("num_key_value_heads",),
    nullable={"partial_rotary_factor"},
    names=llama_names({"ffn.gate_up_proj": "mlp.gate_up_proj"}),
    **DEFAULTS,
)
