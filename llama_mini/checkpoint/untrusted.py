"""What stands between this package and files that strangers made: bounds, and names that may not leave
their folder.

Config, index and header are read here and nowhere else, so that no other file has to think of sizes that
fill the memory, names that are there twice, links that lead nowhere, or text that drives a terminal.
"""

import json
import math
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..config import short, shown

# The largest known of the JSON files read here has 1.2 MB; parsed, one takes 30 times its size.
JSON_BYTES = 4 * 2**20
TOKENS_BYTES = 16 * 2**20  # where tokens are listed: 65,536 added ones make 11.6 MB
HEADER_BYTES = 2**20  # of one file; a Llama of 405B in one file would need 0.15 MB


def said(error: object) -> str:
    """What a library says of a file, which may quote it, as it goes into a message of one line."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(str(error).split()))
    return text if len(text) <= 400 else text[:397] + "..."


def some(texts: Sequence[str], most: int = 20, between: str = ", ") -> str:
    """The first `most` of the texts and how many more there are, as they go into a message of one line."""
    what = between.join(texts[:most])
    return what if len(texts) <= most else f"{what} and {len(texts) - most} more"


def listed(given: dict[str, Any], names: list[str]) -> str:
    """Some of the keys with their values."""
    return some([f"{shown(name)} is {short(given[name])}" for name in names])


def utf8(path: Path, data: bytes) -> str:
    """The text in a file that holds `data`; a `ValueError` that names it where that is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error})") from None


def is_there(path: Path) -> bool:
    """Whether `path` is a file; a `ValueError` for what stands there and is none.

    Links are followed wherever they lead: a hub cache is made of links, large files are often kept on
    another disk, and what is behind one is only ever read as the format that it claims. One that leads
    nowhere is an error, and not a file left out.
    """
    try:
        if path.is_file():
            return True
        there = os.path.lexists(path)
    except OSError as error:  # no permission, a name too long
        raise ValueError(f"{path} cannot be opened: {error.strerror}") from None
    if there and not path.exists():
        raise ValueError(f"{path} is a link that leads to no file")
    if there:
        raise ValueError(f"{path} is {kind(path)}, and a regular file is needed")
    return False


def kind(path: Path) -> str:
    """What stands at `path`, which is no regular file."""
    mode = path.stat().st_mode
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for test, name in kinds if test(mode)), "a device")


def require_file(path: Path) -> None:
    """Raise an error that says what stands at `path`, unless it is a regular file that can be read."""
    if not is_there(path):
        here = "; standard input is not read here" if str(path) == "-" else ""
        raise FileNotFoundError(f"there is no file {str(path)!r}{here}")
    try:
        path.open("rb").close()
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror}") from None


def unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a `ValueError` for one that gives two values to a name."""
    values = dict(pairs)
    if len(values) != len(pairs):
        for name, value in pairs:
            if value != values[name]:
                raise ValueError(
                    f"{short(name)} is there twice, as {short(value)} and as {short(values[name])}"
                )
    return values


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`; a `ValueError` that names it when there is none."""
    try:
        most = TOKENS_BYTES if "token" in path.name else JSON_BYTES
        if path.stat().st_size > most:
            raise ValueError(f"it is longer than {most} bytes")
        data = path.read_bytes()
        if pointer := lfs_pointer(data):
            raise ValueError(pointer)
        values = json.loads(data.decode("utf-8"), object_pairs_hook=unambiguous)
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {said(error)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


class Entry(NamedTuple):
    """What a safetensors header says of a tensor; its data are bytes `begin` to `end` of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


# Bytes of a number. A tensor of another type is named with its type, and not read.
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
ITEM_BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def read_header(file: Path) -> dict[str, Entry]:
    """Every tensor in a safetensors file by its name; a `ValueError` unless the header describes the file
    to its last byte.
    """
    try:
        with file.open("rb") as start:
            size, length = os.fstat(start.fileno()).st_size, int.from_bytes(start.read(8), "little")
            if length > HEADER_BYTES:
                raise ValueError(f"its header would be longer than {HEADER_BYTES} bytes ({length})")
            text = start.read(length)
        if size < 8 + length or size < 8:
            raise ValueError("it ends within its header")
        values = json.loads(text.decode("utf-8"), object_pairs_hook=unambiguous)
        if not isinstance(values, dict):
            raise ValueError("its header is no JSON object")
        values.pop("__metadata__", None)
        entries = {name: _entry(name, value, 8 + length) for name, value in values.items()}
        place = 8 + length
        for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
            if entry.begin != place:
                raise ValueError(f"{shown(name)} begins at byte {entry.begin}, and not at {place}")
            place = entry.end
        if place != size:
            raise ValueError(f"its header describes {place} bytes, and it has {size}")
    except (ValueError, RecursionError, OSError) as error:
        raise unreadable(file, error) from None
    return entries


def _entry(name: str, value: Any, offset: int) -> Entry:
    """One entry of a header, whose data begin at `offset` of the file."""
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, begin, end]
        if any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
            raise ValueError
        if not re.fullmatch("[A-Z0-9_]{1,16}", dtype):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{shown(name)} has no dtype, shape and data_offsets") from None
    if (dtype in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[dtype]) or end < begin:
        raise ValueError(
            f"{shown(name)} {short(tuple(shape))} in {dtype} is not {end - begin} bytes"
        )
    return Entry(dtype, tuple(shape), offset + begin, offset + end)


def unreadable(file: Path, why: object) -> ValueError:
    """The error for a file that is no safetensors file, or only stands for one."""
    with suppress(OSError), file.open("rb") as start:
        why = lfs_pointer(start.read(32)) or why
    return ValueError(f"{file} cannot be read as safetensors: {said(why)}")


def lfs_pointer(data: bytes) -> str | None:
    """What to say of a file that begins like this, where it is a stand-in that Git LFS left."""
    if data.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself: download it again (git lfs pull)"
    return None


def read_weight_map(path: Path) -> dict[str, str]:
    """The index from tensors to files; a `ValueError` unless all are safetensors files beside it."""
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{path} has no weight_map from tensor names to file names")
    for file in index.values():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file, re.ASCII):
            raise ValueError(
                f"{path} names {short(file)}, which is not a safetensors file beside it"
            )
    return index
