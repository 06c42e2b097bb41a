"""Gemma 3 (2025, arXiv:2503.19786): a norm in front of and behind each sublayer (sandwich), and QK-norm.

    x = x + norm2(attention(norm1(x)))     q = rotate(norm(q)), k = rotate(norm(k)), head by head
    x = x + norm4(ffn(norm3(x)))           norm(x) = x / rms(x) * (1 + weight)

The norm behind a sublayer sets the size of its delta, whatever the sublayer's weights. Beside it, as in
Gemma: scaled embeddings, GELU in the gate, a tied head. Five of six blocks see a window of keys, and turn
faster (theta 10,000) than those that see all (1,000,000); the scale of the scores has a key of its own.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from . import gemma
from .family import Family
from .files import llama_names
from .keys import PATTERN, SHARED, read, read_kinds, read_pattern, read_windows, renamed
from .parts import WindowConfig, softcap


@dataclass(frozen=True)
class Gemma3Config(WindowConfig):
    query_pre_attn_scalar: float = 256
    final_logit_softcapping: float | None = None


class Block(gemma.Block):
    def __init__(self, config: Gemma3Config, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention.attend.scale = config.query_pre_attn_scalar**-0.5
        self.post_attention_norm = norm(config.hidden_size, config.rms_norm_eps)
        self.post_ffn_norm = norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = x + self.post_attention_norm(self.attention(self.pre_attention_norm(x), *how))
        return x + self.post_ffn_norm(self.ffn(self.pre_ffn_norm(x)))


class Gemma3(gemma.Gemma):
    config: Gemma3Config

    def __init__(self, config: Gemma3Config, block: type[nn.Module] = Block) -> None:
        super().__init__(config, block)

    def forward(self, *inputs: Any, **how: Any) -> Tensor:
        return softcap(super().forward(*inputs, **how), self.config.final_logit_softcapping)


READ = SHARED | frozenset(
    "attention_bias hidden_act query_pre_attn_scalar final_logit_softcapping".split()
)
WINDOWS = frozenset({"sliding_window", "layer_types"})


def _config(given: dict[str, Any]) -> Gemma3Config:
    given = renamed(given, {"hidden_activation": "hidden_act"})
    windows = read_windows(given, read_pattern(given, every=6))
    given, local_rope = read_kinds(given, "rope_local_base_freq", theta=10000.0)
    return read(
        Gemma3Config,
        given,
        READ,
        theta=1e6,
        local_rope=local_rope,
        qk_norm=True,
        **gemma.DEFAULTS | {"max_position_embeddings": 131072},
        **windows,
    )


NAMES = llama_names(
    {
        "post_attention_norm": "post_attention_layernorm",
        "pre_ffn_norm": "pre_feedforward_layernorm",
        "post_ffn_norm": "post_feedforward_layernorm",
    }
)
FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    model=Gemma3,
    config=_config,
    keys=READ | WINDOWS | PATTERN | {"hidden_activation", "rope_local_base_freq"},
    reads=frozenset({"attn_logit_softcapping", "use_bidirectional_attention"}),
    names=NAMES,
    nullable=frozenset({"final_logit_softcapping", "sliding_window"}),
)
