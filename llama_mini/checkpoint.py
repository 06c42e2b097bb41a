"""From a checkpoint folder to a `Llama`: names, shards, row order, the tied head, and one exact
accounting of it all.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .config import LlamaConfig, read_json
from .hub import resolve
from .model import Llama

# Our names and theirs, less ".weight"; N stands for the number of a block.
HUGGING_FACE = {
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
META = {
    "embed": "tok_embeddings",
    "blocks.N.pre_attention_norm": "layers.N.attention_norm",
    "blocks.N.attention.q_proj": "layers.N.attention.wq",
    "blocks.N.attention.k_proj": "layers.N.attention.wk",
    "blocks.N.attention.v_proj": "layers.N.attention.wv",
    "blocks.N.attention.o_proj": "layers.N.attention.wo",
    "blocks.N.pre_ffn_norm": "layers.N.ffn_norm",
    "blocks.N.ffn.gate_proj": "layers.N.feed_forward.w1",
    "blocks.N.ffn.up_proj": "layers.N.feed_forward.w3",
    "blocks.N.ffn.down_proj": "layers.N.feed_forward.w2",
    "final_norm": "norm",
    "lm_head": "output",
}
DTYPES = {"F64", "F32", "F16", "BF16"}
RECOMPUTED = re.compile(
    r"(model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|rope\.freqs)$"
)  # rope.py makes them


class Stored(NamedTuple):
    """Where a tensor lies, and what its file says of it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def translate(name: str, table: dict[str, str]) -> str | None:
    """The name of a parameter by a table from one scheme to another, or None where the table has no
    such name.
    """
    block = re.search(r"\.(\d+)\.", name)
    pattern = name.replace(block[0], ".N.", 1) if block else name
    there = table.get(pattern.removesuffix(".weight"))
    if there is None or not name.endswith(".weight"):
        return None
    return (there.replace(".N.", block[0]) if block else there) + ".weight"


def load_model(
    folder_or_hub_id: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Llama:
    """The model of a checkpoint folder or hub name, ready for inference on `device`, all parameters
    in `dtype`.

    `dtype` None is the checkpoint's own. Errors: `FileNotFoundError` for what is not there; one
    `ValueError` that lists every tensor that is missing, unexpected or of another shape, before
    memory is taken; `ValueError` for what is not supported.
    """
    folder = resolve(folder_or_hub_id)
    config = LlamaConfig.from_checkpoint(folder)
    table = HUGGING_FACE if (folder / "config.json").is_file() else META
    stored = read_headers(folder, {theirs: ours for ours, theirs in table.items()})
    model = build(config, stored, table)
    dtype = dtype or saved_dtype(config, stored)
    state: dict[str, nn.Parameter] = {}
    for name, tensor in read_tensors(stored, device, dtype, config if table is META else None):
        state[name] = nn.Parameter(tensor)
    if config.tie_word_embeddings:
        tie(state, stored)
    model.load_state_dict(state, assign=True)
    return model.eval()


def read_headers(folder: Path, names: dict[str, str]) -> dict[str, Stored]:
    """Every tensor of a checkpoint by our name, from the headers of the files that hold it; no
    weights are read.
    """
    index = folder / "model.safetensors.index.json"
    wanted: dict[str, str] | None = None
    files = [folder / "model.safetensors"]
    if "norm" in names:
        files = [folder / "consolidated.00.safetensors"]
        if (folder / "consolidated.01.safetensors").exists():
            raise ValueError(
                f"{folder} holds a checkpoint cut for several devices: join its consolidated files first"
            )
    elif not files[0].is_file() and index.is_file():
        wanted = read_json(index).get("weight_map")
        if not isinstance(wanted, dict) or not all(
            isinstance(file, str) for file in wanted.values()
        ):
            raise ValueError(f"{index} has no weight_map from tensor names to file names")
        for file in wanted.values():
            if file in ("", ".", "..") or re.search(r"[/\\\0]", file):
                raise ValueError(
                    f"{index} names {file!r}, which is not the name of a file in its folder"
                )
        files = [folder / file for file in dict.fromkeys(wanted.values())]
    gone = [file.name for file in files if not file.is_file()]
    if gone and wanted is None:
        raise _no_weights(folder, files[0].name)
    if gone:
        raise FileNotFoundError(f"{index} names files that are not there: {', '.join(gone)}")

    stored: dict[str, Stored] = {}
    problems = []
    found = [(file, *entry) for file in files for entry in _header(file)]
    if wanted is not None:
        present = {(name, file.name) for file, name, _, _ in found}
        problems += [
            f"{file} lacks {name}, which the index names"
            for name, file in wanted.items()
            if (name, file) not in present
        ]
        problems += [
            f"{file} holds {name}, which the index does not name there"
            for name, file in present
            if wanted.get(name) != file
        ]
    for file, name, shape, dtype in found:
        ours = translate(name, names)
        if RECOMPUTED.fullmatch(name):
            continue
        if name.endswith(".bias"):
            problems.append(f"{file.name} holds {name}: biases are not supported")
        elif dtype not in DTYPES:
            problems.append(
                f"{file.name} holds {name} as {dtype}: quantised weights are not supported, their scales would be lost"
            )
        elif ours is None:
            problems.append(f"{file.name} holds {name} {shape}, which is no part of this decoder")
        else:
            stored[ours] = Stored(file, name, shape, dtype)
    _raise_all(folder, problems)
    return stored


def build(config: LlamaConfig, stored: dict[str, Stored], table: dict[str, str]) -> Llama:
    """A `Llama` of this config without memory (on the meta device), after checking that `stored`
    fits it exactly.
    """
    files = sorted({tensor.file for tensor in stored.values()})
    folder = files[0].parent
    blocks = 1 + max(
        (int(name.split(".")[1]) for name in stored if name.startswith("blocks.")), default=-1
    )
    if blocks != config.num_hidden_layers:
        raise ValueError(
            f"{folder}: num_hidden_layers is {config.num_hidden_layers}, and the files hold {blocks} blocks"
        )
    try:
        with torch.device("meta"):
            model = Llama(config)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(f"{folder}: no model of these sizes can be made: {error}") from None
    expected = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    problems = [
        f"{file.name} holds {name}, which a model of this config does not have"
        for name, (file, *_) in stored.items()
        if name not in expected
    ]
    for name, shape in expected.items():
        if name in stored:
            file, theirs, found, _ = stored[name]
            if found != shape:
                problems.append(f"{file.name} holds {theirs} {found}, and the config says {shape}")
        elif not (
            config.tie_word_embeddings and name in TIED and any(other in stored for other in TIED)
        ):
            problems.append(
                f"{translate(name, table)} {shape} is missing from {', '.join(file.name for file in files)}"
            )
    _raise_all(folder, problems)
    return model


TIED = ("embed.weight", "lm_head.weight")


def saved_dtype(config: LlamaConfig, stored: dict[str, Stored]) -> torch.dtype:
    """The dtype that the config names, or else that of the embedding."""
    own = next(stored[name].dtype for name in TIED if name in stored)
    name = (
        config.dtype
        or {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}[own]
    )
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"the config's dtype {name!r} is not one of float32, bfloat16, float16")
    return dtype


def read_tensors(
    stored: dict[str, Stored],
    device: str | torch.device,
    dtype: torch.dtype,
    interleaved: LlamaConfig | None,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors one by one, on `device` in `dtype`; a file that needs no conversion is mapped and
    not copied.
    """
    for name, (file, theirs, _, _) in stored.items():
        # Opened for each tensor: a mapping kept open would count every page read from it on top of
        # the converted copies.
        with _open(file) as tensors:
            tensor = tensors.get_tensor(theirs)
            if interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
                tensor = rearrange(
                    tensor, "(h d pair) m -> (h pair d) m", d=interleaved.head_dim // 2, pair=2
                )
            yield name, tensor.to(device, dtype)


def tie(state: dict[str, nn.Parameter], stored: dict[str, Stored]) -> None:
    """Make the embedding and the head of a tied checkpoint one parameter; refuse two that differ."""
    embed, head = (state.get(name) for name in TIED)
    if embed is not None and head is not None and not torch.equal(embed, head):
        raise ValueError(
            f"{stored[TIED[1]].file.name}: tie_word_embeddings is true, and {stored[TIED[1]].name} differs from "
            f"{stored[TIED[0]].name}: set it to false to use both"
        )
    one = embed if embed is not None else head
    assert one is not None  # build() requires one of them
    state.update(dict.fromkeys(TIED, one))


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}") from None


def _header(file: Path) -> list[tuple[str, tuple[int, ...], str]]:
    with _open(file) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  # not a dict
        return [(name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()]


def _no_weights(folder: Path, name: str) -> FileNotFoundError:
    pickles = sorted(
        path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern)
    )
    if pickles:
        return FileNotFoundError(
            f"{folder} holds its weights as {pickles[0]}: loading a pickle can run code that somebody put into it, so only "
            "safetensors are read; where you trust the file, transformers' from_pretrained and save_pretrained convert it"
        )
    return FileNotFoundError(
        f"{folder} holds no weights: neither {name} nor model.safetensors.index.json is there"
    )


def _raise_all(folder: Path, problems: list[str]) -> None:
    if problems:
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(f"{folder} does not fit: " + "; ".join(problems[:20]) + more)
