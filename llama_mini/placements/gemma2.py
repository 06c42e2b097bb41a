"""Gemma 2 (2024, arXiv:2408.00118): Gemma 3's norms, with capped scores in place of QK-norm.

    x = x + norm2(attention(norm1(x)))
    x = x + norm4(ffn(norm3(x)))          norm(x) = x / rms(x) * (1 + weight)

Beside it: scores and logits kept within a cap by tanh, every second block with a window of keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import model
from . import gemma, gemma3
from .family import Family
from .keys import read, read_windows, renamed
from .parts import causal, softcap


@dataclass(frozen=True)
class Gemma2Config(gemma3.Gemma3Config):
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0


class Attend(model.Attend):
    """Attention with capped scores, in the order and dtypes of transformers' eager form, its default."""

    def __init__(self, config: Gemma2Config) -> None:
        super().__init__()
        self.factor = config.query_pre_attn_scalar**-0.5
        self.cap = config.attn_logit_softcapping

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        r = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(r, dim=1), v.repeat_interleave(r, dim=1)
        scores = softcap(q @ k.transpose(-1, -2) * self.factor, self.cap)
        hidden = ~(causal(q, k) if mask is None else mask)
        scores = scores.masked_fill(hidden, torch.finfo(q.dtype).min)
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


class Block(gemma3.Block):
    def __init__(self, config: Gemma2Config, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention.attend = Attend(config)


class Gemma2(gemma3.Gemma3):
    def __init__(self, config: Gemma2Config) -> None:
        super().__init__(config, Block)


READ = gemma3.READ | {"attn_logit_softcapping"}


def _config(given: dict[str, Any]) -> Gemma2Config:
    given = renamed(given, {"hidden_activation": "hidden_act"})
    windows = read_windows(given, lambda n: n % 2 == 1)
    return read(Gemma2Config, given, READ, **gemma.DEFAULTS, **windows)


FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    model=Gemma2,
    config=_config,
    keys=READ | gemma3.WINDOWS | {"hidden_activation"},
    reads=frozenset({"use_bidirectional_attention"}),
    names=gemma3.NAMES,
    nullable=gemma3.FAMILY.nullable | {"attn_logit_softcapping"},
)
