"""EXAONE 4.0 (LG 2025, arXiv:2507.11407): OLMo 2's norms behind the sublayers, QK-norm over each head.

    x = x + norm(attention(x))      q = rotate(norm(q)), k = rotate(norm(k)), head by head
    x = x + norm(ffn(x))

The norm rounds first and multiplies then, as Llama's does. Where a window is set, three of four blocks have
it, and the heads of those that see all keys do not turn.
"""

from typing import Any

from torch import Tensor

from .base import FamilyBlock, WindowConfig, Windowed
from .family import family
from .files import BEHIND
from .keys import FULL, PATTERN, read_pattern, read_windows, still


class Block(FamilyBlock):
    norms = ("post_attention_norm", "post_ffn_norm")

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = x + self.post_attention_norm(self.attention(x, *how))
        return x + self.post_ffn_norm(self.ffn(x))


def kinds(given: dict[str, Any]) -> dict[str, Any]:
    windows = read_windows(given, read_pattern(given, every=4))
    return windows if windows["sliding_window"] is None else still(windows, FULL)


FAMILY = family(
    "exaone4",
    "Exaone4ForCausalLM",
    Windowed,
    block=Block,
    config=WindowConfig,
    keys=PATTERN | {"sliding_window", "layer_types"},
    required=("num_key_value_heads",),
    fields=kinds,
    names=BEHIND,
    nullable={"sliding_window"},
    rms_norm_eps=1e-5,
    qk_norm=True,
)
