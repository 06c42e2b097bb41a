"""Gemma (2024, arXiv:2403.08295): Llama's pre-norm, with a gain of 1 + weight.

    x = x + attention(norm(x))
    x = x + ffn(norm(x))          norm(x) = x / rms(x) * (1 + weight)

Beside it: embeddings times sqrt(m), GELU in the gate, a tied head, heads of a size of their own.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .. import model
from ..config import SIZES
from .family import Family
from .keys import SHARED, read
from .llama import NAMES
from .parts import ACTIVATIONS, GLU, FamilyConfig, OnePlusRMSNorm, WindowConfig, Windowed


class Block(model.Block):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.ffn = GLU(config, ACTIVATIONS[config.hidden_act])


class Gemma(Windowed):
    """All blocks see all keys here; those of its successors, which build on this, are of two kinds."""

    def __init__(self, config: WindowConfig, block: type[nn.Module] = Block) -> None:
        super().__init__(config, OnePlusRMSNorm, block)

    def embedding(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        # Rounded to x's dtype first: 55.4 is 55.5 in bfloat16.
        return x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype, device=x.device)


READ = SHARED | frozenset({"attention_bias", "hidden_act"})
# What the three Gemmas share.
DEFAULTS: dict[str, Any] = {
    "required": (*SIZES, "num_key_value_heads"),
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def _config(given: dict[str, Any]) -> WindowConfig:
    if given.get("hidden_act") == "gelu":  # as the first configs said, and meant the tanh form
        given = {**given, "hidden_act": "gelu_pytorch_tanh"}
    return read(WindowConfig, given, READ, layer_types=("full_attention",), **DEFAULTS)


FAMILY = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    model=Gemma,
    config=_config,
    keys=READ,
    reads=frozenset({"use_bidirectional_attention"}),
    names=NAMES,
)
