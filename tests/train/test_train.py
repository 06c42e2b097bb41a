"""Training: the same result with and without a stop, and a folder that others load."""

import hashlib
import math
import signal

import pytest
import torch
from safetensors.torch import load_file

from llama_mini import Llama, load_model, load_tokenizer
from llama_mini.train import loop
from llama_mini.train.__main__ import main
from llama_mini.train.corpus import BOS, EOS, Window, read_documents
from llama_mini.train.evaluation import evaluate_folder
from llama_mini.train.loop import train
from llama_mini.train.muon import orthogonalise
from llama_mini.train.recipe import PRECISIONS, Recipe
from llama_mini.train.state import STATE
from llama_mini.train.step import initialise, make_optimizers, train_step
from tests.support.fixtures import require
from tests.support.training import OPTIONS, TINY, quiet, stop_at


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


def test_it_says_what_it_does_before_it_does_it(text, tmp_path, monkeypatch):
    """A tokenizer takes a minute: a line stands there before, and one after the first step."""
    lines, work = [], []
    for name in ("read_documents", "train_tokenizer", "encode", "train_step"):
        function = getattr(loop, name)
        monkeypatch.setattr(
            loop,
            name,
            lambda *a, name=name, function=function: (
                work.append((name, len(lines))) or function(*a)
            ),
        )
    train(text, tmp_path, TINY, lambda line, keep: lines.append(line))
    first = dict(reversed(work))
    assert first == {"read_documents": 1, "train_tokenizer": 2, "encode": 3, "train_step": 3}
    assert str(text) in lines[0]
    assert "step 1/20" in lines[3]
    assert lines[3].startswith("[" + "#" + "." * 19 + "]")
    assert "340 tokens" in lines[1]


def test_precision_is_that_of_the_products(text, tmp_path):
    """In bfloat16 the losses differ a little from those in float32, and the weights stay float32."""
    states = {}
    for precision in PRECISIONS:
        out, recipe = tmp_path / precision, Recipe(**{**vars(TINY), "precision": precision})
        assert train(text, out, recipe, stop_at(10)) is False
        states[precision] = torch.load(out / STATE, weights_only=True)["model"]
        assert {weight.dtype for weight in states[precision].values()} == {torch.float32}
    one, other = (states[precision]["embed.weight"] for precision in PRECISIONS)
    assert not torch.equal(one, other)
    assert torch.allclose(one, other, atol=0.02)  # observed: 0.003


def test_another_seed_is_another_training(text, trained, tmp_path):
    train(text, tmp_path, Recipe(**{**vars(TINY), "seed": 1}), quiet)
    name = "model.embed_tokens.weight"
    one, other = (load_file(f / "model.safetensors")[name] for f in (trained, tmp_path))
    assert not torch.equal(one, other)


def test_ctrl_c_says_how_to_go_on(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("llama_mini.train.__main__.show", stop_at(10))
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


def test_the_products_and_nothing_else_are_in_the_precision(monkeypatch):
    """What Newton-Schulz and the linear layers multiply, and what the loss is summed in."""
    seen = {}
    matmul = torch.Tensor.__matmul__

    def spy(a, b):
        seen.setdefault("muon", set()).update((a.dtype, b.dtype))
        return matmul(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", spy)
    for precision in PRECISIONS:
        seen.clear()
        recipe = Recipe(**{**vars(TINY), "precision": precision})
        model = Llama(recipe.config())
        initialise(model, 0)
        layer = model.blocks[0].ffn.up_proj
        layer.register_forward_hook(lambda module, args, out: seen.update(layer=out.dtype))
        batch = [Window([1, 5, 6, 7, 2], 1)]
        train_step(model, make_optimizers(model, recipe), batch, 1e-3, precision)
        products = getattr(torch, precision)
        assert seen == {"muon": {products}, "layer": products}
        assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 16), (24, 8), (8, 24)])
def test_muon_levels_the_singular_values(shape, products):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    update = orthogonalise(u @ torch.diag(torch.logspace(0, -1.5, len(s))) @ v, products)
    assert update.dtype == torch.float32
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.6
    assert values.max() < 1.25
    assert torch.einsum("mi,mn,in->i", u, update, v).min() > 0.6  # along the same directions
