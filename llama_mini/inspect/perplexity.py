"""How well a model predicts a text: perplexity in windows that overlap, so that every token has context.

As in transformers' guide to perplexity: a window moves over the text by a stride, and of each window
only the tokens count that none before it has predicted. The first token of the text is not predicted.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import LlamaConfig
from ..model import Llama

WINDOW = 1024  # tokens, where the context is longer: the logits of a window are in memory together


class Loss(NamedTuple):
    """Sum of -ln p over the predicted tokens, and their number."""

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.tokens)


def sizes(config: LlamaConfig, window: int | None, stride: int | None) -> tuple[int, int]:
    """Window and stride: what is given, or what the context allows up to WINDOW, and half a window.

    A `ValueError` for sizes that the model or the method cannot have.
    """
    most = config.context()
    window = min(most, WINDOW) if window is None else window
    if not 2 <= window <= most:
        raise ValueError(
            f"--window {window}: it must lie between 2 and the context of {most} tokens"
        )
    stride = max(1, window // 2) if stride is None else stride
    if not 1 <= stride < window:
        raise ValueError(
            f"--stride {stride}: it must lie between 1 and {window - 1}, below the window"
        )
    return window, stride


def windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Begin and end of every window over `length` tokens, and the first that it is to predict."""
    predicted = 1
    for begin in range(0, length, stride):
        end = min(begin + window, length)
        if predicted < end:
            yield begin, end, predicted
        predicted = end
        if end == length:
            return


@torch.no_grad()
def loss(model: Llama, tokens: Tensor, window: int, stride: int) -> Loss:
    """The loss of `model` on a text, tokens (1, t); a `ValueError` where it is not finite."""
    t, sums = tokens.shape[1], []
    if t < 2:
        raise ValueError(
            f"the text has {t} tokens: the first is not predicted, so give it 2 or more"
        )
    for begin, end, predicted in windows(t, window, stride):
        logits = model(tokens[:, begin:end])[0, predicted - begin - 1 : -1].float()
        sums.append(F.cross_entropy(logits, tokens[0, predicted:end], reduction="sum").item())
    if not math.isfinite(math.fsum(sums)):
        raise ValueError(
            "the loss is not finite: the weights are damaged, or their dtype is too narrow"
        )
    return Loss(math.fsum(sums), t - 1)
