"""GLM-4-0414 (Zhipu 2025): a norm in front of and behind each sublayer (sandwich), as in Gemma 3.

    x = x + norm2(attention(norm1(x)))
    x = x + norm4(ffn(norm3(x)))

Beside it: biases in q, k and v; half of each head rotated, in pairs that stand side by side. The files call
the norm in front of the FFN `post_attention_layernorm`, as Llama's do, and hold gate and up as one matrix.
"""

from typing import Any

from torch import Tensor, nn

from . import glm
from .family import Family
from .files import llama_names
from .parts import FamilyConfig


class Block(glm.Block):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.post_attention_norm = norm(config.hidden_size, config.rms_norm_eps)
        self.post_ffn_norm = norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = x + self.post_attention_norm(self.attention(self.pre_attention_norm(x), *how))
        return x + self.post_ffn_norm(self.ffn(self.pre_ffn_norm(x)))


class Glm4(glm.Glm):
    def __init__(self, config: FamilyConfig) -> None:
        super().__init__(config, Block)


FAMILY = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    model=Glm4,
    config=glm.glm_config,
    keys=glm.READ,
    reads=frozenset({"hidden_act"}),
    names=llama_names(
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn.gate_up_proj": "mlp.gate_up_proj",
            "post_ffn_norm": "post_mlp_layernorm",
        }
    ),
)
