"""The places of norms as a picture, drawn from the formulas of one family each."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from ..cli import require_place
from . import FAMILIES
from .gallery import formulas, place

# One family of each place, in the order of the README.
SHOWN = "gpt2 openai-gpt olmo2 gemma3_text gpt_neox phi minimax granite".split()
COLOURS = {"norm": "#0072B2", "attention": "#E69F00", "ffn": "#009E73", "+": "white", "*": "white"}


def stations(formula: str, sublayer: str) -> tuple[list[str], list[str], list[str]]:
    """What a sublayer's line of a formula puts on the stream, on the branch, and behind the sum."""
    before = [] if f"{sublayer}(x)" in formula else ["norm"]  # it reads x through a norm
    scaled = ["*"] if "*" in formula else []
    behind = ["norm"] if f"post_{sublayer}_norm({sublayer}" in formula else []
    on_stream = ["norm"] if f"x = post_{sublayer}_norm(x" in formula else []
    if formula.startswith(f"x = pre_{sublayer}_norm"):  # the norm stands on the stream
        return ["norm"], [sublayer, *scaled], on_stream
    return [], [*before, sublayer, *behind, *scaled], on_stream


def draw(axes: Any, name: str) -> None:
    """One place: the stream from left to right at the bottom, and the branches above it."""
    found = formulas(FAMILIES[name])
    axes.set_title(f"{place(found)} ({name})", fontsize=9, loc="left")
    axes.set_axis_off()
    axes.set_ylim(-0.5, 2.5 if len(found.block) == 1 else 1.5)

    def box(x: float, y: float, text: str) -> None:
        style = {"boxstyle": "round,pad=0.3", "facecolor": COLOURS[text], "edgecolor": "black"}
        colour = "black" if text in "+*" else "white"
        axes.text(x, y, text, ha="center", va="center", fontsize=8, color=colour, bbox=style)

    def line(*points: tuple[float, float]) -> None:
        axes.plot(*zip(*points, strict=True), color="#555555", linewidth=1.2, zorder=0)

    at = 0.8
    axes.text(0.1, 0, "x", ha="center", va="center", fontsize=10)
    steps: list[tuple[list[str], list[list[str]], list[str]]] = []
    if len(found.block) == 1:  # both sublayers read one stream
        steps.append(([], [stations(found.block[0], part)[1] for part in ("attention", "ffn")], []))
    else:
        for formula, part in zip(found.block, ("attention", "ffn"), strict=True):
            first, branch, last = stations(formula, part)
            steps.append((first, [branch], last))
    for first, branches, last in steps:
        for text in first:
            box(at, 0, text)
            at += 1
        start, low = at, 0.0
        if len(branches) == 2 and "pre_ffn_norm" not in found.block[0]:  # one norm for both
            line((at, 0), (at, 1.5), (at + 1.4, 1.5))
            box(at + 0.7, 1.5, "norm")
            branches, start, low = [branch[1:] for branch in branches], at + 1.4, 1.5
        end = start + 1.2 * max(map(len, branches)) + 0.4
        for height, branch in enumerate(branches, 1):
            line((start, low), (start, height), (end, height), (end, 0))
            for n, text in enumerate(branch):
                box(start + 0.8 + 1.2 * n, height, text)
        box(end, 0, "+")
        at = end + 0.8
        for text in last:
            box(at, 0, text)
            at += 1
    line((0.25, 0), (at, 0))
    axes.set_xlim(-0.2, 10.8)


def plot(path: Path) -> None:
    """Draw all places into a .png or .svg file; a `ValueError` where that cannot be."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"--plot {path}: the name must end in .png or .svg")
    require_place(path, "--plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'llama-mini[plot]'")
    import matplotlib
    from matplotlib.figure import Figure

    kind = path.suffix.lower().removeprefix(".")
    # A fixed salt and no date: the same formulas give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "placements"}):
        figure = Figure(figsize=(12, 7), layout="constrained", facecolor="white")
        grid = figure.subplots(4, 2, height_ratios=(1, 1, 1.5, 1))
        for axes, name in zip(grid.flat, SHOWN, strict=True):
            draw(axes, name)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(unfinished, dpi=150, format=kind, metadata=metadata)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
