"""One model over several processes: tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053).

    torchrun --nproc-per-node 2 generate.py --prompt "Once upon a time"

Every rank holds its part of each large matrix and the whole residual stream, and runs
`Llama.forward` as it stands. Heads and FFN channels know nothing of one another until `o_proj` and
`down_proj` add them up, so a rank computes its own with its own rows, and one all-reduce behind
each of the two makes the stream whole again everywhere. A forward has one more all-reduce behind
the embedding and one all-gather of the logits; PLAN says what is cut, and why.
"""

import atexit
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from math import gcd
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoint.opening import Checkpoint, open_checkpoint
from ..checkpoint.weights import NoInit, build, read_state
from ..config import LlamaConfig
from ..model import Llama

WHOLE, ROWS, COLUMNS = None, 0, 1  # which axis of a weight (out, in) is cut
PLAN = {
    "embed": ROWS,  # vocabulary: half of a small model; one rank has a token's row, the rest add 0
    "pre_attention_norm": WHOLE,  # its mean is over all of m, and every rank has all of m
    "q_proj": ROWS,  # whole heads: a head's attention needs nothing of another's
    "k_proj": ROWS,  # the key/value heads that the rank's own queries read
    "v_proj": ROWS,  # with k_proj
    "q_norm": WHOLE,  # one weight over d for all heads
    "k_norm": WHOLE,  # with q_norm
    "o_proj": COLUMNS,  # reads the rank's own heads and makes one term of the sum: all-reduce
    "pre_ffn_norm": WHOLE,  # as pre_attention_norm
    "gate_proj": ROWS,  # silu(gate) * up goes channel by channel
    "up_proj": ROWS,  # the channels of gate_proj
    "down_proj": COLUMNS,  # reads the rank's own channels and makes one term: all-reduce
    "final_norm": WHOLE,  # as pre_attention_norm
    "lm_head": ROWS,  # with embed, so that a tied head stays one tensor; the logits are gathered
}


@dataclass(frozen=True)
class Ranks:
    """This process, `rank` of `size` on `device`; it waits for another at most `seconds`."""

    rank: int
    size: int
    device: torch.device
    seconds: float
    store: dist.Store

    def own(self, length: int) -> slice:
        """This rank's part of an axis; the last rank's is shorter where it does not divide."""
        part = -(-length // self.size)
        return slice(self.rank * part, min((self.rank + 1) * part, length))

    def sum(self, x: Tensor) -> Tensor:
        """Every rank's `x` added up, on every rank, in place."""
        with self._naming():
            dist.all_reduce(x)
        return x

    def gather(self, x: Tensor, length: int) -> Tensor:
        """Every rank's part of the last axis side by side: (b, t, own) -> (b, t, length)."""
        x = F.pad(x, (0, -(-length // self.size) - x.shape[-1])).contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._naming():
            dist.all_gather(parts, x)
        return torch.cat(parts, -1)[..., :length]

    def first(self, x: Tensor) -> Tensor:
        """Rank 0's `x`, on every rank."""
        x = x.clone(memory_format=torch.contiguous_format)
        with self._naming():
            dist.broadcast(x, src=0)
        return x

    def agree(self, values: Any) -> Any:
        """Rank 0's `values`, on every rank."""
        box = [values]
        with self._naming():
            dist.broadcast_object_list(box, device=self.device)
        return box[0]

    def missing(self, key: str, seconds: float) -> str:
        """Tell all ranks `key`; name those that do not tell it within `seconds`, "" for none."""
        self.store.set(f"{key}/{self.rank}", "")
        silent, end = set(range(self.size)), time.monotonic() + seconds
        while silent and time.monotonic() < end:
            silent = {rank for rank in silent if not self.store.check([f"{key}/{rank}"])}
            time.sleep(0.05)
        return ", ".join(f"rank {rank}" for rank in sorted(silent))

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """When a collective fails, raise a RuntimeError that names the ranks that do not answer."""
        try:
            yield
        except RuntimeError as error:
            try:
                silent = self.missing("failed", min(5, self.seconds))
            except dist.DistError:
                raise RuntimeError(
                    "torchrun, or rank 0 where it keeps the store, has ended"
                ) from error
            if not silent:
                raise
            raise RuntimeError(
                f"{silent} of {self.size} ended, or did not answer for {self.seconds:g} s "
                "(LLAMA_MINI_TIMEOUT sets the seconds)"
            ) from error


def start(device: torch.device) -> Ranks:
    """Join the processes that torchrun started: over NCCL with a GPU each, over gloo on the CPU.

    LLAMA_MINI_TIMEOUT is the seconds that a rank waits for another (default 120). Raises ValueError
    for a device that does not serve, RuntimeError, with the rank, when one does not start.
    """
    seconds = os.environ.get("LLAMA_MINI_TIMEOUT", "120")
    if not seconds.isdecimal() or int(seconds) == 0:
        raise ValueError(f"LLAMA_MINI_TIMEOUT is {seconds!r}: it must be a number of seconds")
    if device.type == "cuda":
        local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if local > gpus:
            raise ValueError(
                f"{local} ranks need {local} GPUs, and there are {gpus}: use --device cpu"
            )
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_NCCL_DESYNC_DEBUG", "1")  # NCCL names the ranks that lag
    elif device.type != "cpu":
        raise ValueError(f"ranks run on cuda or cpu, not on {device.type}: use --device cpu")
    timeout = timedelta(seconds=int(seconds))
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    ranks = Ranks(rank, size, device, int(seconds), store)
    if silent := ranks.missing("started", int(seconds)):
        raise RuntimeError(f"{silent} of {size} did not start within {seconds} s")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    atexit.register(dist.destroy_process_group)
    return ranks


class SplitEmbedding(nn.Embedding):
    """This rank's rows of the embedding: tokens (b, t), on every rank the same, -> (b, t, m)."""

    def __init__(self, config: LlamaConfig, ranks: Ranks) -> None:
        own = ranks.own(config.vocab_size)
        super().__init__(own.stop - own.start, config.hidden_size)
        self.start, self.ranks = own.start, ranks

    def forward(self, tokens: Tensor) -> Tensor:
        row = tokens - self.start
        elsewhere = (row < 0) | (row >= self.num_embeddings)
        x = super().forward(row.masked_fill(elsewhere, 0))
        return self.ranks.sum(x.masked_fill(elsewhere[..., None], 0))


class SplitHead(nn.Linear):
    """This rank's rows of the head: (b, t, m) -> logits (b, t, vocab).

    Each logit is computed on one rank and copied to the others, so all of them see the same bits.
    One seed can draw different tokens even so, as a GPU's cumsum varies in its last bit: where ranks
    generate, pass `agree=ranks.first` to `stream`.
    """

    def __init__(self, config: LlamaConfig, ranks: Ranks) -> None:
        own = ranks.own(config.vocab_size)
        super().__init__(config.hidden_size, own.stop - own.start, bias=False)
        self.vocab_size, self.ranks = config.vocab_size, ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.ranks.gather(super().forward(x), self.vocab_size)


class RowParallel(nn.Linear):
    """This rank's columns of a projection: its term of the sum, and the sum.

    Megatron names it for the rows of the transpose: it writes x A where nn.Linear has x W^T.
    """

    def __init__(self, whole: nn.Linear, ranks: Ranks) -> None:
        super().__init__(whole.in_features, whole.out_features, bias=False)
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.ranks.sum(super().forward(x))


def require_divisible(config: LlamaConfig, size: int) -> None:
    """Raise a ValueError unless `size` ranks can share heads, FFN channels and vocabulary."""
    h, g, width = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    common = gcd(h, g, width)
    # Parts are rounded up, so the last rank starts last: it must have a token too.
    starts = {n: (n - 1) * -(-config.vocab_size // n) for n in range(1, g + 1) if common % n == 0}
    fits = [n for n, last in starts.items() if last < config.vocab_size]
    if size not in fits:
        raise ValueError(
            f"{size} ranks cannot have equal shares of {h} heads, {g} key/value heads and {width} "
            f"FFN channels (intermediate_size), and a part of {config.vocab_size} tokens each: use "
            f"--nproc-per-node {' or '.join(map(str, fits))}"
        )


def split(config: LlamaConfig, ranks: Ranks) -> Llama:
    """This rank's part of a Llama, without memory (on the meta device).

    Its config counts the rank's own heads and channels: so Attention and KVCache are right as they
    are. Everything else in it, `vocab_size` too, is the whole model's.
    """
    own = replace(
        config,
        num_attention_heads=config.num_attention_heads // ranks.size,
        num_key_value_heads=config.num_key_value_heads // ranks.size,
        intermediate_size=config.intermediate_size // ranks.size,
    )
    with torch.device("meta"), NoInit():
        model = Llama(own)
        model.embed = SplitEmbedding(config, ranks)
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and PLAN[path.split(".")[-1]] == COLUMNS:
                model.set_submodule(path, RowParallel(module, ranks))
        model.lm_head = SplitHead(config, ranks)
    return model


def load_parallel(
    ranks: Ranks,
    source: str | Path | Checkpoint,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Llama:
    """`load_model`, but this rank's part of the model, and nothing else is read from the files."""
    checkpoint = open_checkpoint(source)
    require_divisible(checkpoint.config, ranks.size)
    build(checkpoint)

    def part(name: str, weight: Tensor) -> Tensor:
        axis = PLAN[name.split(".")[-2]]
        if axis is WHOLE:
            return weight[:]
        own = ranks.own(weight.shape[axis])
        # Rows are mapped from the file; columns lie scattered over the whole matrix, so are copied.
        return weight[own] if axis == ROWS else weight[:, own].contiguous()

    model = split(checkpoint.config, ranks)
    model.load_state_dict(read_state(checkpoint, device, dtype, part), assign=True)
    return model.eval().requires_grad_(False)
