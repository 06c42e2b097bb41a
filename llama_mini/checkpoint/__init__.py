"""From a folder or hub name to a config, weights, a tokenizer and a chat prompt."""

from .chat import chat_prompt
from .configs import parse_config
from .memory import require_memory
from .opening import Checkpoint, open_checkpoint, read_config
from .saving import save_model
from .tokenizer import load_tokenizer
from .weights import check_weights, load_model

__all__ = [
    "Checkpoint",
    "chat_prompt",
    "check_weights",
    "load_model",
    "load_tokenizer",
    "open_checkpoint",
    "parse_config",
    "read_config",
    "require_memory",
    "save_model",
]
