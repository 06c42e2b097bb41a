"""From a checkpoint folder to a `Llama`: names, shards, row order, the tied head, and one exact
accounting of it all.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..config import LlamaConfig, is_there, read_json, unambiguous
from ..model import Llama
from .hub import INDEX, resolve
from .refusals import said, short, shown

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
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
TIED = ("embed.weight", "lm_head.weight")
# Tables that old files hold, and that rope.py makes.
RECOMPUTED = re.compile(r"(model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq|rope\.freqs)")
HEADER_BYTES = 2**20  # of one file; a Llama of 405B in one file would need 0.15 MB
# Files of a training run that hold no weights.
TRAINING = {"training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt", "scheduler.pt"}


class NoInit(TorchFunctionMode):
    """Within it, modules are made without initial values.

    On the meta device there are none to draw, and yet `normal_` there imports torch's compiler, which
    takes longer than most loads (observed: 1.4 s and 80 MB).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


class Stored(NamedTuple):
    """Where a tensor lies, what its file says of it, and what is wrong with it ("": nothing)."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    problem: str = ""


class Checkpoint(NamedTuple):
    """A checkpoint of which no weight is read yet."""

    config: LlamaConfig
    stored: dict[str, Stored]  # by our name
    table: dict[str, str]


def translate(name: str, table: dict[str, str]) -> str | None:
    """The name of a parameter by a table from one scheme to another, or None where the table has
    no such name.
    """
    block = re.search(r"\.([0-9]{1,9})\.", name)
    pattern = name.replace(block[0], ".N.", 1) if block else name
    there = table.get(pattern.removesuffix(".weight"))
    if there is None or not name.endswith(".weight") or (".N." in there) != bool(block):
        return None
    return (there.replace(".N.", block[0]) if block else there) + ".weight"


def load_model(
    folder_or_hub_id: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Llama:
    """The model of a checkpoint folder or hub name, ready for inference on `device`, all parameters
    in `dtype` and without gradients.

    `dtype` None is the checkpoint's own. Errors: `FileNotFoundError` for what is not there;
    `ValueError` for what is not supported, before a weight is read, and for tensors that do not fit
    the config: one error lists every one that is missing, unexpected or of another shape.
    """
    checkpoint = open_checkpoint(folder_or_hub_id)
    model = build(*checkpoint)
    model.load_state_dict(read_state(checkpoint, device, dtype), assign=True)
    return model.eval().requires_grad_(False)  # or a cache would keep every step's graph alive


def open_checkpoint(folder_or_hub_id: str | Path) -> Checkpoint:
    """The config and the headers of a checkpoint; no weights are read, and of a hub model whose
    config is refused none are fetched.
    """
    open_config(folder_or_hub_id)
    folder = resolve(folder_or_hub_id)
    table = HUGGING_FACE if is_there(folder / "config.json") else META
    config = LlamaConfig.from_checkpoint(folder)
    return Checkpoint(config, read_headers(folder, inverse(table)), table)


def open_config(folder_or_hub_id: str | Path) -> LlamaConfig:
    """The config; of a hub model before its weights are fetched, unless (Meta's) it counts on them."""
    folder = resolve(folder_or_hub_id, weights=False)
    if not is_there(folder / "config.json"):
        folder = resolve(folder_or_hub_id)
    return LlamaConfig.from_checkpoint(folder)


def check_weights(model: Llama, checkpoint: Checkpoint) -> None:
    """Raise a ValueError that names every tensor of a loaded model that holds NaN or infinity, as its
    file names it.
    """
    problems = []
    for name, weight in model.named_parameters():
        lowest, highest = weight.aminmax()  # both NaN if there is one
        if lowest.isfinite() and highest.isfinite():
            continue
        names = TIED if name in TIED and checkpoint.config.tie_word_embeddings else (name,)
        tensor = next(checkpoint.stored[name] for name in names if name in checkpoint.stored)
        nans, infinite = weight.isnan().sum().item(), weight.isinf().sum().item()
        problems.append(
            f"{tensor.file.name} holds {tensor.name} with {nans} NaN and {infinite} infinite"
        )
    if problems:
        more = f"; and {len(problems) - 100} more" if len(problems) > 100 else ""
        raise ValueError(
            f"{tensor.file.parent} has weights that are no numbers in {weight.dtype}: "
            f"{'; '.join(_fold(problems)[:100])}{more}"
        )


def inverse(table: dict[str, str]) -> dict[str, str]:
    """The table for `translate` in the other direction."""
    return {theirs: ours for ours, theirs in table.items()}


def read_headers(folder: Path, names: dict[str, str]) -> dict[str, Stored]:
    """Every tensor of a checkpoint by our name, or by its own where it has none, from the headers of
    the files that hold it; no weights are read.

    `names` is a table from theirs to ours. Raises for files that are not there or cannot be read.
    """
    files, index = _weight_files(folder, meta="tok_embeddings" in names)
    stored: dict[str, Stored] = {}
    found = set()
    for file in files:
        for name, shape, dtype in _header(file):
            if RECOMPUTED.fullmatch(name):
                continue
            found.add((name, file.name))
            ours, problem, says = translate(name, names), "", f"{file.name} holds {shown(name)}"
            misplaced = bool(index) and index.get(name) != file.name
            if name.endswith(".bias"):
                problem = f"{says}: biases are not supported"
            elif dtype not in DTYPES:
                problem = (
                    f"{says} as {dtype}: quantised weights are not supported, their scales would be "
                    "lost"
                )
            elif ours is None:
                problem = f"{says} {short(shape)}, which is no part of this decoder"
            elif misplaced:
                problem = f"{says}, which the index does not name there"
            if ours is None or (misplaced and name in index):  # that is looked for where it says
                ours = f"{name} in {file.name}"
            stored[ours] = Stored(file, name, shape, dtype, problem)
    for name, file_name in index.items():
        if (name, file_name) not in found and not RECOMPUTED.fullmatch(name):
            problem = f"{file_name} lacks {shown(name)}, which the index names"
            key = translate(name, names) or name
            stored.setdefault(key, Stored(folder / file_name, name, (), "", problem))
    if not stored:
        raise ValueError(f"{', '.join(map(str, files)) or folder / INDEX} holds no tensors")
    return stored


def build(config: LlamaConfig, stored: dict[str, Stored], table: dict[str, str]) -> Llama:
    """A `Llama` of this config without memory (on the meta device), after checking that `stored`
    fits it exactly.
    """
    problems = [tensor.problem for tensor in stored.values() if tensor.problem]
    config_name = "params.json" if table is META else "config.json"
    files = sorted({tensor.file for tensor in stored.values()})
    folder = files[0].parent
    where = ", ".join(file.name for file in files[:3]) + (", ..." if len(files) > 3 else "")
    numbers = [re.match(r"blocks\.([0-9]{1,9})\.", name) for name in stored]
    blocks = 1 + max((int(number[1]) for number in numbers if number), default=-1)
    if blocks > 100 + len(stored) // 4:  # each would have 9: blocks without tensors are not made
        raise ValueError(
            f"{folder} does not fit its {config_name}: {where} holds {len(stored)} tensors, and their "
            f"names count {blocks} blocks"
        )
    if blocks != config.num_hidden_layers:
        problems.append(
            f"num_hidden_layers is {config.num_hidden_layers}, and there are {blocks} blocks in {where}"
        )
    try:
        with torch.device("meta"), NoInit():
            layers = max(1, min(blocks, config.num_hidden_layers))
            model = Llama(dataclasses.replace(config, num_hidden_layers=layers))
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(
            f"{folder / config_name}: no model of these sizes can be made: {said(error)}"
        ) from None
    expected = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    for name, (file, theirs, found, _, problem) in stored.items():
        if not problem and name not in expected:
            problems.append(
                f"{file.name} holds {theirs} {short(found)}, which a model of this config does not have"
            )
        elif not problem and found != expected[name]:
            problems.append(
                f"{file.name} holds {theirs} {short(found)}, and the config says {expected[name]}"
            )
    tied = config.tie_word_embeddings and any(name in stored for name in TIED)
    for name, shape in expected.items():
        if name not in stored and not (tied and name in TIED):
            untied = " (tie_word_embeddings is false)" if name == TIED[1] else ""
            problems.append(f"{translate(name, table)} {shape} is missing from {where}{untied}")
    if problems:
        problems = _fold(problems)
        more = f"; and {len(problems) - 100} more" if len(problems) > 100 else ""
        what = f"{'; '.join(problems[:100])}{more}"
        against = [config_name] + [INDEX] * ("the index" in what)
        raise ValueError(f"{folder} does not fit its {' and '.join(against)}: {what}")
    return model


def stored_vocab_size(folder: Path) -> int:
    """How many rows the embedding of a Meta checkpoint has, which its config may leave open."""
    embed = read_headers(folder, inverse(META)).get(TIED[0])
    if embed is None or not embed.shape:
        raise ValueError(f"{folder} holds no {META['embed']}.weight, and its vocab_size is -1")
    return embed.shape[0]


def read_state(
    checkpoint: Checkpoint,
    device: str | torch.device,
    dtype: torch.dtype | None,
    part: Callable[[str, Any], Tensor] | None = None,
) -> dict[str, nn.Parameter]:
    """The parameters of a checkpoint that `build` has checked; `dtype` and `part` as for `load_model`
    and `read_tensors`.
    """
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(
            f"dtype is {dtype!r}: it must be one of {', '.join(map(str, DTYPES.values()))}"
        )
    config, stored, table = checkpoint
    dtype = own_dtype(checkpoint) if dtype is None else dtype
    interleaved = config if table is META else None
    state = {
        name: nn.Parameter(tensor)
        for name, tensor in read_tensors(stored, device, dtype, interleaved, part)
    }
    if config.tie_word_embeddings:
        tie(state, stored)
    return state


def own_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What the config names, or else the dtype of the embedding (float32 if `build` will refuse that)."""
    if checkpoint.config.dtype is not None:
        return getattr(torch, checkpoint.config.dtype)
    own = next((checkpoint.stored[n].dtype for n in TIED if n in checkpoint.stored), "")
    return DTYPES.get(own, torch.float32)


def read_tensors(
    stored: dict[str, Stored],
    device: str | torch.device,
    dtype: torch.dtype,
    interleaved: LlamaConfig | None,
    part: Callable[[str, Any], Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors one by one, on `device` in `dtype`; a file that needs no conversion is mapped and
    not copied.

    `interleaved` is the config whose q and k rows stand in Meta's order, if any do. `part` reads what
    is wanted of a tensor (whole heads) from its name and its slice in the file; None reads it all.
    """
    for name, (file, theirs, *_) in stored.items():
        # Opened for each tensor: a mapping kept open would count every page read from it on top of
        # the converted copies.
        with _open(file) as tensors:
            tensor = part(name, tensors.get_slice(theirs)) if part else tensors.get_tensor(theirs)
            if interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
                tensor = rearrange(
                    tensor, "(h d pair) m -> (h pair d) m", d=interleaved.head_dim // 2, pair=2
                )
            yield name, tensor.to(device, dtype)


def tie(state: dict[str, nn.Parameter], stored: dict[str, Stored]) -> None:
    """Make the embedding and the head of a tied checkpoint one parameter; refuse two that differ."""
    embed, head = (state.get(name) for name in TIED)
    if embed is not None and head is not None and not torch.equal(embed, head):
        ours, theirs = (stored[name] for name in TIED)
        raise ValueError(
            f"{theirs.file}: tie_word_embeddings is true, and {theirs.name} differs from {ours.name}: "
            "set it to false in config.json to use both"
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
        raise _unreadable(file, error) from None


def _unreadable(file: Path, why: object) -> ValueError:
    with suppress(OSError), file.open("rb") as start:
        if start.read(32).startswith(b"version https://git-lfs"):
            why = "it is a Git LFS pointer, not the file itself (git lfs pull)"
    return ValueError(f"{file} cannot be read as safetensors: {said(why)}")


def require_header(file: Path) -> None:
    """Raise a ValueError for a safetensors header that the library would let pass: one of up to 100 MB,
    which takes gigabytes, or with a name that is there twice, of which the last would count.
    """
    try:
        with file.open("rb") as start:
            length = int.from_bytes(start.read(8), "little")
            if length > HEADER_BYTES:
                raise ValueError(f"its header would be longer than {HEADER_BYTES} bytes ({length})")
            json.loads(start.read(length).decode("utf-8"), object_pairs_hook=unambiguous)
    except (ValueError, RecursionError, OSError) as error:
        raise _unreadable(file, error) from None


def _header(file: Path) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of every tensor."""
    require_header(file)
    with _open(file) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  # not a dict
        return [(name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()]


def _weight_files(folder: Path, meta: bool) -> tuple[list[Path], dict[str, str]]:
    """The files that hold a checkpoint, and the index from tensors to file names where one says."""
    one = folder / ("consolidated.00.safetensors" if meta else "model.safetensors")
    path = folder / INDEX
    if meta and is_there(folder / "consolidated.01.safetensors"):
        raise ValueError(
            f"{folder} holds a checkpoint cut for several devices (consolidated.01.safetensors): join "
            "its consolidated files into one first"
        )
    if is_there(one):
        return [one], {}
    if meta or not is_there(path):
        raise _no_weights(folder, one.name)
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise ValueError(f"{path} has no weight_map from tensor names to file names")
    for file in index.values():
        if file in ("", ".", "..") or re.search(r"[/\\\0]", file):
            raise ValueError(
                f"{path} names {short(file)}, which is not the name of a file in its folder"
            )
    files = [folder / file for file in dict.fromkeys(index.values())]
    try:
        gone = [shown(file.name) for file in files if not is_there(file)]
    except ValueError as error:
        raise ValueError(f"{path} names a file that is none: {said(error)}") from None
    if gone:
        more = f" and {len(gone) - 20} more" if len(gone) > 20 else ""
        raise FileNotFoundError(
            f"{path} names files that are not there: {', '.join(gone[:20])}{more}"
        )
    return files, index


def _no_weights(folder: Path, name: str) -> FileNotFoundError:
    """The error for a folder without the file `name`, and what to do about what is there."""
    there = sorted(path.name for path in folder.iterdir())
    pickles = [
        file
        for file in there
        if file.endswith((".bin", ".pth", ".pt", ".ckpt")) and file not in TRAINING
    ]
    if pickles:
        way = "transformers' from_pretrained and save_pretrained convert it"
        if name.startswith("consolidated"):
            way = (
                f"safetensors.torch.save_file(torch.load('{pickles[0]}', weights_only=True), "
                f"'{name}') converts it"
            )
        return FileNotFoundError(
            f"{folder} holds its weights as {pickles[0]}: loading a pickle can run code that somebody "
            f"put into it, so only safetensors are read; where you trust the file, {way}"
        )
    others = [file for file in there if file.endswith((".safetensors", ".gguf"))]
    also = f" ({', '.join(others)}: not read)" if others else ""
    looked = "neither model.safetensors nor model.safetensors.index.json"
    looked = f"no {name}" if name.startswith("consolidated") else looked
    return FileNotFoundError(f"{folder} holds no weights: {looked} is there{also}")


def _fold(problems: list[str]) -> list[str]:
    """The problems, in one entry where only the number of the block differs."""
    alike: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        before, *rest = re.split(r"(?<=layers\.)([0-9]+)(?=\.)", problem, maxsplit=1)
        number, after = rest or ("", "")
        alike.setdefault((before, after), []).append(number)
    return [
        before + (numbers[0] if len(numbers) == 1 else "{" + ",".join(numbers) + "}") + after
        for (before, after), numbers in alike.items()
    ]
