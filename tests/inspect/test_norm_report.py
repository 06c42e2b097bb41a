"""The norm report: its numbers against transformers' hidden states, its picture, its errors."""

import json
import math
import re
import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from llama_mini import Llama, load_model, load_tokenizer
from llama_mini.checkpoint import parse_config
from llama_mini.checkpoint.names import HUGGING_FACE, translate
from llama_mini.inspect.__main__ import main
from llama_mini.inspect.norm_report import norm_rows, norms_of, outcomes
from llama_mini.inspect.picture import plot
from tests.support.fixtures import BASE, SHAPES, draw_tokens, reference_model, require, strengthen

PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the"
TOLERANCE = 1e-5  # relative; seen 1.2e-6


@pytest.fixture(params=["gqa_tied", "qwen3", "stories260K"])
def pair(request, tmp_path) -> tuple[nn.Module, Llama, Tensor]:
    """One checkpoint by transformers and by us, and tokens (1, t) for it."""
    transformers = require("transformers")
    if request.param == "stories260K":
        folder = request.getfixturevalue("stories260k")
        tokens = torch.tensor([load_tokenizer(folder).encode(PROMPT)])
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return theirs.eval(), load_model(folder, dtype=torch.float32), tokens
    theirs = reference_model(request.param)
    theirs.save_pretrained(tmp_path)
    return theirs, load_model(tmp_path), draw_tokens((1, 12), seed=5)


def their_name(name: str) -> str:
    return translate(f"{name}.weight", HUGGING_FACE).removesuffix(".weight")


def rms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(x**2, axis=-1))


def test_numbers_are_those_of_transformers_hidden_states(pair):
    theirs, ours, tokens = pair
    seen: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, module in theirs.named_modules():
        if name.endswith(("norm", "self_attn", "mlp")):

            def keep(module, inputs, kwargs, output, name=name):
                x = inputs[0] if inputs else kwargs["hidden_states"]
                y = output[0] if isinstance(output, tuple) else output
                seen[name] = x.double().numpy(), y.double().numpy()

            module.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        hidden = theirs(tokens, output_hidden_states=True).hidden_states

    rows = norm_rows(ours, tokens)
    assert [row.name for row in rows] == list(norms_of(ours))
    for row in rows:
        before, after = seen[their_name(row.name)]
        weight = theirs.get_submodule(their_name(row.name)).weight.detach().double().numpy()
        expected = {
            "before": np.median(rms(before)),
            "first": np.median(rms(before[:, 0])),
            "after": np.median(rms(after)),
            "mean_share": np.median(before.mean(-1) ** 2 / (before**2).mean(-1)),
            "mean_share_most": np.max(before.mean(-1) ** 2 / (before**2).mean(-1)),
            "weight_mean": weight.mean(),
            "weight_std": weight.std(),
            "weight_min": weight.min(),
            "weight_max": weight.max(),
        }
        if row.name.endswith("pre_attention_norm"):
            layer = int(row.name.split(".")[1])
            assert np.array_equal(before, hidden[layer].double().numpy())
        if row.reads == "x" and row.name != "final_norm":
            block = their_name(row.name).rpartition(".")[0]
            delta = seen[f"{block}.{'mlp' if row.read_by == 'ffn' else 'self_attn'}"][1]
            expected["delta"] = np.median(rms(delta))
            expected["delta_share"] = np.median(rms(delta) / rms(before + delta))
        for key, value in expected.items():
            assert getattr(row, key) == pytest.approx(value, rel=TOLERANCE), (row.name, key)
        assert (row.delta is None) == ("delta" not in expected)


def test_outcomes_are_those_of_transformers_without_the_norm(pair):
    theirs, ours, tokens = pair
    dropped = ["final_norm", "blocks.0.pre_attention_norm", "blocks.1.pre_ffn_norm"]
    results = outcomes(ours, tokens, dropped)
    assert [result.without for result in results] == [None, *dropped]
    with torch.no_grad():
        whole = theirs(tokens).logits[0, -1].double()
    p = torch.distributions.Categorical(logits=whole)
    for result in results:
        logits = whole
        if result.without:
            parent, _, part = their_name(result.without).rpartition(".")
            norm = theirs.get_submodule(their_name(result.without))
            setattr(theirs.get_submodule(parent), part, nn.Identity())
            with torch.no_grad():
                logits = theirs(tokens).logits[0, -1].double()
            setattr(theirs.get_submodule(parent), part, norm)
        q = torch.distributions.Categorical(logits=logits)
        assert result.token == logits.argmax()
        assert result.probability == pytest.approx(q.probs.max().item(), rel=TOLERANCE)
        assert result.entropy == pytest.approx(q.entropy().item(), rel=TOLERANCE)
        divergence = torch.distributions.kl_divergence(p, q).item()
        assert result.divergence == pytest.approx(
            divergence, rel=TOLERANCE, abs=3e-6
        )  # seen 3.6e-7
        assert (result.divergence > 1e-4) == (result.without is not None)


@pytest.fixture
def model() -> Llama:
    model = Llama(parse_config(SHAPES["qwen3"])).eval()
    strengthen(model, seed=0)
    return model


def hooks(model: Llama) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_every_norm_has_its_place(model):
    rows = norm_rows(model, draw_tokens((1, 4), seed=0))
    block = [
        ("pre_attention_norm", "x", "attention"),
        ("attention.q_norm", "q_proj", "attention.attend"),
        ("attention.k_norm", "k_proj", "attention.attend"),
        ("pre_ffn_norm", "x", "ffn"),
    ]
    places = [(f"blocks.{n}.{name}", *rest) for n in (0, 1) for name, *rest in block]
    assert [(r.name, r.reads, r.read_by) for r in rows] == [*places, ("final_norm", "x", "lm_head")]


def test_the_model_is_left_as_it_was(model):
    tokens = draw_tokens((1, 4), seed=0)
    norm_rows(model, tokens)
    outcomes(model, tokens, ["final_norm"])
    with pytest.raises(ValueError, match=r"'final'.* blocks\.0\.pre_attention_norm, .* final_norm"):
        outcomes(model, tokens, ["final"])
    with pytest.raises(IndexError):
        norm_rows(model, torch.tensor([[64]]))
    assert hooks(model) == 0


def test_a_layer_norm_model_has_its_report_too():
    model = Llama(parse_config(BASE), norm=nn.LayerNorm).eval()
    rows = norm_rows(model, draw_tokens((2, 4), seed=0))
    assert [row.name for row in rows] == list(norms_of(model))
    assert rows[0].after == pytest.approx(1.0, abs=0.05)


def test_a_stream_of_zeros_divides_by_nothing():
    model = Llama(parse_config(BASE)).eval()
    model.embed.weight.data.zero_()
    for row in norm_rows(model, draw_tokens((1, 4), seed=0)):
        assert (row.before, row.mean_share, row.delta_share or 0.0) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["blocks.1.ffn", "blocks.0.attention.q_norm"])
def test_what_is_not_finite_is_named(model, name):
    part = {"blocks.1.ffn": "blocks.1.ffn.down_proj"}.get(name, name)
    model.get_submodule(part).weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match=f"^{re.escape(name)} .*torch.float32"):
        norm_rows(model, draw_tokens((1, 4), seed=0))


def test_logits_that_are_not_finite_are_refused(model):
    model = model.half()
    model.lm_head.weight.data.mul_(100)
    model.blocks[1].ffn.down_proj.weight.data.mul_(1e4)  # final_norm keeps the logits in range
    tokens = draw_tokens((1, 4), seed=0)
    assert len(outcomes(model, tokens, [])) == 1
    with pytest.raises(ValueError, match=r"^lm_head .*final_norm .*torch.float16"):
        outcomes(model, tokens, ["final_norm"])


# The command line


def run(checkpoint, *arguments: object, prompt: str = "Once upon a time") -> int:
    return main(["norms", "--model", str(checkpoint), "--prompt", prompt, *map(str, arguments)])


def test_the_table_explains_itself(checkpoint, capsys):
    assert run(checkpoint) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    columns = "norm,reads,read by,before,first,after,weight,mean,most,delta".split(",")
    assert lines[0].split() == " ".join(columns).split()
    assert [line.split()[0] for line in lines[1:6]] == list(norms_of(load_model(checkpoint)))
    for column in columns:
        assert any(line.startswith(f"{column:<8} ") for line in lines[7:]), column
    assert "reaches final_norm at" in out
    assert [line.split("  ")[0] for line in lines[-3:]] == [
        "with every norm",
        "without final_norm",
        "without blocks.1.pre_ffn_norm",
    ]


def test_json_holds_every_number(checkpoint, capsys):
    assert run(checkpoint, "--json", "--drop", "blocks.0.pre_ffn_norm") == 0
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert report["tokens"] == load_tokenizer(checkpoint).encode("Once upon a time")
    rows = norm_rows(load_model(checkpoint, dtype=torch.float32), torch.tensor([report["tokens"]]))
    assert [row["before"] for row in report["norms"]] == [row.before for row in rows]
    assert [r["without"] for r in report["next_token"]] == [
        None,
        "final_norm",
        "blocks.0.pre_ffn_norm",
    ]


def test_svg_is_drawn_the_same_every_time(checkpoint, tmp_path, capsys):
    require("matplotlib")
    for name in ("a.svg", "b.svg"):
        assert run(checkpoint, "--plot", tmp_path / name) == 0
    a, b = ((tmp_path / name).read_text() for name in ("a.svg", "b.svg"))
    assert a == b
    assert a.startswith("<?xml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.svg", "b.svg"]


def test_only_norms_on_the_stream_are_drawn(model, tmp_path):
    require("matplotlib")
    rows = norm_rows(model, draw_tokens((1, 4), seed=0))
    plot(rows, tmp_path / "a.svg", r"no mathematics: $\nothing$")
    plot(
        [row for row in rows if row.reads == "x"], tmp_path / "b.svg", r"no mathematics: $\nothing$"
    )
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.slow
def test_png_is_opaque(checkpoint, tmp_path, capsys):
    require("matplotlib")
    from matplotlib.image import imread

    assert run(checkpoint, "--plot", tmp_path / "a.png") == 0
    picture = imread(tmp_path / "a.png")
    assert picture.shape[:2] == (900, 1350)
    assert (picture[0, 0] == 1.0).all()
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 50


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["--plot", "norms.pdf"], ["--plot norms.pdf", ".png", ".svg"]),
        (["--plot", "nowhere/norms.svg"], ["--plot nowhere/norms.svg"]),
        (["--drop", "norm"], ["'norm'", "blocks.0.pre_attention_norm, "]),
        (["--model", "nowhere"], ["'nowhere'"]),
        (["--device", "mps"], ["--device mps"]),
        (["--prompt", "time " * 128], ["128 positions"]),
    ],
)
def test_errors_are_one_line(checkpoint, capsys, arguments, values):
    assert run(checkpoint, *arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert all(value in captured.err for value in values)
    assert captured.err.count("\n") == 1


def test_a_device_that_is_not_there(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(checkpoint, "--device", "cuda") == 1
    assert capsys.readouterr().err.startswith("error: --device cuda: ")


def test_without_matplotlib(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(checkpoint) == 0
    capsys.readouterr()
    assert run(checkpoint, "--plot", tmp_path / "a.svg") == 1
    err = capsys.readouterr().err
    assert err.startswith("error: --plot ")
    assert err.endswith("pip install 'llama-mini[plot]'\n")
