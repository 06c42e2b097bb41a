"""llama-mini: a compact Llama-style decoder, written to be read."""

from .cache import KVCache
from .checkpoint import load_model
from .config import LlamaConfig, RopeConfig
from .generation import generate, sample, stream
from .model import Llama, RMSNorm
from .record import compare, record
from .tokenizer import load_tokenizer

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
