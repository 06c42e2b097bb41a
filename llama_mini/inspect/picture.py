"""The norm report as a picture: the stream through the depth, and what each norm makes of it."""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint.files import replace
from ..cli import require_place
from .norm_report import NormRow, is_sink

# Apart by shape and hatching too, not by colour alone; colours by Okabe and Ito.
KINDS = {
    "pre_attention_norm": ("#0072B2", "o", ""),
    "post_attention_norm": ("#56B4E9", "^", ""),
    "pre_ffn_norm": ("#D55E00", "s", "////"),
    "post_ffn_norm": ("#E69F00", "v", "////"),
    "final_norm": ("#009E73", "D", ""),
}


def require_plot(path: Path) -> None:
    """Raise a `ValueError` unless a picture can be drawn into the file `path`."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"--plot {path}: the name must end in .png or .svg")
    require_place(path, "--plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'llama-mini[plot]'")


def plot(rows: Sequence[NormRow], path: Path, title: str) -> None:
    """Draw the stream at every norm that stands on it or beside it, what the norm makes of it, and
    what each sublayer adds.
    """
    require_plot(path)
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

    rows = [row for row in rows if row.stream is not None]
    names = [row.name.split(".") for row in rows]
    blocks: dict[str, list[int]] = {}  # where the norms of each block stand
    for i, name in enumerate(names):
        blocks.setdefault(name[1] if len(name) > 2 else name[0].removesuffix("_norm"), []).append(i)
    # A fixed salt and no date: the same numbers give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "norms", "font.size": 11, "hatch.linewidth": 0.6}):
        figure = Figure(figsize=(9, 6), layout="constrained", facecolor="white")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
        figure.suptitle(title, fontsize=13, parse_math=False)
        for axes in (top, bottom):
            axes.grid(axis="y", color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            for where in [*blocks.values()][::2]:
                if names[where[0]][0] == "blocks":
                    axes.axvspan(where[0] - 0.5, where[-1] + 0.5, color="#f2f2f2", linewidth=0)
        stream, first = [row.stream for row in rows], [row.stream_first for row in rows]
        top.set_yscale("log")
        top.plot(stream, color="black", linewidth=2.5, label="x, the residual stream")
        top.plot(first, "--", color="#767676", label="x at position 0")
        for kind in dict.fromkeys(name[-1] for name in names):
            colour, marker, hatch = KINDS.get(kind, ("#CC79A7", "P", ""))
            mine = [i for i, name in enumerate(names) if name[-1] == kind]
            after = [rows[i].after for i in mine]
            top.vlines(mine, [stream[i] for i in mine], after, color=colour, linewidth=1.2)
            size = 9 if kind == "final_norm" else 6 if len(blocks) < 16 else 4
            top.plot(mine, after, marker, color=colour, markersize=size, label=f"after {kind}")
            behind = kind.replace("pre_", "post_")  # which has the same delta
            shares = [rows[i].delta_share for i in mine]
            if None not in shares and (
                behind == kind or [*names[mine[0]][:-1], behind] not in names
            ):
                sublayer = kind.split("_")[1]
                style = {"color": colour, "edgecolor": "white", "hatch": hatch}
                bottom.bar(mine, shares, 0.8, label=f"added by {sublayer}", **style)
        note = {"textcoords": "offset points", "va": "center"}
        if rows[-1].name == "final_norm":
            text = f"{rows[-1].before:.3g} → {rows[-1].after:.3g}"
            top.annotate(text, (len(rows) - 1, rows[-1].after), (9, 0), **note)
        sinks = [i for i, row in enumerate(rows) if is_sink(row)]
        if sinks:
            highest = max(sinks, key=lambda i: rows[i].stream_first or 0.0)
            text = f"position 0: {rows[highest].stream_first:.3g}, an attention sink"
            side = "right" if 2 * highest > len(rows) else "left"
            top.annotate(text, (highest, first[highest]), (0, 12), ha=side, **note)
            top.set_ylim(top=4 * (rows[highest].stream_first or 1))
        levels = [v for row in rows for v in (row.stream, row.stream_first, row.after) if v] or [1]
        decades = math.log10(max(levels) / min(levels))
        top.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,)))
        top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        top.yaxis.set_minor_locator(NullLocator())
        top.set_ylabel("RMS over the width,\nmedian over positions")
        bottom.set_ylabel("share of x")
        bottom.yaxis.set_major_formatter(PercentFormatter(1.0))
        ticks = {b: sum(at) / len(at) for b, at in blocks.items()}
        step = -(-len(blocks) // 16)
        shown = [b for n, b in enumerate(ticks) if n % step == 0 or not b.isdigit()]
        bottom.set_xticks([ticks[b] for b in shown], shown)
        bottom.set_xlabel("block")
        bottom.set_xlim(-0.8, len(rows) - 0.2)
        top.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        if bottom.containers:
            bottom.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 0.95))
        kind = path.suffix.lower().removeprefix(".")
        metadata = {"Date": None} if kind == "svg" else None
        replace(path, lambda file: figure.savefig(file, dpi=150, format=kind, metadata=metadata))
