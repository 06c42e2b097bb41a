"""The families that load, by `model_type`."""

from .family import Family
from .llama import LLAMA, MISTRAL
from .qwen3 import QWEN3

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN3)}

__all__ = ["FAMILIES", "Family"]
