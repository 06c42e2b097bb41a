"""llama-mini: a compact Llama-style decoder, written to be read."""

import os
import signal
import sys
import warnings

# python -m llama_mini....: torch takes seconds to import, and nothing is lost yet.
if sys.argv[:1] == ["-m"] and any(
    word.removeprefix("-m").startswith("llama_mini.") for word in sys.orig_argv
):
    for each in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, lambda number, frame: os._exit(128 + number))

from .cache import KVCache
from .checkpoint.tokenizer import load_tokenizer
from .checkpoint.weights import load_model
from .config import LlamaConfig, RopeConfig
from .generation import generate, sample, stream
from .inspect.record import compare, record
from .model import Llama, RMSNorm

# `python -m llama_mini.inspect.record` runs a module that is imported above, and Python warns of that.
warnings.filterwarnings(
    "ignore", r"'llama_mini\.inspect\.record' found in sys\.modules", RuntimeWarning
)

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
    "record",
    "sample",
    "stream",
]
