"""The checkpoint in weights/: its activations, its text, and what its card says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from sentencepiece import SentencePieceProcessor

from llama_mini import compare, generate, load_model, load_tokenizer, record
from llama_mini.speed import fast_model
from llama_mini.train.recipe import Recipe
from tests.support.fixtures import (
    ACTIVATIONS,
    SHIPPED,
    SHIPPED_NEW_TOKENS,
    SHIPPED_PROMPT,
    require,
    require_compiler,
)

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT.parent / "shared" / "corpus" / "tinystories.txt"
PROMPTS = (SHIPPED_PROMPT, "Once upon a time", "Tom and his dog", '"Look!" said the', "One day,")


@pytest.fixture(scope="module")
def stored():
    with safe_open(ACTIVATIONS / "shipped.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
        return tensors, file.metadata()


@pytest.fixture(scope="module")
def model():
    return load_model(SHIPPED, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SHIPPED)


def test_every_activation_is_the_stored_one(stored, model, tokenizer):
    tensors, metadata = stored
    assert tokenizer.encode(SHIPPED_PROMPT) == tensors["tokens"][0].tolist()
    reference = {name: tensors[name] for name in json.loads(metadata["order"])}
    differences = compare(reference, record(model, tensors["tokens"]))
    assert list(differences) == list(reference)
    # Observed: 0 with the kernels that wrote the file.
    assert max(difference.relative for difference in differences.values()) <= 5e-6


def test_the_stored_text(stored, model, tokenizer):
    tensors, metadata = stored
    prompt = tensors["tokens"][0].tolist()
    ids = generate(model, [prompt], SHIPPED_NEW_TOKENS)[0]
    assert ids == tensors["greedy"].tolist()
    assert tokenizer.decode(prompt + ids) == metadata["text"]


@pytest.mark.slow
def test_transformers_writes_the_same_text(model, tokenizer):
    transformers = require("transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    own = SentencePieceProcessor(model_file=str(SHIPPED / "tokenizer.model"))
    for prompt in PROMPTS:
        ids = own.encode(prompt, add_bos=True)
        assert tokenizer.encode(prompt) == ids
        text = theirs.generate(torch.tensor([ids]), max_new_tokens=60, do_sample=False)[0].tolist()
        assert generate(model, [ids], 60)[0] == text[len(ids) :]


def test_the_fast_form_writes_the_same_text(model, tokenizer):
    require_compiler()
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    swift = fast_model(model)
    for prompt in prompts:
        assert generate(swift, [prompt], 60) == generate(model, [prompt], 60)


def test_what_a_stranger_runs_first(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "generate.py"),
        "--prompt",
        "Once upon a time",
        "--seed",
        "1",
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Once upon a time")
    assert len(result.stdout.split()) > 50


def test_the_folder():
    config = json.loads((SHIPPED / "config.json").read_text())
    assert config["model_type"] == "llama"
    weights = SHIPPED / "model.safetensors"
    assert weights.stat().st_size <= 12_000_000
    with safe_open(weights, framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    assert not (SHIPPED / "training.pt").exists()


def test_the_recipe_on_the_card_is_the_default():
    card = (SHIPPED / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    (python -m llama_mini\.train .*--out .*)$", card, re.MULTILINE)
    values = vars(Recipe())
    for name, value in values.items():
        assert f"--{name.replace('_', '-')} {value} " in command
    assert "CDLA-Sharing-1.0" in card
    assert "TinyStories" in card


@pytest.mark.slow
def test_a_part_of_the_held_out_loss():
    """All of it takes a minute; the last 40 documents are as good a sign that the text is the card's."""
    from llama_mini.train.corpus import read_documents
    from llama_mini.train.evaluation import evaluate_folder

    if not CORPUS.is_file():
        pytest.skip("the text that it was trained on is not beside the project")
    _, held = read_documents(CORPUS, 40)
    per_character, _ = evaluate_folder(SHIPPED, held)
    assert per_character == pytest.approx(0.46998, abs=1e-4)
