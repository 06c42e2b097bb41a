"""How the files of a family name and lay out its weights, in tables from our names to theirs."""

from collections.abc import Sequence

from torch import Tensor

from .llama import NAMES


def names(prefix: str, inside: dict[str, str], **outside: str) -> dict[str, str]:
    """A table from the names within a block, behind `prefix` in the files, and those outside."""
    return {f"blocks.N.{ours}": f"{prefix}.{theirs}" for ours, theirs in inside.items()} | outside


def llama_names(changes: dict[str, str | None], **outside: str) -> dict[str, str]:
    """Llama's table with other names within a block, and outside; None for what a family does not have."""
    table: dict[str, str | None] = {**NAMES, **outside}
    for ours, theirs in changes.items():
        table[f"blocks.N.{ours}"] = theirs and f"model.layers.N.{theirs}"
    return {ours: theirs for ours, theirs in table.items() if theirs}


def chunks(name: str, tensor: Tensor, fused: str, parts: Sequence[str]) -> dict[str, Tensor]:
    """The parts of a matrix or bias whose rows are those of several layers, as many of each, or the tensor
    where it is none.
    """
    if f".{fused}." not in name or tensor.shape[0] % len(parts):
        return {name: tensor}
    rows = tensor.chunk(len(parts))
    return {name.replace(fused, part): own for part, own in zip(parts, rows, strict=True)}
