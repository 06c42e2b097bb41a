"""Llama, which is model.py as it stands, and Mistral, whose first models see a window of keys only."""

from typing import Any

from ..config import SIZES, LlamaConfig
from ..model import Block, Llama, RMSNorm
from .family import Family
from .keys import SHARED, SLIDING, shared
from .parts import WindowConfig, Windowed

# Our names and theirs, less ".weight"; N stands for the number of a block.
NAMES = {
    "embed": "model.embed_tokens",
    "blocks.N.pre_attention_norm": "model.layers.N.input_layernorm",
    "blocks.N.attention.q_proj": "model.layers.N.self_attn.q_proj",
    "blocks.N.attention.k_proj": "model.layers.N.self_attn.k_proj",
    "blocks.N.attention.v_proj": "model.layers.N.self_attn.v_proj",
    "blocks.N.attention.o_proj": "model.layers.N.self_attn.o_proj",
    "blocks.N.attention.q_norm": "model.layers.N.self_attn.q_norm",
    "blocks.N.attention.k_norm": "model.layers.N.self_attn.k_norm",
    "blocks.N.pre_ffn_norm": "model.layers.N.post_attention_layernorm",
    "blocks.N.ffn.gate_proj": "model.layers.N.mlp.gate_proj",
    "blocks.N.ffn.up_proj": "model.layers.N.mlp.up_proj",
    "blocks.N.ffn.down_proj": "model.layers.N.mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}


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
