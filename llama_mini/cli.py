"""What the command lines share: errors in one line, Ctrl-C and SIGTERM, the choice of a device, peak
memory.
"""

import errno
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch

DEVICES = ("auto", "cpu", "cuda", "mps")
DISK_FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))


def run_command(command: Callable[[], int | None], who: str = "") -> int:
    """Run a command line; its exit code, after one line to standard error for whatever went wrong.

    130 after Ctrl-C, 143 after SIGTERM. When the reader of standard output has gone, the command's own
    code if it came to its end, or else 0. `who` begins the line.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another
    asked: list[int] = []

    def stop_here(number: int) -> None:
        asked.append(number)
        stop(number)

    try:
        with on_stop(stop_here), notes(who in ("", "rank 0: ")):
            code = _run(command, who, asked)
        return 128 + asked[0] if asked else code
    except KeyboardInterrupt as stopped:
        return 128 + next(iter(stopped.args), signal.SIGINT)


def _run(command: Callable[[], int | None], who: str, asked: list[int]) -> int:
    code = 0
    try:
        code = command() or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _silence(sys.stdout, sys.stderr)
        return code
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError, ArithmeticError) as error:
        if asked:  # some libraries make another error of the stop
            return 1
        try:
            sys.stdout.flush()
        except OSError:
            _silence(sys.stdout)
        say(f"error: {who}{reason(error)}")
        return 1


def stop(number: int) -> None:
    raise KeyboardInterrupt(number)


@contextmanager
def on_stop(act: Callable[[int], None]) -> Iterator[None]:
    """Within it, Ctrl-C and SIGTERM call `act` with their number, once.

    What follows within a second is part of the same wish (timeout and torchrun send it twice) and is
    not to disturb what that has begun; what comes later does what it would have done before.
    """
    if threading.current_thread() is not threading.main_thread():  # they come to that one only
        yield
        return
    first: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        earlier, now = before[signal.Signals(number)], time.monotonic()
        if not first:
            first.append(now)
            act(number)
        elif now - first[0] > 1 and callable(earlier):
            earlier(number, frame)
        elif now - first[0] > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # What is ignored, as by a job in the background, stays so.
    before = {number: was for number, was in found.items() if was not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(line: str) -> None:
    """A line to standard error; on a terminal it takes the place of one of progress."""
    print(f"\r\033[K{line}" if sys.stderr.isatty() else line, file=sys.stderr)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"note: {record.getMessage()}")


@contextmanager
def notes(shown: bool) -> Iterator[None]:
    """Within it, what the package logs is a line each to standard error, or nothing."""
    log = logging.getLogger(__package__)
    handler, before = _Notes() if shown else logging.NullHandler(), log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = before


def reason(error: Exception) -> str:
    """An error as one line for a terminal."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        more = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
        asked = f" ({more[1]} more were asked for)" if more else ""
        return f"out of memory{asked}: take a shorter prompt, fewer new tokens, or a smaller model"
    if isinstance(error, OSError) and error.errno in DISK_FULL and error.filename is None:
        return f"standard output cannot be written: {error.strerror}"  # files.py names its files
    # What a file says may end up in it: no escape codes to the terminal, and no end of it.
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= 4000 else f"{text[:4000]} ..."


def _silence(*streams: TextIO) -> None:
    """Nothing more can be written to these, not even by Python at its exit."""
    for stream in streams:
        with suppress(OSError):  # a test's stand-in, which is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def choose_device(name: str) -> torch.device:
    """The device asked for, or for auto the best that is there; a `ValueError` when it is not."""
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if name == "auto":
        name = next(device for device in ("cuda", "mps", "cpu") if there[device])
    if not there.get(name):
        raise ValueError(f"--device {name}: torch finds no such device here; use --device auto")
    return torch.device(name)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: on the GPU, or of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss counts what the program that started us held
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        if found:
            return int(found[1]) * 1024
    import resource  # which not every system has

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows of cells as lines with columns, the first `left` of them flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)
