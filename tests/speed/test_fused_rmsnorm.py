"""The Triton kernel against `RMSNorm`: on the CPU through Triton's interpreter, and on a GPU."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import llama_mini

PACKAGE = Path(llama_mini.__file__).parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed; it comes with torch's CUDA builds: pip install triton",
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

SHAPES = [(3, 2, 64), (2, 3, 100), (2, 2, 576)]
DTYPES = [
    ("float32", "float32"),
    ("float16", "float16"),
    ("float16", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
]
# In a process of its own: whether a kernel is interpreted is settled when its module is imported.
COMPARE = """
import json, sys, torch
from llama_mini import RMSNorm
from llama_mini.speed.fused_rmsnorm import fused_rmsnorm

torch.set_grad_enabled(False)
device, shapes, dtypes = sys.argv[1], *map(json.loads, sys.argv[2:])
generator, results = torch.Generator().manual_seed(0), []
for names in dtypes:
    dtype, weight_dtype = (getattr(torch, name) for name in names)
    for shape in shapes:
        norm = RMSNorm(shape[-1], 1e-5)
        norm.weight.uniform_(0.5, 1.5, generator=generator)
        norm = norm.to(device, weight_dtype)
        x = 3 * torch.randn(*shape, 2, generator=generator)
        x = x.to(device, dtype)[..., 0]  # numbers that do not lie side by side
        ours, theirs = norm(x), fused_rmsnorm(x, norm.weight, norm.eps)
        assert (theirs.shape, theirs.dtype, theirs.device) == (x.shape, x.dtype, x.device)
        other_order = norm.float()(x.float()).to(dtype)
        distance = (ours.double() - theirs.double()).abs() / ours.double().abs().clamp(min=1e-3)
        shares = [(one != theirs).double().mean().item() for one in (ours, other_order)]
        results.append([*names, distance.max().item(), *shares])
ones = torch.ones(4, device=device)
assert fused_rmsnorm(256 * ones.half(), ones, 1e-5).tolist() == [1.0] * 4
assert abs(fused_rmsnorm(1e-3 * ones, ones, 1e-5)[0].item() - 0.3015) < 5e-5
assert fused_rmsnorm(torch.zeros(0, 4, device=device), ones, 1e-5).shape == (0, 4)
print(json.dumps(results))
"""


class Comparison(NamedTuple):
    """Kernel against module: largest relative difference, share of numbers that differ, and the share
    that differs from the other order of casts."""

    dtype: str
    weight_dtype: str
    distance: float
    differ: float
    differ_from_other_order: float


def compare(device: str, **environment: str) -> list[Comparison]:
    arguments = [device, json.dumps(SHAPES), json.dumps(DTYPES)]
    path = os.pathsep.join([str(PACKAGE.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert done.returncode == 0, done.stderr
    return [Comparison(*result) for result in json.loads(done.stdout)]


@pytest.mark.slow
@needs_triton
def test_interpreted_on_the_cpu():
    for result in compare("cpu", TRITON_INTERPRET="1"):
        if result.dtype == "float32":
            assert result.distance < 2e-6  # seen 2.3e-7
        elif result.dtype == "float16":
            assert result.differ < 0.02  # seen 0: a sum in another order may tip a tie
            assert result.differ_from_other_order > 0.1  # seen 0.22
        else:
            assert result.distance < 2**-5  # seen 0.016: the interpreter cuts bfloat16 off, twice


@needs_triton
@needs_gpu
def test_on_the_gpu():
    for result in compare("cuda"):
        if result.dtype == "float32":
            assert result.distance < 2e-6
        else:
            assert result.differ < 0.02
            assert result.differ_from_other_order > 0.1


@needs_triton
@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(2, 4), torch.ones(3), r"x is \(2, 4\) and the weight \(3,\)"),
        (torch.ones(2, 4), torch.ones(1, 4), r"x is \(2, 4\) and the weight \(1, 4\)"),
        (torch.tensor(1.0), torch.ones(1), r"x is \(\) and the weight \(1,\)"),
        (torch.ones(2, 0), torch.ones(0), r"and that at least 1"),
        (torch.ones(1, 32769), torch.ones(32769), "x is 32769 wide, .* at most 32768"),
        (torch.ones(4).double(), torch.ones(4), "x is torch.float64 and the weight torch.float32"),
        (torch.ones(4), torch.ones(4).int(), "the weight torch.int32"),
        (torch.ones(4), torch.ones(4, device="meta"), "x is on cpu and the weight on meta"),
        (torch.ones(4), torch.ones(4), "x is on cpu: use a GPU, or set TRITON_INTERPRET=1"),
    ],
)
def test_what_the_kernel_does_not_cover_is_refused(x, weight, message):
    from llama_mini.speed.fused_rmsnorm import fused_rmsnorm

    with pytest.raises(ValueError, match=message):
        fused_rmsnorm(x, weight, 1e-5)


@needs_triton
def test_gradients_are_refused(monkeypatch):
    import triton

    from llama_mini.speed.fused_rmsnorm import fused_rmsnorm

    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(ValueError, match="no backward pass"):
        fused_rmsnorm(torch.ones(4), torch.ones(4, requires_grad=True), 1e-5)


def test_nothing_imports_it_unasked():
    for path in PACKAGE.glob("*.py"):
        unasked = re.search(
            r"^(from|import) .*(fused_rmsnorm|triton)", path.read_text(), re.MULTILINE
        )
        assert unasked is None or path.name == "fused_rmsnorm.py", path.name
