"""What a config may ask for that this decoder does not do, each with its name: no key is ignored in
silence.
"""

from typing import Any

from ..config import short
from ..placements import FAMILIES, Family
from .untrusted import listed

# `model_type` of families that look alike, and what each would take.
OTHER_FAMILIES = {
    "apertus": "an FFN without a gate and with another activation, and norms on q and k",
    "arcee": "an FFN without a gate and with another activation",
    "baichuan": "q, k and v fused into one projection",
    "bloom": "LayerNorm, biases, and positions as a bias on the scores",
    "chatglm": "q, k and v fused into one projection, biases, and rotating only a part of each head",
    "cohere": "LayerNorm, interleaved pairs, and attention and FFN side by side",
    "cohere2": "LayerNorm, interleaved pairs, and attention and FFN side by side",
    "deepseek": "a mixture of experts",
    "deepseek_v2": "multi-head latent attention and a mixture of experts",
    "deepseek_v3": "multi-head latent attention and a mixture of experts",
    "ernie4_5": "interleaved pairs in a Hugging Face layout",
    "exaone4": "norms behind each sublayer instead of in front of it",
    "falcon": "LayerNorm, and attention and FFN side by side",
    "gemma": "scaled embeddings, a norm gain of 1 + weight, and GELU in the FFN",
    "gemma2": (
        "scaled embeddings, a norm gain of 1 + weight, GELU in the FFN, norms behind each sublayer too, "
        "and soft-capping"
    ),
    "gemma3": (
        "scaled embeddings, a norm gain of 1 + weight, GELU in the FFN, norms behind each sublayer too, "
        "and sliding windows"
    ),
    "gemma3n": "a norm gain of 1 + weight, GELU in the FFN, and embeddings in every block",
    "glm": "biases, and rotating only a part of each head",
    "glm4": "biases, norms behind each sublayer too, and rotating only a part of each head",
    "gpt2": "LayerNorm, biases, and learned positions",
    "gpt_bigcode": "LayerNorm, biases, and learned positions",
    "gpt_neo": "LayerNorm, biases, and learned positions",
    "gpt_neox": "LayerNorm, biases, and attention and FFN side by side",
    "gpt_oss": "a mixture of experts, biases, and attention sinks",
    "gptj": "LayerNorm, biases, and attention and FFN side by side",
    "granite": "multipliers on the embeddings, the deltas, the scores and the logits",
    "granitemoe": "a mixture of experts, and multipliers",
    "hunyuan_v1_dense": "norms on q and k behind their rotation",
    "internlm2": "q, k and v fused into one projection",
    "llama4": "a mixture of experts, and blocks without rotary positions",
    "minicpm": "multipliers on the embeddings, the deltas and the logits",
    "minicpm3": "multi-head latent attention, and multipliers",
    "ministral": "blocks that alternate full and sliding-window attention",
    "mixtral": "a mixture of experts",
    "mllama": "pictures, and cross-attention to them",
    "mpt": "LayerNorm, and positions as a bias on the scores",
    "nanochat": "norms without weights, an FFN without a gate, and soft-capping",
    "nemotron": "LayerNorm, an FFN without a gate, and rotating only a part of each head",
    "olmo": "LayerNorm without weights",
    "olmo2": "norms behind each sublayer instead of in front of it, and a norm over all of q and k",
    "olmo3": "norms behind each sublayer instead of in front of it, and a norm over all of q and k",
    "olmoe": "a mixture of experts, and a norm over all of q and k",
    "opt": "LayerNorm, biases, and learned positions",
    "phi": "LayerNorm, biases, partial rotary, and attention and FFN side by side",
    "phi3": "q, k, v and gate, up fused into one projection each",
    "qwen": "q, k and v fused into one projection, with biases",
    "qwen2": "biases in the q, k and v projections",
    "qwen2_moe": "biases, and a mixture of experts",
    "qwen3_moe": "a mixture of experts",
    "qwen3_next": "linear attention in most blocks, and a mixture of experts",
    "seed_oss": "biases in the q, k and v projections",
    "smollm3": "blocks without rotary positions",
    "stablelm": "LayerNorm, and rotating only a part of each head",
    "starcoder2": "LayerNorm, biases, and an FFN without a gate",
    "yi": "other names for the norms: the later files of Yi, of model_type llama, work",
}
OTHER_FAMILIES |= {f"{name}_text": OTHER_FAMILIES[name] for name in ("gemma3", "gemma3n", "llama4")}

# Keys of which only one value is built in here, and what any other value would take.
ONLY: dict[str, tuple[Any, str]] = {
    "add_cross_attention": (False, "cross-attention"),
    "attention_bias": (False, "biases in the attention projections"),
    "attention_multiplier": (None, "a scale of the scores other than 1/sqrt(head_dim)"),
    "attention_out_bias": (False, "biases in the attention projections"),
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
    "pruned_heads": ({}, "heads that differ from block to block"),
    "q_lora_rank": (None, "multi-head latent attention"),
    "qk_layernorm": (False, "LayerNorm on q and k"),
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

# Keys that may say that a block has no rotary positions.
ROPELESS = frozenset({"no_rope_layers", "no_rope_layer_interval"})

# Keys that change nothing in a forward pass: training, bookkeeping, defaults for the generation of
# another program.
HARMLESS = frozenset(
    "transformers_version _name_or_path _commit_hash auto_map use_cache initializer_range "
    "attention_dropout hidden_dropout hidden_dropout_prob resid_pdrop gradient_checkpointing "
    "pretraining_tp bos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id "
    "decoder_start_token_id forced_bos_token_id forced_eos_token_id output_attentions "
    "output_hidden_states output_scores return_dict return_dict_in_generate torchscript "
    "use_bfloat16 chunk_size_feed_forward id2label label2id problem_type finetuning_task "
    "task_specific_params tokenizer_class prefix is_decoder tie_encoder_decoder bad_words_ids "
    "begin_suppress_tokens suppress_tokens do_sample early_stopping max_length min_length "
    "temperature top_k top_p typical_p num_beams num_beam_groups diversity_penalty "
    "repetition_penalty encoder_no_repeat_ngram_size no_repeat_ngram_size length_penalty "
    "num_return_sequences exponential_decay_length_penalty remove_invalid_values tf_legacy_loss "
    "_flash_attn_2_enabled _attn_implementation _attn_implementation_autoset "
    "attn_implementation is_llama_config transformers.js_config max_sequence_length "
    "model_max_length unsloth_version unsloth_fixed".split()
)


def refuse(given: dict[str, Any], family: Family) -> None:
    """Raise a `ValueError` that names what a Hugging Face config (nulls left out) asks for and is not
    done here.
    """
    for key, (only, needs) in ONLY.items():
        if key in given and key not in family.keys and given[key] != only:
            raise ValueError(
                f"{key} is {short(given[key])}: that would take {needs}, which is not supported"
            )
    no_rope = given.get("no_rope_layers", [])
    if not isinstance(no_rope, list) or 0 in no_rope:
        raise ValueError(
            f"no_rope_layers is {short(no_rope)}: blocks without rotary positions are not supported"
        )
    if "no_rope_layer_interval" in given and not no_rope:
        raise ValueError(
            f"no_rope_layer_interval is {short(given['no_rope_layer_interval'])}: blocks without "
            "rotary positions are not supported"
        )
    unknown = sorted(given.keys() - family.keys - ROPELESS - HARMLESS - ONLY.keys())
    if unknown:
        raise ValueError(
            f"{listed(given, unknown)}: not known for model_type {family.model_type}, and may "
            "change the output; where you know that it does not, delete it"
        )


def family_of(given: dict[str, Any]) -> Family:
    """The family of a config, by `model_type`, else by its class; a `ValueError` for one that is not
    done here.
    """
    names = given.get("architectures", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures is {short(names)}: it must be a list of names")
    by_class = {family.architecture.lower(): name for name, family in FAMILIES.items()}
    classes = [by_class.get(name.lower()) for name in names]
    family = given.get("model_type", next(iter(classes), "llama"))
    if not isinstance(family, str) or family not in FAMILIES:
        if "model_type" not in given:
            supported = ", ".join(family.architecture for family in FAMILIES.values())
            raise ValueError(f"architectures is {short(names)}; supported: {supported}")
        needs = OTHER_FAMILIES.get(family.lower()) if isinstance(family, str) else None
        why = (
            f"that would take {needs}, which is not supported" if needs else "it is not known here"
        )
        raise ValueError(f"model_type is {short(family)}: {why}; supported: {', '.join(FAMILIES)}")
    if names and family not in classes:
        only = FAMILIES[family].architecture
        raise ValueError(
            f"architectures is {short(names)}: with model_type {family}, only {only} is supported"
        )
    return FAMILIES[family]
