"""llama-mini: a compact Llama-style decoder, written to be read."""

import os
import signal
import sys

if sys.argv[:1] == ["-m"]:
    words = [word.removeprefix("-m") for word in sys.orig_argv]
    command = next((word for word in words if word.startswith("llama_mini.")), "")
    if now := {"record": "record (or compare)", "norm_report": "norms"}.get(command.split(".")[-1]):
        sys.exit(f"error: {command} has moved: python -m llama_mini.inspect {now}")
    for each in (signal.SIGINT, signal.SIGTERM) if command else ():
        # torch takes seconds to import, and nothing is lost yet.
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, lambda number, frame: os._exit(128 + number))

from .cache import KVCache
from .checkpoint import load_model, load_tokenizer, read_config, save_model
from .config import LlamaConfig, RopeConfig
from .generation import generate, sample, stream
from .inspect.record import compare, record
from .model import Llama, RMSNorm

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
