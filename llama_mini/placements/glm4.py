"""GLM-4-0414 (Zhipu 2025): a norm in front of and behind each sublayer (sandwich), as in Gemma 3.

    x = x + norm2(attention(norm1(x)))
    x = x + norm4(ffn(norm3(x)))

Beside it: biases in q, k and v; half of each head rotated, in pairs that stand side by side. The files call
the norm in front of the FFN `post_attention_layernorm`, as Llama's do, and hold gate and up as one matrix.
"""

from typing import Any

from torch import Tensor

from . import glm
from .family import family
from .files import llama_names


class Block(glm.Block):
    norms = ("pre_attention_norm", "post_attention_norm", "pre_ffn_norm", "post_ffn_norm")

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = x + self.post_attention_norm(self.attention(self.pre_attention_norm(x), *how))
        return x + self.post_ffn_norm(self.ffn(self.pre_ffn_norm(x)))


FAMILY = family(
    "glm4",
    "Glm4ForCausalLM",
    block=Block,
    keys=glm.KEYS,
    required=("num_key_value_heads",),
    nullable={"partial_rotary_factor"},
    names=llama_names(
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn.gate_up_proj": "mlp.gate_up_proj",
            "post_ffn_norm": "post_mlp_layernorm",
        }
    ),
    **glm.DEFAULTS,
)
