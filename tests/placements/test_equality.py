"""Every family against transformers' own class, bit for bit, on random checkpoints that this class wrote.

Weights are such that every norm, gain and bias matters. 300 tokens reach far beyond every window.
transformers is loaded with `from_pretrained(dtype=...)`: `.to(dtype)` later would round its frequencies.
"""

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llama_mini import KVCache, Llama, load_model
from llama_mini.placements import FAMILIES
from tests.support.fixtures import draw_tokens
from tests.support.placements import BASE, VARIANTS, reference_logits, write

DTYPES = (torch.float32, torch.bfloat16)
# Relative to the largest logit. Observed: 1.1e-6 (gemma3_text's second variant), else below 9e-7.
TOLERANCE = 1e-5
CASES = [
    pytest.param(name, n, id=f"{name}-{n}", marks=[pytest.mark.slow] * (n > 0))
    for name, variants in VARIANTS.items()
    for n in range(len(variants))
]


@functools.cache
def folder_of(name: str, variant: int, root: Path) -> Path:
    folder = root / f"{name}-{variant}"
    write(name, VARIANTS[name][variant], folder, seed=variant)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("families")


def test_every_family_has_a_case():
    assert VARIANTS.keys() >= FAMILIES.keys() - {"llama"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "variant"), CASES)
def test_logits_are_those_of_transformers(
    name: str, variant: int, dtype: torch.dtype, root: Path
) -> None:
    folder = folder_of(name, variant, root)
    model = load_model(folder, dtype=dtype)
    for length in (24, 300):
        tokens = draw_tokens((2, length), length, BASE["vocab_size"])
        with torch.no_grad():
            logits = model(tokens)
        expected = reference_logits(folder, tokens, dtype)
        assert logits.dtype == expected.dtype
        assert torch.equal(logits, expected), f"{(logits != expected).sum()} logits differ"


@torch.no_grad()
def in_chunks(model: Llama, tokens: Tensor, sizes: list[int]) -> Tensor:
    cache = KVCache.for_model(model, *tokens.shape)
    for slots in (*cache.keys, *cache.values):
        slots.fill_(torch.nan)  # a slot that is not written yet must not be read
    return torch.cat([model(chunk, cache=cache) for chunk in tokens.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_chunks_through_the_cache_agree_with_one_pass(name: str, variant: int, root: Path) -> None:
    model = load_model(folder_of(name, variant, root), dtype=torch.float32)
    tokens = draw_tokens((2, 24), 1, BASE["vocab_size"])
    with torch.no_grad():
        whole = model(tokens)
        last = model(tokens, last_only=True)
    assert torch.equal(last.argmax(-1), whole[:, -1:].argmax(-1))
    for sizes in ([24], [5, 1, 7, 11], [1] * 24):
        off = (in_chunks(model, tokens, sizes) - whole).abs().max() / whole.abs().max()
        assert off <= TOLERANCE, f"chunks of {sizes} differ by {off:.2g} of the largest logit"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt_neox", {"hidden_size": 512, "num_attention_heads": 8}),
        ("gpt2", {"n_embd": 168, "n_head": 12}),
        pytest.param("bloom", {"hidden_size": 1024, "n_head": 16}, marks=pytest.mark.slow),
        pytest.param(
            "minimax",
            {"hidden_size": 1280, "intermediate_size": 128, "num_hidden_layers": 3},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_widths_at_which_what_is_one_matrix_in_transformers_must_be_one(
    name, sizes, dtype, tmp_path
) -> None:
    one = {"n_layer": 1} if "n_head" in sizes else {"num_hidden_layers": 1}
    write(name, {**VARIANTS[name][0], **one, **sizes}, tmp_path, seed=0)
    model = load_model(tmp_path, dtype=dtype)
    for length in (1, 24, 300, 512):
        tokens = draw_tokens((1, length), length, BASE["vocab_size"])
        with torch.no_grad():
            logits = model(tokens)
        assert torch.equal(logits, reference_logits(tmp_path, tokens, dtype))
