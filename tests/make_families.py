"""Write tests/activations/families/*.safetensors from transformers: python -m tests.make_families

Run by hand, and only when a family is added: the tests that read the files need no transformers. Nothing
here is computed by llama_mini, and where transformers has each place is written out, so that a fault there
cannot get into what it is tested against.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2 import modeling_gemma2

from tests.support.placements import FAMILIES_FOLDER, VARIANTS, write

# Smaller than the variants, which keep their options.
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "moe_intermediate_size": 8,
    "q_lora_rank": 6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_embd": 16,
    "n_layer": 2,
    "n_positions": 16,
    "head_dim": 8,
    "sliding_window": 4,
}
# Where transformers has the places, within a block behind its name; None: it has none of its own.
LLAMA: dict[str, str | None] = {
    "embed": "model.embed_tokens",
    "pre_attention_norm": "input_layernorm",
    "attention": "self_attn",
    "pre_ffn_norm": "post_attention_layernorm",
    "ffn": "mlp",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}
BEHIND = {
    "pre_attention_norm": None,
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffn_norm": None,
    "post_ffn_norm": "post_feedforward_layernorm",
}
# The embedding of transformers' Gemma is scaled already.
GEMMA = {"embed": None}
SANDWICH = GEMMA | {
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}
GPT = {
    "embed": "transformer.wte",
    "pre_attention_norm": "ln_1",
    "attention": "attn",
    "pre_ffn_norm": "ln_2",
    "final_norm": "transformer.ln_f",
}
PLACES: dict[str, dict[str, str | None]] = {
    "openai-gpt": {
        **GPT,
        "embed": "transformer.tokens_embed",
        "pre_attention_norm": None,
        "post_attention_norm": "ln_1",
        "pre_ffn_norm": None,
        "post_ffn_norm": "ln_2",
        "final_norm": None,
    },
    "gpt2": GPT,
    "gpt_neox": {
        "embed": "gpt_neox.embed_in",
        "attention": "attention",
        "final_norm": "gpt_neox.final_layer_norm",
    },
    "phi": {"pre_ffn_norm": None, "final_norm": "model.final_layernorm"},
    "gemma": GEMMA,
    "gemma2": SANDWICH,
    "gemma3_text": SANDWICH,
    "olmo2": BEHIND,
    "olmo3": BEHIND,
    "exaone4": BEHIND,
    "cohere": {"pre_ffn_norm": None},
    "cohere2": {"pre_ffn_norm": None},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffn_norm": "post_mlp_layernorm",
    },
    "bloom": {
        "embed": "transformer.word_embeddings",
        "embed_norm": "transformer.word_embeddings_layernorm",
        "attention": "self_attention.dense",  # its attention adds to the stream itself
        "ffn": "mlp.dense_4h_to_h",
        "final_norm": "transformer.ln_f",
    },
}
OUTSIDE = ("embed", "embed_norm", "final_norm", "lm_head")
FUSED: dict[str, Callable[[Tensor], Any]] = {
    "openai-gpt": lambda x: x.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4),
    "bloom": lambda x: x.unflatten(-1, (4, 3, -1)).permute(3, 0, 2, 1, 4),
}


def small(name: str) -> dict[str, Any]:
    """The first variant of a family, with smaller sizes; as many kinds of block as there are blocks."""
    values = dict(VARIANTS[name][0])
    values |= {key: size for key, size in SIZES.items() if values.get(key) is not None}
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][:2]
    return values


@torch.no_grad()
def activations(name: str, model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Every place by our name."""
    kept: dict[str, Tensor] = {}

    def keep(ours: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, (tuple, list)) else output
            first = "embed_norm" if name == "nanochat" and ours == "final_norm" else ours
            kept[ours if first in kept else first] = tensor.clone().contiguous()

        return hook

    def attend(inner: Callable[..., Any]) -> Callable[..., Any]:
        def function(
            module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any
        ) -> Any:
            for letter, tensor in zip("qkv", (query, key, value), strict=True):
                kept[f"blocks.{module.layer_idx}.attention.{letter}"] = tensor.clone().contiguous()
            return inner(module, query, key, value, *rest, **more)

        return function

    def fused(n: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            for letter, tensor in zip("qkv", FUSED[name](output), strict=True):
                kept[f"blocks.{n}.attention.{letter}"] = tensor.clone().contiguous()

        return hook

    places = {**LLAMA, **PLACES.get(name, {})}
    stem = {"gpt_neox": "gpt_neox.layers", "gpt2": "transformer.h", "openai-gpt": "transformer.h"}
    blocks = {**stem, "bloom": "transformer.h"}.get(name, "model.layers")
    for ours, theirs in places.items():
        if theirs is None:
            continue
        if ours in OUTSIDE:
            model.get_submodule(theirs).register_forward_hook(keep(ours))
            continue
        for n in range(2):
            module = model.get_submodule(f"{blocks}.{n}.{theirs}")
            module.register_forward_hook(keep(f"blocks.{n}.{ours}"))
    for n in range(2):
        block = model.get_submodule(f"{blocks}.{n}")
        block.register_forward_hook(keep(f"blocks.{n}"))
        if name in FUSED:
            inner = "attn.c_attn" if name == "openai-gpt" else "self_attention.query_key_value"
            block.get_submodule(inner).register_forward_hook(fused(n))
    transformers.AttentionInterface.register("sdpa", attend(sdpa_attention_forward))
    eager = modeling_gemma2.eager_attention_forward
    modeling_gemma2.eager_attention_forward = attend(eager)
    try:
        model(tokens)
    finally:
        transformers.AttentionInterface.register("sdpa", sdpa_attention_forward)
        modeling_gemma2.eager_attention_forward = eager
    return kept


def write_family(name: str) -> None:
    tokens = torch.randint(40, (1, 7), generator=torch.Generator().manual_seed(len(name)))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(name, small(name), folder, seed=7)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        kept = activations(name, model, tokens)
        weights = load_file(folder / "model.safetensors")
        config = (folder / "config.json").read_text()
    tensors = {f"weights.{key}": tensor for key, tensor in weights.items()}
    tensors |= {f"activations.{key}": tensor for key, tensor in kept.items()}
    metadata = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "config": config,
    }
    path = FAMILIES_FOLDER / f"{name}.safetensors"
    save_file({"tokens": tokens, **tensors}, path, metadata)
    print(f"{path.name}: {len(kept)} activations, {path.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    FAMILIES_FOLDER.mkdir(exist_ok=True)
    for family in VARIANTS:
        write_family(family)
