"""Qwen3: Llama with a norm over d on every query and key before rotation (QK-norm, in model.py)."""

from typing import Any

from ..config import SIZES, LlamaConfig, require_positive, short
from ..model import Llama
from .family import Family
from .keys import SHARED, read_layer_types, shared
from .llama import NAMES


def _qwen3(given: dict[str, Any]) -> LlamaConfig:
    required = (*SIZES, "num_key_value_heads")  # transformers' default is 32, whatever the heads
    fields = shared(given, required, max_position_embeddings=32768, head_dim=128)
    asked, first = given.get("use_sliding_window", False), given.get("max_window_layers", 28)
    if not isinstance(asked, bool):
        raise ValueError(f"use_sliding_window must be true or false, not {short(asked)}")
    if type(first) is not int:
        raise ValueError(f"max_window_layers must be an integer, not {short(first)}")
    require_positive("num_hidden_layers", given["num_hidden_layers"], int)
    layers = read_layer_types(given)
    # Blocks from max_window_layers on have a window, unless layer_types says which.
    active = "sliding_attention" in layers if layers else first < given["num_hidden_layers"]
    window = given.get("sliding_window") if asked and active else None
    return LlamaConfig(**fields, qk_norm=True, sliding_window=window)


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    model=Llama,
    config=_qwen3,
    keys=SHARED | {"sliding_window", "layer_types", "use_sliding_window", "max_window_layers"},
    reads=frozenset({"hidden_act", "attention_bias"}),
    names=NAMES,
)
