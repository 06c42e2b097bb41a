"""Comparisons: every variant on the same batches, a table, a picture."""

import json

from llama_mini.train.__main__ import main
from tests.support.fixtures import require
from tests.support.training import OPTIONS


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
