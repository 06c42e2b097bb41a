"""RMSNorm measured against copying: in its two lines, as torch's own function, as torch.compile makes it,
and on a GPU as the Triton kernel of fused_rmsnorm.py. The command is `python -m llama_mini.bench --norm`.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

from ..cli import table
from ..model import RMSNorm

NORM_SHAPES = ((576, 512), (1024, 1024), (2048, 2048), (4096, 4096))  # rows, width
COLUMNS = {
    "time": "median of one call; +- is half of the range that holds the middle half of the measurements",
    "GB/s": "what has to move, one read and one write of x, over the time",
    "of copy": "that rate over the rate of copying x, measured in the same run",
    "to two lines": "largest difference from the first row",
    "to float64": "largest difference from the same x and weight, normalised in float64",
    "compile": "seconds that the first call took, from an empty cache of compiled kernels",
}


@dataclass(frozen=True)
class NormResult:
    """One way to compute RMSNorm at one size: times in seconds, rates in bytes per second.

    `spread` is half the interquartile range of the time. `copy_rate` is that of copying x into a
    tensor that is there already; a norm has to make its output first.
    """

    device: str
    dtype: str
    rows: int
    width: int
    name: str
    seconds: float
    spread: float
    rate: float
    copy_rate: float
    to_two_lines: float
    to_float64: float
    compile_seconds: float | None


def measure(
    function: Callable[[], object], device: str, seconds: float = 0.5
) -> tuple[float, float]:
    """Median time of a call and half its interquartile range, in seconds, over `seconds` or ten calls."""
    if device == "cuda" and find_spec("triton"):
        from triton.testing import do_bench

        # CUDA events, after a warm-up, L2 cache emptied between.
        low, middle, high = do_bench(
            function, warmup=100, rep=int(1000 * seconds), quantiles=[0.25, 0.5, 0.75]
        )
        return middle / 1000, (high - low) / 2000
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    once = timer.timeit(2).median
    times = timer.blocked_autorange(min_run_time=max(seconds, 10 * once))
    return times.median, times.iqr / 2


def ways(norm: RMSNorm, x: Tensor, backend: str) -> dict[str, Callable[[], Tensor]]:
    """The ways to compute `norm(x)` that this machine has, by name, the reference first."""
    torch.compiler.reset()  # or the fifth shape would be compiled for every shape
    compiled = torch.compile(norm, dynamic=False, backend=backend)
    found: dict[str, Callable[[], Tensor]] = {
        "two lines": lambda: norm(x),
        "F.rms_norm": lambda: F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps),
        "torch.compile": lambda: compiled(x),
    }
    if x.device.type == "cuda" and find_spec("triton"):
        from ..speed.fused_rmsnorm import fused_rmsnorm

        found["Triton"] = lambda: fused_rmsnorm(x, norm.weight, norm.eps)
    return found


@torch.no_grad()
def bench_norm(
    device: str,
    shapes: Sequence[tuple[int, int]] = NORM_SHAPES,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    seconds: float = 0.5,
    backend: str = "inductor",
) -> list[NormResult]:
    """Measure every way to compute RMSNorm on x (rows, width), each for about `seconds`."""
    results = []
    for dtype in dtypes:
        for rows, width in shapes:
            generator = torch.Generator("cpu").manual_seed(0)
            x = torch.empty(rows, width, dtype=torch.float32, device="cpu")
            x = x.normal_(generator=generator).to(device, dtype)
            norm = RMSNorm(width, 1e-5).to("cpu", torch.float32)
            norm.weight.uniform_(0.5, 1.5, generator=generator)
            norm = norm.to(device, dtype)
            exact = F.rms_norm(x.double(), (width,), norm.weight.double(), norm.eps)
            reference = norm(x)
            moved, there = 2 * x.numel() * x.element_size(), torch.empty_like(x)
            copy_seconds, _ = measure(lambda: there.copy_(x), device, seconds)  # noqa: B023
            for name, way in ways(norm, x, backend).items():
                began = time.perf_counter()
                y = way()
                first_call = time.perf_counter() - began
                middle, spread = measure(way, device, seconds)
                results.append(
                    NormResult(
                        device,
                        str(dtype).removeprefix("torch."),
                        rows,
                        width,
                        name,
                        middle,
                        spread,
                        moved / middle,
                        moved / copy_seconds,
                        (y.double() - reference.double()).abs().max().item(),
                        (y.double() - exact).abs().max().item(),
                        first_call if name in ("torch.compile", "Triton") else None,
                    )
                )
    return results


def norm_table(results: Sequence[NormResult]) -> str:
    """The results as text, and what each column holds."""
    rows = [["x", "dtype", "way", "time, us", "+-", *[*COLUMNS][1:-1], "compile, s"]]
    for r in results:
        rows.append(
            [
                *(f"{r.rows} x {r.width}", r.dtype, r.name),
                *(f"{r.seconds * 1e6:.1f}", f"{r.spread * 1e6:.1f}", f"{r.rate / 1e9:.1f}"),
                *(f"{r.rate / r.copy_rate:.0%}", f"{r.to_two_lines:.1e}", f"{r.to_float64:.1e}"),
                "" if r.compile_seconds is None else f"{r.compile_seconds:.1f}",
            ]
        )
    return table(rows, left=3) + "\n\n" + table([*COLUMNS.items()], left=2)


def bench_norms(devices: Sequence[str]) -> list[NormResult]:
    """`bench_norm` on each device, compiled from nothing: no kernel of an earlier run is found."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = cache
        return [result for device in devices for result in bench_norm(device)]
