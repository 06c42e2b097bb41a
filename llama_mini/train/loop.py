"""Train a tokenizer and a small Llama on a text file, with stops between any two steps."""

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..cli import on_stop
from ..model import Llama
from .corpus import encode, read_documents, shuffled, train_tokenizer
from .evaluation import evaluate
from .export import FILES, write_card, write_checkpoint
from .recipe import Recipe
from .state import STATE, locked, read_state, restore, write_state
from .step import initialise, make_optimizers, train_step

Report = Callable[[str, bool], None]


def train(
    text: Path,
    out: Path,
    recipe: Recipe,
    report: Report,
    data_note: str = "Not described.",
    evaluate_every: int = 200,
    save_seconds: float = 300.0,
    asked: list[int] | None = None,
) -> bool:
    """Train, from the state in `out` if there is one, until a checkpoint and its card stand there.

    False when Ctrl-C or SIGTERM stopped it between two steps; its number is put into `asked`. The
    same recipe, text and machine give the same weights, stopped or not; `steps` and `decay` may
    still be changed while the decay has not begun. `report` gets a line, and whether it is to stay
    when the next one comes.
    """
    asked = [] if asked is None else asked
    try:
        f"{data_note}{text.name}{out}".encode()
    except UnicodeEncodeError as error:  # the card could not be written at the end
        raise ValueError(f"--data-note, --text and --out must be UTF-8: {error}") from None
    report(f"reading {text}", False)
    kept, held = read_documents(text, recipe.held_out)
    config = recipe.config()
    corpus = hashlib.sha256(text.read_bytes()).hexdigest()
    with locked(out):
        state = read_state(out, recipe, corpus) or new_state(out, recipe, corpus, kept, report)
        state["recipe"] = asdict(recipe)
        report(f"splitting {len(kept) + len(held)} documents into tokens", False)
        data, test = (encode(state["tokenizer"], part, recipe.context) for part in (kept, held))
        torch.set_num_threads(recipe.threads)
        model = Llama(config)
        initialise(model, recipe.seed)
        optimizers = make_optimizers(model, recipe)
        if state["step"]:
            restore(state, model, optimizers, out / STATE)

        def save() -> None:
            write_state(out, state, model, optimizers)

        for left in out.glob(f".{STATE}.*.tmp"):  # by a training that was killed while it wrote
            left.unlink()
        save()  # now, so that a folder that cannot be written to costs no training
        batches = islice(shuffled(data, recipe.batch_tokens, recipe.seed), state["step"], None)
        began, saved = time.monotonic() - state["seconds"], time.monotonic()
        said = 0.0  # a line for the first step, for every tenth, and whenever 5 seconds have passed
        with on_stop(asked.append):
            try:
                while state["step"] < recipe.steps and not asked:
                    lr = recipe.learning_rate * recipe.factor(state["step"])
                    loss, count = train_step(model, optimizers, next(batches), lr, recipe.precision)
                    state["step"] += 1
                    state["tokens"] += count
                    state["seconds"] = time.monotonic() - began
                    if state["step"] % 10 == 0 or time.monotonic() - said > 5:
                        report(progress(state, recipe.steps, loss), False)
                        said = time.monotonic()
                    if state["step"] % evaluate_every == 0 or state["step"] == recipe.steps:
                        held_loss = evaluate(model, test) / sum(map(len, held))
                        if not math.isfinite(held_loss):
                            raise ValueError(
                                f"the held-out loss is {held_loss}: try a lower --learning-rate"
                            )
                        state["curve"].append((state["step"], state["tokens"], held_loss))
                        line = f"step {state['step']}: held-out loss {held_loss:.4f} nats per character"
                        report(line, True)
                    if time.monotonic() - saved > save_seconds:
                        save()
                        saved = time.monotonic()
            except BrokenPipeError:  # nobody reads the reports any more, which come between steps
                save()
                raise
            save()
        if state["step"] < recipe.steps:
            return False
        write_checkpoint(out, model, state["tokenizer"])
        parameters = sum(p.numel() for p in model.parameters())
        epoch = sum(len(window.ids) - window.first for window in data)
        epochs = state["tokens"] / epoch
        facts = {"parameters": parameters, "documents": len(kept), "epochs": epochs}
        write_card(out, state, text.name, data_note, held, **facts)
        (out / STATE).unlink()
    return True


def new_state(
    out: Path, recipe: Recipe, corpus: str, kept: list[str], report: Report
) -> dict[str, Any]:
    """The state before the first step; a `ValueError` where `out` holds files of something else."""
    if (out / "model.safetensors").exists():
        raise ValueError(f"{out} holds a finished checkpoint: give another --out to train anew")
    there = [name for name in FILES if (out / name).exists()]
    if there:
        raise ValueError(f"{out} holds {', '.join(there)} of something else: give another --out")
    report(f"training a tokenizer of {recipe.vocab_size} tokens", False)
    tokenizer = train_tokenizer(kept, recipe.vocab_size)
    state = {"corpus": corpus, "tokenizer": tokenizer, "step": 0, "tokens": 0}
    return state | {"seconds": 0.0, "curve": []}


def progress(state: dict[str, Any], steps: int, loss: float) -> str:
    step, done = state["step"], state["step"] * 20 // steps
    rate, left = state["tokens"] / state["seconds"], state["seconds"] / step * (steps - step) / 60
    return (
        f"[{'#' * done}{'.' * (20 - done)}] step {step}/{steps}, loss {loss:.3f} nats per token, "
        f"{rate:.0f} tokens/s, {left:.0f} min left"
    )
