"""What every norm of a checkpoint does on a prompt: the stream before it, after it, and without it.

    python -m llama_mini.inspect.norm_report --model FOLDER --prompt TEXT [--json] [--plot norms.svg]

An RMS is over the width at one position, and the median over positions stands for them all: a few of
them, the first above all, may be hundreds of times larger, and would be all that a mean shows.
"""

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.files import replace
from ..cli import DEVICES, choose_device, run_command
from ..generation import require_prompts
from ..model import Llama
from .record import record

READERS = {
    "pre_attention_norm": "attention",
    "q_norm": "attention.attend",
    "k_norm": "attention.attend",
    "pre_ffn_norm": "ffn",
    "final_norm": "lm_head",
}
RECORDED = (
    "embed",
    "blocks.*.pre_attention_norm",
    "blocks.*.attention",
    "blocks.*.pre_ffn_norm",
    "blocks.*.ffn",
    "final_norm",
)
COLUMNS = {
    "norm": "name of the norm, in forward order",
    "reads": "what goes into it: the residual stream x, or the queries and keys of every head",
    "read by": "what sees the result; nothing else does",
    "before": "RMS over the width of what it reads, median over positions (and heads)",
    "first": "the same at position 0 alone, where many checkpoints keep their largest numbers",
    "after": "RMS over the width of what it returns, median over positions (and heads)",
    "weight": "mean and standard deviation of its weight",
    "mean": "share of the mean square before it that is the mean over the width: LayerNorm would remove it",
    "delta": "RMS of what the reading sublayer adds, over the RMS of the stream after the addition",
}


@dataclass(frozen=True)
class NormRow:
    """One norm in a forward pass: the columns of the table, and the extremes of the weight.

    Medians are over positions, and over heads inside attention; of an even number the middle two are
    averaged. A delta is None where what reads the norm adds nothing to the stream.
    """

    name: str
    reads: str
    read_by: str
    before: float
    first: float
    after: float
    weight_mean: float
    weight_std: float
    weight_min: float
    weight_max: float
    mean_share: float
    delta: float | None = None
    delta_share: float | None = None


@dataclass(frozen=True)
class Outcome:
    """The next token after the prompt without one norm (None: with all); divergence and entropy in nats.

    `divergence` is the Kullback-Leibler divergence of this distribution from the one with all norms.
    """

    without: str | None
    token: int
    probability: float
    divergence: float
    entropy: float


def rms(x: Tensor) -> Tensor:
    """Root mean square over the last axis, in float64."""
    return x.double().pow(2).mean(-1).sqrt()


def median(x: Tensor) -> float:
    return x.double().flatten().quantile(0.5).item()


def norms_of(model: Llama) -> dict[str, nn.Module]:
    """Every norm by name, in the order in which a forward pass meets them."""
    parts = ["pre_attention_norm", "attention.q_norm", "attention.k_norm", "pre_ffn_norm"]
    names = [f"blocks.{n}.{part}" for n in range(len(model.blocks)) for part in parts]
    modules = {name: model.get_submodule(name) for name in [*names, "final_norm"]}
    return {name: norm for name, norm in modules.items() if not isinstance(norm, nn.Identity)}


def _row(
    name: str, reads: str, read_by: str, norm: Any, x: Tensor, y: Tensor, delta: Tensor | None
) -> NormRow:
    """The row of the norm that reads `x` and returns `y`: (b, t, m) or, in the heads, (b, h, t, d)."""
    weight, square = norm.weight.detach().cpu().double(), x.double().pow(2).mean(-1)
    mean_share = torch.where(square > 0, x.double().mean(-1).pow(2) / square, 0.0)
    share = None if delta is None else rms(delta) / rms(x + delta).clamp(min=1e-300)
    return NormRow(
        name=name,
        reads=reads,
        read_by=read_by,
        before=median(rms(x)),
        first=median(rms(x[..., 0, :])),
        after=median(rms(y)),
        weight_mean=weight.mean().item(),
        weight_std=weight.std(correction=0).item(),
        weight_min=weight.min().item(),
        weight_max=weight.max().item(),
        mean_share=median(mean_share),
        delta=None if delta is None else median(rms(delta)),
        delta_share=None if share is None else median(share),
    )


def norm_rows(model: Llama, tokens: Tensor) -> list[NormRow]:
    """A row for every norm of `model`, in forward order, on `tokens` (b, t).

    The stream before each norm is the embedding plus every delta so far, added as the blocks add
    them. A `ValueError` where an activation is not finite.
    """
    norms = norms_of(model)
    heads: dict[str, NormRow] = {}

    def keep(name: str, norm: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        _require_finite(name, output)
        part = name.rpartition(".")[2]
        reads = part.replace("norm", "proj")
        heads[name] = _row(name, reads, READERS[part], norm, inputs[0].cpu(), output.cpu(), None)

    # What goes into a head's norms has no name among the recorded activations.
    inside = [name for name in norms if ".attention." in name]
    hooks = [norms[name].register_forward_hook(partial(keep, name)) for name in inside]
    try:
        seen = record(model, tokens, RECORDED)
    finally:
        for hook in hooks:
            hook.remove()
    for name, tensor in seen.items():
        _require_finite(name, tensor)

    rows: list[NormRow] = []
    x, delta = seen["embed"], None
    for name, norm in norms.items():
        if name in heads:
            rows.append(heads[name])
            continue
        if delta is not None:
            x = x + delta
        block, _, part = name.rpartition(".")
        delta = seen.get(f"{block}.{READERS[part]}")
        rows.append(_row(name, "x", READERS[part], norm, x, seen[name], delta))
    return rows


def _require_finite(name: str, tensor: Tensor) -> None:
    if not tensor.isfinite().all():
        raise ValueError(
            f"{name} is not finite in {tensor.dtype}: the weights are at fault, or the dtype is too narrow"
        )


@torch.no_grad()
def outcomes(model: Llama, tokens: Tensor, dropped: Iterable[str]) -> list[Outcome]:
    """The next token after `tokens` (1, t) with every norm, and without each one of `dropped`.

    A dropped norm returns what it reads, neither divided nor weighted. A `ValueError` for a name
    that no norm has.
    """
    norms = norms_of(model)
    logits: dict[str | None, Tensor] = {None: model(tokens, last_only=True)[0, -1].cpu()}
    for name in dropped:
        if name not in norms:
            raise ValueError(f"no norm is named {name!r}; the norms are {', '.join(norms)}")
        hook = norms[name].register_forward_hook(lambda norm, inputs, output: inputs[0])
        try:
            logits[name] = model(tokens, last_only=True)[0, -1].cpu()
        finally:
            hook.remove()
    results = []
    for without, row in logits.items():
        _require_finite(f"lm_head without {without}" if without else "lm_head", row)
        log_p = row.double().log_softmax(-1)
        reference = logits[None].double().log_softmax(-1)
        divergence = (reference.exp() * (reference - log_p)).sum().item()
        entropy = -(log_p.exp() * log_p).sum().item()
        token = int(log_p.argmax())
        results.append(Outcome(without, token, log_p[token].exp().item(), divergence, entropy))
    return results


def table(rows: Sequence[NormRow]) -> str:
    """The rows as text, and what each column holds."""
    cells = [list(COLUMNS)]
    for row in rows:
        cells.append(
            [
                row.name,
                row.reads,
                row.read_by,
                f"{row.before:.4g}",
                f"{row.first:.4g}",
                f"{row.after:.4g}",
                f"{row.weight_mean:.3g} ±{row.weight_std:.2g}",
                f"{row.mean_share:.2%}",
                "" if row.delta_share is None else f"{row.delta_share:.0%}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    return "\n".join([*lines, "", *(f"{name:<8} {text}" for name, text in COLUMNS.items())])


def summary(
    rows: Sequence[NormRow], results: Sequence[Outcome], text_of: Callable[[int], str]
) -> str:
    """What the final norm does, in words and in the distribution of the next token."""
    first, last = rows[0], rows[-1]
    growth = last.before / first.before if first.before else math.inf
    lines = [
        f"The stream leaves the embedding at RMS {first.before:.4g} and reaches final_norm at "
        f"{last.before:.4g}, {growth:.1f} times as large; lm_head reads it at {last.after:.4g}.",
        "Without a norm: what it reads goes on as it is, neither divided nor weighted.",
        "",
    ]
    names = [f"without {r.without}" if r.without else "with every norm" for r in results]
    texts = [text_of(result.token) for result in results]
    wide, wider = max(map(len, names)), max(map(len, [*texts, "likeliest"]))
    lines.append(
        f"{'next token':<{wide}}  {'likeliest':<{wider}}  probability  KL, nats  entropy, nats"
    )
    for name, text, result in zip(names, texts, results, strict=True):
        lines.append(
            f"{name:<{wide}}  {text:<{wider}}  {result.probability:>11.1%}  {result.divergence:>8.3f}  "
            f"{result.entropy:>13.3f}"
        )
    return "\n".join(lines)


def require_plot(path: Path) -> None:
    """Raise a `ValueError` unless a picture can be drawn into the file `path`."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"--plot {path}: the name must end in .png or .svg")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'llama-mini[plot]'")


def plot(rows: Sequence[NormRow], path: Path, title: str) -> None:
    """Draw the stream through the depth, what each norm makes of it, and what each sublayer adds."""
    require_plot(path)
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

    rows = [row for row in rows if row.reads == "x"]
    x = range(len(rows))
    final, blocks = x[-1], len(rows) // 2
    kinds = (  # apart by shape and hatching too, not by colour alone; colours by Okabe and Ito
        ("attention", "after pre_attention_norm", "#0072B2", "o", ""),
        ("ffn", "after pre_ffn_norm", "#D55E00", "s", "////"),
        ("lm_head", "after final_norm", "#009E73", "D", ""),
    )
    # A fixed salt and no date: the same numbers give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "norms", "font.size": 11, "hatch.linewidth": 0.6}):
        figure = Figure(figsize=(9, 6), layout="constrained", facecolor="white")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
        figure.suptitle(title, fontsize=13, parse_math=False)
        for axes in (top, bottom):
            axes.grid(axis="y", color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            for n in range(0, blocks, 2):
                axes.axvspan(2 * n - 0.5, 2 * n + 1.5, color="#f2f2f2", linewidth=0)
        before = [row.before for row in rows]
        top.set_yscale("log")
        top.plot(x, before, color="black", linewidth=2.5, label="x, the residual stream")
        top.plot(x, [row.first for row in rows], "--", color="#767676", label="x at position 0")
        for reader, label, colour, marker, hatch in kinds:
            mine = [i for i in x if rows[i].read_by == reader]
            after = [rows[i].after for i in mine]
            top.vlines(mine, [before[i] for i in mine], after, color=colour, linewidth=1.2)
            size = 9 if reader == "lm_head" else 6 if blocks < 16 else 4
            top.plot(mine, after, marker, color=colour, markersize=size, label=label)
            if reader != "lm_head":
                shares = [rows[i].delta_share or 0.0 for i in mine]
                style = {"color": colour, "edgecolor": "white", "hatch": hatch}
                bottom.bar(mine, shares, 0.8, label=f"added by {reader}", **style)
        top.annotate(
            f"{before[-1]:.3g} → {rows[-1].after:.3g}",
            (final, rows[-1].after),
            (9, 0),
            textcoords="offset points",
            va="center",
        )
        levels = [
            value for row in rows for value in (row.before, row.first, row.after) if value
        ] or [1.0]
        decades = math.log10(max(levels) / min(levels))
        top.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,)))
        top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        top.yaxis.set_minor_locator(NullLocator())
        top.set_ylabel("RMS over the width,\nmedian over positions")
        bottom.set_ylabel("share of x")
        bottom.yaxis.set_major_formatter(PercentFormatter(1.0))
        step = -(-blocks // 15)
        bottom.set_xticks(
            [*(2 * n + 0.5 for n in range(0, blocks, step)), final],
            [*(f"{n}" for n in range(0, blocks, step)), "final"],
        )
        bottom.set_xlabel("block")
        bottom.set_xlim(-0.8, final + 0.8)
        top.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        bottom.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 0.95))
        kind = path.suffix.lower().removeprefix(".")
        metadata = {"Date": None} if kind == "svg" else None
        replace(path, lambda file: figure.savefig(file, dpi=150, format=kind, metadata=metadata))


def _report(options: argparse.Namespace) -> str:
    from ..checkpoint.memory import require_memory
    from ..checkpoint.tokenizer import load_tokenizer
    from ..checkpoint.weights import load_model, open_checkpoint

    if options.plot:
        require_plot(Path(options.plot))
    device, dtype = choose_device(options.device), getattr(torch, options.dtype)
    checkpoint = open_checkpoint(options.model)
    tokenizer = load_tokenizer(options.model)
    ids = tokenizer.encode(options.prompt)
    require_prompts(checkpoint.config, [ids], 0)
    require_memory(checkpoint, device, dtype, len(ids), all_logits=True)
    model = load_model(options.model, device, dtype)
    tokens = torch.tensor([ids], device=device)
    rows = norm_rows(model, tokens)
    middle = f"blocks.{len(model.blocks) // 2}.pre_ffn_norm"
    results = outcomes(model, tokens, ("final_norm", options.drop or middle))
    if options.plot:
        name = Path(options.model).resolve().name  # a hub model's folder is named by a hash
        title = f"{name}: the residual stream and its norms, {len(ids)} tokens"
        plot(rows, Path(options.plot), title)

    def text_of(token: int) -> str:
        if token >= tokenizer.vocab_size:  # a row that only pads the embedding
            return f"id {token}"
        decoder = tokenizer.stream_decoder(ids)
        return repr(decoder.push(token) + decoder.flush())

    if options.json:
        return json.dumps(
            {
                "tokens": ids,
                "norms": [asdict(row) for row in rows],
                "next_token": [{**asdict(r), "text": text_of(r.token)} for r in results],
            },
            indent=1,
        )
    return f"{table(rows)}\n\n{summary(rows, results, text_of)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m llama_mini.inspect.norm_report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--model", required=True, metavar="FOLDER", help="checkpoint folder or hub name"
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument(
        "--drop",
        metavar="NORM",
        help="the norm to leave out beside final_norm (default: the middle pre_ffn_norm)",
    )
    parser.add_argument("--json", action="store_true", help="print every number as JSON")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the stream and its norms: a .png or .svg file"
    )
    parser.add_argument("--device", default="cpu", choices=DEVICES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    options = parser.parse_args(arguments)
    return run_command(lambda: print(_report(options)))


if __name__ == "__main__":
    sys.exit(main())
