"""Gemma 3 (2025, arXiv:2503.19786): a norm in front of and behind each sublayer (sandwich), and QK-norm.

    x = x + norm2(attention(norm1(x)))     q = rotate(norm(q)), k = rotate(norm(k)), head by head
    x = x + norm4(ffn(norm3(x)))           norm(x) = x / rms(x) * (1 + weight)

Llama has norm1 and norm3 alone; a norm behind a sublayer sets the size of its delta. Beside it, as in
Gemma: scaled embeddings, GELU in the gate, a tied head. Five of six blocks see a window of keys, and turn
faster (theta 10,000) than those that see all (1,000,000); the scale of the scores has a key of its own.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from . import gemma
from .base import WindowConfig
from .family import family
from .files import SANDWICH
from .keys import PATTERN, read_near_and_far
from .norms import OnePlusRMSNorm


@dataclass(frozen=True)
class Gemma3Config(WindowConfig):
    query_pre_attn_scalar: float = 256


class Block(gemma.Block):
    norms = ("pre_attention_norm", "post_attention_norm", "pre_ffn_norm", "post_ffn_norm")

    def __init__(self, config: Gemma3Config, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention.attend.scale = config.query_pre_attn_scalar**-0.5

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = x + self.post_attention_norm(self.attention(self.pre_attention_norm(x), *how))
        return x + self.post_ffn_norm(self.ffn(self.pre_ffn_norm(x)))


SCALARS = {"query_pre_attn_scalar", "final_logit_softcapping"}
KEYS = SCALARS | {"attention_bias", "hidden_act", "sliding_window", "layer_types"}
FAMILY = family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    gemma.Gemma,
    OnePlusRMSNorm,
    Block,
    Gemma3Config,
    keys=KEYS | PATTERN | {"rope_local_base_freq"},
    renames={"hidden_activation": "hidden_act"},
    fields=read_near_and_far,
    reads={"attn_logit_softcapping", "use_bidirectional_attention"},
    names=SANDWICH,
    nullable={"final_logit_softcapping", "sliding_window"},
    rope_theta=1e6,
    qk_norm=True,
    **gemma.DEFAULTS | {"max_position_embeddings": 131072},
)
