"""Perplexity: transformers' number on the same windows, and what a window is."""

import math
import os
from pathlib import Path

import pytest
import torch

from llama_mini import load_model, load_tokenizer
from llama_mini.inspect.__main__ import main
from llama_mini.inspect.perplexity import Loss, loss, sizes, windows
from tests.support.fixtures import random_llama, require

TEXT = "The quick brown fox jumps over the lazy dog. Once upon a time there was a little girl. " * 9


def of_transformers(model: torch.nn.Module, ids: list[int], window: int, stride: int) -> float:
    """As its guide computes it, with the number of predicted tokens that each loss is a mean of."""
    nats, tokens, before = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        inputs = torch.tensor([ids[begin:end]])
        targets = inputs.clone()
        targets[:, : -(end - before)] = -100
        predicted = int((targets[:, 1:] != -100).sum())
        with torch.no_grad():
            nats += model(inputs, labels=targets).loss.double().item() * predicted
        tokens, before = tokens + predicted, end
        if end == len(ids):
            break
    assert tokens == len(ids) - 1
    return math.exp(nats / tokens)


@pytest.mark.parametrize(("window", "stride"), [(None, None), (32, 7), (16, 15), (128, 100)])
def test_the_number_is_that_of_transformers(
    checkpoint: Path, tmp_path: Path, capsys, window: int | None, stride: int | None
) -> None:
    transformers = require("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    sized = [f"--{n}={v}" for n, v in (("window", window), ("stride", stride)) if v]
    assert main(["perplexity", str(text), "--model", str(checkpoint), *sized]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    found = {name: value.strip() for name, value in rows.items()}
    ids = load_tokenizer(checkpoint).encode(TEXT)
    assert len(ids) > 2 * 128
    window, stride = window or 128, stride or (window or 128) // 2
    expected = of_transformers(model.eval(), ids, window, stride)
    ours = loss(
        load_model(checkpoint, dtype=torch.float32), torch.tensor([ids]), window, stride
    ).perplexity
    assert ours == pytest.approx(expected, rel=1e-6)  # seen 1.0e-7
    assert found["perplexity"] == f"{ours:,.4f}"
    assert found["tokens predicted"] == str(len(ids) - 1)
    assert found["window, stride"].split()[:2] == [f"{window},", str(stride)]
    per_character = float(found["nats per character"]) * len(TEXT)
    assert per_character == pytest.approx(math.log(expected) * (len(ids) - 1), abs=5e-5 * len(TEXT))


@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 30])
@pytest.mark.parametrize(("window", "stride"), [(8, 4), (8, 7), (8, 1), (2, 1), (30, 3)])
def test_every_token_but_the_first_is_predicted_once(length: int, window: int, stride: int) -> None:
    predicted = []
    for begin, end, first in windows(length, window, stride):
        assert end - begin <= window
        assert first > begin
        assert begin == 0 or first - begin >= window - stride  # so much context at least
        predicted += range(first, end)
    assert predicted == [*range(1, length)]


def test_a_model_that_knows_nothing_has_the_size_of_its_vocabulary() -> None:
    model = random_llama()
    model.lm_head.weight.data.zero_()
    assert loss(model, torch.tensor([[1, 2, 3, 4, 5]]), 4, 2).perplexity == pytest.approx(
        64, rel=1e-6
    )
    assert Loss(math.log(2) * 3, 3).perplexity == pytest.approx(2)


def test_sizes_follow_from_the_context() -> None:
    config = random_llama(max_position_embeddings=4096).config
    assert sizes(config, None, None) == (1024, 512)
    assert sizes(config, 4096, None) == (4096, 2048)
    assert sizes(random_llama().config, None, 100) == (256, 100)
    for window, stride in ((1, None), (4097, None), (8, 0), (8, 8)):
        with pytest.raises(ValueError, match=rf"{stride if stride is not None else window}:"):
            sizes(config, window, stride)


def test_bad_input_is_one_line(checkpoint: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").write_text("")
    (tmp_path / "text").write_text(TEXT)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name, values in {
        "gone": [str(tmp_path / "gone")],
        ".": [f"{tmp_path} is a folder"],
        "pipe": [f"{tmp_path / 'pipe'} is a pipe"],
        "/dev/null": ["/dev/null is a device"],
        "link": [f"{tmp_path / 'link'} is a link"],
        "binary": [str(tmp_path / "binary"), "UTF-8"],
        "empty": ["1", "2"],
        "text --window 129": ["--window 129", "128"],
        "text --dtype float16 --model nowhere": ["'nowhere'"],
    }.items():
        file, *options = name.split()
        arguments = ["perplexity", str(tmp_path / file), "--model", str(checkpoint), *options]
        assert main(arguments) == 1, name
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1), name
        assert all(value in err for value in values), err


def test_standard_input_is_not_read(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["perplexity", "-", "--model", "nowhere"]) == 1
    assert "standard input" in capsys.readouterr().err
    Path("-").write_bytes(b"\xff")  # a file of that name is one
    assert main(["perplexity", "-", "--model", "nowhere"]) == 1
    assert "- is not text in UTF-8" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_refused(checkpoint: Path) -> None:
    model = load_model(checkpoint, dtype=torch.float32)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.lm_head.weight.data[3] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        loss(model, torch.tensor([[1, 2, 3]]), 3, 1)
