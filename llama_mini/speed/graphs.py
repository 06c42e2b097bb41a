"""The fast form on a CUDA GPU: one step of one token, compiled by torch and replayed as a CUDA graph.

A step reads every weight once, in less time than a CPU takes to launch its operations one by one. What is
compiled is `Llama.through_blocks` itself, of the layers in row.py. Nothing here has run on a GPU yet.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..cache import KVCache
from ..model import Llama
from ..rope import inverse_frequencies
from .dynamo import CompilerFailed, mark_dynamic, of_its_own
from .private import Held, addresses
from .rebuild import rebuilt
from .row import row_layer, run_step

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

    def __init__(self, like: Sequence[Tensor], batch: int, longest: int) -> None:
        # Longer than any span: a part of a tensor and the whole of one are two kinds to the compiler.
        capacity = longest + 16

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
        self.batch, self.longest = batch, longest
        self.graphs: dict[tuple[Any, ...], StepGraph] = {}

    def inputs(self, span: int) -> tuple[Any, ...]:
        """What `run_step` takes for a step that attends over `span` positions."""
        # By .data they are no views, of whose whole the compiler would note the sizes, too.
        held = [each[:, :, :, :span].data for each in self.held]
        mask = self.seen[..., :span].data
        for tensor in (*held, mask):
            mark_dynamic(tensor, 3)
        return held, self.tokens, self.slot, self.positions, mask


class GraphLlama(Llama):
    """`Llama` with steps of one token that are replayed; all else is as it was.

    It is made of a model with the layers of row.py, on these layers. Caches that are used in turn share
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
        fitting = [a for a in free if a.batch == cache.batch and a.longest >= cache.capacity]
        if fitting:
            arena = min(fitting, key=lambda each: each.longest)
        else:
            # What was outgrown serves nobody whom the new one does not.
            others = [each for each in free if each.batch != cache.batch]
            kept = [*in_use, *others[1 - KEPT :]]
            self.arenas = [each for each in self.arenas if each in kept]
            arena = Arena(cache.keys, cache.batch, span_of(cache.capacity))
            self.arenas.append(arena)
        s = cache.length
        for mine, given in ((arena.keys, cache.keys), (arena.values, cache.values)):
            for n, static in enumerate(mine):
                static[:, :, :s] = given[n][:, :, :s]
                given[n] = static[:, :, : cache.capacity]
        self.leases[cache] = arena
        return arena

    def uncaptured(self, cache: KVCache) -> Tensor:
        """The last step with `cache` once more, by the compiled code itself: the same bits, if a replay is
        right.
        """
        inputs = self.leases[cache].inputs(span_of(cache.length))
        with torch.inference_mode():
            return self.run()(self, *inputs)

    def prepare(self) -> None:
        """Compile the step for one row. A `ValueError` where this machine cannot."""
        weight = self.embed.weight
        self.held = Held(self)  # or the first step would start anew
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
    """The model with the layers of row.py in the place of those they stand for, on the same weights."""
    if type(model) is not Llama:
        raise ValueError(
            f"on a GPU the fast form is made of Llama alone, and this is {type(model).__name__}: "
            "do without it"
        )
    fast = GraphLlama(rebuilt(model, row_layer))
    fast.prepare()
    return fast
