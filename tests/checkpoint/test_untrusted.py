"""A safetensors header that does not describe its file to the last byte is refused, and nothing is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_mini.checkpoint.untrusted import HEADER_BYTES, Entry, read_header


def write(path: Path, header: Any, data: int = 24, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(
        (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)
    )
    return path


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_what_the_library_writes_is_read(tmp_path):
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.ones(())}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert {name: found.shape for name, found in header.items()} == {
        "a": (2, 3),
        "b": (5,),
        "c": (),
    }
    assert {name: found.dtype for name, found in header.items()} == {
        "a": "F32",
        "b": "BF16",
        "c": "F32",
    }
    data = (tmp_path / "x.safetensors").read_bytes()
    assert data[header["c"].begin : header["c"].end] == torch.ones(()).numpy().tobytes()


def test_entries_in_any_order(tmp_path):
    path = write(tmp_path / "x", {"b": entry(8, 24), "a": entry(0, 8), "none": entry(8, 8)})
    length = path.stat().st_size - 24
    assert read_header(path)["b"] == Entry("F32", (4,), length + 8, length + 24)


WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "overlap": ({"a": entry(0, 16), "b": entry(8, 24)}, {}),
    "twice the same bytes": ({"a": entry(0, 24), "b": entry(0, 24)}, {}),
    "a hole": ({"a": entry(0, 8), "b": entry(12, 24)}, {}),
    "a hole in front": ({"a": entry(4, 24)}, {}),
    "bytes left over": ({"a": entry(0, 20)}, {}),
    "beyond the end": ({"a": entry(0, 28)}, {}),
    "backwards": ({"a": entry(24, 0, [6])}, {}),
    "backwards in an unknown dtype": ({"a": entry(24, 0, [6], "F8_E4M3")}, {}),
    "another size": ({"a": entry(0, 24, [7])}, {}),
    "a size that wraps around": ({"a": entry(0, 24, [2**62, 2**62])}, {}),
    "a negative size": ({"a": entry(0, 24, [-6])}, {}),
    "a size that is no integer": ({"a": entry(0, 24, [6.0])}, {}),
    "true": ({"a": entry(0, 24, [6, True])}, {}),
    "a shape that is none": ({"a": entry(0, 24, 6)}, {}),
    "a dtype that is none": ({"a": entry(0, 24, [6], 5)}, {}),
    "a dtype with a line break": ({"a": entry(0, 24, [6], "F\n32")}, {}),
    "three offsets": ({"a": {**entry(0, 24), "data_offsets": [0, 12, 24]}}, {}),
    "no dtype": ({"a": {"shape": [6], "data_offsets": [0, 24]}}, {}),
    "an entry that is none": ({"a": [6]}, {}),
    "a list": ([entry(0, 24)], {}),
    "a name twice": (b'{"a": 1, "a": 2}', {}),
    "not JSON": (b"{", {}),
    "not UTF-8": (b'{"\xff": 1}', {}),
    "a length beyond the file": ({"a": entry(0, 24)}, {"length": 5000}),
    "a length beyond any header": ({"a": entry(0, 24)}, {"length": HEADER_BYTES + 1}),
    "a header longer than any": (b" " * HEADER_BYTES + b"{}", {}),
    "nesting without end": (b'{"a":' * 100_000, {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_header_that_does_not_add_up(tmp_path, name):
    header, options = WRONG[name]
    path = write(tmp_path / "x.safetensors", header, **options)
    with pytest.raises(ValueError, match=r"x\.safetensors cannot be read as safetensors") as error:
        read_header(path)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 600 + len(str(tmp_path))


@pytest.mark.parametrize("size", range(9))
def test_a_file_that_ends_within_its_length(tmp_path, size):
    (tmp_path / "x").write_bytes(bytes([2, 0, 0, 0, 0, 0, 0, 0, 123])[:size])
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        read_header(tmp_path / "x")


@pytest.mark.parametrize(
    "name", ["overlap", "a hole", "bytes left over", "beyond the end", "another size"]
)
def test_the_library_refuses_them_too(tmp_path, name):
    header, options = WRONG[name]
    path = write(tmp_path / "x.safetensors", header, **options)
    with pytest.raises(Exception, match=r"(?i)header|metadata|offset|buffer|shape"):
        load_file(path)
