"""The report of a GPU: every part runs, here on the CPU; what fails or takes too long is written down."""

import json
import time

import pytest
import torch

from llama_mini.bench import gpu_report
from tests.support.fixtures import require, require_compiler


@pytest.mark.slow
def test_every_part_runs_and_is_written(tmp_path, monkeypatch):
    require_compiler()
    require("transformers")
    options = "--shape stories --prompt-tokens 4 --new-tokens 3"
    monkeypatch.setattr(gpu_report, "COMMON", "--runs 1 --json")
    monkeypatch.setattr(gpu_report, "bench_norms", lambda devices: [])
    parts = {
        **{name: part for name, part in gpu_report.PARTS.items() if name not in gpu_report.SPEED},
        "small": (lambda device: gpu_report.speed(options, 100, device), 100),
        "broken": (lambda device: 1 / 0, 1),
        "slow": (lambda device: time.sleep(9), 1),
    }
    monkeypatch.setattr(gpu_report, "PARTS", parts)
    gpu_report.write_report(tmp_path / "out.json", "cpu")
    report = json.loads((tmp_path / "out.json").read_text())
    found = report["parts"]
    failed = {name for name, part in found.items() if "failed" in part}
    assert failed == {"broken", "slow"}, found
    assert "division by zero" in found["broken"]["failed"]
    assert found["slow"]["seconds"] < 5
    del found["same ids"]["seconds"]
    assert found["same ids"] == {"device": 64, "fast": 64, "transformers": 64, "of": 64}
    assert found["replay"]["largest difference, of the largest logit"] <= 1e-5
    assert found["replay"]["replays"] == 0  # on a CPU nothing is captured
    # Observed: 0.003.
    assert all(found["attend"][str(s)]["error"] <= 0.02 for s in gpu_report.LENGTHS)
    table = (tmp_path / "out.md").read_text()
    assert torch.__version__ in table
    assert all(f"| {name}" in table for name in found)


def test_the_whole_fits_into_eight_minutes():
    assert sum(seconds for _, seconds in gpu_report.PARTS.values()) <= 480


@pytest.mark.slow
def test_time_limits_do_not_outlive_their_part():
    with pytest.raises(TimeoutError, match="1 s"), gpu_report.limited(1):
        time.sleep(5)
    with gpu_report.limited(1):
        pass
    time.sleep(1.2)


@pytest.mark.parametrize("name", ["", "no/out.json", "out.md", "out.json"])
def test_a_place_that_cannot_take_the_gpu_report_is_named_before_it_is_measured(
    monkeypatch, tmp_path, name
):
    monkeypatch.setattr(gpu_report, "PARTS", {})
    (tmp_path / "out.md").mkdir()
    with pytest.raises(ValueError, match=f"--gpu-report {tmp_path}"):
        gpu_report.write_report(tmp_path / name, "cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["out.md"]
