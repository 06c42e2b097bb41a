"""Qwen3: Llama with a norm over d on every query and key before rotation (QK-norm, in model.py)."""

from typing import Any

from ..config import SIZES, LlamaConfig
from .base import WindowConfig
from .family import Family
from .files import NAMES
from .keys import SHARED, SLIDING, read_qwen_windows, shared
from .llama import windowed


def _qwen3(given: dict[str, Any]) -> LlamaConfig:
    required = (*SIZES, "num_key_value_heads")  # transformers' default is 32, whatever the heads
    fields = shared(given, required, max_position_embeddings=32768, head_dim=128)
    windows = read_qwen_windows(given)
    if SLIDING in windows["layer_types"]:
        return WindowConfig(**fields, qk_norm=True, **windows)
    return LlamaConfig(**fields, qk_norm=True)


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    model=windowed,
    config=_qwen3,
    keys=SHARED | {"sliding_window", "layer_types", "use_sliding_window", "max_window_layers"},
    reads=frozenset({"hidden_act", "attention_bias"}),
    names=NAMES,
)
