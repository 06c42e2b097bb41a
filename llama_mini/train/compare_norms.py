"""The same small Llama with other norms, trained side by side on the same batches.

The variants of a seed take every step in turn, so that their step times are measured under the
same load.
"""

import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import parse_config
from ..checkpoint.files import replace
from ..config import LlamaConfig
from ..model import Llama, RMSNorm
from .corpus import Window, encode, read_documents, shuffled, train_tokenizer
from .evaluation import evaluate
from .export import write_text
from .loop import Recipe, initialise, make_optimizers, train_step

SMALL = Recipe(
    vocab_size=1024,
    context=256,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    steps=500,
    warmup=50,
    decay=250,
    batch_tokens=2048,
)
VARIANTS = ("RMSNorm", "LayerNorm", "RMSNorm, no final norm")
SEEDS = 3
POINTS = 10  # held-out losses on a curve


def build(variant: str, config: LlamaConfig, seed: int) -> Llama:
    """A freshly initialised model; equal weights in all variants of a seed."""
    model = Llama(config, norm=nn.LayerNorm if variant == "LayerNorm" else RMSNorm)
    if variant.endswith("no final norm"):
        model.final_norm = nn.Identity()
    initialise(model, seed)
    return model


def train_side_by_side(
    recipe: Recipe,
    data: list[Window],
    test: list[Window],
    characters: int,
    report: Callable[[str, bool], None],
) -> list[dict[str, Any]]:
    """One run per variant from `recipe.seed`: parameters, seconds per step, and its curve of
    (step, held-out nats per character).
    """
    config = parse_config(recipe.config())
    models = {variant: build(variant, config, recipe.seed) for variant in VARIANTS}
    optimizers = {variant: make_optimizers(model, recipe) for variant, model in models.items()}
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    curves: dict[str, list[tuple[int, float]]] = {variant: [] for variant in VARIANTS}
    every = max(1, recipe.steps // POINTS)
    batches = shuffled(data, recipe.batch_tokens, recipe.seed)
    for step in range(recipe.steps):
        batch, lr = next(batches), recipe.learning_rate * recipe.factor(step)
        turn = step % len(VARIANTS)  # nobody is always the one that finds the batch in the cache
        for variant in VARIANTS[turn:] + VARIANTS[:turn]:
            began = time.perf_counter()
            loss, _ = train_step(models[variant], optimizers[variant], batch, lr)
            seconds[variant].append(time.perf_counter() - began)
        if (step + 1) % 10 == 0:
            report(f"seed {recipe.seed}, step {step + 1}/{recipe.steps}, loss {loss:.3f}", False)
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            for variant, model in models.items():
                curves[variant].append((step + 1, evaluate(model, test) / characters))
            losses = ", ".join(f"{variant} {curves[variant][-1][1]:.4f}" for variant in VARIANTS)
            report(f"seed {recipe.seed}, step {step + 1}: {losses}", True)
    return [
        {
            "variant": variant,
            "seed": recipe.seed,
            "parameters": sum(p.numel() for p in model.parameters()),
            "seconds_per_step": statistics.median(seconds[variant]),
            "curve": curves[variant],
        }
        for variant, model in models.items()
    ]


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: one row per variant, the loss as mean, lowest and highest over the seeds."""
    lines = [
        "| norm | parameters | ms a step | held-out loss, nats per character | over the seeds |",
        "|---|---|---|---|---|",
    ]
    for variant in VARIANTS:
        mine = [run for run in runs if run["variant"] == variant]
        losses = [run["curve"][-1][1] for run in mine]
        pace = 1000 * statistics.median(run["seconds_per_step"] for run in mine)
        lines.append(
            f"| {variant} | {mine[0]['parameters']:,} | {pace:.0f} | {statistics.mean(losses):.4f} "
            f"| {min(losses):.4f} to {max(losses):.4f} |"
        )
    return "\n".join(lines) + "\n"


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """The curves: the mean over the seeds as a line, lowest to highest as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for variant, style in zip(VARIANTS, ("-", "--", ":"), strict=True):
        curves = [run["curve"] for run in runs if run["variant"] == variant]
        steps = [step for step, _ in curves[0]]
        losses = [[curve[i][1] for curve in curves] for i in range(len(steps))]
        (line,) = axes.plot(steps, list(map(statistics.mean, losses)), style, label=variant)
        low, high = list(map(min, losses)), list(map(max, losses))
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.25, linewidth=0)
    axes.set(xlabel="step", ylabel="held-out loss, nats per character")
    axes.legend()
    replace(path, lambda temporary: figure.savefig(temporary, format="svg"))


def compare_norms(
    text: Path, out: Path, recipe: Recipe, report: Callable[[str, bool], None]
) -> None:
    """Write `norms.json`, `norms.svg` and `norms.md` into `out`: SEEDS runs per variant, the first
    from `recipe.seed`. An `ImportError` without matplotlib, before any work.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--compare-norms draws with matplotlib: pip install 'llama-mini[plot]'")
    kept, held = read_documents(text, recipe.held_out)
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise PermissionError(f"{out} cannot be written to: give another --out")
    torch.set_num_threads(recipe.threads)
    tokenizer = train_tokenizer(kept, recipe.vocab_size)
    data, test = (encode(tokenizer, part, recipe.context) for part in (kept, held))
    runs: list[dict[str, Any]] = []
    for seed in range(recipe.seed, recipe.seed + SEEDS):
        seeded = Recipe(**{**asdict(recipe), "seed": seed})
        runs += train_side_by_side(seeded, data, test, sum(map(len, held)), report)
        values = {"recipe": asdict(recipe), "torch": torch.__version__, "runs": runs}
        write_text(out / "norms.json", json.dumps(values, indent=1) + "\n")  # kept if it ends here
    write_text(out / "norms.md", table(runs))
    plot(runs, out / "norms.svg")
