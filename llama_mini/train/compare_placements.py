"""The same small Llama with its norms in other places: what trains, and what reaches the bottom.

f is attention, then the FFN; N is a norm of its own at each place.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import LlamaConfig
from ..model import Block, Llama, RMSNorm
from .recipe import Recipe
from .side_by_side import Comparison


class Placed(Block):
    """A block whose norms are those in `places`, in the place of model.py's two."""

    places: tuple[str, ...] = ()
    attention_in: nn.Module
    attention_out: nn.Module
    ffn_in: nn.Module
    ffn_out: nn.Module

    def __init__(self, config: LlamaConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        del self.pre_attention_norm, self.pre_ffn_norm
        for place in self.places:
            self.add_module(place, norm(config.hidden_size, config.rms_norm_eps))


class PostNorm(Placed):
    """x = N(x + f(x)): on the stream itself (the first Transformer)."""

    places = ("attention_out", "ffn_out")

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = self.attention_out(x + self.attention(x, *how))
        return self.ffn_out(x + self.ffn(x))


class Sandwich(Placed):
    """x = x + N(f(N(x))): before and behind each sublayer (Gemma 2)."""

    places = ("attention_in", "attention_out", "ffn_in", "ffn_out")

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = x + self.attention_out(self.attention(self.attention_in(x), *how))
        return x + self.ffn_out(self.ffn(self.ffn_in(x)))


class Behind(Placed):
    """x = x + N(f(x)): behind each sublayer, on the branch; with QK-norm it is OLMo 2's."""

    places = ("attention_out", "ffn_out")

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = x + self.attention_out(self.attention(x, *how))
        return x + self.ffn_out(self.ffn(x))


class SideBySide(Placed):
    """x = x + attention(N(x)) + ffn(N(x)): both sublayers read the same stream (GPT-NeoX)."""

    places = ("attention_in", "ffn_in")

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        delta = self.attention(self.attention_in(x), *how)
        return x + delta + self.ffn(self.ffn_in(x))


class NoNorm(Placed):
    """x = x + f(x)."""

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = x + self.attention(x, *how)
        return x + self.ffn(x)


BLOCKS: dict[str, type[Block]] = {
    "pre-norm": Block,
    "post-norm": PostNorm,
    "sandwich": Sandwich,
    "behind": Behind,
    "OLMo 2": Behind,
    "side by side": SideBySide,
    "none": NoNorm,
}
WITHOUT_FINAL_NORM = ("post-norm", "none")  # the one ends in a norm, the other has none at all
QK_NORM = ("OLMo 2",)  # without it, scores grow with the square of the stream, which no norm levels


def build(variant: str, config: LlamaConfig, seed: int) -> Llama:
    """A freshly initialised model; equal matrices in all variants of a seed.

    Embeddings have a standard deviation of 1 and matrices one of fan_in^-1/2, so that every sublayer
    gives what it reads about its own scale. The embedding is not tied: its scale is not the head's.
    """
    config = replace(config, tie_word_embeddings=False, qk_norm=variant in QK_NORM)
    model = Llama(config, RMSNorm, BLOCKS[variant])
    if variant in WITHOUT_FINAL_NORM:
        model.final_norm = nn.Identity()
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 1.0 if name == "embed.weight" else p.shape[1] ** -0.5
            nn.init.normal_(p, std=std, generator=generator)
    return model


def adamw(model: Llama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW for everything: Muon levels every matrix's update, and with it what a placement changes."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return [torch.optim.AdamW(groups, recipe.learning_rate, betas=(0.9, 0.95), fused=True)]


PLACEMENTS = Comparison(
    name="placements",
    variants=tuple(BLOCKS),
    build=build,
    optimizers=adamw,
    recipe=Recipe(
        vocab_size=512,
        context=64,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        held_out=40,
        steps=500,
        warmup=10,
        decay=250,
        batch_tokens=512,
        precision="float32",
    ),
    learning_rates=(1e-3, 1e-2),
)
