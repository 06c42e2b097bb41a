"""The table of results in the room's README, computed anew."""

import re
from pathlib import Path

import pytest
import torch

import llama_mini.inspect
from llama_mini import Llama, load_model, load_tokenizer, record
from llama_mini.inspect.norm_report import norm_rows, outcomes, report
from llama_mini.inspect.picture import plot
from tests.support import smollm2
from tests.support.fixtures import SHIPPED, require

README = Path(llama_mini.inspect.__file__).with_name("README.md").read_text(encoding="utf-8")
PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the"


def column(name: str) -> dict[str, str]:
    """What the table says of a checkpoint, by the first cell of each row."""
    start = README.index("| | stories |")
    lines = README[start : README.index("\n\n", start)].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    at = rows[0].index(name)
    return {row[0]: row[at] for row in rows[2:]}


def attention_to_the_first(model: Llama, tokens: torch.Tensor) -> tuple[float, float]:
    """What the later half of the positions gives to position 0, in the block where that is most; and what
    that would be if attention were spread evenly.
    """
    shares, t = [], tokens.shape[1]
    hidden = ~torch.ones(t, t, dtype=torch.bool).tril()
    seen = record(model, tokens, ["blocks.*.attention.[qk]"])
    for n in range(len(model.blocks)):
        q, k = (seen[f"blocks.{n}.attention.{letter}"] for letter in "qk")
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        shares.append(scores.softmax(-1)[0, :, t // 2 :, 0].mean().item())
    return max(shares), (1 / torch.arange(t // 2 + 1, t + 1)).mean().item()


def numbers(folder: Path) -> dict[str, object]:
    model, tokenizer = load_model(folder, dtype=torch.float32), load_tokenizer(folder)
    ids = tokenizer.encode(PROMPT)
    tokens = torch.tensor([ids])
    rows = norm_rows(model, tokens)
    assert rows[-1].name == "final_norm"
    whole, without = outcomes(model, tokens, ["final_norm"])
    most, even = attention_to_the_first(model, tokens)

    def said(outcome) -> tuple[str, float]:
        decoder = tokenizer.stream_decoder(ids)
        text = decoder.push(outcome.token) + decoder.flush()
        return repr(text), outcome.probability

    return {
        "blocks": len(model.blocks),
        "RMS of the stream at the embedding": rows[0].before,
        "before `final_norm`": rows[-1].before,
        "after `final_norm`": rows[-1].after,
        "squared mean over mean square, median over positions: at most": max(
            row.mean_share for row in rows
        ),
        "at a single position: at most": max(row.mean_share_most for row in rows),
        "next token": said(whole),
        "next token without `final_norm`": said(without),
        "RMS of the stream at position 0: at most": max(row.stream_first for row in rows),
        "attention of later positions to position 0: at most": most,
        "if attention were spread evenly": even,
    }


def require_cell(cell: str, value: object) -> None:
    """Fail unless the number in the cell is the value, rounded to its digits."""
    if isinstance(value, tuple):
        token, value = value
        assert cell.startswith(f"{token} ")
        cell = cell.removeprefix(f"{token} ")
    digits = re.fullmatch(r"(\d+(?:\.(\d+))?)( %)?", cell)
    assert digits, cell
    unit = 10 ** -len(digits[2] or "")
    found = float(value) * (100 if digits[3] else 1)
    assert abs(found - float(digits[1])) <= 0.51 * unit, f"{cell} is {found}"  # one bit on the edge


def require_column(name: str, folder: Path) -> None:
    found, said = numbers(folder), column(name)
    assert list(found) == list(said)
    for row, value in found.items():
        require_cell(said[row], value)


def test_our_own_checkpoint():
    require_column("stories", SHIPPED)


def test_stories260k(stories260k):
    require_column("stories260K", stories260k)


def test_report_and_picture_name_a_sink_where_there_is_one(stories260k, tmp_path):
    require("matplotlib")
    for folder, sink in ((SHIPPED, True), (stories260k, False)):
        model, tokenizer = load_model(folder, dtype=torch.float32), load_tokenizer(folder)
        rows = norm_rows(model, torch.tensor([tokenizer.encode(PROMPT)]))
        plot(rows, tmp_path / "norms.svg", "a sink?")
        for text in (report(rows, [], repr), (tmp_path / "norms.svg").read_text()):
            assert ("an attention sink" in text) == sink


@pytest.mark.public
@pytest.mark.slow
def test_smollm2():
    try:
        folder = smollm2.prepare()
    except (FileNotFoundError, ImportError) as error:
        pytest.skip(f"{error}: {smollm2.how_to_get()}")
    require_column("SmolLM2-135M-Instruct", folder)


@pytest.mark.parametrize(
    ("cell", "value"),
    [("13.3", 13.36), ("0.45 %", 0.0046), ("' sun' 38.5 %", (" sun", 0.385)), ("6", 5), ("", 0)],
)
def test_a_wrong_cell_is_found(cell, value):
    with pytest.raises(AssertionError):
        require_cell(cell, value)
