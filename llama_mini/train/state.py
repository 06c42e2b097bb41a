"""`training.pt`: everything that a training needs to go on, read as distrustfully as a checkpoint."""

import io
import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from sentencepiece import SentencePieceProcessor

from ..checkpoint.files import replace
from ..model import Llama
from .muon import Muon
from .recipe import Recipe, option

try:
    import fcntl
except ImportError:  # Windows: two trainings in one folder are the user's own affair there
    fcntl = None  # type: ignore[assignment]

STATE = "training.pt"
KINDS = {
    "recipe": dict,
    "corpus": str,
    "tokenizer": bytes,
    "step": int,
    "tokens": int,
    "seconds": float,
    "curve": list,
    "model": dict,
    "optimizers": list,
}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within it, no other training works in `folder`, which is made where it is not there; a
    `ValueError` while one does. The lock is on the folder itself and ends with the process.

    What was made and is still empty at the end is taken away: the training was refused.
    """
    missing = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if os.path.exists(folder):
            raise ValueError(f"--out {folder} is there and is no folder: give another") from None
        raise OSError(f"--out {folder} cannot be made: {error.strerror}") from None
    try:
        with alone_in(folder):
            yield
    finally:
        with suppress(OSError):  # it holds something
            for each in missing:
                each.rmdir()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written to: give another --out")
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another training works in {folder}: stop it first, or give another --out"
            ) from None
        except OSError:  # a network file system without locks
            pass
        yield
    finally:
        os.close(handle)


def read_state(out: Path, recipe: Recipe, corpus: str) -> dict[str, Any]:
    """The state to go on from, {} for a new training; a `ValueError` when it is not this one's."""
    path = out / STATE
    if not os.path.lexists(path):
        return {}
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ValueError("it is no file")
        with zipfile.ZipFile(path) as archive:  # torch.load takes damaged numbers as they are
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} in it is damaged")
        state = torch.load(path, weights_only=True)
        before = _check(state)
    except Exception as error:  # a damaged pickle raises many kinds
        raise ValueError(f"{path} cannot be read ({error}): delete it to start anew") from None
    if state["corpus"] != corpus:
        raise ValueError(f"{out} holds a training on another text: give that, or another --out")
    changed = {name for name, value in asdict(recipe).items() if value != getattr(before, name)}
    if state["step"] <= min(recipe.steps - recipe.decay, before.steps - before.decay):
        changed -= {"steps", "decay"}  # no step has depended on them yet
    if changed:
        was = " ".join(f"{option(name)} {getattr(before, name)}" for name in sorted(changed))
        raise ValueError(f"{out} holds a training with {was}: give that, or another --out")
    return state


def _check(state: Any) -> Recipe:
    """The recipe of a state, after a look at everything that needs no model; a `ValueError` says what
    is wrong.
    """
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}")
    for what, names in (("lacks", KINDS.keys() - state), ("also holds", state.keys() - KINDS)):
        if names:
            raise ValueError(f"it {what} {', '.join(sorted(map(str, names)))}")
    for name, kind in KINDS.items():
        if not isinstance(state[name], kind) or isinstance(state[name], bool):
            raise ValueError(f"its {name} is a {type(state[name]).__name__}, not a {kind.__name__}")
    recipe = Recipe(**state["recipe"])  # one that an older version wrote lacks what is default now
    step, tokens, seconds = state["step"], state["tokens"], state["seconds"]
    if not 0 <= step <= recipe.steps:
        raise ValueError(f"its step is {step}, of {recipe.steps}")
    if not (step <= tokens and 0 <= seconds < math.inf and (seconds > 0 or step == 0)):
        raise ValueError(f"its step is {step}, after {tokens} tokens and {seconds} seconds")
    for point in state["curve"]:
        if type(point) is not tuple or [type(value) for value in point] != [int, int, float]:
            raise ValueError("its curve is not made of a step, a number of tokens and a loss each")
    pieces = SentencePieceProcessor(model_proto=state["tokenizer"]).get_piece_size()
    if pieces != recipe.vocab_size:
        raise ValueError(f"its tokenizer has {pieces} tokens, not {recipe.vocab_size}")
    return recipe


def restore(
    state: dict[str, Any], model: Llama, optimizers: list[torch.optim.Optimizer], path: Path
) -> None:
    """Put what `path` holds into a new model and its optimizers; a `ValueError` when it does not fit,
    is not finite, or has not taken the steps that it claims.
    """
    try:
        model.load_state_dict(state["model"])
        _require_finite("weights", model.state_dict().values())
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            ours = _settings(optimizer)
            optimizer.load_state_dict(saved)
            if _settings(optimizer) != ours:
                raise ValueError("the settings of its optimizers are not this recipe's")
            names = (
                {"average"} if isinstance(optimizer, Muon) else {"step", "exp_avg", "exp_avg_sq"}
            )
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                values = optimizer.state[p]
                if values.keys() != names or values.get("step", state["step"]) != state["step"]:
                    raise ValueError(f"its optimizers have not taken {state['step']} steps")
                if any(
                    v.shape != (() if name == "step" else p.shape) for name, v in values.items()
                ):
                    raise ValueError("the averages of its optimizers have other shapes")
                _require_finite("averages", values.values())
    except Exception as error:
        raise ValueError(f"{path} does not fit ({error}): delete it to start anew") from None


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for group in optimizer.param_groups
    ]


def _require_finite(what: str, tensors: Any) -> None:
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise ValueError(f"its {what} are NaN or infinite")


def write_state(
    out: Path, state: dict[str, Any], model: Llama, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Put the state into `out`, whole or not at all."""
    state["model"] = model.state_dict()
    state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
    buffer = io.BytesIO()  # torch.save into a file does not say why a disk refuses it
    torch.save(state, buffer)
    replace(out / STATE, lambda path: path.write_bytes(buffer.getbuffer()))
