"""Rotary position embedding (RoFormer, Su et al. 2021, arXiv:2104.09864).

A head of size d is d/2 pairs of numbers; at position p, pair i is turned by the angle p * theta^(-2i/d).
Which two numbers make a pair is a matter of layout, and checkpoints come in two:

    half-split (Hugging Face)   pair i = x[i], x[i + d/2]     what `rotate` expects
    interleaved (Meta)          pair i = x[2i], x[2i + 1]     checkpoint/meta.py re-orders q and k

A dot product does not care in which order its terms stand, so re-ordering the rows of q and of k alike,
once when they are loaded, turns one layout into the other and leaves every attention score as it is.
"""

import math

import torch
from torch import Tensor

from .config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of every pair, in radians, scaling applied: (d/2,) float32, on the CPU.

    On a GPU the last bit of the power differs; at position 100,000 that is an error of 0.01 radian.

    Scaling: `linear` divides every frequency by the factor (Chen et al. 2023, arXiv:2306.15595);
    `llama3` keeps the fast pairs, divides the slow ones, and blends in between (Llama 3.1,
    arXiv:2407.21783).
    """
    exponents = torch.arange(0, head_dim, 2, device="cpu", dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.rope_theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        wavelengths = 2 * math.pi / frequencies
        longest_kept = rope.original_max_position_embeddings / rope.high_freq_factor
        shortest_divided = rope.original_max_position_embeddings / rope.low_freq_factor
        turns = rope.original_max_position_embeddings / wavelengths
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
        divided = torch.where(wavelengths > shortest_divided, frequencies / rope.factor, blended)
        return torch.where(wavelengths < longest_kept, frequencies, divided)
    return frequencies


def cos_sin(
    rope: RopeConfig, head_dim: int, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every pair at `positions` (t,) or (b, t): two (1 or b, 1, t, d/2) of `dtype`.

    Made anew from the positions on each forward, in float32, and cast last: a stored table would be
    cast by `model.to(torch.bfloat16)`, which cannot tell position 256 from 257.
    """
    frequencies = inverse_frequencies(rope, head_dim)
    frequencies = frequencies.to(positions.device, non_blocking=positions.is_cuda)  # no wait
    angles = positions[..., None].float() * frequencies
    angles = angles.view(-1, 1, *angles.shape[-2:])
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every half-split pair of queries or keys `x` (b, h, t, d) by its angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
