"""Comparisons: every variant on the same batches, a table, a picture; the placements are their formulas."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from llama_mini.model import RMSNorm
from llama_mini.train import gradients, side_by_side
from llama_mini.train.__main__ import main
from llama_mini.train.compare_norms import NORMS
from llama_mini.train.compare_placements import BLOCKS, build
from llama_mini.train.corpus import encode, read_documents, train_tokenizer
from tests.support.fixtures import require
from tests.support.models import CONFIG
from tests.support.training import OPTIONS, TINY, quiet

FEW = [*OPTIONS, "--steps", "6", "--decay", "2"]


def test_compare_norms(text, tmp_path):
    require("matplotlib")
    arguments = ["--text", str(text), "--out", str(tmp_path), "--compare-norms", *FEW]
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
    assert not any(run["diverged"] for run in runs.values())
    assert (tmp_path / "norms.md").read_text().count("\n") == 5
    assert "<svg" in (tmp_path / "norms.svg").read_text()


def test_compare_placements(text, tmp_path, monkeypatch):
    require("matplotlib")
    monkeypatch.setattr(side_by_side, "SEEDS", 1)
    arguments = ["--text", str(text), "--out", str(tmp_path), "--compare-placements", *FEW]
    assert main(arguments) == 0
    runs = json.loads((tmp_path / "placements.json").read_text())["runs"]
    keys = {(run["variant"], run["learning_rate"]) for run in runs}
    assert keys == {(variant, rate) for variant in BLOCKS for rate in (1e-3, 1e-2)}
    assert len(runs) == 14
    parameters = {run["variant"]: run["parameters"] - runs[0]["parameters"] for run in runs}
    more = {"pre-norm": 0, "post-norm": -16, "sandwich": 64, "behind": 0, "side by side": 0}
    assert parameters == more | {"OLMo 2": 2 * 8, "none": -5 * 16}  # q_norm and k_norm of 4 each
    table = (tmp_path / "placements.md").read_text().splitlines()
    assert [row.split(" | ")[:2] for row in table[2:]] == [
        [f"| {variant}", rate] for rate in ("0.001", "0.01") for variant in BLOCKS
    ]
    assert "<svg" in (tmp_path / "placements.svg").read_text()


@pytest.mark.parametrize("option", ["--compare-norms", "--compare-placements"])
def test_without_matplotlib_says_so_at_once(option, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--text", str(text), "--out", str(tmp_path / "out"), option]) == 1
    assert "pip install 'llama-mini[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def windows(text):
    kept, held = read_documents(text, TINY.held_out)
    tokenizer = train_tokenizer(kept, TINY.vocab_size)
    return *(encode(tokenizer, part, TINY.context) for part in (kept, held)), sum(map(len, held))


def test_one_that_diverges_leaves_the_others_alone(windows, tmp_path):
    require("matplotlib")

    def spoiled(variant, config, seed):
        model = NORMS.build("RMSNorm", config, seed)
        with torch.no_grad():
            if variant == "infinite":
                model.embed.weight[:] = math.inf
            if variant == "worse than a guess":
                model.embed.weight.mul_(1e4)
        return model

    recipe = replace(TINY, steps=4, decay=0, warmup=1, learning_rate=1e-9, precision="float32")
    wrong = replace(NORMS, variants=("infinite", "worse than a guess", "right"), build=spoiled)
    alone = replace(NORMS, variants=("right",), build=spoiled)
    runs = side_by_side.train_side_by_side(wrong, recipe, *windows, quiet)
    assert {run["variant"]: run["diverged"] for run in runs} == {
        "infinite": True,
        "worse than a guess": True,
        "right": False,
    }
    (right,) = side_by_side.train_side_by_side(alone, recipe, *windows, quiet)
    assert runs[2]["curve"] == right["curve"]
    assert runs[0]["curve"] == []
    rows = side_by_side.table(runs).splitlines()[2:]
    assert [row.split(" | ")[-1] for row in rows] == ["1 of 1 |", "1 of 1 |", "0 of 1 |"]
    assert [row.split(" | ")[4] for row in rows] == ["", "", f"{right['curve'][-1][1]:.4f}"]
    side_by_side.plot(runs, tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text()


class Sine(nn.Module):
    """Stands for a sublayer."""

    def forward(self, x, *rest):
        return torch.sin(5 * x)


class Cosine(nn.Module):
    def forward(self, x, *rest):
        return torch.cos(3 * x)


def expected(variant, x, n):
    a, f = Sine(), Cosine()
    match variant:
        case "pre-norm":
            x = x + a(n[0](x))
            return x + f(n[1](x))
        case "post-norm":
            x = n[0](x + a(x))
            return n[1](x + f(x))
        case "sandwich":
            x = x + n[1](a(n[0](x)))
            return x + n[3](f(n[2](x)))
        case "behind" | "OLMo 2":
            x = x + n[0](a(x))
            return x + n[1](f(x))
        case "side by side":
            return x + a(n[0](x)) + f(n[1](x))
        case "none":
            x = x + a(x)
            return x + f(x)


@pytest.mark.parametrize("variant", BLOCKS)
def test_a_placement_is_its_formula(variant):
    model = build(variant, CONFIG, 0)
    block = model.blocks[0]
    norms = [module for _, module in block.named_children() if isinstance(module, RMSNorm)]
    order = {"pre_attention_norm": 0, "attention_in": 0, "attention_out": 1, "pre_ffn_norm": 2}
    order |= {"ffn_in": 2, "ffn_out": 3}
    named = {name: m for name, m in block.named_children() if isinstance(m, RMSNorm)}
    norms = [named[name] for name in sorted(named, key=order.__getitem__)]
    assert len(norms) == {"sandwich": 4, "none": 0}.get(variant, 2)
    generator = torch.Generator().manual_seed(1)
    for norm in norms:  # each its own weight, so that none can stand for another
        nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)
    block.attention, block.ffn = Sine(), Cosine()
    x = torch.randn(2, 3, CONFIG.hidden_size, generator=generator)
    assert torch.equal(block(x, None, None, None, None), expected(variant, x, norms))
    qk = isinstance(model.blocks[1].attention.q_norm, RMSNorm)
    assert qk == (variant == "OLMo 2")
    assert isinstance(model.final_norm, RMSNorm) == (variant not in ("post-norm", "none"))


def test_the_variants_of_a_seed_have_equal_matrices():
    states = {}
    for variant in BLOCKS:
        state = build(variant, CONFIG, 3).state_dict()
        states[variant] = {name: weight for name, weight in state.items() if weight.dim() == 2}
    assert not torch.equal(build("none", CONFIG, 4).embed.weight, states["none"]["embed.weight"])
    for state in states.values():
        assert state.keys() == states["none"].keys()
        assert all(torch.equal(state[name], states["none"][name]) for name in state)
    assert states["none"]["embed.weight"].std().item() == pytest.approx(1, abs=0.05)
    wide = states["none"]["blocks.1.ffn.down_proj.weight"]
    assert wide.std().item() == pytest.approx(CONFIG.intermediate_size**-0.5, rel=0.05)
    assert "lm_head.weight" in states["none"]


def test_the_norm_of_a_gradient_is_the_slope_along_it():
    model = build("sandwich", gradients.shape(3), 0).double()
    norms = gradients.block_norms(model, seed=5)
    assert len(norms) == 3

    def loss(block, step):
        with torch.no_grad():
            for p in block.parameters():
                p.add_(p.grad, alpha=step)
            generator = torch.Generator().manual_seed(5)
            size = (gradients.BATCH, gradients.LENGTH + 1)
            tokens = torch.randint(0, gradients.VOCAB, size, generator=generator)
            logits = model(tokens[:, :-1]).flatten(0, 1)
            value = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).item()
            for p in block.parameters():
                p.sub_(p.grad, alpha=step)
        return value

    for block, norm in zip(model.blocks, norms, strict=True):
        slope = (loss(block, 1e-4) - loss(block, -1e-4)) / 2e-4
        assert norm == pytest.approx(slope**0.5, rel=1e-4)


def test_gradients(tmp_path, monkeypatch, capsys):
    require("matplotlib")
    monkeypatch.setattr(gradients, "DEPTHS", (1, 3))
    monkeypatch.setattr(gradients, "SEEDS", 2)
    assert main(["--gradients", "--out", str(tmp_path)]) == 0
    values = json.loads((tmp_path / "gradients.json").read_text())
    assert list(values) == list(BLOCKS)
    assert [len(norms) for norms in values["none"].values()] == [1, 3]
    one, two = (gradients.block_norms(build("pre-norm", gradients.shape(3), n), n) for n in (0, 1))
    means = [math.sqrt(a * b) for a, b in zip(one, two, strict=True)]
    assert values["pre-norm"]["3"] == pytest.approx(means, rel=1e-6)
    rows = (tmp_path / "gradients.md").read_text().splitlines()
    first, last = (values["sandwich"]["3"][n] for n in (0, -1))
    assert f"| {first:.2g} | {last:.2g} | {first / last:.2g} |" in rows[4]
    assert len({row.count("|") for row in rows}) == 1
    assert "<svg" in (tmp_path / "gradients.svg").read_text()
