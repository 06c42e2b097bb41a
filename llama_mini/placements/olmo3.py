"""OLMo 3 (2025): OLMo 2's norms, with a window of keys in three of four blocks.

x = x + norm(attention(x))      q = rotate(split(norm(q))), k = rotate(split(norm(k)))
x = x + norm(ffn(x))
"""

from typing import Any

from . import olmo2
from .base import WindowConfig, Windowed
from .family import family
from .files import BEHIND
from .keys import read_kinds, read_windows
from .norms import LateCastRMSNorm


def kinds(given: dict[str, Any]) -> dict[str, Any]:
    windows = read_windows(given, lambda n: n % 4 == 3)
    return windows | read_kinds(given, theta=500000.0, near=500000.0)


FAMILY = family(
    "olmo3",
    "Olmo3ForCausalLM",
    Windowed,
    LateCastRMSNorm,
    olmo2.Block,
    WindowConfig,
    keys={"attention_bias", "sliding_window", "layer_types"},
    fields=kinds,
    names=BEHIND,
    nullable={"sliding_window"},
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    float32_angles=True,
)
