"""The fast form on a CPU: model.py's Llama, whose steps of one token go through all blocks in step.cpp.

Decoding reads every weight once for each token, so its limit is the rate at which memory can be read. What
keeps plain torch from it is one core that reads alone, and the time between a block's forty operations.
"""

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor, nn

from ..cache import KVCache
from ..model import Attend, Attention, Block, Llama, RMSNorm, SwiGLU
from . import threaded
from .native import library
from .private import Held, addresses
from .rebuild import rebuilt
from .threaded import ThreadedLinear

ROWS = 8  # up to so many, dot products with the rows of a weight are faster than a matrix product
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
BLOCK, STEP = struct.Struct("@11P5d"), struct.Struct("@4P12l")  # as in step.cpp


def at_once() -> bool:
    """Whether operations run as they are called, and nobody wants to trace or to change them."""
    return not (
        torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu")
    )


def readable(*tensors: Tensor) -> bool:
    """Whether step.cpp can take the tensors by their addresses: in memory, in order, of one dtype."""
    dtype = tensors[0].dtype
    return dtype in NAMES and all(
        tensor.dtype is dtype
        and (type(tensor) is Tensor or type(tensor) is nn.Parameter)
        and tensor.is_cpu
        and tensor.is_contiguous()
        for tensor in tensors
    )


def differentiable(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class RowLinear(nn.Linear):
    """A linear layer that takes few rows as dot products with the rows of its weight, on all cores and
    summed in float32. It is made of such a layer, on its weight.

    Many rows are a matrix product, made in float32 on a CPU that cannot multiply in the weights' dtype.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight

    def forward(self, x: Tensor) -> Tensor:
        weight, rows = self.weight, x.shape[:-1].numel()
        if (
            0 < rows <= ROWS
            and x.shape[-1] == weight.shape[-1]
            and at_once()
            and readable(x, weight)
            and not differentiable(x, weight)
        ):
            y = x.new_empty(*x.shape[:-1], len(weight))
            function = getattr(library(), f"linear_{NAMES[x.dtype]}")
            sizes = (rows, *reversed(weight.shape), torch.get_num_threads())
            function(*map(ctypes.c_void_p, addresses([x, weight, y])), *map(ctypes.c_long, sizes))
            return y
        if x.is_cpu and x.dtype in threaded.EMULATED:
            return nn.functional.linear(x.float(), weight.float()).to(x.dtype)
        return super().forward(x)


class RowAttend(Attend):
    """`Attend`, of many queries in float32 on a CPU that cannot multiply in the dtype of the keys."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.scale = attend.scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if q.shape[2] > 1 and q.is_cpu and q.dtype in threaded.EMULATED:
            return super().forward(q.float(), k.float(), v.float(), mask).to(q.dtype)
        return super().forward(q, k, v, mask)


class FastLlama(Llama):
    """`Llama` with a step of its own for one token through a cache; all else is as it was.

    It is made of a model with the layers of this file, on these layers. Where its blocks are not those
    of model.py, or a hook wants to see what happens within, a step runs as it stands there.
    """

    def __init__(self, model: Llama) -> None:
        nn.Module.__init__(self)
        self.config, self.training = model.config, model.training
        for name, child in model.named_children():
            self.add_module(name, child)
        self.plan: Plan | None = None

    def through_blocks(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        if cache is not None and tokens.shape[1] == 1 and len(tokens) <= ROWS and at_once():
            if self.plan is None or not self.plan.held:
                self.plan = Plan.of(self.blocks)
            if self.plan is not None:
                x = self.embedding(tokens, positions)
                cos, sin = self.angles(positions, x.dtype)
                if self.plan.takes(x, cos, sin, mask, cache):
                    return self.plan.step(x, cos, sin, mask, cache)
        return super().through_blocks(tokens, positions, mask, cache)


class Plan:
    """What step.cpp is told of the blocks: sizes, settings, and where the weights lie."""

    def __init__(self, blocks: Any, held: Held) -> None:
        self.held = held  # is false when any of it has changed
        self.sizes = sizes = {
            name: tuple(parameter.shape) for name, parameter in blocks[0].named_parameters()
        }
        self.m, self.d = sizes["pre_attention_norm.weight"][0], int(blocks[0].attention.head_dim)
        self.h, self.g = (sizes[f"attention.{n}_proj.weight"][0] // self.d for n in "qk")
        self.f = sizes["ffn.gate_proj.weight"][0]
        self.blocks = b"".join(map(packed, blocks))

    @classmethod
    def of(cls, blocks: Any) -> "Plan | None":
        """The plan of blocks that are, class for class and size for size, what step.cpp has written out."""
        held = Held(blocks)
        if (
            not held
            or not len(blocks)
            or not all(map(is_plain, blocks))
            or list(blocks.buffers())  # somebody's own
            or not readable(*held.weights)
        ):
            return None
        plan = cls(blocks, held)
        m, f, hd, gd = plan.m, plan.f, plan.h * plan.d, plan.g * plan.d
        right = {
            **{"pre_attention_norm": (m,), "pre_ffn_norm": (m,)},
            **{"attention.q_proj": (hd, m), "attention.k_proj": (gd, m)},
            **{"attention.v_proj": (gd, m), "attention.o_proj": (m, hd)},
            **{"attention.q_norm": (plan.d,), "attention.k_norm": (plan.d,)},
            **{"ffn.gate_proj": (f, m), "ffn.up_proj": (f, m), "ffn.down_proj": (m, f)},
        }
        fits = all(
            tuple(weight.shape) == right[name.removesuffix(".weight")]
            for block in blocks
            for name, weight in block.named_parameters()
        )
        return plan if fits else None

    def takes(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache
    ) -> bool:
        """Whether this call is one that step.cpp has written out: plain tensors of the sizes expected."""
        b, s, held = len(x), cache.length + 1, [*cache.keys, *cache.values]
        shape = (b, self.g, cache.capacity, self.d)
        return (
            len(held) * BLOCK.size == 2 * len(self.blocks)
            and all(tensor.shape == shape for tensor in held)
            and x.shape == (b, 1, self.m)
            and (mask is None or mask.shape in ((1, 1, s), (1, 1, 1, s), (b, 1, 1, s)))
            and readable(self.held.weights[0], x, cos, sin, *held)
            and not differentiable(x, *self.held.weights)
        )

    def step(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        """The stream (b, 1, m) behind the blocks, given that before them."""
        x = x.clone()  # it is replaced, and a hook on the embedding may have kept it
        s, count = cache.length + 1, len(cache.keys)
        mask = None if mask is None else mask.contiguous()
        arguments = STEP.pack(
            *addresses([x, cos, sin]),
            0 if mask is None else mask.data_ptr(),
            *(len(x), self.h, self.g, self.d, self.m, self.f, cache.capacity, s),
            0 if len(cos) == 1 else self.d // 2,
            0 if mask is None or len(mask) == 1 else s,
            *(count, torch.get_num_threads()),
        )
        lists = [(ctypes.c_void_p * count)(*addresses(held)) for held in (cache.keys, cache.values)]
        getattr(library(), f"step_{NAMES[x.dtype]}")(arguments, self.blocks, *lists)
        return x


def packed(block: Any) -> bytes:
    """The record `Block` of step.cpp."""
    a, f = block.attention, block.ffn
    norms = (block.pre_attention_norm, a.q_norm, a.k_norm, block.pre_ffn_norm)
    layers = (
        *(norms[0], a.q_proj, a.k_proj, a.v_proj, a.o_proj, *norms[1:]),
        *(f.gate_proj, f.up_proj, f.down_proj),
    )
    return BLOCK.pack(
        *(layer.weight.data_ptr() if hasattr(layer, "weight") else 0 for layer in layers),
        *(getattr(norm, "eps", 0.0) for norm in norms),
        a.head_dim**-0.5 if a.attend.scale is None else a.attend.scale,
    )


def is_plain(block: Any) -> bool:
    """Whether the block is what step.cpp has written out, class for class."""
    if type(block) is not Block or type(block.attention) is not Attention:
        return False
    a, f = block.attention, block.ffn
    if type(f) is not SwiGLU or type(a.attend) is not RowAttend:
        return False
    linears = (a.q_proj, a.k_proj, a.v_proj, a.o_proj, f.gate_proj, f.up_proj, f.down_proj)
    return (
        all(type(layer) is RowLinear for layer in linears)
        and type(block.pre_attention_norm) is type(block.pre_ffn_norm) is RMSNorm
        and {type(a.q_norm), type(a.k_norm)} <= {RMSNorm, nn.Identity}
    )


def fast_on_cpu(model: Llama) -> Llama:
    """The model with layers of this file in the place of those that they stand for, on the same weights."""
    library()  # or the error that says why not

    def layer(module: nn.Module) -> nn.Module | None:
        if type(module) in (nn.Linear, ThreadedLinear) and module.bias is None:
            return RowLinear(module)
        return RowAttend(module) if type(module) is Attend else None

    new = rebuilt(model, layer)
    # A class of its own has a forward of its own: there each layer is fast, and not the whole step.
    return FastLlama(new) if type(model) is Llama else new
