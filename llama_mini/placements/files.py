"""How the files of a family name and lay out its weights, in tables from our names to theirs."""

from torch import Tensor

from ..config import LlamaConfig

# Llama's, less ".weight"; N stands for the number of a block.
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


def names(prefix: str, inside: dict[str, str], **outside: str) -> dict[str, str]:
    """A table from the names within a block, behind `prefix` in the files, and those outside."""
    return {f"blocks.N.{ours}": f"{prefix}.{theirs}" for ours, theirs in inside.items()} | outside


def llama_names(changes: dict[str, str | None], **outside: str) -> dict[str, str]:
    """Llama's table with other names within a block, and outside; None for what a family does not have."""
    table: dict[str, str | None] = {**NAMES, **outside}
    for ours, theirs in changes.items():
        table[f"blocks.N.{ours}"] = theirs and f"model.layers.N.{theirs}"
    return {ours: theirs for ours, theirs in table.items() if theirs}


# Norms behind the sublayers, of OLMo 2 and EXAONE 4; and in front of and behind them, of Gemma 2 and 3.
BEHIND = llama_names(
    {
        "pre_attention_norm": None,
        "post_attention_norm": "post_attention_layernorm",
        "pre_ffn_norm": None,
        "post_ffn_norm": "post_feedforward_layernorm",
    }
)
SANDWICH = llama_names(
    {
        "post_attention_norm": "post_attention_layernorm",
        "pre_ffn_norm": "pre_feedforward_layernorm",
        "post_ffn_norm": "post_feedforward_layernorm",
    }
)
LATENT = llama_names(
    {
        "attention.q_down": "self_attn.q_a_proj",
        "attention.q_latent_norm": "self_attn.q_a_layernorm",
        "attention.q_up": "self_attn.q_b_proj",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
    }
)
GPT2 = names(
    "transformer.h.N",
    {
        "pre_attention_norm": "ln_1",
        "attention.qkv_proj": "attn.c_attn",
        "attention.o_proj": "attn.c_proj",
        "pre_ffn_norm": "ln_2",
        "ffn.up_proj": "mlp.c_fc",
        "ffn.down_proj": "mlp.c_proj",
    },
    embed="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    lm_head="lm_head",
)
# The norms of GPT stand behind the sublayers, under GPT-2's names.
GPT1 = {ours.replace(".pre_", ".post_"): theirs for ours, theirs in GPT2.items()} | {
    "embed": "transformer.tokens_embed",
    "positions": "transformer.positions_embed",
}
del GPT1["final_norm"]
NEOX_BLOCK = {
    "pre_attention_norm": "input_layernorm",
    "attention.qkv_proj": "attention.query_key_value",
    "attention.o_proj": "attention.dense",
    "pre_ffn_norm": "post_attention_layernorm",
    "ffn.up_proj": "mlp.dense_h_to_4h",
    "ffn.down_proj": "mlp.dense_4h_to_h",
}
NEOX = names(
    "gpt_neox.layers.N",
    NEOX_BLOCK,
    embed="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    lm_head="embed_out",
)
BLOOM = names(
    "transformer.h.N",
    {ours: theirs.replace("attention.", "self_attention.") for ours, theirs in NEOX_BLOCK.items()},
    embed="transformer.word_embeddings",
    embed_norm="transformer.word_embeddings_layernorm",
    final_norm="transformer.ln_f",
    lm_head="lm_head",
)


def experts(prefix: str, count: int, gate: str, up: str, down: str) -> dict[str, str | None]:
    """The names of so many experts within a block, for `llama_names`."""
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return {
        f"ffn.experts.{n}.{ours}": f"{prefix}.experts.{n}.{theirs}"
        for n in range(count)
        for ours, theirs in parts.items()
    }


HUNYUAN = llama_names(
    {
        "attention.q_norm": "self_attn.query_layernorm",
        "attention.k_norm": "self_attn.key_layernorm",
    }
)
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
DIFFERENCE = llama_names({f"attention.{name}": f"self_attn.{name}" for name in LAMBDAS})
PHI = llama_names(
    {
        "attention.o_proj": "self_attn.dense",
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
        "pre_ffn_norm": None,
        "ffn.up_proj": "mlp.fc1",
        "ffn.down_proj": "mlp.fc2",
    },
    final_norm="model.final_layernorm",
)
MINIMAX = llama_names(
    {
        "ffn.router": "block_sparse_moe.gate",
        **experts("block_sparse_moe", 256, "w1", "w3", "w2"),
    }
)
_PARTS = ("gate_proj", "up_proj", "down_proj")
DEEPSEEK = LATENT | llama_names(
    {
        "ffn.router": "mlp.gate",
        "ffn.router.bias": "mlp.gate.e_score_correction_bias",
        **experts("mlp", 512, *_PARTS),
        **{f"ffn.shared.{part}": f"mlp.shared_experts.{part}" for part in _PARTS},
    }
)


def transposed(name: str, tensor: Tensor, config: LlamaConfig) -> dict[str, Tensor]:
    """Every matrix of a block turned round: a view, since a copy moves bits."""
    return {name: tensor.t() if name.startswith("blocks.") and tensor.dim() == 2 else tensor}
