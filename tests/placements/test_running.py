"""What runs a Llama runs every family: generation, recording, the norm report; what does not names it."""

from pathlib import Path

import pytest
import torch

from llama_mini import generate, load_model, record
from llama_mini.inspect.norm_report import norm_rows, norms_of
from llama_mini.model import Llama
from llama_mini.speed import all_cores, fast_model
from tests.support.fixtures import draw_tokens, logits_in_chunks, require_compiler
from tests.support.placements import BASE, VARIANTS, write


@pytest.fixture(scope="module", params=VARIANTS)
def loaded(request, tmp_path_factory) -> tuple[str, Path, Llama]:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    write(name, VARIANTS[name][0], folder)
    return name, folder, load_model(folder)


@torch.no_grad()
def test_a_batch_of_uneven_prompts_is_generated_as_each_alone(loaded):
    _, _, model = loaded
    rows = [draw_tokens((1, length), length, BASE["vocab_size"])[0].tolist() for length in (3, 17)]
    together = generate(model, rows, max_new_tokens=6, stop_ids=())
    alone = [generate(model, [row], max_new_tokens=6, stop_ids=())[0] for row in rows]
    assert together == alone
    tokens = torch.tensor([rows[1] + alone[1]])
    assert model(tokens)[0, 16:-1].argmax(-1).tolist() == alone[1]


def test_every_norm_has_a_row_in_the_report_and_every_place_is_recorded(loaded):
    _, _, model = loaded
    tokens = draw_tokens((1, 9), 0, BASE["vocab_size"])
    seen = record(model, tokens)
    for n, block in enumerate(model.blocks):
        for part, _ in block.named_children():
            assert f"blocks.{n}.{part}" in seen
    assert {row.name for row in norm_rows(model, tokens)} >= norms_of(model).keys()


def test_threaded_layers_move_no_bit(loaded):
    _, _, model = loaded
    tokens = draw_tokens((2, 9), 1, BASE["vocab_size"])
    with torch.no_grad():
        assert torch.equal(all_cores(model)(tokens), model(tokens))


@torch.no_grad()
def test_the_fast_form_writes_the_same(loaded):
    _, _, model = loaded
    require_compiler()
    tokens = draw_tokens((1, 9), 1, BASE["vocab_size"])
    plain, fast = (
        logits_in_chunks(each, tokens, [6, 1, 1, 1]) for each in (model, fast_model(model))
    )
    assert (plain - fast).abs().max() <= 1e-5 * plain.abs().max()


def test_more_positions_than_were_learned_are_an_error(tmp_path):
    write("gpt2", {**VARIANTS["gpt2"][0], "n_positions": 8}, tmp_path)
    model = load_model(tmp_path)
    model(torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(ValueError, match=r"9 positions.*8"):
        model(torch.zeros(1, 9, dtype=torch.long))
