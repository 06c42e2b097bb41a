"""The fast form on a CUDA GPU: one step of one token, compiled by torch and replayed as a CUDA graph.

A step reads every weight once, in less time than a CPU takes to launch its operations one by one. What is
compiled is `Llama.through_blocks` itself; only the layers are made for one row, and the cache has its
position in a tensor, so that neither code nor graph depends on it. Nothing here has run on a GPU yet.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from ..cache import KVCache
from ..model import Attend, Attention, Block, Llama
from ..rope import inverse_frequencies
from .dynamo import CompilerFailed, mark_dynamic, of_its_own
from .private import Held, addresses
from .rebuild import rebuilt
from .threaded import ThreadedLinear

TYPICAL = 512  # positions for which the compiler chooses its loops; they hold for any number
KEPT = 4  # static caches that stay when no cache uses them


def settings() -> tuple[Any, ...]:
    """What torch's settings make of a step: a graph keeps those under which it was captured."""
    products = torch.backends.cuda.matmul
    return (
        products.fp32_precision,  # TF32, whichever of torch's switches set it
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
    )


def span_of(length: int) -> int:
    """How many positions a step reads to attend over `length`: at most a quarter more, or 256, and 40
    different numbers up to 131,072, as each is a graph.
    """
    step = max(256, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


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


class StepGraph:
    """A step as a CUDA graph, on tensors that stay where they are."""

    def __init__(self, step: Callable[[], Tensor], pool: Any, stream: Any) -> None:
        step()  # compiles, and writes what the replay writes again
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # Another thread may allocate or copy meanwhile: it is none of this capture's business.
        with torch.cuda.graph(self.graph, pool, stream, capture_error_mode="thread_local"):
            self.logits = step()

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.logits.clone()  # the next replay writes over it


class Arena:
    """A static cache, the inputs of a step, and the graphs that read them: for one `KVCache` at a time."""

    def __init__(self, like: Sequence[Tensor], batch: int, capacity: int) -> None:
        # Longer than any span: a part of a tensor and the whole of one are two kinds to the compiler.
        capacity += 16

        def room(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=like[0].device)

        # In that mode, the cache could not be written to outside of it.
        with torch.inference_mode(False):
            self.held = [
                room(2, batch, old.shape[1], capacity, old.shape[3], dtype=old.dtype)
                for old in like
            ]
            self.tokens, self.slot, self.positions = room(batch, 1), room(1), room(batch, 1)
            self.seen = room(batch, 1, 1, capacity, dtype=torch.bool)
        self.keys, self.values = [t[0] for t in self.held], [t[1] for t in self.held]
        self.batch, self.capacity = batch, capacity
        self.graphs: dict[tuple[Any, ...], StepGraph] = {}

    def inputs(self, span: int) -> tuple[Any, ...]:
        """What `run_step` takes for a step that attends over `span` positions."""
        held, mask = [each[:, :, :, :span] for each in self.held], self.seen[..., :span]
        for tensor in (*held, mask):
            mark_dynamic(tensor, 3)
        return held, self.tokens, self.slot, self.positions, mask


class GraphLlama(Llama):
    """`Llama` with steps of one token that are replayed; all else is as it was.

    It is made of a model with the layers of this file, on these layers. Caches that are used in turn share
    a static one, so that a second generation captures nothing. Where a hook or autocast wants to see or
    change what happens within, a step runs as it stands in model.py.
    """

    def __init__(self, model: Llama) -> None:
        nn.Module.__init__(self)
        self.config, self.training = model.config, model.training
        for name, child in model.named_children():
            self.add_module(name, child)
        self.forget()

    def forget(self) -> None:
        """Start anew: nothing is compiled, captured or kept."""
        self.held: Held | None = None
        self.compiled: Callable[..., Tensor] | None = None
        self.arenas: list[Arena] = []
        self.leases: weakref.WeakKeyDictionary[KVCache, Arena] = weakref.WeakKeyDictionary()
        self.pool: Any = None
        self.known = self.config
        with torch.inference_mode(False):
            frequencies = inverse_frequencies(self.config.rope, self.config.head_dim)
            self.frequencies = frequencies.to(self.embed.weight.device)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `cos_sin`, but a graph cannot ask the CPU for the frequencies."""
        if not torch.compiler.is_compiling():
            return super().angles(positions, dtype)
        angles = (positions[..., None].float() * self.frequencies).unsqueeze(1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ValueError(
            "the fast form on a GPU holds graphs: copy the plain model, and make it fast"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "the fast form on a GPU holds graphs: pickle the plain model, and make it fast"
        )

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        one = cache is not None and tokens.dim() == 2 and tokens.shape[1] == 1
        if (
            not one
            or (mask is not None and mask.dtype != torch.bool)
            or not self.can_replay(tokens)
        ):
            return super().forward(tokens, cache, positions, mask, last_only)
        assert cache is not None
        length = cache.require(len(tokens), 1, self.embed.weight.dtype)
        self.config.require_in_window(length + 1)
        with torch.inference_mode():
            logits = self.step(tokens, cache, positions, mask)
        cache.length += 1
        return logits

    def can_replay(self, tokens: Tensor) -> bool:
        if self.held is None or not self.held or self.config is not self.known:
            self.forget()  # what was captured is of other weights, settings or layers
            self.held = Held(self)
        return bool(self.held) and not (
            torch.is_autocast_enabled(tokens.device.type)
            or torch.compiler.is_compiling()
            or (torch.is_grad_enabled() and any(w.requires_grad for w in self.held.weights))
        )

    def step(
        self, tokens: Tensor, cache: KVCache, positions: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """Logits (b, 1, vocab) after one more token (b, 1)."""
        arena, length = self.arena_of(cache), cache.length
        span = span_of(length + 1)
        arena.tokens.copy_(tokens)
        arena.slot.fill_(length)
        arena.positions.copy_(arena.slot if positions is None else positions)
        if mask is not None and mask.dim() < 4:
            mask = mask.unsqueeze(-3)
        arena.seen[..., length + 1 : span] = False
        arena.seen[..., : length + 1] = True if mask is None else mask
        key = (span, *settings())
        if key not in arena.graphs:
            inputs = arena.inputs(span)
            arena.graphs[key] = self.captured(lambda: self.run()(self, *inputs))
        return arena.graphs[key]()

    def captured(self, step: Callable[[], Tensor]) -> StepGraph:
        if self.pool is None:  # all graphs share their memory, as they run one after the other
            self.pool = (torch.cuda.graph_pool_handle(), torch.cuda.Stream())
        return StepGraph(step, *self.pool)

    def run(self) -> Callable[..., Tensor]:
        if self.compiled is None:
            on_gpu = self.embed.weight.device.type == "cuda"
            # Else the sum over values gets one poor configuration, which uses 4 of every 32 bytes.
            options: dict[str, Any] = {"max_autotune_pointwise": True} if on_gpu else {}
            self.compiled = torch.compile(of_its_own(run_step), fullgraph=True, options=options)
        return self.compiled

    def arena_of(self, cache: KVCache) -> Arena:
        """The static cache that `cache` has for its own, filled with what it holds."""
        arena, held = self.leases.get(cache), [*cache.keys, *cache.values]
        if arena is not None and addresses(held) == addresses([*arena.keys, *arena.values]):
            return arena
        # New, grown, or its tensors were replaced.
        in_use = list(self.leases.values())
        free = [each for each in self.arenas if each not in in_use]
        fitting = [a for a in free if a.batch == cache.batch and a.capacity >= cache.capacity]
        if fitting:
            arena = min(fitting, key=lambda each: each.capacity)
        else:
            for old in free[: max(0, len(free) + 1 - KEPT)]:
                self.arenas.remove(old)
            arena = Arena(cache.keys, cache.batch, span_of(cache.capacity))
            self.arenas.append(arena)
        s = cache.length
        for mine, given in ((arena.keys, cache.keys), (arena.values, cache.values)):
            for n, static in enumerate(mine):
                static[:, :, :s] = given[n][:, :, :s]
                given[n] = static[:, :, : cache.capacity]
        self.leases[cache] = arena
        return arena

    def prepare(self) -> None:
        """Compile the step for one row. A `ValueError` where this machine cannot."""
        weight = self.embed.weight
        with torch.inference_mode():
            cache = KVCache(self.config, 1, TYPICAL, weight.device, weight.dtype)
            inputs = Arena(cache.keys, 1, TYPICAL).inputs(TYPICAL)
            try:
                self.run()(self, *inputs)
            except CompilerFailed as error:
                why = str(error).strip().split("\n")[0]
                raise ValueError(
                    f"this machine cannot compile a step: use the plain model ({why})"
                ) from None


def fast_on_cuda(model: Llama) -> GraphLlama:
    """The model with layers of this file in the place of those that they stand for, on the same weights."""
    if type(model) is not Llama:
        raise ValueError(
            f"on a GPU the fast form is made of Llama alone, and this is {type(model).__name__}: "
            "do without it"
        )

    def layer(module: nn.Module) -> nn.Module | None:
        if type(module) in (nn.Linear, ThreadedLinear) and module.bias is None:
            return RowLinear(module)
        if type(module) is Attend:
            return RowAttend(module)
        if type(module) is Attention:
            return RowAttention(module)
        return SharedBlock(module) if type(module) is Block else None

    fast = GraphLlama(rebuilt(model, layer))
    fast.prepare()
    return fast
