"""Whatever torch's default dtype and device are, inspect gives the same numbers."""

from collections.abc import Callable

import pytest
import torch

from llama_mini import compare, load_model, record
from llama_mini.inspect.norm_report import norm_rows, outcomes
from llama_mini.inspect.perplexity import loss
from tests.support.fixtures import SHIPPED, draw_tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_defaults_of_torch_change_nothing(dtype: torch.dtype, device: str) -> None:
    model = load_model(SHIPPED, dtype=torch.float32)
    tokens = draw_tokens((1, 9), seed=0)
    floats = {"embed": torch.tensor([1.0, 0.1], dtype=torch.float32)}
    integers = {"embed": torch.tensor([2**53 + 1, 1])}
    calls: list[Callable[[], object]] = [
        lambda: {n: x.numpy().tobytes() for n, x in record(model, tokens).items()},
        lambda: norm_rows(model, tokens),
        lambda: outcomes(model, tokens, ["final_norm"]),
        lambda: loss(model, tokens, 4, 2),
        lambda: compare(floats, {"embed": floats["embed"] * 3}),
        lambda: compare(integers, {"embed": integers["embed"] + 1}),
    ]
    before = [call() for call in calls]
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            after = [call() for call in calls]
    finally:
        torch.set_default_dtype(torch.float32)
    assert after == before
