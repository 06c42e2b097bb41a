"""A text file as training data: documents, a tokenizer, windows of tokens, batches in a fixed order."""

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import sentencepiece
import torch
from torch import Tensor

from ..checkpoint.untrusted import require_file

BOS, EOS = 1, 2
IGNORED = -100  # cross_entropy's mark for a target that does not count


class Window(NamedTuple):
    """Consecutive tokens of one document; those from `first` on are predicted."""

    ids: list[int]
    first: int


def read_documents(path: Path, held_out: int) -> tuple[list[str], list[str]]:
    """The documents of a UTF-8 text, each ended by a line `<|endoftext|>`: all but the last
    `held_out`, and those. A `ValueError` when there is nothing to train on.
    """
    require_file(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}"
        ) from None
    parts = re.split(r"^<\|endoftext\|>$", text, flags=re.MULTILINE)
    documents = [part for part in (part.strip("\n") for part in parts) if part]
    if len(documents) <= held_out:
        raise ValueError(
            f"{path} holds {len(documents)} documents, and {held_out} are to be held out: give a "
            "longer text, with a line <|endoftext|> after each document, or a smaller --held-out"
        )
    return documents[:-held_out], documents[-held_out:]


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> bytes:
    """A SentencePiece model file: BPE, bytes for what it has not seen, digits one by one."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(documents),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",  # what is decoded is what was encoded
            remove_extra_whitespaces=False,
            character_coverage=1.0,
            max_sentence_length=1 << 24,
            unk_id=0,
            bos_id=BOS,
            eos_id=EOS,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        # The library names the size that would do; its own flags say nothing to our reader.
        size = re.search(r"<= (\d+)", str(error)) or re.search(r"vs (\d+)", str(error))
        hint = f" ({'at most' if '<=' in size[0] else 'at least'} {size[1]})" if size else ""
        raise ValueError(
            f"--vocab-size {vocab_size} does not suit a text of {sum(map(len, documents))} "
            f"characters{hint}"
        ) from None
    return model.getvalue()


def encode(tokenizer: bytes, documents: Sequence[str], context: int) -> list[Window]:
    """The windows of the documents, each from BOS to EOS, by the tokenizer in a model file."""
    model = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    return windows([[BOS, *ids, EOS] for ids in model.encode(list(documents))], context)


def windows(documents: Sequence[list[int]], context: int) -> list[Window]:
    """Every document of ids from its start; where one is longer than the context, what is left over
    goes into further windows, half a context of new tokens each, behind tokens seen before.
    """
    result = []
    for ids in documents:
        result.append(Window(ids[: context + 1], 1))
        for start in range(context + 1, len(ids), context // 2):
            end = min(start + context // 2, len(ids))
            result.append(Window(ids[end - context - 1 : end], context + 1 - (end - start)))
    return result


def collate(batch: Sequence[Window]) -> tuple[Tensor, Tensor]:
    """Inputs and next-token targets, both (b, t), filled up on the right to the longest window."""
    t = max(len(window.ids) for window in batch) - 1
    inputs = torch.full((len(batch), t), EOS, dtype=torch.long, device="cpu")
    targets = torch.full_like(inputs, IGNORED)
    for row, (ids, first) in enumerate(batch):
        inputs[row, : len(ids) - 1] = inputs.new_tensor(ids[:-1])
        targets[row, first - 1 : len(ids) - 1] = inputs.new_tensor(ids[first:])
    return inputs, targets


def cut(data: Sequence[Window], tokens: int) -> list[list[Window]]:
    """Batches of windows of about the same length, at most `tokens` tokens with the filling."""
    batches: list[list[Window]] = []
    for window in sorted(data, key=lambda window: len(window.ids)):
        # Sorted, so the newest window is the longest.
        if not batches or (len(window.ids) - 1) * (len(batches[-1]) + 1) > tokens:
            batches.append([])
        batches[-1].append(window)
    return batches


def permuted(length: int, generator: torch.Generator) -> list[int]:
    return torch.randperm(length, generator=generator, dtype=torch.long, device="cpu").tolist()


def shuffled(data: Sequence[Window], tokens: int, seed: int) -> Iterator[list[Window]]:
    """Batches without end; `seed` alone decides their order, which is new in every epoch.

    Lengths are sorted within pools of 2048 shuffled windows: little filling, all lengths mixed.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = permuted(len(data), generator)
        for start in range(0, len(order), 2048):
            batches = cut([data[i] for i in order[start : start + 2048]], tokens)
            for i in permuted(len(batches), generator):
                yield batches[i]
