"""How large the gradient of each block's weights is before the first step, for six placements of norms.

One pass over random tokens at initialisation: the claim that pre-norm lets gradients reach the bottom,
measured (Xiong et al. 2020, arXiv:2002.04745, make it for LayerNorm at a Transformer's usual sizes).
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from ..checkpoint import files
from ..config import LlamaConfig
from ..model import Llama
from .compare_placements import BLOCKS, build
from .side_by_side import STYLES, require_matplotlib
from .state import locked

DEPTHS = (4, 16, 48)
SEEDS = 3
BATCH, LENGTH, VOCAB = 4, 64, 512


def shape(depth: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
    )


def block_norms(model: Llama, seed: int) -> list[float]:
    """The L2 norm of the gradient of each block's weights, first block first; NaN or infinite where it
    is so.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(
        0, VOCAB, (BATCH, LENGTH + 1), generator=generator, dtype=torch.long, device="cpu"
    )
    logits = model(tokens[:, :-1]).float()
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return [
        math.sqrt(
            sum(p.grad.square().sum().item() for p in block.parameters() if p.grad is not None)
        )
        for block in model.blocks
    ]


def measure(seed: int, report: Callable[[str, bool], None]) -> dict[str, dict[int, list[float]]]:
    """By placement and depth: each block's norm, the geometric mean over SEEDS seeds from `seed`."""
    result: dict[str, dict[int, list[float]]] = {}
    for variant in BLOCKS:
        for depth in DEPTHS:
            report(f"{variant}, {depth} blocks", False)
            seeds = range(seed, seed + SEEDS)
            norms = [block_norms(build(variant, shape(depth), each), each) for each in seeds]
            means = torch.tensor(norms, dtype=torch.float64, device="cpu").log().mean(0).exp()
            result.setdefault(variant, {})[depth] = means.tolist()
    return result


def table(norms: dict[str, dict[int, list[float]]]) -> str:
    """Markdown: for each placement and depth the gradient of the first and of the last block."""
    lines = ["| placement |", "|---|"]
    for depth in DEPTHS:
        lines[0] += f" {depth} blocks: first | last | first / last |"
        lines[1] += "---|---|---|"
    for variant, depths in norms.items():
        row = f"| {variant} |"
        for first, last in ((depths[depth][0], depths[depth][-1]) for depth in DEPTHS):
            row += f" {first:.2g} | {last:.2g} | {first / last if last else math.nan:.2g} |"
        lines.append(row)
    return "\n".join(lines) + "\n"


def plot(norms: dict[str, dict[int, list[float]]], path: Path) -> None:
    """A picture for each depth: the gradient of each block, on a logarithmic scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(DEPTHS), 4), layout="constrained")
    for axes, depth in zip(figure.subplots(1, len(DEPTHS), sharey=True), DEPTHS, strict=True):
        for n, (variant, depths) in enumerate(norms.items()):
            axes.plot(range(depth), depths[depth], ls=STYLES[n], color=f"C{n}", label=variant)
        axes.set(xlabel="block", yscale="log", title=f"{depth} blocks")
    axes.legend()
    figure.axes[0].set_ylabel("norm of the gradient of its weights")
    files.replace(path, lambda temporary: figure.savefig(temporary, format="svg"))


def write(out: Path, seed: int, report: Callable[[str, bool], None]) -> None:
    """Write `gradients.json`, `gradients.md` and `gradients.svg` into `out`."""
    require_matplotlib()
    with locked(out):
        norms = measure(seed, report)
        files.write_text(out / "gradients.json", json.dumps(norms, indent=1) + "\n")
        files.write_text(out / "gradients.md", table(norms))
        plot(norms, out / "gradients.svg")
