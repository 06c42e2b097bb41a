"""The same small Llama with RMSNorm, with LayerNorm, and without the norm in front of the head."""

from torch import nn

from ..config import LlamaConfig
from ..model import Llama, RMSNorm
from .recipe import Recipe
from .side_by_side import Comparison
from .step import initialise, make_optimizers


def build(variant: str, config: LlamaConfig, seed: int) -> Llama:
    """A freshly initialised model; equal weights in all variants of a seed."""
    model = Llama(config, norm=nn.LayerNorm if variant == "LayerNorm" else RMSNorm)
    if variant.endswith("no final norm"):
        model.final_norm = nn.Identity()
    initialise(model, seed)
    return model


NORMS = Comparison(
    name="norms",
    variants=("RMSNorm", "LayerNorm", "RMSNorm, no final norm"),
    build=build,
    optimizers=make_optimizers,
    recipe=Recipe(
        vocab_size=1024,
        context=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        steps=500,
        warmup=50,
        decay=250,
        batch_tokens=2048,
        precision="float32",
    ),
)
