"""One token's linear layers on all cores of a CPU, in plain torch: the same bits, sooner.

The product of a matrix and one vector goes to a routine of the BLAS that runs on one thread, and then a
single core waits for memory. A batch of such products, each with its own rows of the weight, runs on all.
"""

import torch
from torch import Tensor, nn

LEAST = 2**17  # numbers in a weight; below, the threads cost more than they save
BLOCK = 4  # the routine takes so many rows at once, and rows that do not fill a block otherwise

# Whether a weight's product is the same to the last bit in parts, by all that can decide it.
EXACT: dict[tuple[object, ...], bool] = {}


class ThreadedLinear(nn.Linear):
    """nn.Linear without a bias, whose product with one token in float32 is shared out over the threads
    by rows of the weight, where that moves no bit. It is made of such a layer, on its weight.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight

    decided: tuple[object, int] = (None, 1)  # for which threads and weight, how many parts

    def forward(self, x: Tensor) -> Tensor:
        if is_plain(x, self.weight):
            weight = self.weight
            threads = torch.get_num_threads()
            now = (threads, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
            before, n = self.decided
            if now != before:
                n = parts(weight, threads)
                self.decided = (now, n)
            if n > 1:
                return in_parts(x, weight, n)
        return super().forward(x)


def is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether this is one token (1, 1, m) on a CPU, and its product is all that is asked for."""
    return not (
        torch.compiler.is_compiling()
        or x.shape != (1, 1, weight.shape[-1])
        or type(x) is not Tensor
        or type(weight) is not nn.Parameter
        or weight.device.type != "cpu"
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or (torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad))
    )


def parts(weight: Tensor, threads: int) -> int:
    """How many of the threads can share a product with `weight` (o, m): 1 unless that gives the same bits.

    Tried once for a shape.
    """
    rows, columns = weight.shape
    blocks, rest = divmod(rows, BLOCK)
    if (
        rest
        or weight.numel() < LEAST
        or weight.dtype != torch.float32
        or not weight.is_contiguous()
    ):
        return 1
    n = max(n for n in range(1, threads + 1) if blocks % n == 0)
    if n == 1:
        return 1
    key = (rows, columns, weight.data_ptr() % 64, threads)
    if key not in EXACT:
        seeded = torch.Generator("cpu").manual_seed(0)
        xs = torch.randn(3, 1, 1, columns, generator=seeded, dtype=torch.float32, device="cpu")
        some = weight[:1024]
        backwards = nn.functional.linear(xs[0].flip(-1), some.flip(-1))
        moved = (backwards != nn.functional.linear(xs[0], some)).float().mean()
        if not moved > 0.25:  # a weight of zeros is the same in any order, and shows nothing
            return 1
        EXACT[key] = all(
            torch.equal(in_parts(x, weight, n), nn.functional.linear(x, weight)) for x in xs
        )
    return n if EXACT[key] else 1


def in_parts(x: Tensor, weight: Tensor, n: int) -> Tensor:
    """x (1, 1, m) times `weight` (o, m), as n products with o / n rows each: (1, 1, o)."""
    o, m = weight.shape
    columns = weight.as_strided((n, m, o // n), (o // n * m, 1, m))
    return torch.bmm(x.reshape(m).expand(n, 1, m), columns).view(1, 1, o)
