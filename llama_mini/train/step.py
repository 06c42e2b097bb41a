"""One step of a training: first weights, optimizers, loss, update."""

from collections.abc import Sequence

import torch
from torch import nn

from ..model import Llama
from .corpus import Window
from .evaluation import loss_sum
from .muon import Muon
from .recipe import Recipe


def initialise(model: Llama, seed: int) -> None:
    """Normal weights, but 0 for what is added to the stream: every block begins as the identity."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(p)
        elif p.dim() == 2:
            std = 0.02 if name == "embed.weight" else 0.5 * p.shape[1] ** -0.5
            nn.init.normal_(p, std=std, generator=generator)


def make_optimizers(model: Llama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks; AdamW, without decay, for the embedding and the norms."""
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    taken = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in taken]
    lr, products = recipe.learning_rate, getattr(torch, recipe.precision)
    return [
        Muon(matrices, lr, recipe.weight_decay, products),
        torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train_step(
    model: Llama,
    optimizers: list[torch.optim.Optimizer],
    batch: Sequence[Window],
    lr: float,
    precision: str,
) -> tuple[float, int]:
    """One step of all optimizers: mean loss before it, and the number of tokens. A `ValueError`
    when the loss is not finite; the weights are untouched then.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        total, count = loss_sum(model, batch)
    loss = total / count
    if not loss.isfinite():
        raise ValueError(f"the loss is {loss.item()}: try a lower --learning-rate")
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), count
