"""llama-mini: a compact Llama-style decoder, written to be read."""

import os
import signal
import sys
import traceback
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _command() -> str:
    """The name of our command that this process runs; "" where another program imports the package."""
    program = Path(sys.argv[0] if getattr(sys, "argv", None) else "")
    if program.name == "-m":  # and the module is being looked for
        words = [word.removeprefix("-m") for word in sys.orig_argv]
        return next((word for word in words if word.split(".")[0] == "llama_mini"), "")
    ours = program.stem == "llama-mini" or program.resolve() == _HERE.parent / "generate.py"
    return program.stem if ours else ""


if _running := _command():
    moved = {"record": "record (or compare)", "norm_report": "norms"}
    if now := moved.get(_running.split(".")[-1]):
        sys.exit(f"error: {_running} has moved: python -m llama_mini.inspect {now}")
    for each in (signal.SIGINT, signal.SIGTERM):
        # torch takes seconds to import, and nothing is lost yet.
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, lambda number, frame: os._exit(128 + number))
    if "RANK" in os.environ:  # of a rank that ends, torch would tell each other one in 16 lines
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

try:
    from .cache import KVCache
    from .checkpoint import load_model, load_tokenizer, read_config, save_model
    from .config import LlamaConfig, RopeConfig
    from .generation import generate, sample, stream
    from .inspect.record import compare, record
    from .model import Llama, RMSNorm
except (ImportError, OSError) as error:  # a package is missing, or its library cannot be loaded
    if not _running:
        raise
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame.line for frame in frames if Path(frame.filename).is_relative_to(_HERE)]
    sys.exit(f"error: {ours[-1]!r} failed: {' '.join(f'{type(error).__name__}: {error}'.split())}")

__version__ = "0.1.0"

__all__ = [
    "KVCache",
    "Llama",
    "LlamaConfig",
    "RMSNorm",
    "RopeConfig",
    "compare",
    "generate",
    "load_model",
    "load_tokenizer",
    "read_config",
    "record",
    "sample",
    "save_model",
    "stream",
]
