"""What the command lines share: errors in one line, the choice of a device, peak memory."""

import contextlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

DEVICES = ("auto", "cpu", "cuda", "mps")


def run_command(command: Callable[[], int | None], who: str = "") -> int:
    """Run a command line; its exit code, after one line to standard error for whatever went wrong.

    130 after Ctrl-C; 0 when the reader of standard output has gone. `who` begins the line.
    """
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another
    try:
        code = command() or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # nothing more can be written, not even by Python at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        reason = " ".join(str(error).split()) or type(error).__name__
        # What a file says may end up in it: no escape codes to the terminal, and no end of it.
        reason = "".join(c if c.isprintable() else "\ufffd" for c in reason)
        reason = reason if len(reason) <= 4000 else f"{reason[:4000]} ..."
        print(f"error: {who}{reason}", file=sys.stderr)
        return 1


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
