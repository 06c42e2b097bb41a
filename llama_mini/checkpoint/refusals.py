"""What a config may ask for that this decoder does not do, each with its name: no key is ignored in
silence.
"""

import re
from typing import Any

from ..config import short
from ..placements import FAMILIES, Family
from ..placements.keys import unread_rope
from .untrusted import listed

# `model_type` of families that look alike, and what each would take.
OTHER_FAMILIES = {
    "apertus": "an FFN without a gate and with another activation, and norms on q and k",
    "arcee": "an FFN without a gate and with another activation",
    "baichuan": "q, k and v fused into one projection",
    "chatglm": "q, k and v fused into one projection, biases, and rotating only a part of each head",
    "deepseek": "a mixture of experts",
    "deepseek_v2": "multi-head latent attention and a mixture of experts",
    "falcon": "LayerNorm, and attention and FFN side by side",
    "gemma3": "pictures: of its text alone, a folder of model_type gemma3_text works",
    "gemma3n": "several streams, embeddings in every block, and keys and values that blocks share",
    "gpt_bigcode": "LayerNorm, biases, and learned positions",
    "gpt_neo": "LayerNorm, biases, and learned positions",
    "gpt_oss": "a mixture of experts, biases, and attention sinks",
    "gptj": "LayerNorm, biases, and attention and FFN side by side",
    "granitemoe": "a mixture of experts, and multipliers",
    "internlm2": "q, k and v fused into one projection",
    "llama4": "a mixture of experts, and blocks without rotary positions",
    "minicpm": "multipliers on the embeddings, the deltas and the logits",
    "minicpm3": "multi-head latent attention, and multipliers",
    "ministral": "blocks that alternate full and sliding-window attention",
    "mixtral": "a mixture of experts",
    "mllama": "pictures, and cross-attention to them",
    "mpt": "LayerNorm, and positions as a bias on the scores",
    "nemotron": "LayerNorm, an FFN without a gate, and rotating only a part of each head",
    "olmoe": "a mixture of experts, and a norm over all of q and k",
    "opt": "LayerNorm, biases, and learned positions",
    "qwen": "q, k and v fused into one projection, with biases",
    "qwen2_moe": "biases, and a mixture of experts",
    "qwen3_moe": "a mixture of experts",
    "qwen3_next": "linear attention in most blocks, and a mixture of experts",
    "seed_oss": "biases in the q, k and v projections",
    "stablelm": "LayerNorm, and rotating only a part of each head",
    "starcoder2": "LayerNorm, biases, and an FFN without a gate",
    "yi": "other names for the norms: the later files of Yi, of model_type llama, work",
}
OTHER_FAMILIES |= {f"{name}_text": OTHER_FAMILIES[name] for name in ("gemma3n", "llama4")}

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
    "is_causal": (True, "attention that sees later positions"),
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
    "per_layer_config": (None, "blocks that differ in their sizes"),
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
    "slow_but_exact": (False, "sums in another order"),
    "use_bias": (False, "biases in the projections"),
    "use_bidirectional_attention": (False, "attention to later positions"),
    "use_mrope": (False, "rotary positions in several dimensions"),
    "use_parallel_residual": (False, "attention and FFN side by side"),
    "use_qk_norm": (False, "norms on q and k other than Qwen3's"),
}

# Of these, the ones that say what the weights are, whichever class reads them.
ALWAYS = frozenset(
    "quantization_config quantization compression_config per_layer_config is_encoder_decoder "
    "is_causal".split()
)
# Keys that transformers' classes have for training, bookkeeping and generation: they are read, and change
# nothing in a forward pass.
DECLARED = frozenset(
    "transformers_version _name_or_path name_or_path _commit_hash auto_map transformers.js_config "
    "pad_token_id bos_token_id use_cache initializer_range attention_dropout pretraining_tp "
    "chunk_size_feed_forward id2label label2id num_labels problem_type return_dict output_attentions "
    "output_hidden_states attn_implementation assistant_confidence_threshold assistant_lookbehind "
    "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff "
    "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty "
    "max_length min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule "
    "num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values "
    "repetition_penalty return_dict_in_generate suppress_tokens target_lookbehind temperature top_k "
    "top_p typical_p".split()
)


def refuse(given: dict[str, Any], family: Family) -> None:
    """Raise a `ValueError` that names what a Hugging Face config (nulls left out) asks for and is not
    done here.
    """
    for key, (only, needs) in ONLY.items():
        is_read = key in ALWAYS or family.reads is None or key in family.reads
        if key not in given or key in family.keys or not is_read:
            continue
        if given[key] != only and (key, given[key]) != ("hidden_act", "swish"):  # SiLU's other name
            raise ValueError(
                f"{key} is {short(given[key])}: that would take {needs}, which is not supported"
            )
    # Llama's class reads neither, and would give these weights rotary positions that they never had.
    given = {key: value for key, value in given.items() if key not in family.keys}
    layers, key = given.get("no_rope_layers", []), "no_rope_layers"
    if not layers and "no_rope_layer_interval" in given:
        key = "no_rope_layer_interval"
    elif isinstance(layers, list) and 0 not in layers:
        return
    raise ValueError(
        f"{key} is {short(given[key])}: blocks without rotary positions are not supported"
    )


def unread(given: dict[str, Any], family: Family) -> dict[str, Any]:
    """The keys that transformers' class for this family does not read, with their values: they cannot
    change what it gives.

    A `ValueError` where the folder brings code of its own for the model, which may read them.
    """
    read = family.keys | (ONLY.keys() if family.reads is None else family.reads) | ALWAYS | DECLARED
    keys = {key: value for key, value in given.items() if key not in read} | unread_rope(
        given, family.keys
    )
    own = _own_code(given, family)
    if keys and own:
        raise ValueError(
            f"auto_map names {short(own)}: code that came with these weights is not run here, and it "
            f"may read what {family.architecture} does not: {listed(keys, sorted(keys))}; where you "
            "know that it changes nothing, delete it"
        )
    return keys


def _own_code(given: dict[str, Any], family: Family) -> str | None:
    """The class that a folder's own code makes the model with, where it is not the family's."""
    names = given.get("auto_map", {})
    name = names.get("AutoModelForCausalLM") if isinstance(names, dict) else None
    name = name[0] if isinstance(name, list) and name else name
    if not isinstance(name, str) or name.rpartition(".")[2] == family.architecture:
        return None
    return name


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
    # transformers goes by model_type, and wrappers put names of their own here. A class of another family,
    # or for something else than the next token, says that these are other weights.
    only = FAMILIES[family].architecture
    for name in names:
        stem = name.lower().removesuffix("forcausallm").replace("_", "")
        others = {other.replace("_", "") for other in OTHER_FAMILIES.keys() | FAMILIES.keys()}
        others -= {family.replace("_", "")}
        is_other = stem in others or name.lower() in by_class
        if (is_other and name.lower() != only.lower()) or re.search(
            r"For(?!CausalLM|LM)[A-Z]", name
        ):
            raise ValueError(
                f"architectures is {short(names)}: with model_type {family}, only {only} is supported"
            )
    return FAMILIES[family]
