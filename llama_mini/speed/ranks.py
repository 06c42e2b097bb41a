"""The processes that torchrun started: which of them this is, and what they say to one another.

    torchrun --nproc-per-node 2 generate.py --prompt "Once upon a time"

Rank 0 reads the prompt, draws the tokens and prints; the others hold their parts of the model and
follow. One process alone is the rank 0 of 1, and says nothing to anybody.
"""

import atexit
import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..cli import choose_device

T = TypeVar("T")
PATIENCE = 10  # seconds, with a store that takes a call and does not answer
LEFT = -2  # in the place of drawn ids, of which -1 is none that can be drawn


@dataclass
class Ranks:
    """This process, `rank` of `size` on `device`, with `local` of them on this machine; it waits for
    another at most `seconds`.
    """

    rank: int
    size: int
    device: torch.device
    seconds: float = 120
    store: dist.Store | None = None
    local: int = 1
    left: bool = False

    def own(self, length: int) -> slice:
        """This rank's part of an axis; the last rank's is shorter where it does not divide."""
        part = -(-length // self.size)
        return slice(self.rank * part, min((self.rank + 1) * part, length))

    def share(self) -> float:
        """The part of a model that the memory of `device` is to hold."""
        return (self.local if self.device.type == "cpu" else 1) / self.size

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
        if self.size == 1:
            return x
        x = x.clone(memory_format=torch.contiguous_format)
        with self._naming():
            dist.broadcast(x, src=0)
        return x

    def agree(self, values: Any) -> Any:
        """Rank 0's `values`, on every rank."""
        box = [values]
        if self.size > 1:
            with self._naming():
                dist.broadcast_object_list(box, device=torch.device("cpu"))
        return box[0]

    def of_first(self, make: Callable[[], T]) -> T | None:
        """What `make` returns on rank 0, on every rank; its error there ends all of them."""
        made = None
        with self.together():
            if self.rank == 0:
                made = make()
        return self.agree(made)

    def everyone(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of the ranks, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            with self._naming():
                dist.all_gather_object(values, value)
        return values

    @contextmanager
    def together(self) -> Iterator[dict[str, Any]]:
        """Work that each rank does alone, so without a collective, and that all end together.

        Where it fails on any rank, the first of them raises its error, and the others exit without a
        word. What the work puts into the dict that it is given has to be the same on all ranks: a
        ValueError names what is not. Else parts of two models would make one, and wrong text.
        """
        same: dict[str, Any] = {}
        problem: Exception | None = None
        try:
            yield same
        except (ValueError, OSError, ImportError, MemoryError) as error:
            problem = error
        digests = {key: hashlib.sha256(repr(it).encode()).digest() for key, it in same.items()}
        told = self.everyone((problem is not None, digests))
        failed = [rank for rank, (bad, _) in enumerate(told) if bad]
        if failed and self.rank != failed[0]:
            raise SystemExit(1)
        if problem is not None:
            raise problem
        for rank, (_, others) in enumerate(told):
            unlike = [key for key, digest in told[0][1].items() if others.get(key) != digest]
            if unlike and self.rank > 0:
                raise SystemExit(1)
            if unlike:
                raise ValueError(
                    f"rank {rank} has not the same {', '.join(unlike)} as rank 0: start all ranks "
                    "with the same options, on the same checkpoint"
                )

    def in_step(self, ids: Tensor) -> tuple[Tensor, list[int]]:
        """`stream`'s `agree`: on every rank the ids that rank 0 drew. Where rank 0 has left, a
        BrokenPipeError: all ranks end at the same step.
        """
        ids = self.first(torch.full_like(ids, LEFT) if self.left else ids)
        with self._naming():
            self.wait()
        numbers = ids.tolist()
        if numbers[0] == LEFT:
            raise BrokenPipeError
        return ids, numbers

    def wait(self) -> None:
        """Wait until the GPU has done what it was given; a RuntimeError after `seconds`.

        NCCL's calls return at once, and what they wait for on the GPU they wait for without end.
        """
        if self.size == 1 or self.device.type != "cuda":
            return
        done, end = torch.cuda.Event(), time.monotonic() + self.seconds
        done.record()
        while not done.query():
            if time.monotonic() > end:
                raise RuntimeError(f"the GPU has waited for {self.seconds:g} s")
            time.sleep(0)  # others may run

    @contextmanager
    def printing(self, steps: Iterator[Any]) -> Iterator[None]:
        """Within it rank 0 prints what comes of `steps`, a `stream` with `in_step`; where it cannot
        any more, the others hear of it in the step that they are waiting in.
        """
        try:
            yield
        except OSError:
            if self.size > 1:
                self.left = True
                with suppress(BrokenPipeError):
                    next(steps, None)
            raise

    def missing(self, key: str, seconds: float) -> str:
        """Tell all ranks `key`; name those that do not tell it within `seconds`, "" for none."""
        assert self.store is not None
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
            if self.device.type == "cuda" and dist.group.WORLD is not None:
                dist.group.WORLD.abort()  # or this process could not end, either
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


def own_rank() -> tuple[int, int]:
    """Which of how many processes this is, by the variables that torchrun sets; (0, 1) without it."""
    started = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]
    if all(started) and all(re.fullmatch("[0-9]{1,6}", number) for number in started[:2]):
        rank, size = map(int, started[:2])
        if rank < size:
            return rank, size
    return 0, 1


def who() -> str:
    """How a line of this process begins where there are several."""
    rank, size = own_rank()
    return f"rank {rank}: " if size > 1 else ""


def join(device: str) -> Ranks:
    """The ranks that torchrun started, or this process alone, on a device by its name or "auto"."""
    chosen = choose_device(device)
    return start(chosen) if own_rank()[1] > 1 else Ranks(0, 1, chosen)


def start(device: torch.device) -> Ranks:
    """Join the processes that torchrun started: over NCCL with a GPU each, over gloo on the CPU.

    LLAMA_MINI_TIMEOUT is the seconds that a rank waits for another (default 120). Raises ValueError
    for a device or a variable that does not serve, RuntimeError, with the rank, when one does not
    start.
    """
    rank, size = own_rank()
    seconds = _number("LLAMA_MINI_TIMEOUT", 120, 1, 10**6, "a number of seconds")
    port = _number("MASTER_PORT", None, 0, 65535, "the port at which the ranks meet")
    local = 1 if device.type == "cuda" else size
    local = _number("LOCAL_WORLD_SIZE", local, 1, size, "the number of ranks on this machine")
    if device.type == "cuda":
        gpus = torch.cuda.device_count()
        if local > gpus:
            raise ValueError(
                f"{local} ranks need {local} GPUs, and there are {gpus}: use --device cpu"
            )
        device = torch.device("cuda", _number("LOCAL_RANK", 0, 0, gpus - 1, "this rank's GPU"))
        torch.cuda.set_device(device)
        # `wait` sees what fails; torch would end this process before it can say so.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    elif device.type != "cpu":
        raise ValueError(f"ranks run on cuda or cpu, not on {device.type}: use --device cpu")
    timeout = timedelta(seconds=seconds)
    ranks = Ranks(rank, size, device, seconds, _meet(rank, port, timeout), local)
    if silent := ranks.missing("started", seconds):
        raise RuntimeError(f"{silent} of {size} did not start within {seconds} s")
    # What is no tensor goes over gloo, which says in time where a rank does not answer.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=ranks.store, rank=rank, world_size=size, timeout=timeout)
    atexit.register(dist.destroy_process_group)
    return ranks


def _number(name: str, default: int | None, least: int, most: int, what: str) -> int:
    """What the variable of this name says. Raises a ValueError unless it lies in these bounds."""
    value = os.environ.get(name)
    if value is None and default is not None:
        return default
    if value is None or not re.fullmatch("[0-9]{1,7}", value) or not least <= int(value) <= most:
        raise ValueError(
            f"{name} is {'not set' if value is None else repr(value)}: it must be {what}, "
            f"from {least} to {most}"
        )
    return int(value)


def _meet(rank: int, port: int, timeout: timedelta) -> dist.Store:
    """The store through which ranks find one another, kept at that port by torchrun or by rank 0."""
    host, seconds = os.environ["MASTER_ADDR"], timeout.total_seconds()
    found: list[dist.Store | Exception] = []

    def look() -> None:
        try:
            found.append(next(dist.rendezvous("env://", timeout=timeout))[0])
        except Exception as error:
            found.append(error)

    # torch waits without end for a program at that port that takes the call and says nothing.
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    end = time.monotonic() + seconds + 5
    calls = rank > 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    while looking.is_alive() and time.monotonic() < end:
        looking.join(0.5)
        if calls and looking.is_alive():
            with suppress(OSError), socket.create_connection((host, port), 1):
                calls, end = False, time.monotonic() + min(seconds, PATIENCE)
    store = found[0] if found else TimeoutError("what listens there does not answer")
    if isinstance(store, Exception):
        raise RuntimeError(
            f"the ranks did not meet at {host}:{port} (MASTER_ADDR, MASTER_PORT; LLAMA_MINI_TIMEOUT is "
            f"{seconds:g} s): {store}"
        ) from store
    return store
