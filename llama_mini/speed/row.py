"""What torch's compiler is given for one more token: the layers of model.py, made for one row.

Uncompiled they are the layers that they stand for. The blocks share their code, and a cache has its
position in a tensor, so that the code does not depend on it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from ..model import Attend, Attention, Block, Llama
from .threaded import ThreadedLinear


def is_row(x: Tensor) -> bool:
    """Whether this is one token of one text, in what is compiled."""
    return torch.compiler.is_compiling() and x.shape[:-1].numel() == 1


def row_product(x: Tensor, weight: Tensor) -> Tensor:
    """One row (1, 1, m) times a weight (o, m) as dot products, which run at the rate of the memory."""
    row = x.float().reshape(-1)
    # The compiler keeps the values of a tensor with strides of its own. Else it would compute what
    # stands before it, a norm, anew for every row of the weight.
    row = row.as_strided(row.shape, (1,))
    return (weight.float() * row).sum(-1).to(x.dtype).view(*x.shape[:-1], -1)


class RowLinear(nn.Linear):
    """A linear layer that takes one row by `row_product`."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return row_product(x, self.weight) if is_row(x) else super().forward(x)


class PartLinear(RowLinear):
    """One of the layers whose product `RowAttention` has made: its part, from `start` on."""

    start = 0

    def forward(self, x: Tensor) -> Tensor:
        return x.narrow(-1, self.start, self.out_features) if is_row(x) else super().forward(x)


class RowAttention(Attention):
    """`Attention` that takes q, k and v of one row as one product: one kernel in the place of three."""

    def __init__(self, attention: Attention) -> None:
        nn.Module.__init__(self)
        self.head_dim, start = attention.head_dim, 0
        for name, child in attention.named_children():
            self.add_module(name, child)
        for name in ("q_proj", "k_proj", "v_proj"):
            part = PartLinear(getattr(attention, name))
            part.start, start = start, start + part.out_features
            self.add_module(name, part)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        if is_row(x):
            # The weights stay where they are: it is in the kernel that they are put together.
            weights = [layer.weight for layer in (self.q_proj, self.k_proj, self.v_proj)]
            x = row_product(x, torch.cat(weights))
        return super().forward(x, *others)


class RowAttend(Attend):
    """`Attend` for one query, written out for the compiler: keys and values are read where they lie."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.scale = attend.scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if q.shape[2] > 1 or mask is None or not torch.compiler.is_compiling():
            return super().forward(q, k, v, mask)
        g, d = k.shape[1], q.shape[-1]
        grouped = rearrange(q, "b (g r) 1 d -> b g r 1 d", g=g).float()
        scores = (grouped * k[:, :, None].float()).sum(-1)
        scores = scores * (d**-0.5 if self.scale is None else self.scale)
        shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        # What another text left behind must not count: NaN times a share of 0 is NaN.
        seen = v[:, :, None].float().masked_fill(~mask[..., None], 0)
        heads = (shares[..., None] * seen).sum(-2).to(q.dtype)
        return rearrange(heads, "b g r d -> b (g r) 1 d")


class SharedBlock(Block):
    """`Block`, compiled once for all of them."""

    def __init__(self, block: Block) -> None:
        nn.Module.__init__(self)
        for name, child in block.named_children():
            self.add_module(name, child)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, cache: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(x, cos, sin, mask, cache)
        return run_block(self, x, cos, sin, mask, *cache)


@torch.compiler.nested_compile_region
def run_block(
    block: Block,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
    held: Tensor,
    slot: Tensor,
) -> Tensor:
    return Block.forward(block, x, cos, sin, mask, Slot(held, slot))  # type: ignore[arg-type]


class Slot(NamedTuple):
    """A block's keys and values (2, b, g, span, d), and where to write: a number in a tensor."""

    held: Tensor
    slot: Tensor

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write `k`, `v` (b, g, 1, d) at the slot, at once; return keys and values (b, g, span, d)."""
        self.held.index_copy_(3, self.slot, torch.stack((k, v)))
        return self.held[0], self.held[1]


def run_step(
    model: Llama,
    held: Sequence[Tensor],
    tokens: Tensor,
    slot: Tensor,
    positions: Tensor,
    mask: Tensor,
) -> Tensor:
    """`Llama.forward` for one more token (b, 1): logits (b, 1, vocab)."""
    slots: Any = [Slot(each, slot) for each in held]
    x = model.through_blocks(tokens, positions, mask, slots)
    return model.lm_head(model.final_norm(x))


def row_layer(module: nn.Module) -> nn.Module | None:
    """The layer of this file in the place of `module`; None where there is none."""
    if type(module) in (nn.Linear, ThreadedLinear) and module.bias is None:
        return RowLinear(module)
    if type(module) is Attend:
        return RowAttend(module)
    if type(module) is Attention:
        return RowAttention(module)
    return SharedBlock(module) if type(module) is Block else None
