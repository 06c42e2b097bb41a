"""How well a checkpoint predicts a text it has not seen: nats per character, whatever its tokenizer."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint import check_weights, load_model, load_tokenizer, open_checkpoint
from ..model import Llama
from .corpus import IGNORED, Window, collate, cut, windows


def loss_sum(model: Llama, batch: Sequence[Window]) -> tuple[Tensor, int]:
    """Sum of -ln p over the targets of a batch, and their number."""
    inputs, targets = collate(batch)
    logits = model(inputs).float().flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, int((targets != IGNORED).sum())


@torch.no_grad()
def evaluate(model: Llama, data: Sequence[Window]) -> float:
    """Sum of -ln p over all windows, in nats."""
    return math.fsum(loss_sum(model, batch)[0].item() for batch in cut(data, 8192))


def evaluate_folder(folder: Path, held: Sequence[str]) -> tuple[float, float]:
    """Held-out loss of a checkpoint in float32: nats per character, nats per token. A `ValueError` for
    weights that are NaN or infinite.
    """
    checkpoint = open_checkpoint(folder)
    model, tokenizer = load_model(checkpoint, dtype=torch.float32), load_tokenizer(checkpoint)
    check_weights(model, checkpoint)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    if bos is None or eos is None:
        raise ValueError(f"{folder}: its tokenizer names no BOS or no EOS, which the loss needs")
    documents = [[bos, *tokenizer.encode(text, bos=False), eos] for text in held]
    total = evaluate(model, windows(documents, model.config.max_position_embeddings))
    return total / sum(map(len, held)), total / sum(len(ids) - 1 for ids in documents)
