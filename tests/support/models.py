"""A tiny decoder whose parts all matter."""

import torch

from llama_mini import Llama, LlamaConfig
from tests.support.fixtures import strengthen

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
)


# Logits, of which the largest is 3.6, may differ by this where they should be the same. Observed: 3.1e-6,
# and 3.5e-6 with other kernels (ATEN_CPU_CAPABILITY=default).
CLOSE = 1e-5


def make(config: LlamaConfig = CONFIG) -> Llama:
    """A model whose parts all matter."""
    model = Llama(config).eval()
    strengthen(model, seed=0)
    return model


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found - expected).abs().max().item()
