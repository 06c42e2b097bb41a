"""Qwen 2 and 2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases in q, k and v.

    x = x + attention(norm(x))
    x = x + ffn(norm(x))

Qwen 3 gave the biases up for QK-norm: see `model.Attention`. Some blocks may see a window of keys only.
"""

from .base import WindowConfig, Windowed
from .family import family
from .keys import read_qwen_windows

FAMILY = family(
    "qwen2",
    "Qwen2ForCausalLM",
    Windowed,
    config=WindowConfig,
    keys={"sliding_window", "layer_types", "use_sliding_window", "max_window_layers"},
    required=("num_key_value_heads",),
    fields=read_qwen_windows,
    max_position_embeddings=32768,
    attention_bias=True,
    o_proj_bias=False,
)
