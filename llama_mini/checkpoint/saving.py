"""From a model back to a folder in Hugging Face's layout, which load_model and transformers read."""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..config import LlamaConfig
from ..model import Llama
from ..placements import FAMILIES, Family
from ..placements.keys import ROPE_KEYS
from .configs import parse_config
from .files import replace, write_bytes
from .headers import DTYPES
from .hub import INDEX, SETTINGS
from .names import in_any_block, translate
from .opening import GENERATION, Checkpoint, open_checkpoint
from .tokenizer import load_tokenizer
from .untrusted import is_there, some
from .weights import NoInit

SHARD_BYTES = 5 * 10**9
SHARD_TENSORS = 4000  # a header with more could be longer than the loader reads


def save_model(model: Llama, folder: str | Path, tokenizer_from: str | Path | Checkpoint) -> None:
    """Write a model, in its own dtype, with the tokenizer, the chat template and the generation settings
    of another folder or hub name, as a new Hugging Face folder: whole or not at all.

    `folder` must not be there, or be empty. Errors: `ValueError` for a model whose family's config.json
    cannot be written, a tokenizer with more ids than the model has, parameters of several dtypes;
    `FileNotFoundError` for a source that is not there; `OSError` for what cannot be written.
    """
    source, target = open_checkpoint(tokenizer_from), Path(folder).expanduser().resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is there and not an empty folder: name another")
    config, tensors = describe(model, source)
    size, rows = load_tokenizer(source).vocab_size, model.config.vocab_size
    if size > rows:
        raise ValueError(f"{source.folder}: its tokenizer has {size} ids, and the model {rows}")
    files = {
        name: (source.folder / name).read_bytes()
        for name in SETTINGS
        if is_there(source.folder / name)
    }
    ends: dict[str, Any] = {k: config[k] for k in ("bos_token_id", "eos_token_id") if k in config}
    files = {GENERATION: as_json(ends), **files, "config.json": as_json(config)}
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    missing = [folder for folder in target.parents if not folder.exists()]
    try:
        temporary.mkdir(parents=True)
        write_model(temporary, tensors, files)
        if target.exists():
            target.rmdir()  # which is empty
        temporary.rename(target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in missing:  # what was made above it
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):  # name the folder that was asked for
            said = f"{target} cannot be written: {error.strerror}" if error.strerror else str(error)
            raise OSError(said.replace(str(temporary), str(target))) from error
        raise


def write_model(folder: Path, tensors: list[tuple[str, Tensor]], files: dict[str, bytes]) -> None:
    """Put tensors, by the names of their files, and other files into a folder, each file whole or not
    at all; `config.json`, by which a folder is known to be a checkpoint, comes last.
    """
    shards = plan(tensors, SHARD_BYTES)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        index |= dict.fromkeys(shard, name)
        content = {key: tensor.contiguous() for key, tensor in shard.items()}
        replace(folder / name, partial(save_file, content, metadata={"format": "pt"}))
    if len(shards) > 1:
        size = sum(tensor.nbytes for _, tensor in tensors)
        files = {INDEX: as_json({"metadata": {"total_size": size}, "weight_map": index}), **files}
    for name in sorted(files, key=lambda name: name == "config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        write_bytes(folder / name, files[name])


def plan(tensors: list[tuple[str, Tensor]], shard_bytes: int) -> list[dict[str, Tensor]]:
    """The tensors in order, cut into files of at most `shard_bytes` bytes each, or one larger tensor."""
    shards: list[dict[str, Tensor]] = [{}]
    held = 0
    for name, tensor in tensors:
        if shards[-1] and (held + tensor.nbytes > shard_bytes or len(shards[-1]) == SHARD_TENSORS):
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += tensor.nbytes
    return shards


def describe(model: Llama, source: Checkpoint) -> tuple[dict[str, Any], list[tuple[str, Tensor]]]:
    """The `config.json` of a model, and its tensors by the names in files.

    The config is that of `source` where it describes this model, else one made of the model's own,
    which is possible for Llama and Qwen3.
    """
    if is_there(source.folder / "config.json") and same(model.config, source.config):
        values = {k: v for k, v in source.json("config.json").items() if k != "dtype"}
        require_family(model, source.family, source.folder)
        values["torch_dtype"] = dtype_name(model, source.family)
        return values, list(_as_stored(model, source))
    family = FAMILIES[kind_of(model.config)]
    require_family(model, family, source.folder)
    tokenizer = load_tokenizer(source)
    dtype = dtype_name(model, family)
    values = config_values(model.config, dtype, tokenizer.bos_id, tokenizer.eos_id)
    if not same(model.config, parse_config(values)):
        raise ValueError(f"a config.json cannot say all of {model.config}")
    return values, named_tensors(model, family)


def dtype_name(model: Llama, family: Family) -> str:
    """The dtype of all parameters, but for those that the family keeps in float32."""
    named = model.named_parameters()
    dtypes = {p.dtype for name, p in named if in_any_block(name) not in family.float32}
    names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model is on the meta device: it has no weights to save")
    if len(dtypes) != 1 or not dtypes <= set(DTYPES.values()):
        raise ValueError(
            f"the parameters are {', '.join(names)}: call model.to(torch.bfloat16) first"
        )
    return names[0]


def same(one: LlamaConfig, other: LlamaConfig) -> bool:
    """Whether two configs describe one model, whatever its dtype and the tokens that end a text."""
    one, other = (dataclasses.replace(each, dtype=None, eos_token_id=()) for each in (one, other))
    return type(one) is type(other) and one == other


def require_family(model: Llama, family: Family, folder: Path) -> None:
    """Raise a ValueError for a model that is not what `family` makes of its config."""
    with torch.device("meta"), NoInit():
        made = family.model(model.config)
    require_float_weights(model, made)

    def parts(of: Llama) -> tuple[object, ...]:
        blocks = [type(module) for block in of.blocks for module in block.modules()]
        return type(of), blocks, {name: tuple(p.shape) for name, p in of.named_parameters()}

    if parts(model) != parts(made):
        raise ValueError(
            f"{folder} has no config.json of this {type(model).__name__} (it is not what "
            f"{family.architecture} makes of its config): give the folder that it was loaded from"
        )


def require_float_weights(model: Llama, made: Llama) -> None:
    """Raise a ValueError that names the layers whose weight is no float parameter, as it is in `made`."""
    modules, quantised = dict(model.named_modules()), []
    for name, layer in made.named_modules():
        own, kind = modules.get(name), type(modules.get(name))
        weight = own and getattr(own, "weight", None)
        is_float = isinstance(weight, Tensor) and weight.is_floating_point()
        if own is not None and "weight" in layer._parameters and not is_float:
            quantised.append(f"{name} is a {kind.__module__}.{kind.__qualname__}")
    if quantised:
        raise ValueError(
            "only float weights can be saved, so save the model before it is quantised: "
            f"{some(quantised, 3)}"
        )


def named_tensors(model: Llama, family: Family) -> list[tuple[str, Tensor]]:
    """The parameters by the family's names, a tied head once; for families that fuse none."""
    named = []
    for name, parameter in model.named_parameters():  # a shared parameter is named once
        theirs = translate(name, family.names)
        assert theirs is not None  # the table covers every parameter of its family
        named.append((theirs, parameter.detach()))
    return named


def _as_stored(model: Llama, source: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The tensors as the files of `source` lay them out: fused, transposed, or one by one."""
    split = source.family.split
    if split is None:
        yield from named_tensors(model, source.family)
        return
    state = model.state_dict()
    for name, stored in source.stored.items():
        # Where each element goes, told by splitting a tensor of places; some families' splits copy.
        places = torch.arange(math.prod(stored.shape), dtype=torch.long, device="cpu")
        parts = split(name, places.view(stored.shape), model.config)
        found = torch.cat([place.flatten() for place in parts.values()])
        if not torch.equal(found.sort().values, places):
            raise ValueError(f"{source.folder}: {stored.name} is more than its parts")
        values = torch.cat([state[part].flatten().cpu() for part in parts])
        yield stored.name, torch.empty_like(values).scatter_(0, found, values).view(stored.shape)


def kind_of(config: LlamaConfig) -> str:
    """The family that a plain config belongs to."""
    return "qwen3" if config.qk_norm else "llama"


def config_values(
    config: LlamaConfig, dtype: str, bos_id: int | None, eos_id: int | None
) -> dict[str, Any]:
    """A `config.json` for a Llama or Qwen3 of this shape, without a window; the ids are those of the
    tokenizer, of which the end of a text counts where the config names none.
    """
    kind = kind_of(config)
    values: dict[str, Any] = {"architectures": [FAMILIES[kind].architecture], "model_type": kind}
    values |= dataclasses.asdict(config)
    for field in ("rope", "qk_norm", "dtype", "sliding_window"):
        del values[field]
    if kind == "llama":
        values["mlp_bias"] = False
    values |= {"hidden_act": "silu", "attention_bias": False, "rope_theta": config.rope.rope_theta}
    if config.rope.rope_type != "default":
        keys = ("rope_type", *ROPE_KEYS[config.rope.rope_type])
        values["rope_scaling"] = {key: getattr(config.rope, key) for key in keys}
    if config.rope.rope_type == "linear":  # the reader multiplies by the factor
        length, factor = config.max_position_embeddings, max(1.0, config.rope.factor)
        values |= {"max_position_embeddings": max(1, int(length / factor))}
        values |= {"max_sequence_length": length}
    ends: list[int | None] = list(config.eos_token_id) or [eos_id]
    values |= {"bos_token_id": bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    return values | {"torch_dtype": dtype}


def as_json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
