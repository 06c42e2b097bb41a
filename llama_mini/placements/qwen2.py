"""Qwen 2 and 2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases in q, k and v.

    x = x + attention(norm(x))
    x = x + ffn(norm(x))

Qwen 3 gave the biases up for QK-norm: see `model.Attention`. Some blocks may see a window of keys only.
"""

from typing import Any

from .. import model
from ..config import SIZES
from .family import Family
from .keys import SHARED, read, read_qwen_windows
from .llama import NAMES
from .parts import WindowConfig, Windowed


class Qwen2(Windowed):
    def __init__(self, config: WindowConfig) -> None:
        super().__init__(config, model.RMSNorm, model.Block)


def _config(given: dict[str, Any]) -> WindowConfig:
    required = (*SIZES, "num_key_value_heads")
    return read(
        WindowConfig,
        given,
        required=required,
        max_position_embeddings=32768,
        attention_bias=True,
        o_proj_bias=False,
        **read_qwen_windows(given),
    )


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    model=Qwen2,
    config=_config,
    keys=SHARED | {"sliding_window", "layer_types", "use_sliding_window", "max_window_layers"},
    reads=frozenset({"hidden_act"}),
    names=NAMES,
)
