"""SmolLM3 (Hugging Face 2025): Llama whose every fourth block does not rotate (NoPE, arXiv:2501.18795).

x = x + attention(norm(x))
x = x + ffn(norm(x))
"""

from typing import Any

from torch import nn

from .. import model
from ..config import require_positive, short
from .family import Family
from .keys import MOST, NOPE, SHARED, read, read_windows
from .llama import NAMES
from .parts import FamilyConfig, PartlyRotated, WindowConfig, Windowed


class Block(model.Block):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = PartlyRotated(config, norm)


class SmolLM3(Windowed):
    def __init__(self, config: WindowConfig) -> None:
        super().__init__(config, model.RMSNorm, Block)


READ = SHARED | {"attention_bias", "mlp_bias"}
KINDS = (
    "no_rope_layers no_rope_layer_interval use_sliding_window sliding_window layer_types".split()
)


def _config(given: dict[str, Any]) -> WindowConfig:
    every = given.get("no_rope_layer_interval", 4)
    windowed = given.get("use_sliding_window", False) and given.get("sliding_window") is not None
    require_positive("no_rope_layer_interval", every, int)
    require_positive("num_hidden_layers", given.get("num_hidden_layers"), int)
    blocks = min(given["num_hidden_layers"], MOST)
    turns = given.get("no_rope_layers", [int((n + 1) % every != 0) for n in range(blocks)])
    if not isinstance(turns, list) or len(turns) != blocks or set(turns) - {0, 1}:
        raise ValueError(f"no_rope_layers is {short(turns)}: it must hold 0 or 1 for each block")
    windows = read_windows(given, lambda n: not windowed or bool(turns[n]), window=None)
    kinds = zip(turns, windows["layer_types"], strict=True)
    windows["layer_types"] = tuple(kind if turn else NOPE + kind for turn, kind in kinds)
    return read(
        WindowConfig,
        given,
        READ,
        theta=2e6,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        **windows,
    )


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    model=SmolLM3,
    config=_config,
    keys=READ | frozenset(KINDS),
    reads=frozenset({"hidden_act"}),
    names=NAMES,
    nullable=frozenset({"sliding_window"}),
)
