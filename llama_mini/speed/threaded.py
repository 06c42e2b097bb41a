"""One token's linear layers on all cores of a CPU, in plain torch: the same bits, sooner.

torch makes one token's product as that of two matrices. In float32 this comes to a routine of the BLAS
that runs on one thread, and then a single core waits for memory; a batch of such products, each with its
own rows of the weight, runs on all. In bfloat16 the weight is first brought into another order; a matrix
and a vector go without.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

Product = Callable[[Tensor, Tensor], Tensor]

# Numbers in a weight; below, little is saved, or the threads cost more.
LEAST = {torch.float32: 2**17, torch.bfloat16: 2**16}
BLOCK = 4  # the routine takes so many rows at once, and rows that do not fill a block otherwise

# Whether a weight's product by another way is the same to the last bit, by all that can decide it.
EXACT: dict[tuple[object, ...], bool] = {}
TRIALS = 8  # products by which that is decided
SHOWN = 10  # sums that have to differ in another order, for these products to decide it


def emulated() -> set[torch.dtype]:
    """The dtypes that this CPU has no products for; none where torch cannot say."""
    needs = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return {dtype for dtype, feature in needs.items() if not has.get(feature, True)}


EMULATED = emulated()


class ThreadedLinear(nn.Linear):
    """nn.Linear without a bias, whose product with one token in float32 or bfloat16 is made another way
    where that is sooner and moves no bit. It is made of such a layer, on its weight.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight

    decided: tuple[object, Product | None] = (None, None)  # for which threads and weight, which way

    def forward(self, x: Tensor) -> Tensor:
        if is_plain(x, self.weight):
            weight = self.weight
            threads = torch.get_num_threads()
            now = (threads, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
            before, product = self.decided
            if now != before:
                product = product_of(weight, threads)
                self.decided = (now, product)
            if product is not None:
                return product(x, weight)
        return super().forward(x)


def is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether this is one token (1, 1, m) on a CPU, and its product is all that is asked for."""
    return not (
        torch.compiler.is_compiling()
        or x.shape != (1, 1, weight.shape[-1])
        or type(x) is not Tensor
        or type(weight) is not nn.Parameter
        or weight.device.type != "cpu"
        or torch.is_autocast_enabled("cpu")
        or (torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad))
    )


def product_of(weight: Tensor, threads: int) -> Product | None:
    """The sooner way to a product with `weight` (o, m); None unless it gives the same bits.

    Tried once for a shape.
    """
    least = torch.inf if weight.dtype in EMULATED else LEAST.get(weight.dtype, torch.inf)
    if weight.numel() < least or not weight.is_contiguous():
        return None
    product: Product = as_vector
    if weight.dtype == torch.float32:
        blocks, rest = divmod(len(weight), BLOCK)
        n = max(n for n in range(1, threads + 1) if blocks % n == 0)
        if rest or n == 1:
            return None
        product = partial(in_parts, n=n)
    key = (*weight.shape, weight.dtype, weight.data_ptr() % 64, threads)
    if key not in EXACT:
        some, xs = telling(weight)
        backwards = [nn.functional.linear(x.flip(-1), some.flip(-1)) for x in xs]
        plain = [nn.functional.linear(x, some) for x in xs]
        moved = sum(int((a != b).sum()) for a, b in zip(plain, backwards, strict=True))
        if moved < SHOWN:  # a weight of zeros is the same in any order, and shows nothing
            return None
        EXACT[key] = all(
            torch.equal(product(x, weight), nn.functional.linear(x, weight)) for x in xs
        )
    return product if EXACT[key] else None


def telling(weight: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Some rows (n, m) of `weight`, and vectors (1, 1, m) whose products with them nearly cancel.

    What is left of such a sum is mostly rounding, so another order shows, even where 8 bits are kept.
    """
    some = weight[: min(512, weight.shape[1] // 2)]
    seeded = torch.Generator("cpu").manual_seed(0)
    xs = torch.randn(TRIALS, weight.shape[1], generator=seeded, dtype=torch.float32, device="cpu")
    directions = torch.linalg.qr(some.float().t()).Q
    xs = (xs - xs @ directions @ directions.t()).to(weight.dtype)
    return some, [x.view(1, 1, -1) for x in xs]


def as_vector(x: Tensor, weight: Tensor) -> Tensor:
    """`weight` (o, m) times x (1, 1, m), as a matrix and a vector: (1, 1, o)."""
    return torch.mv(weight, x.view(-1)).view(1, 1, -1)


def in_parts(x: Tensor, weight: Tensor, n: int) -> Tensor:
    """x (1, 1, m) times `weight` (o, m), as n products with o / n rows each: (1, 1, o)."""
    o, m = weight.shape
    columns = weight.as_strided((n, m, o // n), (o // n * m, 1, m))
    return torch.bmm(x.reshape(m).expand(n, 1, m), columns).view(1, 1, o)
