"""Where the norms of every family go, read off its own code: each forward is run on a symbol that writes
down what is done to it.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..model import Llama, RMSNorm
from . import FAMILIES, experts, norms
from .family import Family

# What each class of norm is: over which numbers, its gain, and where it rounds to the stream's dtype.
NORMS: dict[type[nn.Module], tuple[str, str, str]] = {
    RMSNorm: ("RMS", "w", "rounds, then w"),
    norms.LateCastRMSNorm: ("RMS", "w", "w, then rounds"),
    norms.OnePlusRMSNorm: ("RMS", "1 + w", "1 + w, then rounds"),
    norms.BareRMSNorm: ("RMS", "none", "rounds"),
    nn.LayerNorm: ("LayerNorm", "w, bias", "in torch's kernel"),
    norms.BareLayerNorm: ("LayerNorm", "none", "rounds"),
    norms.GainLayerNorm: ("LayerNorm", "w", "w, then rounds"),
}
# The keys that every config here needs; sizes do not show in a formula.
SIZES = {
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
SAID: dict[str, dict[str, Any]] = {
    "minimax": {"layer_types": ["full_attention"] * 2},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
}


class Symbol:
    """A tensor that is only written down: `text`, with the operations done to it in their order."""

    shape = (1, 2, 3, 16)
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    def joined(self, sign: str, other: object, swap: bool = False) -> "Symbol":
        """Two terms with a sign between them; a sum within a product gets its brackets."""
        texts = [written(term) for term in ((other, self) if swap else (self, other))]
        if sign in "*/":
            texts = [f"({text})" if top_level_sum(text) else text for text in texts]
        return Symbol(f" {sign} ".join(texts))

    def __add__(self, other: object) -> "Symbol":
        return self.joined("+", other)

    def __sub__(self, other: object) -> "Symbol":
        return self.joined("-", other)

    def __mul__(self, other: object) -> "Symbol":
        return self.joined("*", other)

    def __rmul__(self, other: object) -> "Symbol":
        return self.joined("*", other, swap=True)

    def __rsub__(self, other: object) -> "Symbol":
        return self.joined("-", other, swap=True)

    def __neg__(self) -> "Symbol":
        return self

    def __truediv__(self, other: object) -> "Symbol":
        return self.joined("/", other)

    def __getitem__(self, index: object) -> "Symbol":
        return self

    def split(self, sizes: Sequence[int], dim: int = 0) -> list["Symbol"]:
        return [Symbol(f"{self}[{n}]") for n in range(len(sizes))]

    def chunk(self, count: int, dim: int = 0) -> list["Symbol"]:
        return self.split([1] * count)

    def itself(self, *how: object, **more: object) -> "Symbol":
        return self

    repeat = expand = unsqueeze = float = to = itself

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.__name__.strip("_").removeprefix("r")
        if sign := {"add": "+", "sub": "-", "mul": "*"}.get(name):
            return cls(written(args[0])).joined(sign, args[1])
        if name == "cat":
            return cls(f"[{', '.join(map(written, args[0]))}]")
        return cls(f"{function.__name__}({written(args[0])})")


def written(term: object) -> str:
    if isinstance(term, Tensor):
        return f"{term.item():g}" if term.numel() == 1 and not term.is_meta else "l"
    return f"{term:g}" if isinstance(term, float) else str(term)


def top_level_sum(text: str) -> bool:
    """Whether a formula is a sum that no brackets hold together."""
    depth = 0
    for before, sign, after in zip(text, text[1:], text[2:], strict=False):
        depth += (before in "([") - (before in ")]")
        if depth == 0 and before == after == " " and sign in "+-":
            return True
    return False


class Named(nn.Module):
    """A module in whose place its name is written down, with what it reads and what it reads it through."""

    def __init__(self, name: str, *through: str) -> None:
        super().__init__()
        self.names = (name, *through)
        self.read: list[str] = []

    def forward(self, x: Symbol, *how: object) -> Symbol:
        self.read.append(str(x))
        return Symbol("".join(f"{name}(" for name in self.names) + f"{x}" + ")" * len(self.names))


class NamedAttend(nn.Module):
    """Attention's heads, written down; and the q, k and v that they were made of."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[str, str, str]] = []

    def forward(self, q: Symbol, k: Symbol, v: Symbol, mask: object) -> Symbol:
        self.read.append((str(q), str(k), str(v)))
        return Symbol("heads")


def name_children(module: nn.Module) -> None:
    """Put a name in the place of every child, and of every number that a forward may multiply by."""
    for name, child in list(module.named_children()):
        inner = [part for part, _ in child.named_children()] if "proj" in name else []
        if name == "attend":
            module.attend = NamedAttend()
        elif not isinstance(child, nn.Identity):
            setattr(module, name, Named(name, *inner))
    for name, value in list(vars(module).items()):
        if type(value) is float:
            setattr(module, name, Symbol(name))
        elif name == "act":
            module.act = lambda x: Symbol(f"act({x})")  # type: ignore[assignment]


@contextmanager
def without_axes() -> Iterator[None]:
    """Within it, `rearrange` and `rotate` take symbols, which have no axes."""
    stubs: dict[str, Callable[..., Symbol]] = {
        "rearrange": lambda x, *how, **sizes: x,
        "rotate": lambda x, cos, sin: Symbol(f"rotate({x})"),
    }
    modules = [vars(sys.modules[name]) for name in sys.modules if name.startswith(ROOMS)]
    kept = [(names, name, names[name]) for names in modules for name in stubs if name in names]
    try:
        for names, name, _ in kept:
            names[name] = stubs[name]
        yield
    finally:
        for names, name, value in kept:
            names[name] = value


ROOMS = (__package__, Llama.__module__)
MIXTURES = (experts.GroupedExperts, experts.TopExperts)


class Formulas(NamedTuple):
    """A family in formulas: what the stream begins with, what a block makes of it, what attention compares
    and returns, what the FFN returns, and what becomes of the stream.
    """

    embedding: str
    block: tuple[str, ...]
    q: str
    k: str
    attention: str
    ffn: str
    logits: str


def tiny(family: Family) -> Llama:
    """A model of two blocks, without memory."""
    given = {**SIZES, **SAID.get(family.model_type, {})}
    with torch.device("meta"):
        return family.model(family.config(given))


def formulas(family: Family) -> Formulas:
    """The forward of every part of a model, run on a symbol."""
    model: Any = tiny(family)
    block, x = model.blocks[1], Symbol("x")
    mixture = isinstance(block.ffn, MIXTURES)
    attention, ffn = block.attention, block.ffn
    for module in (model, block, attention, *([] if mixture else [ffn])):
        name_children(module)
    with without_axes():
        out = str(attention(x, x, x, None, None))
        ffn_text = "experts(x)" if mixture else str(ffn(x))
        logits = str(through(model))
    q, k, _ = attention.attend.read[0]
    embedding = str(model.embedding(Symbol("tokens"), Symbol("positions")))
    texts = (plain(text) for text in (q, k, out, ffn_text, logits))
    return Formulas(embedding, block_lines(block), *texts)


def through(model: Any) -> Symbol:
    """What becomes of the stream behind the last block."""
    model.through_blocks = lambda *inputs: Symbol("x")
    return model(torch.zeros(1, 3, dtype=torch.long, device="cpu"))


def block_lines(block: Any) -> tuple[str, ...]:
    """A block's formula, in two lines where its FFN reads what attention made of the stream."""
    whole = str(block(Symbol("x"), None, None, None, None))
    first = dict(block.named_children()).get("pre_ffn_norm", block.ffn).read[0]
    if "attention(" not in first:
        return (f"x = {whole}",)
    return f"x = {first}", f"x = {whole.replace(first, 'x')}"


def plain(text: str) -> str:
    """A formula without what is not about norms: which part of a head rotates, which half is which."""
    text = re.sub(r"\[rotate\((.+)\), \1\]", r"rotate(\1)", text)
    return re.sub(r"\[heads, heads\]\[([01])\]", lambda m: f"heads{int(m[1]) + 1}", text)


def lines(family: Family) -> list[str]:
    """A family's formulas, those within a sublayer and at the ends only where a norm stands in them."""
    f = formulas(family)
    found = [f"x = {f.embedding}"] if "norm" in f.embedding else []
    found += f.block
    if "norm" in f.q:
        found.append(f"attention: q = {f.q}, k = {f.k}")
    if "norm" in f.attention:
        found.append(f"attention = {f.attention}")
    if "norm" in f.ffn:
        found.append(f"ffn = {f.ffn}")
    return [*found, f"logits = {f.logits}"]


def place(f: Formulas) -> str:
    """Where a block's norms stand, by its formula."""
    first = f.block[0].removeprefix("x = ")
    if len(f.block) == 1:
        two = "pre_ffn_norm" in first
        return "side by side, two norms" if two else "side by side, one norm"
    if first.startswith("post_attention_norm("):
        return "post-norm, on the stream"
    if first.startswith("pre_attention_norm("):
        return "on the stream, before both branches"
    if "post_attention_norm(attention(pre_attention_norm" in first:
        return "sandwich: before and behind"
    if "post_attention_norm(attention(x))" in first:
        return "behind, inside the residual"
    return "pre-norm, scaled deltas" if "*" in first else "pre-norm"


def inside(f: Formulas, model: Llama) -> str:
    """The norms within a block's sublayers."""
    if "latent_norm" in f.q:
        return "latents of q and of k, v"
    if re.search(r"rotate\(q_norm\(", f.q):
        wide = isinstance(model.get_submodule("blocks.0.attention.q_norm"), norms.AllHeads)
        return "q, k: all heads at once, then rotated" if wide else "q, k: each head, then rotated"
    if re.search(r"norm\(rotate\(", f.q):
        return "q, k: each head, rotated before"
    if "norm" in f.attention and "norm" in f.ffn:
        return "before both last projections"
    return "heads, by pairs, before o_proj" if "norm" in f.attention else ""


def ends(f: Formulas) -> str:
    """What is not Llama's at the ends: one norm, before the head."""
    return ", ".join(
        ["embedding norm"] * ("norm" in f.embedding) + ["no final norm"] * ("norm" not in f.logits)
    )


COLUMNS = ("family", "norm", "gain", "order", "in a block", "in its sublayers", "at the ends")


def rows() -> list[tuple[str, ...]]:
    """The table of all families, a heading first."""
    found: list[tuple[str, ...]] = [COLUMNS]
    for name, family in FAMILIES.items():
        model, f = tiny(family), formulas(family)
        parts_of = model.get_submodule("blocks.0").named_children()
        norm = next(child for part, child in parts_of if part.endswith("_norm"))
        found.append((name, *NORMS[type(norm)], place(f), inside(f, model), ends(f)))
    return found


def markdown(rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown, in columns that line up in a terminal too."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join(
        f"| {text} |" if n else f"| {text} |\n|{rule}|" for n, text in enumerate(texts)
    )


def by_place() -> list[tuple[str, ...]]:
    """The short form of the table: who has which place."""
    found: dict[str, list[str]] = {}
    families = rows()[1:]
    for column in (-3, -2, -1):
        for row in families:
            if row[column]:
                found.setdefault(row[column], []).append(row[0])
    return [("norms", "families"), *((what, ", ".join(names)) for what, names in found.items())]
