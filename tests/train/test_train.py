"""Training: the same result with and without a stop, a folder that others load, errors in one line."""

import hashlib
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from llama_mini import load_model, load_tokenizer
from llama_mini.train.corpus import (
    BOS,
    EOS,
    IGNORED,
    Window,
    collate,
    encode,
    read_documents,
    shuffled,
    train_tokenizer,
    windows,
)
from llama_mini.train.evaluation import evaluate, evaluate_folder
from llama_mini.train.loop import STATE, Recipe, main, train
from llama_mini.train.muon import orthogonalise
from tests.support.fixtures import require
from tests.support.training import OPTIONS, TINY, documents


def quiet(line: str, keep: bool) -> None:
    pass


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "tales.txt"
    path.write_text("".join(f"{d}\n<|endoftext|>\n" for d in documents(120)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "tales"
    assert (
        main(["--text", str(text), "--out", str(out), "--data-note", "Made up; CC0.", *OPTIONS])
        == 0
    )
    return out


def stop_at(step: int):
    """A report that sends the process a Ctrl-C when a step has been reported."""

    def report(line: str, keep: bool) -> None:
        if f"step {step}/" in line:
            os.kill(os.getpid(), signal.SIGINT)

    return report


def test_stopped_and_resumed_is_the_same_training(text, trained, tmp_path):
    out = tmp_path / "tales"
    assert train(text, out, TINY, stop_at(10)) is False
    state = torch.load(out / STATE, weights_only=True)
    assert state["step"] == 10
    assert not (out / "model.safetensors").exists()
    assert train(text, out, TINY, quiet, "Made up; CC0.") is True
    straight, resumed = (load_file(folder / "model.safetensors") for folder in (trained, out))
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]
    lines = [
        [line for line in (folder / "README.md").read_text().splitlines() if "minutes" not in line]
        for folder in (trained, out)
    ]
    assert lines[0] == lines[1]


def test_another_seed_is_another_training(text, trained, tmp_path):
    train(text, tmp_path, Recipe(**{**vars(TINY), "seed": 1}), quiet)
    name = "model.embed_tokens.weight"
    one, other = (load_file(f / "model.safetensors")[name] for f in (trained, tmp_path))
    assert not torch.equal(one, other)


def test_ctrl_c_says_how_to_go_on(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("llama_mini.train.loop.show", stop_at(10))
    handler = signal.getsignal(signal.SIGINT)
    assert main(["--text", str(text), "--out", str(tmp_path), *OPTIONS]) == 130
    assert capsys.readouterr().err == "stopped; the same command goes on from here\n"
    assert signal.getsignal(signal.SIGINT) is handler


def test_length_may_change_before_the_decay_and_not_after(text, trained, tmp_path):
    out = tmp_path / "tales"
    longer = Recipe(**{**vars(TINY), "steps": 40})
    assert train(text, out, longer, stop_at(10)) is False
    assert train(text, out, TINY, stop_at(20)) is True  # asked to stop at its last step
    name = "model.embed_tokens.weight"
    one, other = (load_file(f / "model.safetensors")[name] for f in (trained, out))
    assert torch.equal(one, other)

    late = tmp_path / "late"
    assert train(text, late, Recipe(**{**vars(TINY), "decay": 12}), stop_at(10)) is False
    with pytest.raises(ValueError, match=r"holds a training with --decay 12: give that"):
        train(text, late, TINY, quiet)


def test_loads_here_and_learned_something(text, trained):
    kept, held = read_documents(text, TINY.held_out)
    assert (len(kept), len(held)) == (112, 8)
    model, tokenizer = load_model(trained), load_tokenizer(trained)
    assert model.config.dtype == "bfloat16"
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (BOS, EOS)
    assert tokenizer.decode(tokenizer.encode(held[0])) == held[0]
    per_character, per_token = evaluate_folder(trained, held)
    assert per_token < math.log(TINY.vocab_size) - 0.5  # 4.8 against 5.7 for a guess
    assert per_character < per_token


def test_loads_in_transformers(trained):
    transformers = require("transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    tokens = torch.tensor([load_tokenizer(trained).encode("Tim saw a cat.")])
    with torch.no_grad():
        assert torch.equal(load_model(trained, dtype=torch.float32)(tokens), theirs(tokens).logits)
    assert theirs.generation_config.eos_token_id == EOS


def test_card_gives_its_numbers_and_how_to_make_them_again(text, trained, capsys):
    card = (trained / "README.md").read_text()
    assert "Made up; CC0." in card
    assert card.count("\n> ") >= 3
    assert hashlib.sha256(text.read_bytes()).hexdigest() in card
    assert "{" not in card
    commands = [line.split() for line in card.splitlines() if line.startswith("    python -m")]
    evaluate_command, train_command = commands
    assert train_command[3:7] == ["--text", "tales.txt", "--out", "tales"]
    assert train_command[7 : 7 + len(OPTIONS)] == OPTIONS
    arguments = evaluate_command[3:]
    arguments[1], arguments[3] = str(text), str(trained)
    assert main(arguments) == 0
    result = capsys.readouterr().out
    assert f"**Held-out loss: {result.split()[2]} nats per character**" in card


def test_held_out_documents_teach_nothing(text, tmp_path):
    kept, held = read_documents(text, 8)
    other = tmp_path / "other.txt"
    changed = [*kept, *("Zzz qqq." for _ in held)]
    other.write_text("\n<|endoftext|>\n".join(changed), encoding="utf-8")
    for name, source in (("one", text), ("two", other)):
        train(source, tmp_path / name, Recipe(**{**vars(TINY), "steps": 10}), quiet)
    one, two = (tmp_path / name for name in ("one", "two"))
    for file in ("tokenizer.model", "model.safetensors"):
        assert (one / file).read_bytes() == (two / file).read_bytes()


def test_loss_is_that_of_one_document_at_a_time(text, trained):
    _, held = read_documents(text, TINY.held_out)
    model, tokenizer = load_model(trained, dtype=torch.float32), load_tokenizer(trained)
    documents = [[BOS, *tokenizer.encode(d, bos=False), EOS] for d in held]
    short = [ids for ids in documents if len(ids) <= TINY.context + 1]
    assert 2 <= len(short) < len(documents)
    total = 0.0
    for ids in short:
        tokens = torch.tensor(ids)
        with torch.no_grad():
            total += F.cross_entropy(
                model(tokens[None, :-1])[0], tokens[1:], reduction="sum"
            ).item()
    # observed difference 1e-7 relative: batches are filled up, which must not count
    assert evaluate(model, windows(short, TINY.context)) == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("length", [2, 8, 9, 10, 12, 13, 14, 31])
def test_every_token_is_predicted_once_with_enough_before_it(length):
    ids = list(range(100, 100 + length))
    predicted = []
    for window in windows([ids], context=8):
        assert len(window.ids) <= 9
        assert window.ids == ids[ids.index(window.ids[0]) :][: len(window.ids)]
        assert window.first == 1 or window.first >= 4
        predicted += window.ids[window.first :]
    assert predicted == ids[1:]


def test_collate_ignores_filling_and_what_was_predicted_before():
    inputs, targets = collate([Window([1, 5, 6, 2], 1), Window([7, 8, 9], 2)])
    assert inputs.tolist() == [[1, 5, 6], [7, 8, EOS]]
    assert targets.tolist() == [[5, 6, 2], [IGNORED, 9, IGNORED]]


def test_an_epoch_holds_every_window_once_in_batches_of_bounded_size(text):
    kept, _ = read_documents(text, 8)
    data = encode(train_tokenizer(kept, 340), kept, 32)
    orders = []
    for _ in range(2):
        seen, batches = [], shuffled(data, 128, seed=3)
        while len(seen) < 2 * len(data):
            batch = next(batches)
            assert len(batch) * max(len(window.ids) - 1 for window in batch) <= 128
            seen += [tuple(window.ids) for window in batch]
        orders.append(seen)
    everything = sorted(tuple(window.ids) for window in data)
    first, second = orders[0][: len(data)], orders[0][len(data) :]
    assert sorted(first) == sorted(second) == everything
    assert first != second
    assert orders[0] == orders[1]


@pytest.mark.parametrize("shape", [(16, 16), (24, 8), (8, 24)])
def test_muon_levels_the_singular_values(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    update = orthogonalise(u @ torch.diag(torch.logspace(0, -1.5, len(s))) @ v)
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.6
    assert values.max() < 1.25
    assert torch.einsum("mi,mn,in->i", u, update, v).min() > 0.6  # along the same directions


def spoil(folder: Path, text: Path, case: str) -> tuple[list[str], str]:
    """Arguments that cannot work, and what the error line must say."""
    path, out = folder / "bad.txt", folder / "out"
    arguments = ["--text", str(path), "--out", str(out), *OPTIONS]
    match case:
        case "missing":
            return arguments, f"there is no text file {path}"
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
            return arguments, str(out)
        case "heads":
            path.write_bytes(text.read_bytes())
            return [*arguments, "--num-attention-heads", "3"], "num_attention_heads 3"
        case "steps":
            return [*arguments, "--steps", "0"], "--steps 0: it must be 1 or more"
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
        case "diverges":
            path.write_bytes(text.read_bytes())
            return [*arguments, "--learning-rate", "1e30"], "try a lower --learning-rate"
        case "evaluates nothing":
            path.write_bytes(text.read_bytes())
            arguments = ["--text", str(path), "--evaluate", str(out), "--held-out", "8"]
            return arguments, f"there is no folder '{out}'"
    raise AssertionError(case)


@pytest.mark.parametrize(
    "case",
    [
        "missing",
        "empty",
        "one short document",
        "not UTF-8",
        "vocabulary too large",
        "vocabulary too small",
        "folder is a file",
        "heads",
        "steps",
        "decay",
        "state damaged",
        "a bit of the state has changed",
        "files of somebody else",
        "a note that is not text",
        "diverges",
        "evaluates nothing",
    ],
)
def test_bad_input_gets_one_line(case, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("llama_mini.train.loop.show", quiet)
    arguments, expected = spoil(tmp_path, text, case)
    assert main(arguments) == 1
    result = capsys.readouterr()
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert expected in result.err
    assert not list(tmp_path.rglob("*.tmp"))
    assert not (tmp_path / "out" / "model.safetensors").exists()


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


def test_compare_norms(text, tmp_path, monkeypatch, capsys):
    require("matplotlib")
    arguments = ["--text", str(text), "--out", str(tmp_path), "--compare-norms", *OPTIONS]
    arguments += ["--steps", "6", "--decay", "2"]
    assert main(arguments) == 0
    values = json.loads((tmp_path / "norms.json").read_text())
    runs = {(run["variant"], run["seed"]): run for run in values["runs"]}
    assert len(runs) == 9
    rms, layer, none = (
        runs[variant, 0]["parameters"]
        for variant in ("RMSNorm", "LayerNorm", "RMSNorm, no final norm")
    )
    assert layer - rms == 5 * 16  # the biases of 2 norms a block and 1
    assert rms - none == 16
    finals = {key: run["curve"][-1] for key, run in runs.items()}
    assert {step for step, _ in finals.values()} == {6}
    assert len({loss for _, loss in finals.values()}) == 9
    assert all(run["curve"][-1][1] < run["curve"][0][1] for run in runs.values())
    assert (tmp_path / "norms.md").read_text().count("\n") == 5
    assert "<svg" in (tmp_path / "norms.svg").read_text()


def test_compare_norms_without_matplotlib_says_so_at_once(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--text", str(text), "--out", str(tmp_path / "out"), "--compare-norms"]) == 1
    assert "pip install 'llama-mini[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
