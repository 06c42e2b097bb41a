"""The ways to compute RMSNorm: what is measured, counted and compared; how fast they are, no test says."""

import json
from functools import partial

import pytest
import torch
from torch.utils.benchmark import Timer

from llama_mini.bench import __main__ as bench
from llama_mini.bench import norm as bench_norm

SMALL = partial(bench_norm.bench_norm, shapes=[(4, 16), (3, 32)], seconds=0.005, backend="eager")


@pytest.mark.parametrize(("slow_one_in", "expected"), [(5, (0.25, 0.0)), (2, (None, 0.125))])
def test_measure_takes_the_median_and_half_the_interquartile_range(
    monkeypatch, slow_one_in, expected
):
    """By a clock that goes on in the function alone."""
    now, calls = 0.0, 0

    def now_and_then_slow():
        nonlocal now, calls
        calls += 1
        now += 0.5 if calls % slow_one_in == 0 else 0.25

    monkeypatch.setattr(bench_norm, "Timer", partial(Timer, timer=lambda: now))
    median, spread = bench_norm.measure(now_and_then_slow, "cpu", 8)
    assert (median if expected[0] else None, spread) == expected
    assert calls >= 20


@pytest.fixture(scope="module")
def results():
    return SMALL("cpu")


def test_every_way_at_every_size_in_both_dtypes(results):
    ways = ["two lines", "F.rms_norm", "torch.compile"]
    assert [(r.dtype, r.rows, r.width, r.name) for r in results] == [
        (dtype, rows, width, way)
        for dtype in ("float32", "bfloat16")
        for rows, width in ((4, 16), (3, 32))
        for way in ways
    ]
    assert [r.name for r in results if r.compile_seconds is not None] == ["torch.compile"] * 4


def test_rates_are_one_read_and_one_write_over_the_time(results):
    for r in results:
        size = {"float32": 4, "bfloat16": 2}[r.dtype]
        assert r.rate * r.seconds == pytest.approx(2 * r.rows * r.width * size)
        assert r.copy_rate > 0


def test_differences_show_the_order_of_casts(results):
    for r in results:
        if r.name == "two lines":
            assert r.to_two_lines == 0
        if r.dtype == "float32":
            assert r.to_float64 < 2e-6  # seen 3.6e-7
            assert r.to_two_lines < 2e-6
        else:  # two roundings of numbers below 4, to 8 bits
            assert 1e-4 < r.to_float64 < 2**-5


def test_a_way_that_computes_something_else_is_seen(monkeypatch):
    def rms_norm(x, shape, weight, eps):
        return real(x, shape, weight, eps) * (1.001 if x.dtype == torch.float32 else 1)

    real = torch.nn.functional.rms_norm
    monkeypatch.setattr(bench_norm.F, "rms_norm", rms_norm)
    wrong = SMALL("cpu", dtypes=[torch.float32])[1]
    assert wrong.name == "F.rms_norm"
    assert wrong.to_two_lines > 1e-3
    assert wrong.to_float64 > 1e-3


@pytest.mark.slow
def test_table_and_json(monkeypatch, capsys):
    monkeypatch.setattr(bench_norm, "bench_norm", SMALL)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "set by the command, and by no other test")
    assert bench.main(["--norm", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"torch {torch.__version__}, threads {torch.get_num_threads()}")
    assert lines[3].split()[:2] == ["x", "dtype"]
    assert len(lines) == 4 + 12 + 1 + len(bench_norm.COLUMNS)
    assert bench.main(["--norm", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in report["norm"]][:3] == [
        "two lines",
        "F.rms_norm",
        "torch.compile",
    ]
