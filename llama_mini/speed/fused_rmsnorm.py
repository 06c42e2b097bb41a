"""RMSNorm in one kernel, forward only: a row is read once, reduced and scaled in registers, written once.

Nothing in the package uses it unless asked to; `python -m llama_mini.bench --norm` shows what fusing
saves. Needs Triton and a GPU, or `TRITON_INTERPRET=1` in the environment, which runs the kernel on the
CPU, slowly, for tests.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 32768  # a row of float32 is then half the registers of a multiprocessor
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _rmsnorm(x, weight, out, width, eps, block: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, block)
    inside = column < width
    row = tl.load(x + start + column, mask=inside, other=0.0)
    w = tl.load(weight + column, mask=inside, other=0.0)
    h = row.to(tl.float32)
    h = h * tl.rsqrt(tl.sum(h * h) / width + eps)
    # The casts of model.RMSNorm, in its order: the product of two halves is exact in float32, so it
    # is rounded once, as there.
    h = h.to(row.dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(out + start + column, h.to(row.dtype), mask=inside)


def fused_rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in the dtype of `x` (..., m); weight (m,).

    Casts where `RMSNorm` does. A `ValueError` for what the kernel does not cover: another dtype,
    shapes or devices that do not fit together, rows wider than `WIDEST`, no GPU, and gradients.
    """
    width = x.shape[-1] if x.dim() else 0
    if not width or weight.shape != (width,):
        raise ValueError(
            f"x is {tuple(x.shape)} and the weight {tuple(weight.shape)}: the weight must be as long as "
            "the last axis of x, and that at least 1"
        )
    if width > WIDEST:
        raise ValueError(f"x is {width} wide, and a row must fit in registers: at most {WIDEST}")
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise ValueError(
            f"x is {x.dtype} and the weight {weight.dtype}: float32, bfloat16 and float16 are supported"
        )
    if x.device != weight.device:
        raise ValueError(
            f"x is on {x.device} and the weight on {weight.device}: move them together"
        )
    if x.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(
            f"x is on {x.device}: use a GPU, or set TRITON_INTERPRET=1 in the environment"
        )
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        raise ValueError("fused_rmsnorm has no backward pass: call it under torch.no_grad()")
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(width)
        warps = min(max(block // 512, 1), 16)  # 16 numbers a thread up to a width of 8192
        with torch.cuda.device_of(x):
            _rmsnorm[(x.numel() // width,)](x, weight, out, width, eps, block, num_warps=warps)
    return out
