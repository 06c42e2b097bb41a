"""Llama, which is model.py as it stands, and Mistral, whose first models see a window of keys only."""

from typing import Any

from ..config import SIZES, LlamaConfig
from ..model import Block, Llama, RMSNorm
from .base import WindowConfig, Windowed
from .family import Family
from .files import NAMES
from .keys import SHARED, SLIDING, shared


def _llama(given: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(**shared(given))


def _mistral(given: dict[str, Any]) -> LlamaConfig:
    window = given.get("sliding_window", 4096)
    fields = shared(
        given,
        (*SIZES, "num_key_value_heads"),  # transformers' default is 8, whatever the heads
        max_position_embeddings=131072,
    )
    if window is None:
        return LlamaConfig(**fields)
    return WindowConfig(**fields, sliding_window=window, layer_types=(SLIDING,))


def windowed(config: LlamaConfig) -> Llama:
    """Llama, or where blocks have a window `Windowed`, which gives them their masks."""
    if isinstance(config, WindowConfig):
        return Windowed(config, RMSNorm, Block)
    return Llama(config)


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    model=Llama,
    config=_llama,
    keys=SHARED,
    reads=frozenset({"hidden_act", "attention_bias", "mlp_bias"}),
    names=NAMES,
)
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    model=windowed,
    config=_mistral,
    keys=SHARED | {"sliding_window"},
    reads=frozenset({"hidden_act"}),
    names=NAMES,
    nullable=frozenset({"sliding_window"}),  # null is no window, and left out is one of 4,096
)
