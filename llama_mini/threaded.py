"""One token's linear layers on all cores of a CPU, in plain torch: the same bits, sooner.

The product of a matrix and one vector goes to a routine of the BLAS that runs on one thread, and then a
single core waits for memory. A batch of such products, each with its own rows of the weight, runs on all.
"""

from math import gcd

import torch
from torch import Tensor, nn

from .model import Llama

LEAST = 2**17  # numbers in a weight; below, the threads cost more than they save
BLOCK = 4  # rows that the routine takes at once, and what is left over otherwise

# Whether a weight's product is the same to the last bit in parts, by all that can decide it.
EXACT: dict[tuple[int, ...], bool] = {}


class ThreadedLinear(nn.Linear):
    """nn.Linear without a bias, whose product with one token in float32 is shared out over the threads
    by rows of the weight, where that moves no bit.
    """

    seen: tuple[object, ...] = ()  # the weight and the threads for which `n` was found
    n = 1

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[:-1] == (1, 1) and is_plain(x, self.weight):
            weight = self.weight
            now = (weight.data_ptr(), weight.shape, weight.dtype, torch.get_num_threads())
            if now != self.seen:
                self.seen, self.n = now, parts(weight)
            if self.n > 1:
                return in_parts(x, weight, self.n)
        return super().forward(x)


def is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether nothing but the product itself is asked for, and on a CPU."""
    return not (
        torch.compiler.is_compiling()
        or weight.device.type != "cpu"
        or torch.is_autocast_enabled("cpu")
        or (torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad))
    )


def parts(weight: Tensor) -> int:
    """How many threads can share a product with `weight` (o, m): 1 unless that gives the same bits.

    Tried once for a shape, with numbers of which no two orders give one sum.
    """
    rows, columns = weight.shape
    n = gcd(rows // BLOCK, torch.get_num_threads())
    if (
        n == 1
        or rows % BLOCK
        or weight.numel() < LEAST
        or weight.dtype != torch.float32
        or not weight.is_contiguous()
    ):
        return 1
    key = (n, rows, columns, weight.data_ptr() % 64)
    if key not in EXACT:
        x = torch.randn(1, 1, columns, generator=torch.Generator().manual_seed(0))
        whole = nn.functional.linear(x, weight)
        shows = (whole != 0).float().mean() > 0.5  # an empty weight is the same in any order
        EXACT[key] = bool(shows) and torch.equal(in_parts(x, weight, n), whole)
    return n if EXACT[key] else 1


def in_parts(x: Tensor, weight: Tensor, n: int) -> Tensor:
    """x (1, 1, m) times `weight` (o, m), as n products with o / n rows each: (1, 1, o)."""
    o, m = weight.shape
    columns = weight.as_strided((n, m, o // n), (o // n * m, 1, m))
    return torch.bmm(x.expand(n, 1, m), columns).view(1, 1, o)


def thread_linears(model: Llama) -> Llama:
    """The model, its plain linear layers made `ThreadedLinear`s in place."""
    for module in model.modules():
        if type(module) is nn.Linear and module.bias is None:
            module.__class__ = ThreadedLinear
    return model
