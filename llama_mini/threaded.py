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

    def forward(self, x: Tensor) -> Tensor:
        n = self.parts(x)
        if n > 1 and self.is_exact(n, x):
            return in_parts(x, self.weight, n)
        return super().forward(x)

    def parts(self, x: Tensor) -> int:
        """Among how many threads the product with x can be shared: 1 for all but one token in float32
        on a CPU, without gradients.
        """
        weight = self.weight
        if (
            x.shape[:-1] != (1, 1)
            or weight.dtype != torch.float32
            or weight.device.type != "cpu"
            or weight.numel() < LEAST
            or len(weight) % BLOCK
            or not weight.is_contiguous()
            or torch.compiler.is_compiling()
            or torch.is_autocast_enabled("cpu")
            or (torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad))
        ):
            return 1
        return gcd(len(weight) // BLOCK, torch.get_num_threads())

    def is_exact(self, n: int, like: Tensor) -> bool:
        """Whether n parts give the bits of the whole: tried once for a shape, with numbers of which no
        two orders give one sum.
        """
        key = (n, *self.weight.shape, self.weight.data_ptr() % 64)
        if key not in EXACT:
            x = torch.randn(like.shape, generator=torch.Generator().manual_seed(0))
            whole = super().forward(x)
            shows = (whole != 0).float().mean() > 0.5  # an empty weight is the same in any order
            EXACT[key] = bool(shows) and torch.equal(in_parts(x, self.weight, n), whole)
        return EXACT[key]


def in_parts(x: Tensor, weight: Tensor, n: int) -> Tensor:
    """x (1, 1, m) times `weight` (o, m), as n products with o / n rows each: (1, 1, o)."""
    rows = weight.view(n, -1, weight.shape[1])
    return torch.bmm(x.expand(n, -1, -1), rows.transpose(1, 2)).view(1, 1, -1)


def thread_linears(model: Llama) -> Llama:
    """The model, its plain linear layers made `ThreadedLinear`s in place."""
    for module in model.modules():
        if type(module) is nn.Linear and module.bias is None:
            module.__class__ = ThreadedLinear
    return model
