"""Write tests/activations/*.safetensors from transformers: python -m tests.make_activations

Run by hand, and only when a case is added: the tests that read the files need no transformers. Nothing
here is computed by llama_mini, so a fault there cannot get into what it is tested against.
"""

import json
from functools import partial
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from sentencepiece import SentencePieceProcessor
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from tests.support.fixtures import (
    ACTIVATIONS,
    HALVES,
    SHAPES,
    SHIPPED,
    SHIPPED_NEW_TOKENS,
    SHIPPED_PROMPT,
    TOKENS,
    draw_tokens,
    reference_model,
)

VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__}
# The names under which activations are recorded, and where transformers has them.
OUTSIDE = {"embed": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
IN_BLOCK = {
    ".pre_attention_norm": ".input_layernorm",
    ".attention": ".self_attn",
    ".pre_ffn_norm": ".post_attention_layernorm",
    ".ffn": ".mlp",
    "": "",
}
POSITIONS = [0, 1, 2, 3, 5, 8, 31, 255, 256, 257, 1000, 4095]


@torch.no_grad()
def activations(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Every named activation, in the order in which transformers makes them."""
    kept: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        kept[name] = (output[0] if isinstance(output, tuple) else output).clone().contiguous()

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any):
        for letter, tensor in zip("qkv", (query, key, value), strict=True):
            kept[f"blocks.{module.layer_idx}.attention.{letter}"] = tensor.clone().contiguous()
        return sdpa_attention_forward(module, query, key, value, *rest, **more)

    for ours, theirs in OUTSIDE.items():
        model.get_submodule(theirs).register_forward_hook(partial(keep, ours))
    for n in range(model.config.num_hidden_layers):
        for ours, theirs in IN_BLOCK.items():
            module = model.get_submodule(f"model.layers.{n}{theirs}")
            module.register_forward_hook(partial(keep, f"blocks.{n}{ours}"))
    transformers.AttentionInterface.register("sdpa", attend)
    try:
        model(tokens)
    finally:
        transformers.AttentionInterface.register("sdpa", sdpa_attention_forward)
    return kept


def write_case(name: str) -> None:
    seed = list(SHAPES).index(name)
    model = reference_model(name)
    tokens = draw_tokens(TOKENS.get(name, (2, 9)), seed)
    weights = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    kept = activations(model, tokens)
    model.config.architectures = [type(model).__name__]
    metadata = {
        **VERSIONS,
        "dtype": "float32",
        "seed": str(seed),
        "attn_implementation": model.config._attn_implementation,
        "config": model.config.to_json_string(use_diff=True),
        "order": json.dumps(list(kept)),
    }
    path = ACTIVATIONS / f"{name}.safetensors"
    save_file({"tokens": tokens, **weights, **kept}, path, metadata)
    print(f"{path.name}: {len(kept)} activations, {path.stat().st_size // 1000} kB")


@torch.no_grad()
def write_halves() -> None:
    """RMSNorm and RoPE in bfloat16 and float16, where an order of casts shows that float32 hides."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {"positions": torch.tensor(POSITIONS)}
    norm = modeling_llama.LlamaRMSNorm(32, eps=1e-5)
    for dtype in HALVES:
        prefix = str(dtype).removeprefix("torch.")
        weight = torch.empty(32).uniform_(0.5, 1.5, generator=generator).to(dtype)
        x = (torch.randn(8, 16, 32, generator=generator) * 3).to(dtype)
        norm.weight = nn.Parameter(weight)
        tensors |= {f"{prefix}.x": x, f"{prefix}.weight": weight, f"{prefix}.norm": norm(x)}
        q = torch.randn(1, 4, len(POSITIONS), 16, generator=generator).to(dtype)
        tensors[f"{prefix}.q"] = q
        for name in ("mha_untied", "linear_scaling", "llama3_scaling"):
            config = transformers.AutoConfig.for_model(**{**SHAPES[name], "head_dim": 16})
            rope = modeling_llama.LlamaRotaryEmbedding(config)
            cos, sin = rope(q, tensors["positions"][None])
            tensors[f"{prefix}.{name}.cos"] = cos[..., :8].clone()
            tensors[f"{prefix}.{name}.sin"] = sin[..., :8].clone()
            turned, _ = modeling_llama.apply_rotary_pos_emb(q, q, cos, sin)
            tensors[f"{prefix}.{name}.rotated"] = turned
    path = ACTIVATIONS / "halves.safetensors"
    save_file(tensors, path, {**VERSIONS, "seed": "0", "eps": "1e-5", "head_dim": "16"})
    print(f"{path.name}: {path.stat().st_size // 1000} kB")


def write_shipped() -> None:
    """The checkpoint in weights/: activations of a prompt, and how it goes on at temperature 0."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        SHIPPED, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    tokenizer = SentencePieceProcessor(model_file=str(SHIPPED / "tokenizer.model"))
    tokens = torch.tensor([tokenizer.encode(SHIPPED_PROMPT, add_bos=True)])
    text = model.generate(tokens, max_new_tokens=SHIPPED_NEW_TOKENS, do_sample=False)
    kept = activations(model, tokens)
    metadata = {**VERSIONS, "dtype": "float32", "order": json.dumps(list(kept))}
    metadata |= {
        "prompt": SHIPPED_PROMPT,
        "text": tokenizer.decode(text[0].tolist()),
    }
    path = ACTIVATIONS / "shipped.safetensors"
    greedy = text[0, tokens.shape[1] :].contiguous()
    save_file({"tokens": tokens, "greedy": greedy, **kept}, path, metadata)
    print(f"{path.name}: {len(kept)} activations, {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    ACTIVATIONS.mkdir(exist_ok=True)
    for case in SHAPES:
        write_case(case)
    write_halves()
    write_shipped()
