"""The CUDA path on a machine without a GPU: what waits for the device, what is compiled how often, what
a graph reads, and the code that torch generates: Triton's interpreter runs it on the CPU, and ptxas
assembles it.

Real capture and replay, NCCL, kernels of torch's own and any time are not to be had this way.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fixtures import require, require_compiler

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TORCH, TRITON = "2.13", "3.7.1"  # whose private names tests/support/fake_gpu.py uses
A_BLOCK = 10  # kernels for one row: torch made 12 of the layers as they stand in model.py
AROUND = 4  # embedding, angles, final norm, head

ROWS = "three ragged rows"
FLOAT32 = [
    "grouped, untied",
    "every head its own, three blocks",
    "QK-norm, tied",
    "scaled angles, odd sizes",
    ROWS,
]
FAULTS = ["the slot behind", "values never written", "parts that overlap"]


def not_here(why: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"{why}, and in CI nothing is skipped for that")
    pytest.skip(why)


def found(folder: Path, what: str, *given: str, interpret: bool = False) -> Any:
    """What tests/support/cuda_steps.py finds, in a process of its own."""
    if sys.platform != "linux":
        not_here("a GPU is only made believe on Linux")
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA, and has a device guard of its own")
    if not torch.__version__.startswith(TORCH):
        not_here(f"it uses names of torch {TORCH}'s own, and this is torch {torch.__version__}")
    require_compiler()
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.cuda_steps", what, *given],
        cwd=ROOT,
        env=os.environ | folders | quiet | ({"TRITON_INTERPRET": "1"} if interpret else {}),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def require_triton() -> None:
    version = require("triton").__version__
    if version != TRITON:
        not_here(f"it uses names of triton {TRITON}'s own, and this is {version}")


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict[str, dict[str, Any]]:
    require_triton()
    names = (*FLOAT32, "bfloat16", *FAULTS)
    return found(tmp_path_factory.mktemp("torch"), "interpreted", *names, interpret=True)


def test_one_wait_for_a_token_and_no_tensor_on_a_wrong_device(tmp_path):
    """A batch's ids are one list, of which fake tensors ask for each."""
    seen = found(tmp_path, "waits")
    kinds = {(each["kind"], each["rows"], each.get("captured")) for each in seen["kinds"]}
    assert kinds == {("plain", 1, None), ("plain", 2, None), ("fast", 1, 1), ("fast", 2, 1)}
    for each in seen["kinds"]:
        ((line, count),) = each["waits"].items()
        assert line.startswith("generation.py")
        assert "drawn.tolist()" in line
        assert count == 10 * each["rows"]
    assert seen["a fault"] == 20
    assert "cpu" in seen["on the CPU"]


def test_what_a_graph_reads_is_alive_when_it_is_replayed(tmp_path):
    counts = found(tmp_path, "alive")
    fault = counts.pop("a fault")
    assert fault["alive"] < fault["read"]
    assert counts.keys() == {"bare linears", "steps"}
    assert all(count["alive"] == count["read"] > 10 for count in counts.values())


def test_a_step_is_compiled_once_for_one_row_and_once_for_more(tmp_path):
    """Over spans, capacities and inference mode on and off."""
    counts = found(tmp_path, "compilations")
    assert counts == {"first": 1, "1 rows": 1, "2 rows": 2, "3 rows": 2, "8 rows": 2}


def test_every_part_of_the_report_of_a_gpu_runs_on_one(tmp_path):
    """Its numbers are made up; that none is on a wrong device, and every line runs, is not."""
    report = found(tmp_path, "report")
    parts = report["parts"]
    assert not [name for name, part in parts.items() if "failed" in part], parts
    assert parts["same ids"]["transformers"] == parts["same ids"]["fast"] == 3
    assert (
        parts["replay"]["of these the same bits as uncaptured"] == parts["replay"]["replays"] == 12
    )
    assert parts["memory"]["bytes"] == 7
    assert report["modes"] == ["error", "default"]
    assert report["device"] == "fake"


@pytest.mark.parametrize("name", [*FLOAT32, "bfloat16"])
def test_generated_code_computes_what_the_plain_model_does(interpreted, name):
    """From caches full of NaN, up to a span and beyond it."""
    # Observed: at most 4.6e-7 and 2.3e-7; in bfloat16 0.011 and 0.010.
    bound = 0.03 if name == "bfloat16" else 1e-6
    assert interpreted[name]["logits"] <= bound
    assert interpreted[name]["caches"] <= bound


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_step_is_seen(interpreted, name):
    assert interpreted[name]["logits"] > 0.1


def test_a_block_takes_few_kernels(interpreted):
    counts = {
        "grouped, untied": A_BLOCK * 2,
        "every head its own, three blocks": (A_BLOCK + 1) * 3,
        "QK-norm, tied": (A_BLOCK + 2) * 2,
        "scaled angles, odd sizes": A_BLOCK * 2,
        "bfloat16": A_BLOCK * 2,
    }
    for name, count in counts.items():
        assert interpreted[name]["kernels"] == count + AROUND
        assert interpreted[name]["others"] == 0  # products by cuBLAS
    assert interpreted[ROWS]["others"] > 0


@pytest.mark.parametrize(("shape", "dtype"), [("tinyllama-1.1b", "bfloat16")])
def test_it_assembles_for_an_h200_and_what_torch_takes_spills_no_register(tmp_path, shape, dtype):
    """Torch measures several configurations of a kernel, but none that spills more than 16 registers."""
    require_triton()
    kernels = found(tmp_path, "assembled", shape, dtype)
    assert len(kernels) == A_BLOCK + AROUND - 1  # one of the products is another's kernel
    for configurations in kernels.values():
        assert {each["target"] for each in configurations} == {"sm_90a"}
        assert min(each["spilled"] for each in configurations) == 0
    # Observed: 1 of 58, of the sum over values.
    assert sum(each["spilled"] > 0 for cs in kernels.values() for each in cs) <= 1
    products = [name for name in kernels if "as_strided" in name]
    assert len(products) == 5
    for name in products:  # weights are read 16 bytes at a time
        assert max(each["widest"] for each in kernels[name]) == 16
