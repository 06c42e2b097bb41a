"""The norm report on blocks whose norms stand elsewhere: what it says of each is what the block does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llama_mini import Llama, LlamaConfig
from llama_mini.checkpoint import parse_config
from llama_mini.inspect.norm_report import median, norm_rows, outcomes, report, rms
from llama_mini.inspect.picture import plot
from llama_mini.model import Block
from tests.support.fixtures import BASE, draw_tokens, require, strengthen

TOKENS = draw_tokens((1, 8), seed=3)


class Plain(nn.Module):
    """RMSNorm without a weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Four(Block):
    """A block with norms in front of and behind each sublayer, of which `steps` uses what it wants."""

    steps: Callable[..., Tensor]

    def __init__(self, config: LlamaConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.post_attention_norm = norm(config.hidden_size, config.rms_norm_eps)
        self.post_ffn_norm = norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return type(self).steps(self, x, *rest)


def sandwich(b: Any, x: Tensor, *rest: Any) -> Tensor:
    x = x + b.post_attention_norm(b.attention(b.pre_attention_norm(x), *rest))
    return x + b.post_ffn_norm(b.ffn(b.pre_ffn_norm(x)))


def behind(b: Any, x: Tensor, *rest: Any) -> Tensor:
    x = x + b.post_attention_norm(b.attention(x, *rest))
    return x + b.post_ffn_norm(b.ffn(x))


def on_the_stream(b: Any, x: Tensor, *rest: Any) -> Tensor:
    x = b.post_attention_norm(x + b.attention(x, *rest))
    return b.post_ffn_norm(x + b.ffn(x))


def side_by_side(b: Any, x: Tensor, *rest: Any) -> Tensor:
    return x + b.attention(b.pre_attention_norm(x), *rest) + b.ffn(b.pre_ffn_norm(x))


def one_norm(b: Any, x: Tensor, *rest: Any) -> Tensor:
    n = b.pre_attention_norm(x)
    return x + b.attention(n, *rest) + b.ffn(n)


def scaled(b: Any, x: Tensor, *rest: Any) -> Tensor:
    x = x + 0.25 * b.attention(b.pre_attention_norm(x), *rest)
    return x + 0.25 * b.ffn(b.pre_ffn_norm(x))


PLACES = {
    sandwich: [
        ("pre_attention_norm", "x", "attention"),
        ("post_attention_norm", "attention", "x"),
        ("pre_ffn_norm", "x", "ffn"),
        ("post_ffn_norm", "ffn", "x"),
    ],
    behind: [("post_attention_norm", "attention", "x"), ("post_ffn_norm", "ffn", "x")],
    on_the_stream: [("post_attention_norm", "x", "ffn, x"), ("post_ffn_norm", "x", "x")],
    side_by_side: [("pre_attention_norm", "x", "attention"), ("pre_ffn_norm", "x", "ffn")],
    one_norm: [("pre_attention_norm", "x", "attention, ffn")],
    scaled: [("pre_attention_norm", "x", "attention"), ("pre_ffn_norm", "x", "ffn")],
}


def made(steps: Callable[..., Tensor], norm: type[nn.Module] = Plain) -> Llama:
    block = type("Placed", (Four,), {"steps": staticmethod(steps)})
    model = Llama(parse_config(BASE), norm=norm, block=block).eval().requires_grad_(False)
    strengthen(model, seed=4)
    return model


@pytest.mark.parametrize("steps", PLACES, ids=lambda steps: steps.__name__)
def test_who_reads_what(steps):
    rows = norm_rows(made(steps), TOKENS)
    expected = [(f"blocks.{n}.{name}", *rest) for n in (0, 1) for name, *rest in PLACES[steps]]
    found = [(row.name, row.reads, row.read_by) for row in rows]
    assert found == [*expected, ("final_norm", "x", "lm_head")]


@pytest.mark.parametrize("steps", PLACES, ids=lambda steps: steps.__name__)
def test_the_stream_and_what_is_added_to_it(steps):
    """Each norm by its place, on a stream that a hook on every block has seen."""
    model, ends = made(steps), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: ends.append((inputs[0], output)))
    rows = norm_rows(model, TOKENS)
    for n, (x, y) in enumerate(ends):
        mine = [row for row in rows if row.name.startswith(f"blocks.{n}.")]
        if steps in (side_by_side, one_norm):
            for row in mine:
                assert row.stream == row.before == median(rms(x))
                assert row.delta == pytest.approx(median(rms(y - x)), rel=1e-6)
        elif steps is behind:
            assert mine[-1].stream == pytest.approx(median(rms(y)), rel=1e-6)
            assert [row.delta == row.after for row in mine] == [True, True]
        elif steps is on_the_stream:
            assert [row.delta for row in mine] == [None, None]
            assert mine[-1].after == median(rms(y))
        elif steps is sandwich:
            first, second, third, fourth = mine
            assert first.delta == pytest.approx(second.delta, rel=1e-6) == second.after
            assert third.delta == pytest.approx(fourth.delta, rel=1e-6) == fourth.after
            assert fourth.stream == pytest.approx(median(rms(y)), rel=1e-6)
        else:  # what is added, and not what the sublayer returns
            assert mine[0].before == median(rms(x))
            middle = x + 0.25 * model.blocks[n].attention(
                model.blocks[n].pre_attention_norm(x), *rotation(model), None, None
            )
            assert mine[0].delta == pytest.approx(median(rms(middle - x)), rel=1e-6)
            assert mine[1].delta == pytest.approx(median(rms(y - middle)), rel=1e-6)


def rotation(model: Llama) -> tuple[Tensor, Tensor]:
    return model.angles(torch.arange(TOKENS.shape[1]), torch.float32)


class NoEnds(Llama):
    """A norm on the embedding and none in front of the head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, norm=nn.LayerNorm)
        self.embed_norm = nn.LayerNorm(config.hidden_size)
        self.final_norm = nn.Identity()

    def embedding(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embed_norm(self.embed(tokens))


def test_norms_at_other_ends(tmp_path):
    model = NoEnds(parse_config(BASE)).eval().requires_grad_(False)
    strengthen(model, seed=4)
    rows = norm_rows(model, TOKENS)
    assert (rows[0].name, rows[0].reads, rows[0].read_by) == ("embed_norm", "embed", "x")
    assert rows[0].stream == rows[0].after == rows[1].before
    assert rows[-1].name == "blocks.1.pre_ffn_norm"
    results = outcomes(model, TOKENS, ["embed_norm"])
    assert results[1].divergence > 1e-3
    text = report(rows, results, repr)
    assert [line.split()[0] for line in text.splitlines()[1:6]] == [row.name for row in rows]
    require("matplotlib")
    plot(rows, tmp_path / "a.svg", "other ends")
    picture = (tmp_path / "a.svg").read_text()
    assert "after embed_norm" in picture
    assert "after final_norm" not in picture


@pytest.mark.parametrize("steps", [sandwich, behind], ids=lambda steps: steps.__name__)
def test_report_and_picture_of_norms_without_weights(steps, tmp_path):
    rows = norm_rows(made(steps), TOKENS)
    assert {row.weight_mean for row in rows} == {None}
    assert " none " in report(rows, outcomes(made(steps), TOKENS, []), repr)
    require("matplotlib")
    plot(rows, tmp_path / "a.svg", "placed")
    picture = (tmp_path / "a.svg").read_text()
    assert picture.count("<!-- added by") == 2  # one bar for a sublayer, not one for each norm
