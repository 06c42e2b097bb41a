"""A tiny decoder whose parts all matter."""

from dataclasses import replace

import torch

from llama_mini import Llama, LlamaConfig
from llama_mini.checkpoint import parse_config
from tests.support.fixtures import BASE, strengthen

TINY = parse_config(BASE)
CONFIG = replace(TINY, vocab_size=61, head_dim=16)  # 16 is not hidden_size over heads


# Logits, of which the largest is 3.3, may differ by this where they should be the same. Observed: 4.5e-6,
# and 4.5e-6 with other kernels (ATEN_CPU_CAPABILITY=default).
CLOSE = 1e-5


def make(config: LlamaConfig = CONFIG) -> Llama:
    """A model whose parts all matter."""
    model = Llama(config).eval()
    strengthen(model, seed=0)
    return model


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found - expected).abs().max().item()
