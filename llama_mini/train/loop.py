"""Train a tokenizer and a small Llama on a text file; the result is a Hugging Face style folder.

python -m llama_mini.train --text stories.txt --out weights/stories
python -m llama_mini.train --text stories.txt --evaluate weights/stories
python -m llama_mini.train --text stories.txt --out comparison --compare-norms
"""

import argparse
import dataclasses
import hashlib
import io
import math
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import parse_config
from ..checkpoint.files import replace
from ..cli import on_stop, run_command, say
from ..model import Llama
from .corpus import BOS, EOS, Window, encode, read_documents, shuffled, train_tokenizer
from .evaluation import evaluate, evaluate_folder, loss_sum
from .export import FILES, write_card, write_checkpoint
from .muon import Muon

STATE = "training.pt"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, beside the text; each field is an option."""

    vocab_size: int = 4096
    context: int = 512
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    held_out: int = 500  # documents at the end of the text
    steps: int = 3000
    warmup: int = 100  # steps
    decay: int = 1000  # steps
    batch_tokens: int = 4096
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    seed: int = 0
    threads: int = 2

    def __post_init__(self) -> None:
        least = {"seed": 0, "decay": 0, "weight_decay": 0, "learning_rate": 1e-9, "context": 2}
        for name, value in asdict(self).items():
            if not least.get(name, 1) <= value < math.inf:
                raise ValueError(f"{option(name)} {value}: it must be {least.get(name, 1)} or more")
        if self.threads > 1024:  # far more end the process inside torch
            raise ValueError(f"--threads {self.threads}: it must be 1024 or fewer")
        if self.warmup + self.decay > self.steps:
            raise ValueError(
                f"--warmup {self.warmup} and --decay {self.decay} do not fit into --steps {self.steps}"
            )

    def config(self) -> dict[str, Any]:
        """The model's `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "torch_dtype": "bfloat16",
        }

    def factor(self, step: int) -> float:
        """Of the learning rate: up over the warm-up, level, down to zero over the decay."""
        rising, falling = (step + 1) / self.warmup, (self.steps - step) / max(self.decay, 1)
        return min(rising, 1.0, falling)


def option(field: str) -> str:
    return "--" + field.replace("_", "-")


def initialise(model: Llama, seed: int) -> None:
    """Normal weights, but 0 for what is added to the stream, so that every block starts silent."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(p)
        elif p.dim() == 2:
            std = 0.02 if name == "embed.weight" else 0.5 * p.shape[1] ** -0.5
            nn.init.normal_(p, std=std, generator=generator)


def make_optimizers(model: Llama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks; AdamW, without decay, for the embedding and the norms."""
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    taken = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in taken]
    lr = recipe.learning_rate
    return [
        Muon(matrices, lr, recipe.weight_decay),
        torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train_step(
    model: Llama, optimizers: list[torch.optim.Optimizer], batch: Sequence[Window], lr: float
) -> tuple[float, int]:
    """One step of all optimizers: mean loss before it, and the number of tokens. A `ValueError`
    when the loss is not finite; the weights are untouched then.
    """
    total, count = loss_sum(model, batch)
    loss = total / count
    if not loss.isfinite():
        raise ValueError(f"the loss is {loss.item()}: try a lower --learning-rate")
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), count


def read_state(out: Path, recipe: Recipe, corpus: str) -> dict[str, Any]:
    """The state to go on from, {} for a new training; a `ValueError` when it is not this one's."""
    path = out / STATE
    if not path.exists():
        if (out / "model.safetensors").exists():
            raise ValueError(f"{out} holds a finished checkpoint: give another --out to train anew")
        there = [name for name in FILES if (out / name).exists()]
        if there:
            raise ValueError(
                f"{out} holds {', '.join(there)} of something else: give another --out"
            )
        return {}
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load takes damaged numbers as they are
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} in it is damaged")
        state = torch.load(path, weights_only=True)
        before, step = Recipe(**state["recipe"]), int(state["step"])
        missing = {"corpus", "tokens", "seconds", "curve", "model", "optimizers"} - state.keys()
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except Exception as error:  # a damaged pickle raises many kinds
        raise ValueError(f"{path} cannot be read ({error}): delete it to start anew") from None
    if state["corpus"] != corpus:
        raise ValueError(f"{out} holds a training on another text: give that, or another --out")
    changed = {name for name, value in asdict(recipe).items() if value != getattr(before, name)}
    if step <= min(recipe.steps - recipe.decay, before.steps - before.decay):
        changed -= {"steps", "decay"}  # no step has depended on them yet
    if changed:
        was = " ".join(f"{option(name)} {getattr(before, name)}" for name in sorted(changed))
        raise ValueError(f"{out} holds a training with {was}: give that, or another --out")
    return state


def train(
    text: Path,
    out: Path,
    recipe: Recipe,
    report: Callable[[str, bool], None],
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
    kept, held = read_documents(text, recipe.held_out)
    config = parse_config(recipe.config())
    corpus = hashlib.sha256(text.read_bytes()).hexdigest()
    state = read_state(out, recipe, corpus)
    if not state:
        state = {"corpus": corpus, "tokenizer": train_tokenizer(kept, recipe.vocab_size)}
        state |= {"step": 0, "tokens": 0, "seconds": 0.0, "curve": []}
    state["recipe"] = asdict(recipe)
    data, test = (encode(state["tokenizer"], part, recipe.context) for part in (kept, held))

    torch.set_num_threads(recipe.threads)
    model = Llama(config)
    initialise(model, recipe.seed)
    optimizers = make_optimizers(model, recipe)
    if state["step"]:
        try:
            model.load_state_dict(state["model"])
            for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        except Exception as error:
            raise ValueError(
                f"{out / STATE} does not fit ({error}): delete it to start anew"
            ) from None

    def save() -> None:
        state["model"] = model.state_dict()
        state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
        buffer = io.BytesIO()  # torch.save into a file does not say why a disk refuses it
        torch.save(state, buffer)
        replace(out / STATE, lambda path: path.write_bytes(buffer.getbuffer()))

    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob(f".{STATE}.*.tmp"):  # by a training that was killed while it wrote
        left.unlink()
    save()  # now, so that a folder that cannot be written to costs no training
    batches = islice(shuffled(data, recipe.batch_tokens, recipe.seed), state["step"], None)
    began, saved = time.monotonic() - state["seconds"], time.monotonic()
    with on_stop(asked.append):
        try:
            while state["step"] < recipe.steps and not asked:
                lr = recipe.learning_rate * recipe.factor(state["step"])
                loss, count = train_step(model, optimizers, next(batches), lr)
                state["step"] += 1
                state["tokens"] += count
                state["seconds"] = time.monotonic() - began
                if state["step"] % 10 == 0:
                    report(progress(state, recipe.steps, loss), False)
                if state["step"] % evaluate_every == 0 or state["step"] == recipe.steps:
                    held_loss = evaluate(model, test) / sum(map(len, held))
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
    write_checkpoint(out, model, recipe.config(), state["tokenizer"])
    parameters = sum(p.numel() for p in model.parameters())
    epoch = sum(len(window.ids) - window.first for window in data)
    facts = {"parameters": parameters, "documents": len(kept), "epochs": state["tokens"] / epoch}
    write_card(out, state, text.name, data_note, held, **facts)
    (out / STATE).unlink()
    return True


def progress(state: dict[str, Any], steps: int, loss: float) -> str:
    step, done = state["step"], state["step"] * 20 // steps
    rate, left = state["tokens"] / state["seconds"], state["seconds"] / step * (steps - step) / 60
    return (
        f"[{'#' * done}{'.' * (20 - done)}] step {step}/{steps}, loss {loss:.3f} nats per token, "
        f"{rate:.0f} tokens/s, {left:.0f} min left"
    )


def show(line: str, keep: bool) -> None:
    """A line of progress to standard error; on a terminal the next one takes its place."""
    if sys.stderr.isatty():
        line = f"\r\033[K{line}"
    print(line, end="\n" if keep or not sys.stderr.isatty() else "", file=sys.stderr, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m llama_mini.train",
        description=(__doc__ or "").split("\n")[0],  # python -OO leaves it out
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--text", type=Path, required=True, help="UTF-8, a line <|endoftext|> after each document")
    add("--out", type=Path, help="folder of the checkpoint, and of the state until it is finished")
    add("--data-note", default="Not described.", help="source and licence of the text")
    add("--evaluate", type=Path, metavar="FOLDER", help="only measure a checkpoint's held-out loss")
    add("--compare-norms", action="store_true", help="other norms, smaller by default; a table")
    for field in dataclasses.fields(Recipe):
        kind = type(field.default)
        add(option(field.name), type=kind, metavar="N", help=f"default {field.default}")
    options = parser.parse_args(arguments)
    if (options.out is None) == (options.evaluate is None):
        parser.error("give --out FOLDER or --evaluate FOLDER")
    return options


def run(options: argparse.Namespace) -> int:
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Recipe)}
    given = {name: value for name, value in given.items() if value is not None}
    if options.evaluate:
        held_out = given.get("held_out", Recipe.held_out)
        _, held = read_documents(options.text, held_out)
        per_character, per_token = evaluate_folder(options.evaluate, held)
        print(f"held-out loss {per_character:.4f} nats per character, {per_token:.4f} per token")
        return 0
    if options.compare_norms:
        from .compare_norms import SMALL, compare_norms

        compare_norms(options.text, options.out, dataclasses.replace(SMALL, **given), show)
        return 0
    asked: list[int] = []
    try:
        done = train(
            options.text, options.out, Recipe(**given), show, options.data_note, asked=asked
        )
        if not done:
            raise KeyboardInterrupt(*asked)
    except KeyboardInterrupt:
        kept = (options.out / STATE).exists()
        say("stopped; the same command goes on from here" if kept else "stopped; nothing was kept")
        raise
    print(f"{options.out} holds the checkpoint and its card")
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return run_command(lambda: run(options))
