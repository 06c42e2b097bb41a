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


def chunks(
    name: str, tensor: Tensor, fused: str, parts: Sequence[str], sizes: Sequence[int] = ()
) -> dict[str, Tensor]:
    """The parts of a matrix or bias whose rows are those of several layers, or the tensor where it is none.

    `sizes` are the rows of each part; by default all have as many.
    """
    if f".{fused}." not in name:
        return {name: tensor}
    rows = list(sizes) or [tensor.shape[0] // len(parts)] * len(parts)
    split = tensor.split(rows) if sum(rows) == tensor.shape[0] else [tensor] * len(parts)
    return {name.replace(fused, part): rows for part, rows in zip(parts, split, strict=True)}
