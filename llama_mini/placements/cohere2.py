"""Command R7B (Cohere 2024): Command R with a window of keys in three of four blocks.

    n = norm(x)
    x = x + attention(n) + ffn(n)

The blocks that see all keys know no positions: their heads do not turn.
"""

from typing import Any

from . import cohere
from .family import Family
from .keys import FULL, PATTERN, read, read_pattern, read_windows, renamed, still

READ = cohere.READ - {"qk_norm", "head_dim"}


def _config(given: dict[str, Any]) -> cohere.CohereConfig:
    kinds = still(read_windows(given, read_pattern(given, every=4)), FULL)
    given = renamed(given, {"layer_norm_eps": "rms_norm_eps"})
    return read(cohere.CohereConfig, given, READ, **cohere.DEFAULTS, **kinds)


FAMILY = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    model=cohere.Cohere,
    config=_config,
    keys=READ | PATTERN | {"head_dim", "layer_norm_eps", "sliding_window", "layer_types"},
    reads=frozenset({"hidden_act"}),
    names=cohere.NAMES,
    nullable=frozenset({"sliding_window"}),
)
