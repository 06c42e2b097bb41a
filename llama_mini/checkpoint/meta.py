"""Meta's layout, and Mistral's: `params.json`, other names, and q and k rows in another order."""

import dataclasses
from typing import Any

from einops import rearrange
from torch import Tensor

from ..config import LlamaConfig, RopeConfig, require_positive, short
from ..model import Llama
from ..placements.family import Family
from ..placements.keys import require_keys
from .names import META
from .untrusted import listed

KEYS = frozenset(
    "dim n_layers n_heads n_kv_heads vocab_size multiple_of ffn_dim_multiplier norm_eps rope_theta "
    "use_scaled_rope rope_scale_factor max_seq_len max_batch_size".split()
)
MISTRAL_KEYS = frozenset(
    "head_dim hidden_dim sliding_window tied_embeddings model_parallel".split()
)


def halves_first(name: str, tensor: Tensor, config: LlamaConfig) -> dict[str, Tensor]:
    """q and k with each head's rows in the order of model.py (pair i is x[i], x[i + d/2]); the files
    have the two rows of a pair side by side.
    """
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        d = config.head_dim
        tensor = rearrange(tensor, "(h d pair) m -> (h pair d) m", d=d // 2, pair=2)
    return {name: tensor}


def from_params(given: dict[str, Any]) -> LlamaConfig:
    """The config in a `params.json`. In Meta's the width of the FFN follows from three keys, as in Meta's
    own code; Mistral's names it `hidden_dim`.
    """
    require_keys(given, ("dim", "n_layers", "n_heads", "vocab_size", "norm_eps"), "params.json")
    unknown = sorted(given.keys() - KEYS - MISTRAL_KEYS)
    if unknown:
        raise ValueError(
            f"{listed(given, unknown)}: not known in params.json, and may change the output"
        )
    for key in "dim n_layers n_heads n_kv_heads multiple_of hidden_dim head_dim".split():
        require_positive(key, given.get(key, 256), int)
    multiple, multiplier = given.get("multiple_of", 256), given.get("ffn_dim_multiplier", 1.0)
    require_positive("ffn_dim_multiplier", multiplier, int, float)
    require_positive("norm_eps", given["norm_eps"], int, float)
    if given["vocab_size"] == -1:
        raise ValueError(
            "vocab_size is -1: write the number of rows of tok_embeddings.weight in its place"
        )
    width = int(multiplier * int(2 * 4 * given["dim"] / 3))
    width = given.get("hidden_dim", -(-width // multiple) * multiple)
    is_mistral, window = "hidden_dim" in given, given.get("sliding_window")
    # Mistral's own code has another default where attention is full.
    theta = 1000000.0 if is_mistral and window is None else 10000.0
    rope = RopeConfig(rope_theta=given.get("rope_theta", theta))
    scaled, factor = given.get("use_scaled_rope", False), given.get("rope_scale_factor")
    if scaled is True and factor is not None:
        rope = dataclasses.replace(rope, rope_type="llama3", factor=factor)
    elif scaled is True:
        raise ValueError(
            "use_scaled_rope is true without a rope_scale_factor: add the model's own, "
            '"rope_scale_factor": 8 for Llama 3.1 and 3.3, 32 for Llama 3.2'
        )
    elif scaled is not False or factor is not None:
        raise ValueError(
            f"use_scaled_rope is {short(scaled)}, and rope_scale_factor is {short(factor)}: true goes "
            "with a factor, false with none"
        )
    # The file does not say how long a context is: Llama 3.1's, Llama 3's or Llama 2's, by what it
    # does say.
    context = 131072 if rope.rope_type == "llama3" else 8192 if rope.rope_theta >= 500000 else 4096
    context = 32768 if is_mistral else context
    return LlamaConfig(
        vocab_size=given["vocab_size"],
        hidden_size=given["dim"],
        intermediate_size=width,
        num_hidden_layers=given["n_layers"],
        num_attention_heads=given["n_heads"],
        num_key_value_heads=given.get("n_kv_heads", given["n_heads"]),
        max_position_embeddings=given.get("max_seq_len", context),
        rms_norm_eps=given["norm_eps"],
        rope=rope,
        sliding_window=window,
        tie_word_embeddings=given.get("tied_embeddings", False),
        **{key: given[key] for key in ("head_dim",) if key in given},
    )


META_LLAMA = Family(
    model_type="llama",
    architecture="Transformer",
    model=Llama,
    config=from_params,
    keys=KEYS | MISTRAL_KEYS,
    names=META,
    split=halves_first,
)
