"""Configs as the hub has them, in the keys of transformers 4, only smaller: transformers reads the same
file, and gives the same logits.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_mini import load_model
from tests.support.fixtures import draw_tokens, require
from tests.support.placements import BASE, LATENT, MIXTURE, draw

PLAIN = {
    **BASE,
    "torch_dtype": "float32",
    "initializer_range": 0.02,
    "rope_scaling": None,
    "pad_token_id": 0,
    "use_cache": True,
}
GPT = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256, "n_ctx": 256, "vocab_size": 96}
DYNAMIC = {"alpha": 1000.0, "beta_fast": 32, "factor": 1.0, "mscale": 1.0, "type": "dynamic"}
LLAMA3 = {
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
FOUR = ["sliding_attention"] * 3 + ["full_attention"]
HUB: dict[str, dict[str, Any]] = {
    "gpt2": {**GPT, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
    "openai-gpt": {**GPT, "afn": "gelu", "layer_norm_epsilon": 1e-5, "n_special": 0},
    "gpt_neox": {
        **{key: value for key, value in PLAIN.items() if key != "num_key_value_heads"},
        "rotary_emb_base": 5000,
        "rotary_pct": 0.5,
        "use_parallel_residual": True,
    },
    "phi": {**PLAIN, "num_key_value_heads": None, "partial_rotary_factor": 0.5, "rope_theta": 1e4},
    "qwen2": {**PLAIN, "max_window_layers": 2, "sliding_window": 8, "use_sliding_window": False},
    "gemma": {**PLAIN, "head_dim": 24, "hidden_act": "gelu", "rope_theta": 1e4},
    "gemma2": {**PLAIN, "head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 24},
    "gemma3_text": {
        **PLAIN,
        "head_dim": 24,
        "num_hidden_layers": 4,
        "rope_local_base_freq": 500.0,
        "rope_theta": 1e5,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
    },
    "olmo": {**PLAIN, "clip_qkv": None, "rope_theta": 1e4, "tie_word_embeddings": True},
    "olmo2": {**PLAIN, "rms_norm_eps": 1e-6, "rope_theta": 5e5},
    "olmo3": {**PLAIN, "num_hidden_layers": 4, "layer_types": FOUR, "sliding_window": 8},
    "granite": {**PLAIN, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "hunyuan_v1_dense": {**PLAIN, "head_dim": 24, "rope_scaling": DYNAMIC, "rope_theta": 1e4},
    "exaone4": {
        **PLAIN,
        "layer_types": ["full_attention"] * 3,
        "rope_scaling": LLAMA3,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    "smollm3": {**PLAIN, "no_rope_layers": [1, 1, 0], "rope_theta": 5e6},
    "glm": {**PLAIN, "head_dim": 16, "partial_rotary_factor": 1.0, "attention_bias": False},
    "glm4": {**PLAIN, "head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5},
    "cohere": {**PLAIN, "layer_norm_eps": 1e-5, "logit_scale": 0.25, "rope_theta": 8e6},
    "ernie4_5": {**PLAIN, "head_dim": 16, "use_bias": False, "rope_theta": 5e5},
    "bloom": {
        "n_embed": 64,
        "n_layer": 3,
        "num_attention_heads": 4,
        "vocab_size": 96,
        "layer_norm_epsilon": 1e-5,
        "offset_alibi": 100,
        "skip_bias_add": True,
    },
}


KINDS = {**PLAIN, "num_hidden_layers": 4, "sliding_window": 8, "layer_types": FOUR}
SCALED = {"rope_theta": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
FULL, NEAR = {"full_attention": {"rope_theta": 3e4}}, {"sliding_attention": {"rope_theta": 300.0}}
ODD_HEADS = {"n_embd": 60, "n_head": 4}
CASES = [
    *HUB.items(),
    # Older keys, and those beside the nested ones, are about one kind of block.
    ("olmo3", {**KINDS, **SCALED}),
    ("olmo3", {**KINDS, "rope_theta": 2e4, "rope_parameters": NEAR}),
    ("olmo3", {**KINDS, "rope_theta": 2e4, "rope_parameters": {**FULL, "rope_theta": 77.0}}),
    ("gemma3_text", {**KINDS, **SCALED, "head_dim": 24, "rope_local_base_freq": 500.0}),
    (
        "gemma3_text",
        {**KINDS, "head_dim": 24, "rope_parameters": FULL, "rope_local_base_freq": 70.0},
    ),
    # Heads of an odd size, of which nothing turns.
    ("gpt2", {**HUB["gpt2"], **ODD_HEADS}),
    ("openai-gpt", {**HUB["openai-gpt"], **ODD_HEADS}),
    ("bloom", {**HUB["bloom"], "n_embed": 60}),
    # Of an odd size, of which a part turns; and all blocks with experts.
    ("deepseek_v3", {**LATENT, **MIXTURE, "qk_nope_head_dim": 13, "first_k_dense_replace": 0}),
    ("ernie4_5", {**PLAIN, "head_dim": None}),  # not as if left out
]


@pytest.mark.parametrize(("name", "values"), CASES, ids=[name for name, _ in CASES])
def test_a_config_means_what_it_means_in_transformers(
    name: str, values: dict[str, Any], tmp_path: Path
) -> None:
    transformers = require("transformers")
    text = json.dumps({"model_type": name, **values})
    (tmp_path / "config.json").write_text(text)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    draw(reference, 0, one_plus=name.startswith("gemma"))
    reference.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if name in ("gpt2", "bloom"):  # whose first files have no prefix, and a mask
        weights = {key.removeprefix("transformer."): tensor for key, tensor in weights.items()}
    if name == "gpt2":
        weights["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    tokens = draw_tokens((1, 40), 0, 96)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path)(tokens), reference(tokens).logits)


def test_the_embedding_of_padding_is_that_of_the_file(tmp_path: Path) -> None:
    """transformers' Youtu alone sets it to zero; with the file's it is the same again."""
    transformers = require("transformers")
    values = {**LATENT, "pad_token_id": 5, "tie_word_embeddings": True}
    config = transformers.AutoConfig.for_model("youtu", **values)
    model = transformers.AutoModelForCausalLM.from_config(config)
    draw(model, 0, one_plus=False)
    model.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = draw_tokens((1, 40), 0, 96)
    with torch.no_grad():
        assert torch.equal(ours.embed.weight, model.get_input_embeddings().weight)
        assert not reference.get_input_embeddings().weight[5].any()
        reference.get_input_embeddings().weight[5] = ours.embed.weight[5]
        assert torch.equal(ours(tokens), reference(tokens).logits)
