"""What a training refuses, in one line each: options, texts, folders, and states that are not its own."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_mini import load_model, save_model
from llama_mini.train.__main__ import main
from llama_mini.train.loop import train
from llama_mini.train.recipe import Recipe
from llama_mini.train.state import STATE
from tests.support.fixtures import SHIPPED
from tests.support.training import OPTIONS, TINY, quiet, stop_at


def spoil(folder: Path, text: Path, case: str) -> tuple[list[str], str]:
    """Arguments that cannot work, and what the error line must say."""
    path, out = folder / "bad.txt", folder / "out"
    arguments = ["--text", str(path), "--out", str(out), *OPTIONS]
    match case:
        case "missing":
            return arguments, f"there is no file '{path}'"
        case "a pipe":
            os.mkfifo(path)
            return arguments, f"{path} is a pipe"
        case "empty":
            path.write_text("")
            return arguments, f"{path} holds 0 documents, and 8 are to be held out"
        case "one short document":
            path.write_text("Tim ran.")
            return arguments, f"{path} holds 1 documents, and 8 are to be held out"
        case "not UTF-8":
            path.write_bytes(b"Tim \xff ran.\n<|endoftext|>\n" * 20)
            return arguments, f"{path} is not UTF-8 text: byte 4 is 0xff"
        case "vocabulary too large":
            path.write_text("Tim ran.\n<|endoftext|>\n" * 20)
            return arguments, "--vocab-size 340 does not suit a text of 96 characters (at most"
        case "vocabulary too small":
            path.write_bytes(text.read_bytes())
            return [*arguments, "--vocab-size", "200"], "(at least"
        case "folder is a file":
            path.write_bytes(text.read_bytes())
            out.write_text("")
            return arguments, f"--out {out} is there and is no folder"
        case "folder within a file":
            path.write_bytes(text.read_bytes())
            return [*arguments, "--out", str(path / "out")], f"--out {path / 'out'} cannot be made"
        case "heads":
            path.write_bytes(text.read_bytes())
            return [*arguments, "--num-attention-heads", "3"], "num_attention_heads 3"
        case "steps":
            return [*arguments, "--steps", "0"], "--steps 0: it must be from 1 to"
        case "learning rate" | "weight decay" | "blocks" | "seed" | "threads" | "context":
            path.write_bytes(text.read_bytes())
            name, value, end = {
                "learning rate": ("--learning-rate", "1e+308", "1e+30"),
                "weight decay": ("--weight-decay", "nan", "1000000.0"),
                "blocks": ("--num-hidden-layers", "2000", "500"),
                "seed": ("--seed", str(10**20), str(2**31 - 1)),
                "threads": ("--threads", "2000", "1024"),
                "context": ("--context", "1", str(2**31 - 1)),
            }[case]
            low = {"--learning-rate": "1e-09", "--weight-decay": "0.0", "--seed": "0"}
            low |= {"--context": "2"}
            said = f"{name} {value}: it must be from {low.get(name, 1)} to {end}"
            return [*arguments, name, value], said
        case "decay":
            return [*arguments, "--decay", "19"], "do not fit into --steps 20"
        case "state damaged":
            path.write_bytes(text.read_bytes())
            out.mkdir()
            (out / STATE).write_bytes(b"PK\x03\x04 half a file")
            return arguments, f"{out / STATE} cannot be read"
        case "a bit of the state has changed":
            path.write_bytes(text.read_bytes())
            assert train(text, out, TINY, stop_at(10)) is False
            data = bytearray((out / STATE).read_bytes())
            data[len(data) // 2] ^= 64
            (out / STATE).write_bytes(data)
            return arguments, f"{out / STATE} cannot be read"
        case "files of somebody else":
            path.write_bytes(text.read_bytes())
            out.mkdir()
            (out / "README.md").write_text("mine")
            return arguments, f"{out} holds README.md of something else"
        case "a note that is not text":
            path.write_bytes(text.read_bytes())
            return [*arguments, "--data-note", "\udcff"], "must be UTF-8"
        case "a pipe in the place of the state":
            path.write_bytes(text.read_bytes())
            out.mkdir()
            os.mkfifo(out / STATE)
            return arguments, f"{out / STATE} cannot be read (it is no file)"
        case "diverges":
            path.write_bytes(text.read_bytes())
            return [*arguments, "--learning-rate", "1e30"], "try a lower --learning-rate"
        case "evaluates NaN":
            path.write_bytes(text.read_bytes())
            model = load_model(SHIPPED)
            with torch.no_grad():
                model.blocks[2].ffn.up_proj.weight[1, 2] = float("nan")
            save_model(model, folder / "nan", SHIPPED)
            arguments = ["--text", str(path), "--evaluate", str(folder / "nan"), "--held-out", "8"]
            return arguments, "model.layers.2.mlp.up_proj.weight"
        case "gradients of a recipe":
            return ["--out", str(out), "--gradients", "--steps", "9"], "--steps"
        case "evaluates nothing":
            path.write_bytes(text.read_bytes())
            arguments = ["--text", str(path), "--evaluate", str(out), "--held-out", "8"]
            return arguments, f"there is no folder '{out}'"
    raise AssertionError(case)


@pytest.mark.parametrize(
    "case",
    [
        "missing",
        "a pipe",
        "empty",
        "one short document",
        "not UTF-8",
        "vocabulary too large",
        "vocabulary too small",
        "folder is a file",
        "folder within a file",
        "heads",
        "steps",
        "learning rate",
        "weight decay",
        "blocks",
        "seed",
        "threads",
        "context",
        "decay",
        "a pipe in the place of the state",
        "state damaged",
        "a bit of the state has changed",
        "files of somebody else",
        "a note that is not text",
        "diverges",
        "evaluates NaN",
        "evaluates nothing",
        "gradients of a recipe",
    ],
)
def test_bad_input_gets_one_line(case, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("llama_mini.train.__main__.show", quiet)
    arguments, expected = spoil(tmp_path, text, case)
    before = set(tmp_path.iterdir())
    assert main(arguments) == 1
    result = capsys.readouterr()
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert expected in result.err
    assert not list(tmp_path.rglob("*.tmp"))
    assert not (tmp_path / "out" / "model.safetensors").exists()
    # No folder is left of what was refused; a training that diverges has kept its state.
    assert case == "diverges" or set(tmp_path.iterdir()) == before


def test_a_folder_of_something_refused_goes_with_its_parents(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("llama_mini.train.__main__.show", quiet)
    out = tmp_path / "a" / "b"
    (tmp_path / "a").mkdir()
    for folder in (out / "c" / "d", out):
        arguments = ["--text", str(text), "--out", str(folder), *OPTIONS, "--vocab-size", "200"]
        assert main(arguments) == 1
        assert "--vocab-size" in capsys.readouterr().err
        assert [path.name for path in tmp_path.rglob("*")] == ["a"]


def test_a_folder_belongs_to_one_training(text, trained, tmp_path):
    with pytest.raises(ValueError, match="holds a finished checkpoint"):
        train(text, trained, TINY, quiet)
    assert train(text, tmp_path, TINY, stop_at(10)) is False
    with pytest.raises(ValueError, match=r"holds a training with --hidden-size 16 --seed 0: give"):
        train(text, tmp_path, Recipe(**{**vars(TINY), "seed": 1, "hidden_size": 32}), quiet)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "One more.\n")
    with pytest.raises(ValueError, match="holds a training on another text"):
        train(other, tmp_path, TINY, quiet)


@pytest.fixture(scope="module")
def stopped(text, tmp_path_factory) -> dict[str, Any]:
    """The state of a training that was stopped after 10 of 20 steps."""
    out = tmp_path_factory.mktemp("stopped")
    assert train(text, out, TINY, stop_at(10)) is False
    return torch.load(out / STATE, weights_only=True)


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda state: state.pop(name)


def put(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """Change what lies under the keys."""

    def change(state: dict[str, Any]) -> None:
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = to

    return change


def finished_untrained(state: dict[str, Any]) -> None:
    state["step"] = TINY.steps


CHANGES = {
    "the end, without the steps": (finished_untrained, "20 steps"),
    "beyond the end": (put("step", to=21), "21, of 20"),
    "before the start": (put("step", to=-1), "-1, of 20"),
    "half a step": (put("step", to=9.5), "float"),
    "true": (put("step", to=True), "bool"),
    "no tokens": (put("tokens", to=3), "3 tokens"),
    "no time": (put("seconds", to=0.0), "0.0 seconds"),
    "endless": (put("seconds", to=float("inf")), "inf seconds"),
    **{
        f"without {name}": (without(name), f"lacks {name}")
        for name in "corpus tokenizer step tokens seconds curve model optimizers recipe".split()
    },
    "a key too many": (put("best", to=1), "also holds best"),
    "another recipe's key": (put("recipe", "dropout", to=0.1), "dropout"),
    "a recipe's size as text": (put("recipe", "hidden_size", to="16"), "'16'"),
    "a curve of something else": (put("curve", to=["rising"]), "curve"),
    "a tokenizer that is none": (put("tokenizer", to=b"xyz"), "cannot be read"),
    "another tokenizer": (
        put("tokenizer", to=(SHIPPED / "tokenizer.model").read_bytes()),
        "4096 tokens, not 340",
    ),
    "a weight too few": (lambda state: state["model"].popitem(), "Missing key"),
    "a weight of another shape": (put("model", "final_norm.weight", to=torch.ones(3)), "[3]"),
    "a weight that is NaN": (
        put("model", "final_norm.weight", to=torch.full((16,), float("nan"))),
        "weights are NaN",
    ),
    "an optimizer too few": (lambda state: state["optimizers"].pop(), "argument 2 is shorter"),
    "other settings": (
        put("optimizers", 0, "param_groups", 0, "momentum", to=0.5),
        "settings of its optimizers",
    ),
    "other steps": (put("optimizers", 1, "state", 0, "step", to=torch.tensor(4.0)), "10 steps"),
    "an average too few": (lambda state: state["optimizers"][0]["state"].pop(0), "10 steps"),
    "a square too few": (
        lambda state: state["optimizers"][1]["state"][0].pop("exp_avg_sq"),
        "10 steps",
    ),
    "an average of another shape": (
        put("optimizers", 0, "state", 0, "average", to=torch.zeros(2, 2)),
        "other shapes",
    ),
    "an average that is infinite": (
        put("optimizers", 1, "state", 0, "exp_avg", to=torch.full((340, 16), float("inf"))),
        "averages are NaN or infinite",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_state_is_checked(case, text, stopped, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("llama_mini.train.__main__.show", quiet)
    change, says = CHANGES[case]
    torch.save(stopped, tmp_path / STATE)
    state = torch.load(tmp_path / STATE, weights_only=True)
    change(state)
    torch.save(state, tmp_path / STATE)
    assert main(["--text", str(text), "--out", str(tmp_path), *OPTIONS]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path / STATE} ")
    assert err.count("\n") == 1
    assert says in err
    assert [path.name for path in tmp_path.iterdir()] == [STATE]


def test_a_state_from_before_a_field_has_its_default(text, stopped, tmp_path):
    recipe = {name: value for name, value in stopped["recipe"].items() if name != "precision"}
    assert stopped["recipe"]["precision"] == Recipe.precision == "bfloat16"
    torch.save(stopped | {"recipe": recipe}, tmp_path / STATE)
    wrong = Recipe(**{**vars(TINY), "precision": "float32"})
    with pytest.raises(ValueError, match="holds a training with --precision bfloat16"):
        train(text, tmp_path, wrong, quiet)
    assert train(text, tmp_path, TINY, quiet) is True


def test_one_training_in_a_folder(text, tmp_path):
    """A second one is refused while the first works, and not after it."""
    errors = []

    def intrude(line: str, keep: bool) -> None:
        if "step 10/" in line:
            with pytest.raises(ValueError, match="another training works in") as error:
                train(text, tmp_path, TINY, quiet)
            errors.append(str(error.value))

    assert train(text, tmp_path, TINY, intrude) is True
    assert len(errors) == 1
    assert str(tmp_path) in errors[0]
    with pytest.raises(ValueError, match="holds a finished checkpoint"):
        train(text, tmp_path, TINY, quiet)
