"""The files that hold a checkpoint's weights, and what their headers say."""

import re
from pathlib import Path
from typing import NamedTuple

import torch

from ..config import short, shown
from .hub import INDEX, META_FILES
from .names import translate_all
from .untrusted import Entry, is_there, read_header, read_weight_map, said, some

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Tables that follow from the config, and that rope.py and model.py make anew.
RECOMPUTED = re.compile(
    r"(.*\.)?(rotary_emb\.(.*_)?(inv_freq|cos_cached|sin_cached|seq_len_cached|cos|sin)|rope\.freqs|freqs_(cis|cos|sin)|"
    r"causal_mask|masked_bias|position_ids)"
)
# Files of a training run that hold no weights.
TRAINING = {"training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt", "scheduler.pt"}


class Stored(NamedTuple):
    """Where a tensor lies, what its file says of it, and what is wrong with it ("": nothing)."""

    file: Path
    name: str
    entry: Entry
    problem: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def dtype(self) -> str:
        return self.entry.dtype


def read_headers(folder: Path, names: dict[str, str], constant: str = "") -> dict[str, Stored]:
    """Every tensor of a checkpoint by our name, or by its own where it has none, from the headers of
    the files that hold it; no weights are read.

    `names` is a table from theirs to ours, `constant` that of `Family`. Raises for files that are not
    there or cannot be read.
    """
    files, index = _weight_files(folder, meta="tok_embeddings" in names)
    headers = {file: read_header(file) for file in files}
    held = {(name, file.name) for file, header in headers.items() for name in header}
    all_names = {name for name, _ in held} | index.keys()
    tables = re.compile(f"{RECOMPUTED.pattern}|{constant}" if constant else RECOMPUTED.pattern)
    ours = translate_all([name for name in all_names if not tables.fullmatch(name)], names)
    stored: dict[str, Stored] = {}

    def add(key: str, tensor: Stored) -> None:
        before = stored.setdefault(key, tensor)
        if before is not tensor:  # two names in the file for one of ours
            says = (
                f"{tensor.file.name} holds {shown(tensor.name)} and {shown(before.name)}, which are"
            )
            problem = f"{says} the same tensor"
            stored[f"{tensor.name} in {tensor.file.name}"] = tensor._replace(problem=problem)

    for file, header in headers.items():
        for name, entry in header.items():
            if name not in ours:
                continue
            key, problem, says = ours[name], "", f"{file.name} holds {shown(name)}"
            misplaced = bool(index) and index.get(name) != file.name
            if entry.dtype not in DTYPES:
                problem = (
                    f"{says} as {entry.dtype}: quantised weights are not supported, their scales would "
                    "be lost"
                )
            elif key is None:
                problem = f"{says} {short(entry.shape)}, which is no part of this decoder"
            elif misplaced:
                problem = f"{says}, which the index does not name there"
            if key is None or (misplaced and name in index):  # that is looked for where it says
                key = f"{name} in {file.name}"
            add(key, Stored(file, name, entry, problem))
    for name, file_name in index.items():
        if (name, file_name) not in held and name in ours:
            problem = f"{file_name} lacks {shown(name)}, which the index names"
            nothing = Stored(folder / file_name, name, Entry("", (), 0, 0), problem)
            stored.setdefault(ours[name] or name, nothing)
    if not stored:
        raise ValueError(f"{', '.join(map(str, files)) or folder / INDEX} holds no tensors")
    return stored


def _weight_files(folder: Path, meta: bool) -> tuple[list[Path], dict[str, str]]:
    """The files that hold a checkpoint, and the index from tensors to file names where one says."""
    names, path = META_FILES if meta else ("model.safetensors",), folder / INDEX
    if meta and is_there(folder / "consolidated.01.safetensors"):
        raise ValueError(
            f"{folder} holds a checkpoint cut for several devices (consolidated.01.safetensors): join "
            "its consolidated files into one first"
        )
    for name in names:
        if is_there(folder / name):
            return [folder / name], {}
    if meta or not is_there(path):
        raise _no_weights(folder, names[0])
    index = read_weight_map(path)
    files = [folder / file for file in dict.fromkeys(index.values())]
    try:
        gone = [shown(file.name) for file in files if not is_there(file)]
    except ValueError as error:
        raise ValueError(f"{path} names a file that is none: {said(error)}") from None
    if gone:
        raise FileNotFoundError(f"{path} names files that are not there: {some(gone)}")
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
