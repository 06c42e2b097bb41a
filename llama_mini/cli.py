"""What the command lines share: errors in one line, Ctrl-C and SIGTERM, text on a terminal, the choice of
device and dtype, peak memory.
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
from typing import Any, TextIO, TypeVar

import torch

T = TypeVar("T")
D = TypeVar("D")
DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "bfloat16", "float16")
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
    _asked.clear()

    def stop_here(number: int) -> None:
        _asked.append(number)
        stop(number)

    try:
        with on_stop(stop_here), notes(who in ("", "rank 0: ")):
            code = _run(command, who)
        return 128 + _asked[0] if _asked else code
    except KeyboardInterrupt as stopped:
        return 128 + next(iter(stopped.args), signal.SIGINT)


_asked: list[int] = []  # the signals that asked this command to stop


def heed() -> None:
    """Raise the stop that was asked for, for long loops: a library that takes every error for an answer,
    as some in other languages do, can lose it on its way.
    """
    if _asked:
        stop(_asked[0])


def _run(command: Callable[[], int | None], who: str) -> int:
    code = 0
    try:
        code = command() or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        silence(sys.stdout, sys.stderr)
        return code
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError, ArithmeticError) as error:
        if _asked:  # some libraries make another error of the stop
            return 1
        try:
            sys.stdout.flush()
        except OSError:
            silence(sys.stdout)
        say(f"error: {who}{reason(error)}")
        return 1


def stop(number: int) -> None:
    raise KeyboardInterrupt(number)


@contextmanager
def on_stop(act: Callable[[int], None]) -> Iterator[None]:
    """Within it, Ctrl-C and SIGTERM call `act` with their number, once.

    A signal within one second of the first is ignored, because timeout and torchrun send it twice. A
    later one goes to the previous handler.
    """
    if not _in_main_thread():
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


class Interruptible:
    """While it is entered, Ctrl-C ends what `attempt` is doing, at most once, and nothing else."""

    def __init__(self) -> None:
        self._armed = False
        self._before: Any = None

    def __enter__(self) -> "Interruptible":
        if _in_main_thread() and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def attempt(self, act: Callable[[], T], otherwise: D) -> T | D:
        """What `act` returns, or `otherwise` where Ctrl-C ended it. SIGTERM passes through."""
        try:
            self._armed = True
            return act()
        except KeyboardInterrupt as stopped:
            if stopped.args:  # SIGTERM, with its number
                raise
            return otherwise
        finally:
            self._armed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            # One press, one end: the next may come while this one is still being cleared away.
            self._armed = False
            raise KeyboardInterrupt


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()  # signals come to that one only


# Control characters but newline and tab: what a terminal would obey.
ESCAPED = {c: f"\\x{c:02x}" for c in (*range(0x20), *range(0x7F, 0xA0)) if c not in b"\n\t"}


def show(text: str) -> None:
    """Text to standard output at once. A terminal shows its control characters escaped:
    otherwise a model or a file could control it. A file or a pipe gets the text as it is.
    """
    print(text.translate(ESCAPED) if sys.stdout.isatty() else text, end="", flush=True)


def read_input() -> str:
    """Standard input up to its end, less the line break there."""
    if sys.stdin is None:
        raise ValueError("standard input is to be read, and it is closed")
    return decoded(sys.stdin.buffer.read())


def read_line() -> str | None:
    """The next line of standard input, None at its end."""
    if sys.stdin is None:
        raise ValueError("standard input is to be read, and it is closed")
    data = sys.stdin.buffer.readline()
    return decoded(data) if data else None


def decoded(data: bytes) -> str:
    """UTF-8 as text, less a line break at its end."""
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from None


def say(line: str) -> None:
    """A line to standard error; on a terminal it overwrites the progress line."""
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
        return f"standard output cannot be written: {error.strerror}"  # checkpoint/files.py names its files
    # The text may quote a file: no control characters reach the terminal, and the length is limited.
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= 4000 else f"{text[:4000]} ..."


def silence(*streams: TextIO) -> None:
    """Nothing more can be written to these, not even by Python at its exit."""
    for stream in streams:
        with suppress(OSError):  # a test's stand-in, which is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def require_place(path: Path, option: str) -> None:
    """Raise a `ValueError` unless a file can be put at `path`, which `option` asks for. A command calls it
    before the work whose result it is to write.
    """
    folder = path.resolve().parent  # a link stays, and the file that it leads to is replaced
    # Not Path's own questions: they raise where a folder above may not be looked into.
    if os.path.exists(path) and not os.path.isfile(path):
        what = "a folder" if os.path.isdir(path) else "a pipe or a device"
        raise ValueError(f"{option} {path} is {what}: name a file")
    if not os.path.isdir(folder):
        raise ValueError(f"{option} {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {path}: nothing can be written in {folder}")


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
    if name == "cuda":
        # cuDNN plans anew for every key length, and in generation every step has a new one.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(name)


def choose_dtype(
    name: str, device: torch.device, own: str | None
) -> tuple[torch.dtype | None, str]:
    """The dtype asked for, and a note where it is another. For auto float32 on the CPU, and elsewhere
    the checkpoint's `own` (None: left to the weights).
    """
    if name == "auto" and device.type == "cpu":
        return torch.float32, ""
    wanted, note = own if name == "auto" else name, ""
    if wanted == "bfloat16" and not has_bfloat16(device):
        wanted, note = "float16", f"note: this {device.type} has no bfloat16; using float16"
    return getattr(torch, wanted) if wanted else None, note


def has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" or torch.backends.mps.is_macos_or_newer(14, 0)


def require_seed(seed: int | None) -> None:
    """Raise a `ValueError` for a seed that torch does not take."""
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"--seed {seed}: it must lie between 0 and 2^63 - 1")


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
