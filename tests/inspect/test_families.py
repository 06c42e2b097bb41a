"""Report, picture, trace, perplexity and the bench's counts on every family, from its random checkpoint."""

import pytest
import torch

from llama_mini import compare, load_model, record
from llama_mini.bench.limits import Work
from llama_mini.bench.ways import through_model
from llama_mini.inspect.norm_report import norm_rows, norms_of, outcomes, report
from llama_mini.inspect.perplexity import loss
from llama_mini.inspect.picture import plot
from llama_mini.inspect.record import load_trace, names_of, save_trace
from llama_mini.model import Llama
from tests.support.fixtures import draw_tokens, require
from tests.support.placements import BASE, VARIANTS, write

TOKENS = draw_tokens((1, 9), seed=0, vocab_size=BASE["vocab_size"])


@pytest.fixture(scope="module", params=VARIANTS)
def model(request, tmp_path_factory) -> Llama:
    folder = tmp_path_factory.mktemp(request.param)
    write(request.param, VARIANTS[request.param][0], folder)
    return load_model(folder)


@pytest.mark.slow
def test_the_stream_of_the_report_is_that_of_the_blocks(model, tmp_path):
    """What the norm behind the last block reads, and every delta, by hooks of the test's own."""
    ends: list[torch.Tensor] = []
    hook = model.blocks[-1].register_forward_hook(lambda *call: ends.append(call[2]))
    rows = norm_rows(model, TOKENS)
    hook.remove()
    last = ends[0].double().pow(2).mean(-1).sqrt().quantile(0.5).item()
    if rows[-1].name == "final_norm":
        assert rows[-1].stream == rows[-1].before == pytest.approx(last, rel=1e-12)
    else:
        assert rows[-1].after == pytest.approx(last, rel=1e-12)
    assert all(row.read_by and row.reads for row in rows)
    results = outcomes(model, TOKENS, norms_of(model))
    assert len(report(rows, results, repr).splitlines()) > len(rows) + len(results)
    require("matplotlib")
    plot(rows, tmp_path / "norms.svg", "a family")


@pytest.mark.slow
def test_a_trace_holds_every_name(model, tmp_path):
    seen = record(model, TOKENS)
    assert list(seen) == names_of(model)
    save_trace(tmp_path / "trace", seen, {})
    assert set(compare(seen, load_trace(tmp_path / "trace")).values()) == {(0.0, 0.0)}


@pytest.mark.slow
def test_what_a_generation_asks_for(model):
    """No more bytes a step than all weights and the cache; no fewer operations than two for each weight
    of an attention's linear layers and each token.
    """
    work = Work(model)
    through_model(work.model, TOKENS, 3)
    assert len(work.bytes) == len(work.operations) == 3
    weights = sum(parameter.nbytes for parameter in model.parameters())
    cached = work.bytes[2] - work.bytes[1]
    assert 0 <= cached < weights / 100
    assert 0 < work.bytes[1] <= weights + cached * (TOKENS.shape[1] + 1)
    attention = [
        p for n, p in model.named_parameters() if ".attention." in n and n.endswith("proj.weight")
    ]
    assert work.operations[0] >= 2 * TOKENS.numel() * sum(p.numel() for p in attention)
    assert loss(model, TOKENS, 6, 3).tokens == TOKENS.numel() - 1
