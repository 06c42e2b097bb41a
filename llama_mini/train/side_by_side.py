"""Variants of one small Llama, trained side by side on the same batches: losses, a table, a picture.

The variants of a seed take every step in turn, so that their step times are measured under the same
load. A variant diverges when its loss is not finite, or ends above that of an even guess.
"""

import importlib.util
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import files
from ..config import LlamaConfig
from ..model import Llama
from .corpus import Window, encode, read_documents, shuffled, train_tokenizer
from .evaluation import evaluate
from .recipe import Recipe
from .state import locked
from .step import train_step

Report = Callable[[str, bool], None]
SEEDS = 3
POINTS = 10  # held-out losses on a curve
STYLES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))


@dataclass(frozen=True)
class Comparison:
    """`name` begins the names of its files; `build` makes the model of a variant from a config and a
    seed; every one of `learning_rates` is tried, or the recipe's where there are none.
    """

    name: str
    variants: tuple[str, ...]
    build: Callable[[str, LlamaConfig, int], Llama]
    optimizers: Callable[[Llama, Recipe], list[torch.optim.Optimizer]]
    recipe: Recipe
    learning_rates: tuple[float, ...] = ()


def train_side_by_side(
    comparison: Comparison,
    recipe: Recipe,
    data: list[Window],
    test: list[Window],
    characters: int,
    report: Report,
) -> list[dict[str, Any]]:
    """One run per variant from `recipe.seed`: parameters, seconds per step, and its curve of
    (step, held-out nats per character), which ends where it diverges.
    """
    variants, config = comparison.variants, recipe.config()
    models = {variant: comparison.build(variant, config, recipe.seed) for variant in variants}
    optimizers = {variant: comparison.optimizers(models[variant], recipe) for variant in variants}
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    curves: dict[str, list[tuple[int, float]]] = {variant: [] for variant in variants}
    guess = math.log(config.vocab_size) * sum(len(w.ids) - w.first for w in test) / characters
    running, every = list(variants), max(1, recipe.steps // POINTS)
    batches = shuffled(data, recipe.batch_tokens, recipe.seed)
    where = f"seed {recipe.seed}, learning rate {recipe.learning_rate:g}, step"
    for step in range(recipe.steps):
        batch, lr = next(batches), recipe.learning_rate * recipe.factor(step)
        turn = step % len(variants)  # nobody is always the one that finds the batch in the cache
        for variant in variants[turn:] + variants[:turn]:
            if variant not in running:
                continue
            began = time.perf_counter()
            try:
                train_step(models[variant], optimizers[variant], batch, lr, recipe.precision)
            except ValueError:  # its loss is not finite
                running.remove(variant)
                report(f"{where} {step + 1}: {variant} diverged", True)
            seconds[variant].append(time.perf_counter() - began)
        if (step + 1) % 10 == 0 or step == 0:
            report(f"{where} {step + 1}/{recipe.steps}", False)
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            for variant in running:
                curves[variant].append((step + 1, evaluate(models[variant], test) / characters))
            losses = ", ".join(f"{variant} {curves[variant][-1][1]:.4f}" for variant in running)
            report(f"{where} {step + 1}: {losses}", True)
    return [
        {
            "variant": variant,
            "seed": recipe.seed,
            "learning_rate": recipe.learning_rate,
            "parameters": sum(p.numel() for p in models[variant].parameters()),
            "seconds_per_step": statistics.median(seconds[variant]),
            "curve": curves[variant],
            "diverged": variant not in running or not curves[variant][-1][1] < guess,
        }
        for variant in variants
    ]


def rates(runs: list[dict[str, Any]]) -> list[float]:
    return sorted({run["learning_rate"] for run in runs})


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: a row per variant and learning rate, the loss as mean, lowest and highest over the
    seeds that did not diverge.
    """
    lines = [
        "| variant | learning rate | parameters | ms a step | held-out loss, nats per character "
        "| over the seeds | diverged |",
        "|---|---|---|---|---|---|---|",
    ]
    for rate in rates(runs):
        for variant in dict.fromkeys(run["variant"] for run in runs):
            mine = [r for r in runs if r["variant"] == variant and r["learning_rate"] == rate]
            losses = [run["curve"][-1][1] for run in mine if not run["diverged"]]
            pace = 1000 * statistics.median(run["seconds_per_step"] for run in mine)
            mean = f"{statistics.mean(losses):.4f}" if losses else ""
            span = f"{min(losses):.4f} to {max(losses):.4f}" if losses else ""
            lines.append(
                f"| {variant} | {rate:g} | {mine[0]['parameters']:,} | {pace:.0f} | {mean} | {span} "
                f"| {len(mine) - len(losses)} of {len(mine)} |"
            )
    return "\n".join(lines) + "\n"


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """The curves, a picture for each learning rate: the mean over the seeds that did not diverge as a
    line, lowest to highest as a band.
    """
    from matplotlib.figure import Figure

    wide = len(rates(runs))
    figure = Figure(figsize=(2 + 5 * wide, 4), layout="constrained")
    for axes, rate in zip(figure.subplots(1, wide, squeeze=False)[0], rates(runs), strict=True):
        for n, variant in enumerate(dict.fromkeys(run["variant"] for run in runs)):
            mine = [r for r in runs if r["variant"] == variant and r["learning_rate"] == rate]
            curves = [run["curve"] for run in mine if not run["diverged"]]
            label = f"{variant} (all diverged)" if not curves else variant
            steps = [step for step, _ in curves[0]] if curves else []
            losses = [[curve[i][1] for curve in curves] for i in range(len(steps))]
            means = list(map(statistics.mean, losses))
            axes.plot(steps, means, ls=STYLES[n % len(STYLES)], color=f"C{n}", label=label)
            low, high = list(map(min, losses)), list(map(max, losses))
            axes.fill_between(steps, low, high, color=f"C{n}", alpha=0.2, linewidth=0)
        axes.set(xlabel="step", ylabel="held-out loss, nats per character")
        axes.set_title(f"learning rate {rate:g}")
        axes.legend()
    files.replace(path, lambda temporary: figure.savefig(temporary, format="svg"))


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("a comparison draws with matplotlib: pip install 'llama-mini[plot]'")


def compare(comparison: Comparison, text: Path, out: Path, recipe: Recipe, report: Report) -> None:
    """Write `<name>.json`, `<name>.svg` and `<name>.md` into `out`: SEEDS runs per variant and learning
    rate, the first from `recipe.seed`. An `ImportError` without matplotlib, before any work.
    """
    require_matplotlib()
    report(f"reading {text}", False)
    kept, held = read_documents(text, recipe.held_out)
    with locked(out):
        torch.set_num_threads(recipe.threads)
        report(f"training a tokenizer of {recipe.vocab_size} tokens", False)
        tokenizer = train_tokenizer(kept, recipe.vocab_size)
        report(f"splitting {len(kept) + len(held)} documents into tokens", False)
        data, test = (encode(tokenizer, part, recipe.context) for part in (kept, held))
        runs: list[dict[str, Any]] = []
        for seed in range(recipe.seed, recipe.seed + SEEDS):
            for rate in comparison.learning_rates or (recipe.learning_rate,):
                one = replace(recipe, seed=seed, learning_rate=rate)
                length = sum(map(len, held))
                runs += train_side_by_side(comparison, one, data, test, length, report)
                values = {"recipe": asdict(recipe), "torch": torch.__version__, "runs": runs}
                # kept if it ends here
                files.write_text(
                    out / f"{comparison.name}.json", json.dumps(values, indent=1) + "\n"
                )
        files.write_text(out / f"{comparison.name}.md", table(runs))
        plot(runs, out / f"{comparison.name}.svg")
