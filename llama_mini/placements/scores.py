"""Attention's scores other than model.Attend's: capped, with a bias by distance, masked by a sum."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import model
from ..config import LlamaConfig
from .attention import Unrotated


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), which lies within (-cap, cap); None caps nothing."""
    return x if cap is None else torch.tanh(x / cap) * cap


def causal(q: Tensor, k: Tensor) -> Tensor:
    """The mask that None stands for, written out: (1, 1, t, s), the last query sees all keys."""
    t, s = q.shape[2], k.shape[2]
    return torch.ones(1, 1, t, s, dtype=torch.bool, device=q.device).tril(s - t)


class EagerAttend(model.Attend):
    """Attention in the order and dtypes of transformers' eager form; a family may change the scores."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        r = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(r, dim=1), v.repeat_interleave(r, dim=1)
        hidden = ~(causal(q, k) if mask is None else mask)
        scores = self.scores(q, k).masked_fill(hidden, torch.finfo(q.dtype).min)
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5


def slopes(heads: int, device: torch.device) -> Tensor:
    """How fast the scores of each head fall with distance: powers of 2, and odd ones for what is left."""

    def powers(count: int, exponents: Tensor) -> Tensor:
        base = 2 ** -(2 ** -(math.log2(count) - 3))
        return torch.tensor(base, dtype=torch.float32, device=device).pow(exponents)

    near = 2 ** math.floor(math.log2(heads))
    some = powers(near, torch.arange(1, 1 + near, device=device, dtype=torch.int32))
    odd = torch.arange(1, 1 + 2 * (heads - near), 2, device=device, dtype=torch.int32)
    return torch.cat((some, powers(2 * near, odd)))


class AlibiAttend(model.Attend):
    """Attention with ALiBi (arXiv:2108.12409), in the order and dtypes of transformers', which is eager."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        (b, h, t, d), s = q.shape, k.shape[2]
        distance = torch.arange(s, dtype=torch.long, device=q.device)
        alibi = slopes(h, q.device)[:, None, None] * distance
        alibi = alibi.repeat(b, 1, 1).to(q.dtype)
        q, k, v = q.reshape(b * h, t, d), k.reshape(b * h, s, d), v.reshape(b * h, s, d)
        scores = alibi.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=1.0 / math.sqrt(d))
        seen = causal(q[None], k[None]) if mask is None else mask
        low = torch.where(seen, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
        scores = scores.view(b, h, t, s) + low
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.bmm(weights.view(b * h, t, s), v).view(b, h, t, d)


class Alibi(Unrotated):
    """Attention with `AlibiAttend`."""

    by_head = True

    def __init__(self, config: LlamaConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attend = AlibiAttend()


class SumAttend(model.Attend):
    """Attention whose scores that may not be seen get -10,000, in the model's own dtype (GPT)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        seen = (causal(q, k) if mask is None else mask).to(q.dtype)
        scores = q @ k.transpose(-1, -2) / math.sqrt(v.shape[-1])
        return F.softmax(scores * seen - 1e4 * (1 - seen), dim=-1) @ v


class SumAttention(Unrotated):
    """Attention with `SumAttend`."""

    def __init__(self, config: LlamaConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attend = SumAttend()
