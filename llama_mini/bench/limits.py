"""What the machine can do, and what a model asks of it: the shares in the report are one over the other."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from ..inspect.record import twin
from ..model import Llama

# Far more than any processor caches; and matrices that keep all of it busy.
BUFFER_BYTES = {"cpu": 2**28, "cuda": 2**30}
MATRIX = {"cpu": 1024, "cuda": 8192}


def bare_linears(model: Llama, batch: int) -> Callable[[], object]:
    """Every linear layer of the model on one token per row, in order, and nothing else; on a GPU as one
    CUDA graph, or the launches would be what is measured.
    """
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    inputs = {weight.shape[1]: weight.new_ones(batch, 1, weight.shape[1]) for weight in weights}

    def call() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    if not weights[0].is_cuda:
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(what_it_reads: object = (weights, inputs)) -> None:  # kept as long as the graph
        graph.replay()

    return replay


def limits(model: Llama, batch: int) -> dict[str, tuple[Callable[[], object], float]]:
    """What the machine is measured by, each with the amount of one call: copy and read in bytes, matmul
    in floating-point operations, linears in steps.
    """
    weight = model.embed.weight
    device, n = weight.device, MATRIX[weight.device.type]
    x = torch.ones(BUFFER_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    y = torch.empty_like(x)
    a, b = torch.randn(2, n, n, dtype=torch.float32, device=device).to(weight.dtype)
    c = torch.empty_like(a)
    return {
        "copy": (lambda: y.copy_(x), 2 * x.nbytes),
        "read": (lambda: x.sum(), x.nbytes),
        "matmul": (lambda: torch.mm(a, b, out=c), 2 * n**3),
        "linears": (bare_linears(model, batch), 1),
    }


def rate(function: Callable[[], object], amount: float, seconds: float = 0.1) -> float:
    """`amount` per second of calling `function` for about `seconds`."""
    timer = Timer("f()", globals={"f": function}, num_threads=torch.get_num_threads())
    return amount / timer.blocked_autorange(min_run_time=seconds).median


class Work:
    """What one generation asks for, counted by hooks on a model of its own.

    `model` is to be run once. Counted are the products of linear layers and of attention, over the
    pairs of a query and a key that it sees; and the bytes that have to be read: the parameters of each
    module that is called (of an embedding only rows), and keys and values.
    """

    def __init__(self, model: Llama) -> None:
        self.operations: list[int] = []  # of each pass
        self.bytes: list[int] = []
        self.model = twin(model)
        for name, module in self.model.named_modules():
            module.register_forward_pre_hook(partial(self.count, name))

    def count(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not name:  # a new pass
            self.operations.append(0)
            self.bytes.append(0)
        elif name.endswith("attend"):
            q, k, v, mask = inputs
            b, h, t, d = q.shape
            pairs = b * (t * k.shape[2] - t * (t - 1) // 2) if mask is None else seen(mask, b)
            self.operations[-1] += 2 * h * pairs * (d + v.shape[-1])
            self.bytes[-1] += k.nbytes + v.nbytes
        elif not isinstance(module, nn.Embedding) and inputs[0].numel():  # an expert may get none
            self.bytes[-1] += sum(p.nbytes for p in module.parameters(recurse=False))
            if isinstance(module, nn.Linear):
                self.operations[-1] += 2 * inputs[0].numel() * module.out_features


def seen(mask: Tensor, batch: int) -> int:
    """Pairs of a query and a key in a mask (1 or b, 1, t, s)."""
    return int(mask.sum()) * batch // mask.shape[0]
