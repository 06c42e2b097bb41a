"""What GPT, GPT-2, GPT-NeoX and BLOOM share: names of their own for keys, and biases everywhere."""

from typing import Any

from ..config import require_positive
from .keys import require_keys

# The names that GPT and GPT-2 have for keys, and BLOOM.
GPT_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
}
BLOOM_KEYS = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "layer_norm_epsilon": "rms_norm_eps",
}
# Of GPT and GPT-2, for training and for heads that are not the language model's.
GPT_UNUSED = frozenset(
    "attn_pdrop embd_pdrop resid_pdrop summary_type summary_use_proj summary_activation "
    "summary_proj_to_labels summary_first_dropout".split()
)
NEOX_KEYS = {
    "layer_norm_eps": "rms_norm_eps",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
}
# What has nothing to turn: positions are learned, or a bias on the scores.
UNTURNED = {"head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "rope_parameters"}
BIASES: dict[str, Any] = {"rms_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True}
TIED = BIASES | {"tie_word_embeddings": True}
NEOX_DEFAULTS = BIASES | {"hidden_act": "gelu", "partial_rotary_factor": 0.25}
# Tables of the causal mask, in old files.
GPT_MASK = r"(transformer\.)?h\.[0-9]+\.attn\.bias"
NEOX_MASK = r"gpt_neox\.layers\.[0-9]+\.attention\.bias"


def four_times_hidden_size(given: dict[str, Any]) -> dict[str, int]:
    """The width of the FFN, where no key says it."""
    require_keys(given, ("hidden_size",), "the config")
    require_positive("hidden_size", given["hidden_size"], int)
    return {"intermediate_size": given.get("intermediate_size", 4 * given["hidden_size"])}


GPT1_ACTS = {"gelu": "gelu_new", "swish": "silu"}  # what the names of 2018 mean


def gpt1_fields(given: dict[str, Any]) -> dict[str, Any]:
    act = given.get("hidden_act", "gelu")
    return four_times_hidden_size(given) | {"hidden_act": GPT1_ACTS.get(str(act), act)}
