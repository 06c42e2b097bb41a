"""Folders with the tensors of a tiny model, and what loading one gives or says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llama_mini import Llama, load_model
from llama_mini.checkpoint import parse_config
from llama_mini.checkpoint.names import HUGGING_FACE, translate
from tests.support.fixtures import BASE, strengthen

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


def tensors(**changes: Any) -> dict[str, Tensor]:
    """The tensors of a model of BASE with changes, by Hugging Face names, drawn from a fixed seed."""
    model = Llama(parse_config({**BASE, **changes}))
    strengthen(model, seed=0)
    named = {translate(name, HUGGING_FACE): weight for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del named[HEAD]
    return named


def write(folder: Path, weights: dict[str, Tensor], **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**BASE, **changes}))
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        folder / "model.safetensors",
    )
    return folder


def write_shards(folder: Path, *shards: dict[str, Tensor], **index: str) -> list[str]:
    """Write the tensors in several files and their index; `index` adds to it or changes it."""
    (folder / "config.json").write_text(json.dumps(BASE))
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    weight_map: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map | index})
    (folder / "model.safetensors.index.json").write_text(text)
    return names


def halves(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    names = sorted(weights)
    return (
        {name: weights[name] for name in names[: len(names) // 2]},
        {name: weights[name] for name in names[len(names) // 2 :]},
    )


def check(model: Llama, weights: dict[str, Tensor]) -> None:
    """Fail unless the model holds exactly these tensors."""
    held = {translate(name, HUGGING_FACE): weight for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        assert model.lm_head.weight is model.embed.weight
        weights = {HEAD: weights.get(EMBED, weights.get(HEAD)), EMBED: weights.get(HEAD), **weights}
    assert held.keys() == weights.keys()
    for name, weight in held.items():
        assert torch.equal(weight, weights[name]), name


def read_nothing(*_: object) -> None:
    raise AssertionError("a tensor was read")


def complaint(folder: Path, kind: type[Exception] = ValueError, reads: bool = False) -> str:
    """The error for this folder, which is one line that names it, and comes before a tensor is read."""
    with pytest.MonkeyPatch.context() as patch:
        if not reads:
            patch.setattr("llama_mini.checkpoint.weights.read_tensors", read_nothing)
        with pytest.raises(kind) as error:
            load_model(folder)
    message = str(error.value)
    assert str(folder) in message
    assert "\n" not in message
    return message
