"""What every norm of a model does on a prompt: the stream before it, after it, and without it.

An RMS is over the width at one position, and the median over positions stands for them all: a few of
them, the first above all, may be hundreds of times larger, and would be all that a mean shows.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..cli import table
from ..model import Llama, RMSNorm
from .record import twin

COLUMNS = {
    "norm": "name of the norm, in forward order",
    "reads": "what goes into it: the residual stream x, or what comes out of that part of the model",
    "read by": "what sees the result: a sublayer, or the stream x, to which it is added or which it is",
    "before": "RMS over the width of what it reads, median over positions (and heads)",
    "first": "the same at position 0 alone, where many checkpoints keep their largest numbers",
    "after": "RMS over the width of what it returns, median over positions (and heads)",
    "weight": "mean and standard deviation of its weight",
    "mean": "share of the mean square before it that is the mean over the width, which LayerNorm would "
    "remove: median over positions",
    "most": "the same at the position where it is largest",
    "delta": "RMS of what the reading sublayer adds, over the RMS of the stream after the addition",
}
SINK = 3  # times the median at the same place: from there on the report speaks of a sink


@dataclass
class NormRow:
    """One call of one norm in a forward pass: the columns of the table, and the extremes of the weight.

    Medians are over positions, and over heads inside attention; of an even number the middle two are
    averaged. `stream` is the RMS of x there, and `stream_first` that at position 0. None stands where
    there is no such thing: a norm without a weight, a norm inside a sublayer, nothing added.
    """

    name: str
    reads: str
    read_by: str
    before: float
    first: float
    after: float
    mean_share: float
    mean_share_most: float
    weight_mean: float | None = None
    weight_std: float | None = None
    weight_min: float | None = None
    weight_max: float | None = None
    stream: float | None = None
    stream_first: float | None = None
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
    """Root mean square over the last axis, in float64, on the CPU."""
    return x.cpu().double().pow(2).mean(-1).sqrt()


def median(x: Tensor) -> float:
    return x.double().flatten().quantile(0.5).item()


def norms_of(model: Llama) -> dict[str, nn.Module]:
    """Every norm by name: a module that is called so, or is one by its class."""
    return {
        name: module
        for name, module in model.named_modules()
        if (name.endswith("norm") and not isinstance(module, nn.Identity))
        or isinstance(module, (RMSNorm, nn.LayerNorm, nn.RMSNorm))
    }


class Walk:
    """What hooks on every module make of one forward pass: a row for each call of a norm.

    Who reads whom is told by the memory of a tensor, which a view of it shares: as it is while the
    tensor is kept, until the next block begins.
    """

    def __init__(self, model: Llama) -> None:
        self.rows: list[NormRow] = []
        self.made: dict[int | None, tuple[str, NormRow | None, Tensor | None]] = {}
        self.before_delta: list[tuple[NormRow, Tensor]] = []  # whose sublayer is at work
        self.x = torch.empty(0, dtype=torch.float32, device="cpu")
        self.norms = norms_of(model)
        for name, module in model.named_modules():
            if name and not isinstance(module, nn.Identity):
                module.register_forward_pre_hook(partial(self.enter, name))
                module.register_forward_hook(partial(self.leave, name))

    def enter(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note which norms' results go into a module."""
        reader = within_block(name) or "x"
        for tensor in inputs:
            row = self.maker(tensor)[1]
            readers = row.read_by.split(", ") if row else []
            if row and not any(f"{reader}.".startswith(f"{known}.") for known in readers):
                row.read_by = ", ".join([*filter(None, readers), reader])
        if reader == "x":
            self.made.clear()
            self.stream(inputs[0])

    def leave(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Make the row of a norm, and remember whose the output is."""
        part, row = within_block(name), None
        if name in self.norms or "." not in part:
            require_finite(name, output)
        if name in self.norms:
            row = self.row(name, inputs[0], output)
        elif not part:
            last = self.maker(output)[1]
            if last and not last.read_by:
                last.read_by = "x"
            self.stream(output)
        self.made[output.untyped_storage().data_ptr()] = (name, row, output)

    def maker(self, tensor: object) -> tuple[str, NormRow | None, Tensor | None]:
        """The module whose output this is, and its row if it is a norm."""
        where = tensor.untyped_storage().data_ptr() if isinstance(tensor, Tensor) else None
        return self.made.get(where, ("", None, None))

    def row(self, name: str, x: Tensor, y: Tensor) -> NormRow:
        parent, _, part = within_block(name).rpartition(".")
        source = within_block(self.maker(x)[0])
        reads = source.removeprefix(f"{parent}.") or (f"in {parent}" if parent else "x")
        row = new_row(name, reads, self.norms[name], x, y)
        self.rows.append(row)
        if parent:  # within a sublayer
            return row
        if row.reads == "x":
            self.stream(x)
            self.before_delta += [(row, x)] * part.startswith("pre_")
        elif name.startswith("blocks."):  # a delta on its way to the stream
            add(row, self.x, y)
            self.x = self.x + y
        else:
            self.x = y
        row.stream, row.stream_first = median(rms(self.x)), median(rms(self.x[..., 0, :]))
        return row

    def stream(self, x: Tensor) -> None:
        """The stream is now `x`: what is new in it was added by those that read the norms before."""
        for row, before in self.before_delta:
            add(row, before, x.cpu().double() - before.cpu().double())
        self.before_delta = [(row, before) for row, before in self.before_delta if x is before]
        self.x = x


def add(row: NormRow, x: Tensor, delta: Tensor) -> None:
    """Note in the row of a norm what it has its sublayer add to the stream `x`."""
    delta = delta.cpu().double()
    row.delta = median(rms(delta))
    row.delta_share = median(rms(delta) / rms(x.cpu().double() + delta).clamp(min=1e-300))


def within_block(name: str) -> str:
    """The name of a module less that of its block; of a block nothing."""
    return re.sub(r"^blocks\.\d+\.?", "", name)


def new_row(name: str, reads: str, norm: nn.Module, x: Tensor, y: Tensor) -> NormRow:
    """The row of the norm that reads `x` and returns `y`: (b, t, m) or, in the heads, (b, h, t, d)."""
    weight, x = getattr(norm, "weight", None), x.cpu().double()
    square = x.pow(2).mean(-1)
    mean_share = torch.where(square > 0, x.mean(-1).pow(2) / square, 0.0)
    row = NormRow(
        name=name,
        reads=reads,
        read_by="",
        before=median(rms(x)),
        first=median(rms(x[..., 0, :])),
        after=median(rms(y)),
        mean_share=median(mean_share),
        mean_share_most=mean_share.max().item(),
    )
    if weight is not None:
        w = weight.detach().cpu().double()
        row.weight_mean, row.weight_std = w.mean().item(), w.std(correction=0).item()
        row.weight_min, row.weight_max = w.min().item(), w.max().item()
    return row


@torch.no_grad()
def norm_rows(model: Llama, tokens: Tensor) -> list[NormRow]:
    """A row for every call of a norm in `model(tokens)`, tokens (b, t), in forward order.

    A `ValueError` where an activation is not finite.
    """
    own = twin(model)
    walk = Walk(own)
    own(tokens)
    for row in walk.rows:
        parent, _, part = within_block(row.name).rpartition(".")
        if not row.read_by:
            row.read_by = "attention.attend" if parent == "attention" else parent or "x"
        elif part.startswith("post_") and row.reads == "x" != row.read_by:
            row.read_by += ", x"  # which it becomes
    return walk.rows


def require_finite(name: str, tensor: Tensor) -> None:
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
        own = twin(model)
        own.set_submodule(name, nn.Identity())
        logits[name] = own(tokens, last_only=True)[0, -1].cpu()
    results = []
    for without, row in logits.items():
        require_finite(f"lm_head without {without}" if without else "lm_head", row)
        log_p = row.double().log_softmax(-1)
        reference = logits[None].double().log_softmax(-1)
        divergence = (reference.exp() * (reference - log_p)).sum().item()
        entropy = -(log_p.exp() * log_p).sum().item()
        token = int(log_p.argmax())
        results.append(Outcome(without, token, log_p[token].exp().item(), divergence, entropy))
    return results


def is_sink(row: NormRow) -> bool:
    """Whether position 0 stands far above the stream at the others."""
    return bool(row.stream and row.stream_first and row.stream_first > SINK * row.stream)


def report(
    rows: Sequence[NormRow], results: Sequence[Outcome], text_of: Callable[[int], str]
) -> str:
    """The rows as a table and what its columns hold; the stream in words; the next token without a norm."""
    cells = [list(COLUMNS)]
    for row in rows:
        weight = (
            "none" if row.weight_mean is None else f"{row.weight_mean:.3g} ±{row.weight_std:.2g}"
        )
        numbers = [f"{value:.4g}" for value in (row.before, row.first, row.after)]
        shares = [f"{value:.2%}" for value in (row.mean_share, row.mean_share_most)]
        delta = "" if row.delta_share is None else f"{row.delta_share:.0%}"
        cells.append([row.name, row.reads, row.read_by, *numbers, weight, *shares, delta])
    parts = [table(cells, left=3), table([*COLUMNS.items()], left=2)]
    words = ["Without a norm: what it reads goes on as it is, neither divided nor weighted."]
    first, last = rows[0].stream or 0.0, rows[-1]
    if first and last.name == "final_norm":
        words.append(
            f"The stream begins at RMS {first:.4g} and reaches final_norm at {last.before:.4g}, "
            f"{last.before / first:.1f} times as large; {last.read_by} reads it at {last.after:.4g}."
        )
    sink = max(filter(is_sink, rows), key=lambda row: row.stream_first or 0.0, default=None)
    if sink and sink.stream and sink.stream_first:
        times = f"{sink.stream_first / sink.stream:.1f} times the median"
        words.append(
            f"At position 0 it reaches {sink.stream_first:.4g}, at {sink.name}, {times}: an attention sink "
            "(llama_mini/inspect/README.md)."
        )
    cells = [["next token", "likeliest", "probability", "KL, nats", "entropy, nats"]]
    for result in results:
        name = f"without {result.without}" if result.without else "with every norm"
        numbers = [f"{result.probability:.1%}", f"{result.divergence:.3f}", f"{result.entropy:.3f}"]
        cells.append([name, text_of(result.token), *numbers])
    return "\n\n".join([*parts, "\n".join(words), table(cells, left=2)])
