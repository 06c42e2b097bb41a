"""The text as windows and batches, and the loss over them."""

import pytest
import torch
import torch.nn.functional as F

from llama_mini import load_model, load_tokenizer
from llama_mini.train.corpus import (
    BOS,
    EOS,
    IGNORED,
    Window,
    collate,
    encode,
    read_documents,
    shuffled,
    train_tokenizer,
    windows,
)
from llama_mini.train.evaluation import evaluate
from tests.support.training import TINY


def test_loss_is_that_of_one_document_at_a_time(text, trained):
    _, held = read_documents(text, TINY.held_out)
    model, tokenizer = load_model(trained, dtype=torch.float32), load_tokenizer(trained)
    documents = [[BOS, *tokenizer.encode(d, bos=False), EOS] for d in held]
    short = [ids for ids in documents if len(ids) <= TINY.context + 1]
    assert 2 <= len(short) < len(documents)
    total = 0.0
    for ids in short:
        tokens = torch.tensor(ids)
        with torch.no_grad():
            total += F.cross_entropy(
                model(tokens[None, :-1])[0], tokens[1:], reduction="sum"
            ).item()
    # observed difference 1e-7 relative: batches are filled up, which must not count
    assert evaluate(model, windows(short, TINY.context)) == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("length", [2, 8, 9, 10, 12, 13, 14, 31])
def test_every_token_is_predicted_once_with_enough_before_it(length):
    ids = list(range(100, 100 + length))
    predicted = []
    for window in windows([ids], context=8):
        assert len(window.ids) <= 9
        assert window.ids == ids[ids.index(window.ids[0]) :][: len(window.ids)]
        assert window.first == 1 or window.first >= 4
        predicted += window.ids[window.first :]
    assert predicted == ids[1:]


def test_collate_ignores_filling_and_what_was_predicted_before():
    inputs, targets = collate([Window([1, 5, 6, 2], 1), Window([7, 8, 9], 2)])
    assert inputs.tolist() == [[1, 5, 6], [7, 8, EOS]]
    assert targets.tolist() == [[5, 6, 2], [IGNORED, 9, IGNORED]]


def test_an_epoch_holds_every_window_once_in_batches_of_bounded_size(text):
    kept, _ = read_documents(text, 8)
    data = encode(train_tokenizer(kept, 340), kept, 32)
    orders = []
    for _ in range(2):
        seen, batches = [], shuffled(data, 128, seed=3)
        while len(seen) < 2 * len(data):
            batch = next(batches)
            assert len(batch) * max(len(window.ids) - 1 for window in batch) <= 128
            seen += [tuple(window.ids) for window in batch]
        orders.append(seen)
    everything = sorted(tuple(window.ids) for window in data)
    first, second = orders[0][: len(data)], orders[0][len(data) :]
    assert sorted(first) == sorted(second) == everything
    assert first != second
    assert orders[0] == orders[1]
