"""SmolLM3 (Hugging Face 2025): Llama whose every fourth block does not rotate (NoPE, arXiv:2501.18795).

x = x + attention(norm(x))
x = x + ffn(norm(x))
"""

from .base import WindowConfig, Windowed
from .family import family
from .keys import read_no_rope

FAMILY = family(
    "smollm3",
    "SmolLM3ForCausalLM",
    Windowed,
    config=WindowConfig,
    keys={"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"}
    | {"use_sliding_window", "sliding_window", "layer_types"},
    fields=read_no_rope,
    nullable={"sliding_window"},
    rope_theta=2e6,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
)
