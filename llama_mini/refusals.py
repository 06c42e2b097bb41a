"""What a config may say that this decoder does not do, each with its name: no key is ignored in
silence.
"""

from typing import Any

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# `model_type` of families that look alike, and what sets each apart.
OTHER_FAMILIES = {
    "cohere": "LayerNorm, interleaved pairs, and attention and FFN side by side",
    "deepseek_v2": "multi-head latent attention and a mixture of experts",
    "deepseek_v3": "multi-head latent attention and a mixture of experts",
    "falcon": "LayerNorm, and attention and FFN side by side",
    "gemma": "scaled embeddings, a norm gain of 1 + weight, and GELU in the FFN",
    "gemma2": "scaled embeddings, a norm gain of 1 + weight, norms behind each sublayer, and soft-capping",
    "gemma3": "scaled embeddings, a norm gain of 1 + weight, and norms behind each sublayer",
    "gemma3_text": "scaled embeddings, a norm gain of 1 + weight, and norms behind each sublayer",
    "gpt2": "LayerNorm, biases, and learned positions",
    "gpt_neox": "LayerNorm, biases, and attention and FFN side by side",
    "granite": "multipliers on the embeddings, the deltas, the scores and the logits",
    "llama4": "a mixture of experts, and blocks without rotary positions",
    "llama4_text": "a mixture of experts, and blocks without rotary positions",
    "ministral": "blocks that alternate full and sliding-window attention",
    "mixtral": "a mixture of experts",
    "olmo": "LayerNorm without weights",
    "olmo2": "norms behind each sublayer instead of in front of it, and a norm over all of q and k",
    "olmo3": "norms behind each sublayer instead of in front of it, and a norm over all of q and k",
    "phi": "LayerNorm, biases, partial rotary, and attention and FFN side by side",
    "phi3": "q, k, v and gate, up fused into one projection each",
    "qwen2": "biases in the q, k and v projections",
    "qwen2_moe": "biases, and a mixture of experts",
    "qwen3_moe": "a mixture of experts",
    "smollm3": "blocks without rotary positions",
    "stablelm": "LayerNorm and partial rotary",
}

# Keys of which only one value is built in here, and what any other value would take.
ONLY: dict[str, tuple[Any, str]] = {
    "add_cross_attention": (False, "cross-attention"),
    "attention_bias": (False, "biases in the attention projections"),
    "attention_multiplier": (None, "a scale of the scores other than 1/sqrt(head_dim)"),
    "attn_logit_softcapping": (None, "soft-capping of the scores"),
    "bias": (False, "biases in the projections"),
    "clip_qkv": (None, "clipping of q, k and v"),
    "compression_config": (None, "dequantising the weights with their scales"),
    "cross_attention_hidden_size": (None, "cross-attention"),
    "embedding_multiplier": (1.0, "scaled embeddings"),
    "final_logit_softcapping": (None, "soft-capping of the logits"),
    "hidden_act": ("silu", "another activation in the FFN"),
    "hidden_activation": ("silu", "another activation in the FFN"),
    "is_encoder_decoder": (False, "an encoder"),
    "kv_lora_rank": (None, "multi-head latent attention"),
    "logit_scale": (1.0, "scaled logits"),
    "logits_scaling": (1.0, "scaled logits"),
    "mlp_bias": (False, "biases in the FFN projections"),
    "n_routed_experts": (None, "a mixture of experts"),
    "num_experts": (None, "a mixture of experts"),
    "num_local_experts": (None, "a mixture of experts"),
    "parallel_attn": (False, "attention and FFN side by side"),
    "partial_rotary_factor": (1.0, "rotating only a part of each head"),
    "q_lora_rank": (None, "multi-head latent attention"),
    "qkv_bias": (False, "biases in the q, k and v projections"),
    "quantization": (None, "dequantising the weights with their scales"),
    "quantization_config": (None, "dequantising the weights with their scales"),
    "query_pre_attn_scalar": (None, "a scale of the scores other than 1/sqrt(head_dim)"),
    "residual_multiplier": (1.0, "scaled deltas"),
    "rope_interleaved": (False, "interleaved pairs in a Hugging Face layout"),
    "rotary_pct": (1.0, "rotating only a part of each head"),
    "use_bias": (False, "biases in the projections"),
    "use_mrope": (False, "rotary positions in several dimensions"),
    "use_parallel_residual": (False, "attention and FFN side by side"),
    "use_qk_norm": (False, "norms on q and k other than Qwen3's"),
}

# Keys that config.py reads.
USED = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters original_max_position_embeddings "
    "tie_word_embeddings sliding_window use_sliding_window layer_types no_rope_layers bos_token_id eos_token_id "
    "torch_dtype dtype model_type architectures".split()
)

# Keys that change nothing in a forward pass: training, bookkeeping, defaults for another program's
# generation.
HARMLESS = frozenset(
    "transformers_version _name_or_path auto_map use_cache initializer_range attention_dropout pretraining_tp "
    "pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id decoder_start_token_id forced_bos_token_id "
    "forced_eos_token_id output_attentions output_hidden_states output_scores return_dict return_dict_in_generate "
    "torchscript use_bfloat16 chunk_size_feed_forward id2label label2id problem_type finetuning_task "
    "task_specific_params tokenizer_class prefix is_decoder tie_encoder_decoder bad_words_ids begin_suppress_tokens "
    "suppress_tokens do_sample early_stopping max_length min_length temperature top_k top_p typical_p num_beams "
    "num_beam_groups diversity_penalty repetition_penalty encoder_no_repeat_ngram_size no_repeat_ngram_size "
    "length_penalty num_return_sequences exponential_decay_length_penalty remove_invalid_values tf_legacy_loss "
    "pruned_heads max_window_layers no_rope_layer_interval _flash_attn_2_enabled _attn_implementation "
    "_attn_implementation_autoset attn_implementation is_llama_config transformers.js_config max_sequence_length "
    "unsloth_version unsloth_fixed".split()
)


def refuse(given: dict[str, Any]) -> None:
    """Raise a `ValueError` that names the first key of a Hugging Face config (nulls left out) that
    asks for something else.
    """
    for key, (only, needs) in ONLY.items():
        if key in given and given[key] != only:
            raise ValueError(
                f"{key} is {_short(given[key])}: that would take {needs}, which is not supported"
            )
    no_rope = given.get("no_rope_layers", [])
    if not isinstance(no_rope, list) or 0 in no_rope:
        raise ValueError(
            f"no_rope_layers is {_short(no_rope)}: blocks without rotary positions are not supported"
        )
    if "no_rope_layer_interval" in given and not no_rope:
        raise ValueError(
            f"no_rope_layer_interval is {_short(given['no_rope_layer_interval'])}: blocks without rotary positions "
            "are not supported"
        )
    family = given.get("model_type")
    if family is None:
        for architecture in given.get("architectures", []):
            if architecture not in FAMILIES.values():
                raise ValueError(
                    f"architectures names {_short(architecture)}; supported: {', '.join(FAMILIES.values())}"
                )
    elif family not in FAMILIES:
        needs = OTHER_FAMILIES.get(family) if isinstance(family, str) else None
        why = f": that would take {needs}, which is not supported" if needs else ""
        raise ValueError(f"model_type is {_short(family)}{why}; supported: {', '.join(FAMILIES)}")
    for key in sorted(given.keys() - USED - HARMLESS - ONLY.keys()):
        raise ValueError(
            f"{key} is {_short(given[key])}: this key is not known here, and what it asks for may change the output; "
            "if you know that it does not, delete it"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
