"""The same decoder, faster where speed is asked for: sums in another order, so the last bits may differ.

Decoding reads every weight once for each token, so its limit is the rate at which memory can be read. What
keeps the plain model from it is the time between operations, and on a CPU the product of a matrix and one
vector. Here a whole step for one token is one compiled function, in which all blocks share their code, and
on a GPU it is replayed as one CUDA graph. What is compiled is model.py itself: only its linear layers and
`attend` are replaced, and how the cache is written.
"""

import copy
import itertools
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch._dynamo import mark_dynamic
from torch._dynamo.exc import TorchDynamoException

from ..cache import KVCache
from ..model import Attend, Block, Llama
from ..rope import cos_sin
from .threaded import ThreadedLinear

# Up to so many rows, dot products read the weights faster than a matrix product does.
ROWS = {"cpu": 8, "cuda": 1}
# A step attends over a multiple of so many positions: on a GPU, each number of them is a graph.
SPAN = {"cpu": 1, "cuda": 256}
TYPICAL = 512  # positions for which the compiler chooses its loops; they hold for any number


class RowLinear(ThreadedLinear):
    """A linear layer that takes few rows as dot products with the rows of its weight, summed in float32.

    Compiled, these run at the rate of the memory, on all cores. Many rows are a matrix product, made in
    float32 on a CPU that cannot multiply in the weights' dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        rows, few = x.shape[:-1].numel(), ROWS.get(x.device.type, 0)
        if rows > few and x.device.type == "cpu" and x.dtype in EMULATED:
            return nn.functional.linear(x.float(), self.weight.float()).to(x.dtype)
        if rows > few or not torch.compiler.is_compiling():
            return super().forward(x)
        wide = x.float().reshape(rows, -1)
        # The compiler keeps the values of a tensor with strides of its own. Else it would compute what
        # stands before it, a norm, anew for every row of the weight.
        wide = wide.as_strided(wide.shape, (wide.shape[1], 1))
        weight = self.weight.float()
        # One sum for each row of x; they share one pass over the weight.
        products = torch.stack([(weight * row).sum(-1) for row in wide.unbind()])
        return products.to(x.dtype).view(*x.shape[:-1], -1)


def emulated() -> set[torch.dtype]:
    """The dtypes that this CPU has no products for; none where torch cannot say."""
    needs = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return {dtype for dtype, feature in needs.items() if not has.get(feature, True)}


EMULATED = emulated()


class RowAttend(Attend):
    """`Attend` for a single query, written out for the compiler: keys and values are read where they lie.

    A longer pass is made in float32 on a CPU that cannot multiply in the dtype of the keys.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if q.shape[2] > 1 or mask is None:
            if q.device.type == "cpu" and q.dtype in EMULATED:
                return super().forward(q.float(), k.float(), v.float(), mask).to(q.dtype)
            return super().forward(q, k, v, mask)
        g, d = k.shape[1], q.shape[-1]
        grouped = rearrange(q, "b (g r) 1 d -> b g r 1 d", g=g).float()
        scores = (grouped * k[:, :, None].float()).sum(-1) * d**-0.5
        shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        # A slot that was never written can hold NaN, which times a share of 0 would be NaN.
        seen = v[:, :, None].float().masked_fill(~mask[..., None], 0)
        heads = (shares[..., None] * seen).sum(-2).to(q.dtype)
        return rearrange(heads, "b g r d -> b (g r) 1 d")


class Slot(NamedTuple):
    """A block's cache for one step: the position to write is a number in a tensor, so that neither code
    nor graph depends on it. Of the first `span` positions, which are read, `mask` leaves those written.
    """

    keys: Tensor
    values: Tensor
    slot: Tensor
    span: int

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write `k`, `v` (b, g, 1, d) at the slot; return keys and values (b, g, span, d)."""
        self.keys.index_copy_(2, self.slot, k)
        self.values.index_copy_(2, self.slot, v)
        return self.keys[:, :, : self.span], self.values[:, :, : self.span]


class StepGraph:
    """One step as a CUDA graph: inputs are copied to where it reads, logits from where it writes."""

    def __init__(self, step: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        step(*self.inputs)  # compiles; writes the same position as the step that is captured
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=torch.cuda.Stream()):
            self.logits = step(*self.inputs)

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return self.logits.clone()  # the next replay writes over it


class FastLlama(Llama):
    """A `Llama` whose steps of one token through a cache are compiled; `fast_model` makes it.

    The first step of every batch size compiles, for half a minute or less.
    """

    # By batch size; and the graphs of every cache in use, by span and shapes.
    steps: dict[int, Callable[..., Tensor]]
    graphs: weakref.WeakKeyDictionary[KVCache, dict[Any, StepGraph]]

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        wrong = mask is not None and mask.dtype != torch.bool  # which the model names
        if cache is None or cache.length == 0 or tokens.shape[1] > 1 or wrong:
            return super().forward(tokens, cache, positions, mask, last_only)
        cache.require(tokens.shape[0], 1, self.embed.weight.dtype)
        self.config.require_in_window(cache.length + 1)
        on_gpu = tokens.device.type == "cuda"
        with torch.cuda.device(tokens.device) if on_gpu else nullcontext():
            return self.step(tokens, cache, positions, mask)

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, cache: KVCache, positions: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """Logits (b, 1, vocab) after one more token (b, 1)."""
        device, length = tokens.device, cache.length
        run = partial(self.prepare(len(tokens)), self, cache.keys, cache.values)
        if cache not in self.graphs:
            self.graphs[cache] = {}
            for tensor in cache.keys + cache.values:
                mark_dynamic(tensor, 2)
        # Below the capacity as long as it can be: a span that equals it is compiled anew.
        whole = SPAN[device.type]
        span = min(-(-(length + 1) // whole) * whole, max(cache.capacity - 1, length + 1))
        slot = torch.full((1,), length, dtype=torch.long, device=device)
        if mask is not None and mask.dim() < 4:
            mask = mask.unsqueeze(-3)
        # One form for every batch, of its own memory: another shape or stride would be compiled anew, and
        # one tensor in two places be taken for one input for good.
        seen = torch.zeros(len(tokens), 1, 1, span, dtype=torch.bool, device=device)
        seen[..., : length + 1] = True if mask is None else mask
        where = torch.empty_like(tokens).copy_(slot if positions is None else positions)
        inputs = (tokens.contiguous(), slot, where, seen)
        if device.type == "cuda":
            # A cache that grew has other tensors, and another capacity.
            shapes = (cache.capacity, *(tensor.shape for tensor in inputs))
            if shapes not in self.graphs[cache]:
                self.graphs[cache][shapes] = StepGraph(run, inputs)
            logits = self.graphs[cache][shapes](inputs)
        else:
            mark_dynamic(seen, 3)
            logits = run(*inputs)
        cache.length += 1
        return logits

    def prepare(self, batch: int) -> Callable[..., Tensor]:
        """The compiled step for this many rows, tried once with TYPICAL positions.

        A `ValueError` where this machine cannot compile.
        """
        if batch not in self.steps:
            weight = self.embed.weight
            step = compiled(run_step)
            with torch.inference_mode():
                cache = KVCache(self.config, batch, TYPICAL + 2, weight.device, weight.dtype)
                tokens = torch.zeros(batch, 1, dtype=torch.long, device=weight.device)
                slot = torch.full((1,), TYPICAL, dtype=torch.long, device=weight.device)
                where = torch.full((batch, 1), TYPICAL, dtype=torch.long, device=weight.device)
                seen = torch.ones(batch, 1, 1, TYPICAL + 1, dtype=torch.bool, device=weight.device)
                for tensor in cache.keys + cache.values:
                    mark_dynamic(tensor, 2)
                mark_dynamic(seen, 3)
                try:
                    step(self, cache.keys, cache.values, tokens, slot, where, seen)
                except TorchDynamoException as error:
                    why = str(error).strip().split("\n")[0]
                    raise ValueError(
                        f"this machine cannot compile a step: use the plain model ({why})"
                    ) from None
            self.steps[batch] = step
        return self.steps[batch]


def run_step(
    model: Llama,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    tokens: Tensor,
    slot: Tensor,
    positions: Tensor,
    mask: Tensor,
) -> Tensor:
    """`Llama.forward` for one more token (b, 1): logits (b, 1, vocab)."""
    x = model.embed(tokens)
    cos, sin = cos_sin(model.config.rope, model.config.head_dim, positions, x.dtype)
    for block, *written in zip(model.blocks, keys, values, strict=True):
        x = run_block(block, x, cos, sin, mask, slot, *written)
    return model.lm_head(model.final_norm(x))


@torch.compiler.nested_compile_region  # compiled once, for all blocks
def run_block(
    block: Block,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
    slot: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """The stream (b, 1, m) behind a block."""
    return block(x, cos, sin, mask, Slot(keys, values, slot, mask.shape[-1]))


NUMBERS = itertools.count()


def compiled(function: Any) -> Any:
    """The function compiled for one model and batch: what was compiled for another is never looked at.

    So of the conditions that torch checks before each call only those on tensors and shapes are kept, which
    saves a millisecond in a step of 30 blocks; the others are about a model that stays as it is. And what
    was checked is not asserted again within.
    """
    # Under one name for all, torch would see which numbers differ between models, and make them inputs.
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(NUMBERS)}")
    own = types.FunctionType(code, function.__globals__)
    kept = ("TENSOR_MATCH", "DUPLICATE_INPUT", "SHAPE_ENV")
    options: dict[str, Any] = {
        "guard_filter_fn": lambda all_: [g.guard_type in kept for g in all_],
        "size_asserts": False,
    }
    return torch.compile(own, fullgraph=True, options=options)


def fast_model(model: Llama) -> FastLlama:
    """The model in its fast form, on the same weights; the model itself stays as it is.

    Logits of its steps come without gradients. A `ValueError` for a model on another device than a CPU
    or a CUDA GPU.
    """
    device = model.embed.weight.device
    if device.type not in SPAN:
        raise ValueError(f"the compiled form runs on cpu and cuda, and the model is on {device}")
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    fast = copy.deepcopy(model, shared)
    for module in fast.modules():
        module.__class__ = FAST.get(type(module), type(module))
    assert isinstance(fast, FastLlama)
    fast.steps, fast.graphs = {}, weakref.WeakKeyDictionary()
    return fast


FAST = {Llama: FastLlama, nn.Linear: RowLinear, ThreadedLinear: RowLinear, Attend: RowAttend}
