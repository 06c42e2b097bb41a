"""Wrong models of every family: each moves a norm, its gain, its statistics, its cast or the order of a
sum, and must give other logits than transformers, in float32 or in bfloat16. The right one gives the same.
"""

import copy
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from llama_mini import Llama, RMSNorm, load_model
from llama_mini.placements import FAMILIES, norms
from llama_mini.placements.gallery import formulas, place
from tests.support.fixtures import draw_tokens
from tests.support.placements import BASE, VARIANTS, reference_logits, write

DTYPES = (torch.float32, torch.bfloat16)
# One of each place stands for the others in a plain run.
PLAIN = "openai-gpt gpt2 gpt_neox phi gemma3_text olmo2 nanochat youtu minimax granite".split()
D = BASE["hidden_size"] // BASE["num_attention_heads"]
Spoil = Callable[[Llama], None]


def norms_of(model: Llama) -> dict[str, nn.Module]:
    """Every norm that is called, by its name."""
    kinds = (RMSNorm, norms.BareRMSNorm, nn.LayerNorm, norms.BareLayerNorm, norms.GainLayerNorm)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def of_block(model: Llama, number: int = 1) -> list[str]:
    return [name for name in norms_of(model) if name.startswith(f"blocks.{number}.")]


# Norms


def drop(name: str) -> Spoil:
    return lambda model: model.set_submodule(name, nn.Identity())


def each_norm(change: Callable[[nn.Module, Tensor, Callable[[Tensor], Tensor]], Tensor]) -> Spoil:
    """Every norm computed otherwise: `change` takes the norm, its input, and what it does now."""

    def spoil(model: Llama) -> None:
        for norm in norms_of(model).values():
            right = norm.forward

            def forward(self: nn.Module, x: Tensor, right: Any = right) -> Tensor:
                return change(self, x, right)

            norm.forward = types.MethodType(forward, norm)  # type: ignore[method-assign]

    return spoil


def wider_gain(norm: nn.Module, x: Tensor, right: Any) -> Tensor:
    return right(x) + (x / x.float().pow(2).mean(-1, keepdim=True).sqrt()).to(x.dtype)


def other_centre(norm: nn.Module, x: Tensor, right: Any) -> Tensor:
    """LayerNorm without the mean taken away; RMSNorm with it."""
    if isinstance(norm, (nn.LayerNorm, norms.BareLayerNorm, norms.GainLayerNorm)):
        variance = x.float().var(-1, keepdim=True, correction=0)
        return right(x) + (x.float().mean(-1, keepdim=True) * variance.rsqrt()).to(x.dtype)
    return right(x - x.mean(-1, keepdim=True))


def sum_for_mean(norm: nn.Module, x: Tensor, right: Any) -> Tensor:
    return right(x) / x.shape[-1] ** 0.5


def rounded_before(norm: nn.Module, x: Tensor, right: Any) -> Tensor:
    """The scale of the input rounded to its dtype before it divides."""
    scale = x.float().pow(2).mean(-1, keepdim=True).rsqrt().to(x.dtype)
    return right(x * scale)


def in_the_other_order(norm: nn.Module, x: Tensor, right: Any) -> Tensor:
    """Rounded before the gain where it is after, and after where it is before."""
    weight, centred = getattr(norm, "weight", None), not isinstance(norm, RMSNorm)
    if weight is None:  # without a gain there is no order
        return right(x)
    if isinstance(norm, norms.AllHeads):
        x = rearrange(x, "b h t d -> b t (h d)")
    x32 = x.float()
    x32 = x32 - x32.mean(-1, keepdim=True) if centred else x32
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + norm.eps)
    gain = 1 + weight if isinstance(norm, norms.OnePlusRMSNorm) else weight
    if type(norm) is RMSNorm:
        return (gain.float() * normed).to(x.dtype)
    y = gain * normed.to(x.dtype)
    if isinstance(norm, norms.AllHeads):
        y = rearrange(y, "b t (h d) -> b h t d", h=y.shape[-1] // D)
    return y + norm.bias if isinstance(norm, nn.LayerNorm) else y


def wrong_eps(model: Llama) -> None:
    for norm in norms_of(model).values():
        if isinstance(norm, norms.BareLayerNorm):
            norm.forward = partial(F.layer_norm, normalized_shape=norm.shape, eps=1e-3)  # type: ignore
        else:
            norm.eps = 100 * norm.eps


def swap_norms(model: Llama) -> None:
    """Two norms of a block in each other's place, or of two blocks where each has but one."""
    first, second = (of_block(model, 0)[0], of_block(model)[0])
    own = [name for name in of_block(model) if name.count(".") == 2]
    if len(own) > 1:
        first, second = own[0], own[-1]
    a, b = model.get_submodule(first), model.get_submodule(second)
    model.set_submodule(first, b)
    model.set_submodule(second, a)


# Places


def block_forward(forward: Callable[..., Tensor]) -> Spoil:
    def spoil(model: Llama) -> None:
        for block in model.blocks:
            block.forward = types.MethodType(forward, block)

    return spoil


def ends_of(block: Any) -> tuple[Callable[[Tensor], Tensor], ...]:
    """The norms in front of and behind each sublayer; where there is none, what does nothing."""
    names = ("pre_attention_norm", "post_attention_norm", "pre_ffn_norm", "post_ffn_norm")
    return tuple(getattr(block, name, nn.Identity()) for name in names)


def as_pre_norm(self: Any, x: Tensor, *how: Any) -> Tensor:
    a, b, c, d = ends_of(self)
    x = x + self.attention(a(b(x)), *how)
    return x + self.ffn(c(d(x)))


def as_norm_behind(self: Any, x: Tensor, *how: Any) -> Tensor:
    a, b, c, d = ends_of(self)
    x = x + a(b(self.attention(x, *how)))
    return x + c(d(self.ffn(x)))


def on_the_stream(self: Any, x: Tensor, *how: Any) -> Tensor:
    a, b, c, d = ends_of(self)
    x = a(b(x + self.attention(x, *how)))
    return c(d(x + self.ffn(x)))


def side_by_side(self: Any, x: Tensor, *how: Any) -> Tensor:
    a, b, c, d = ends_of(self)
    return x + b(self.attention(a(x), *how)) + d(self.ffn(c(x)))


def one_after_the_other(self: Any, x: Tensor, *how: Any) -> Tensor:
    a, b, c, d = ends_of(self)
    x = x + b(self.attention(a(x), *how))
    return x + d(self.ffn(c(x)))


MUTANTS: dict[str, Spoil] = {
    "the first norm of block 1 dropped": lambda model: drop(of_block(model)[0])(model),
    "the last norm of block 1 dropped": lambda model: drop(of_block(model)[-1])(model),
    "the norm nearest the head dropped": lambda model: drop([*norms_of(model)][-1])(model),
    "norms swapped": swap_norms,
    "gain 1 + weight": each_norm(wider_gain),
    "the mean kept or taken": each_norm(other_centre),
    "sum of squares for their mean": each_norm(sum_for_mean),
    "another eps": wrong_eps,
    "rounded before the division": each_norm(rounded_before),
    "the other order of casts": each_norm(in_the_other_order),
    "as pre-norm": block_forward(as_pre_norm),
    "norms behind the sublayers": block_forward(as_norm_behind),
    "norms on the stream": block_forward(on_the_stream),
    "side by side": block_forward(side_by_side),
    "one after the other": block_forward(one_after_the_other),
}
# What is no mutant of a family, since it is the family.
SAME = {
    "pre-norm": {"as pre-norm", "one after the other"},
    "post-norm, on the stream": {"norms on the stream"},
    "behind, inside the residual": {"norms behind the sublayers", "one after the other"},
    "sandwich: before and behind": {"one after the other"},
}
BARE = {"norms swapped", "the other order of casts"}  # without weights


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[pytest.mark.slow] * (n not in PLAIN)) for n in VARIANTS],
)
def right(request, tmp_path_factory) -> tuple[str, list[tuple[Llama, Tensor]], Tensor]:
    """A family's models in both dtypes, with the logits of transformers, and the tokens."""
    name = request.param
    folder: Path = tmp_path_factory.mktemp(name)
    write(name, VARIANTS[name][0], folder)
    tokens = draw_tokens((1, 24), 3, BASE["vocab_size"])
    return (
        name,
        [
            (load_model(folder, dtype=dtype), reference_logits(folder, tokens, dtype))
            for dtype in DTYPES
        ],
        tokens,
    )


@torch.no_grad()
def test_every_mutant_is_caught(right):
    name, models, tokens = right
    assert all(torch.equal(model(tokens), expected) for model, expected in models)
    alive, caught = [], 0
    for mutant, spoil in MUTANTS.items():
        differs = False
        for model, expected in models:
            spoiled = copy.deepcopy(model)
            spoil(spoiled)
            differs |= not torch.equal(spoiled(tokens), expected)
        caught += differs
        if not differs:
            alive.append(mutant)
    bare = name in ("olmo", "nanochat")
    assert set(alive) == SAME.get(place(formulas(FAMILIES[name])), set()) | (
        BARE if bare else set()
    )
    assert caught >= 6
