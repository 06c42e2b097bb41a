"""Command R7B (Cohere 2024): Command R with a window of keys in three of four blocks.

    n = norm(x)
    x = x + attention(n) + ffn(n)

The blocks that see all keys know no positions: their heads do not turn.
"""

from typing import Any

from . import cohere
from .family import family
from .keys import FULL, PATTERN, read_pattern, read_windows, still


def kinds(given: dict[str, Any]) -> dict[str, Any]:
    windows = still(read_windows(given, read_pattern(given, every=4)), FULL)
    return {**windows, "head_dim": None}  # written, and not read


FAMILY = family(
    "cohere2",
    "Cohere2ForCausalLM",
    *cohere.MODEL,
    keys=PATTERN | {"attention_bias", "logit_scale", "sliding_window", "layer_types"},
    renames={"layer_norm_eps": "rms_norm_eps"},
    fields=kinds,
    names=cohere.FAMILY.names,
    nullable={"sliding_window"},
    **cohere.DEFAULTS,
)
