"""Random checkpoints of every family, written by transformers' own classes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.fixtures import require

FAMILIES_FOLDER = Path(__file__).resolve().parents[1] / "activations" / "families"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
NEOX = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
MHA = {"num_key_value_heads": 4}
MQA = {"num_key_value_heads": 1}
GPT = {
    "vocab_size": 96,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {**BASE, "head_dim": 24, "rms_norm_eps": 1e-5}
WINDOWED = {"layer_types": KINDS, "sliding_window": 8}
LATENT = {
    **BASE,
    **MHA,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "tie_word_embeddings": False,
}
FIXED = {"rope_parameters": ROPE}
BLOOM = {"vocab_size": 96, "hidden_size": 64, "n_layer": 3, "n_head": 4}
FACTORS = {
    "full_attn_alpha_factor": 3.5,
    "full_attn_beta_factor": 1.25,
    "mlp_alpha_factor": 3.5,
    "mlp_beta_factor": 0.75,
}
MIXTURE = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
GRANITE = {
    **BASE,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 8.0,
}


def nested(full: dict[str, Any], near: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": full, "sliding_attention": near}}


# Arguments of the config class of a model_type; the first of each family is the one that is stored.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "mistral": [{**BASE, "sliding_window": 8}, {**BASE, "sliding_window": None, "head_dim": 24}],
    "qwen3": [
        {**BASE, "head_dim": 24},
        {**BASE, "head_dim": 24, "use_sliding_window": True, **WINDOWED},
        {**BASE, **MQA, "head_dim": 16, "use_sliding_window": True, "sliding_window": 8}
        | {"max_window_layers": 1},
    ],
    "openai-gpt": [GPT, {**GPT, "afn": "silu", "n_head": 2, "tie_word_embeddings": False}],
    "gpt2": [
        GPT,
        {**GPT, "n_inner": 100, "activation_function": "relu", "n_embd": 60, "n_head": 3},
        {**GPT, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
        {**GPT, "scale_attn_weights": False, "activation_function": "gelu"},
    ],
    "gpt_neox": [
        {**NEOX},
        {**NEOX, "use_parallel_residual": False, "rotary_pct": 0.5, "tie_word_embeddings": True},
        {**NEOX, "attention_bias": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"},
        {**NEOX, "rope_parameters": {**ROPE, "rope_theta": 500.0, "partial_rotary_factor": 0.375}},
    ],
    "phi": [
        {**BASE},
        {**BASE, **MHA, "qk_layernorm": True, "partial_rotary_factor": 0.4},
        {**BASE, **MQA, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ],
    "qwen2": [
        {**BASE, "tie_word_embeddings": True},
        {**BASE, **MQA, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {**BASE, **MHA, "use_sliding_window": True, **WINDOWED, "rope_parameters": LINEAR},
    ],
    "gemma": [{**GEMMA, **MQA}, {**GEMMA, "attention_bias": True, "tie_word_embeddings": False}],
    "gemma2": [
        {**GEMMA, **WINDOWED, "query_pre_attn_scalar": 48, "attn_logit_softcapping": 5.0},
        {**GEMMA, **MQA, "final_logit_softcapping": None, "attn_logit_softcapping": None},
        {**GEMMA, **MHA, "sliding_window": 16, "attention_bias": True, "hidden_activation": "gelu"},
    ],
    "gemma3_text": [
        {
            **GEMMA,
            **WINDOWED,
            **nested({**ROPE, "rope_theta": 1e6}, ROPE),
            "query_pre_attn_scalar": 48,
        },
        {
            **GEMMA,
            **MQA,
            "sliding_window": 16,
            "final_logit_softcapping": 3.0,
            "num_hidden_layers": 7,
        },
        {**GEMMA, **MHA, **WINDOWED, **nested(LINEAR, ROPE), "tie_word_embeddings": False},
    ],
    "olmo": [{**BASE}, {**BASE, **MHA, "clip_qkv": 0.5, "attention_bias": True}],
    "olmo2": [
        {**BASE},
        {**BASE, **MHA, "attention_bias": True, "tie_word_embeddings": True},
        {**BASE, **MQA},
    ],
    "granite": [
        GRANITE,
        {**GRANITE, **MHA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ],
    "nanochat": [
        {**BASE, **MHA},
        {**BASE, "final_logit_softcapping": None, "attention_bias": True, "hidden_act": "gelu"},
    ],
    "youtu": [
        LATENT,
        {**LATENT, "q_lora_rank": None, "rope_interleave": False, "tie_word_embeddings": True},
        {**LATENT, "attention_bias": True, "v_head_dim": 12, "rms_norm_eps": 1e-3},
    ],
    "deepseek_v3": [
        {**LATENT, **MIXTURE},
        {**LATENT, **MIXTURE, "q_lora_rank": None, "norm_topk_prob": False, "n_shared_experts": 2},
        {**LATENT, **MIXTURE, "first_k_dense_replace": 3, "attention_bias": True},
    ],
    "hunyuan_v1_dense": [
        {**BASE, "head_dim": 24},
        {**BASE, **MQA, "head_dim": 8, "attention_bias": True},
    ],
    "bitnet": [
        {**BASE, **FIXED},
        {**BASE, **MHA, "tie_word_embeddings": True, "hidden_act": "silu"},
    ],
    "diffllama": [{**BASE}, {**BASE, **MHA, "attention_bias": True, "tie_word_embeddings": True}],
    "minimax": [
        {**BASE, **FACTORS, "num_local_experts": 4, "layer_types": ["full_attention"] * 3},
        {**BASE, "num_local_experts": 1, "num_experts_per_tok": 1, "head_dim": 24}
        | {"layer_types": ["full_attention"] * 3, "mlp_beta_factor": 2.5, "sliding_window": 8},
    ],
    "cohere": [
        {**BASE, **FIXED},
        {**BASE, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
        {**BASE, **MHA, "logit_scale": 0.5},
    ],
    "cohere2": [{**BASE, "sliding_window": 8, "num_hidden_layers": 4}, {**BASE, **WINDOWED, **MQA}],
    "glm": [{**BASE, "head_dim": 16}, {**BASE, **MHA, "head_dim": 24, "attention_bias": False}],
    "glm4": [
        {**BASE, "head_dim": 16},
        {
            **BASE,
            **MQA,
            "attention_bias": False,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
        },
    ],
    "bloom": [
        BLOOM,
        {**BLOOM, "n_head": 6, "hidden_size": 48, "tie_word_embeddings": False},
        {**BLOOM, "apply_residual_connection_post_layernorm": True},
    ],
    "smollm3": [
        {**BASE, "num_hidden_layers": 5},
        {**BASE, "no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True},
        {**BASE, "use_sliding_window": True, "sliding_window": 8, "no_rope_layer_interval": 2},
    ],
    "exaone4": [
        {**BASE, "sliding_window": None, "layer_types": ["full_attention"] * 3},
        {**BASE, **MHA, "sliding_window": 8, "num_hidden_layers": 5},
    ],
    "ernie4_5": [
        {**BASE, "head_dim": 16},
        {**BASE, **MQA, "use_bias": True, "tie_word_embeddings": False},
    ],
    "phi3": [
        {**BASE},
        {**BASE, **MHA, "sliding_window": 8, "tie_word_embeddings": True},
        {**BASE, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.75}},
        {**BASE, **MQA, "head_dim": 8, "num_attention_heads": 8, "intermediate_size": 100},
    ],
    "olmo3": [
        {**BASE, "sliding_window": 8, "num_hidden_layers": 5},
        {**BASE, **MQA, **WINDOWED, **nested(LINEAR, ROPE), "attention_bias": True},
    ],
}


@torch.no_grad()
def draw(model: nn.Module, seed: int, one_plus: bool) -> None:
    """Weights under which a fault shows: no norm near 1, no bias near 0, no gain that is another's."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():  # a tied head comes once, as the embedding
        gain = weight.dim() == 1 and name.endswith("weight") and not one_plus
        if weight.dim() == 1:
            weight.uniform_(0.4, 1.6, generator=generator) if gain else weight.normal_(
                0, 0.3, generator=generator
            )
        else:
            weight.normal_(0, 0.6 * weight.shape[-1] ** -0.5, generator=generator)
            if "embed" in name or "wte" in name or "wpe" in name:
                weight.normal_(0, 0.6, generator=generator)


def write(model_type: str, values: dict[str, Any], folder: Path, seed: int = 0) -> None:
    """A checkpoint folder of that family with random weights in float32."""
    transformers = require("transformers")
    config = transformers.AutoConfig.for_model(model_type, **values)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    draw(model, seed, one_plus=model_type.startswith("gemma"))
    model.save_pretrained(folder)


def reference_logits(folder: Path, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    transformers = require("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return model(tokens).logits
