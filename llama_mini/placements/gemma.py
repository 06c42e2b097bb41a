"""Gemma (2024, arXiv:2403.08295): Llama's pre-norm, with a gain of 1 + weight.

    x = x + attention(norm(x))
    x = x + ffn(norm(x))          norm(x) = x / rms(x) * (1 + weight)

Beside it: embeddings times sqrt(m), GELU in the gate, a tied head, heads of a size of their own.
"""

from typing import Any

import torch
from torch import Tensor

from .base import FamilyBlock, WindowConfig, Windowed
from .family import family
from .ffn import GLU
from .norms import OnePlusRMSNorm


class Block(FamilyBlock):
    ffn_class = GLU


class Gemma(Windowed):
    """All blocks see all keys here; those of its successors, which build on this, are of two kinds."""

    def embedding(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        # Rounded to x's dtype first: 55.4 is 55.5 in bfloat16.
        return x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype, device=x.device)


def tanh_form(given: dict[str, Any]) -> dict[str, Any]:
    """The first configs said gelu, and meant its tanh form."""
    return {"hidden_act": "gelu_pytorch_tanh"} if given.get("hidden_act") == "gelu" else {}


# What the three Gemmas share.
DEFAULTS: dict[str, Any] = {
    "required": ("num_key_value_heads",),
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
FAMILY = family(
    "gemma",
    "GemmaForCausalLM",
    Gemma,
    OnePlusRMSNorm,
    Block,
    WindowConfig,
    keys={"attention_bias", "hidden_act"},
    fields=tanh_form,
    reads={"use_bidirectional_attention"},
    **DEFAULTS,
)
