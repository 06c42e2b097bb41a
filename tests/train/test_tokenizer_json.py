"""tokenizer.json beside tokenizer.model: the same ids and the same text, here and in transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from sentencepiece import SentencePieceProcessor

from llama_mini import load_tokenizer
from llama_mini.checkpoint import open_checkpoint
from llama_mini.checkpoint.tokenizer import SentencePieceTokenizer, TokenSettings
from llama_mini.train.corpus import train_tokenizer
from llama_mini.train.tokenizer_json import tokenizer_json
from tests.support.fixtures import SHIPPED, require

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus" / "tinystories.txt"
ODD = [
    "",
    " ",
    " a",
    "  two  spaces ",
    "\n",
    "\n\n a\tb\r\n",
    "\u2581 \u2581a",
    "aaaaaaaaa hahahahaha ......... !!!!! ssssss",
    "1234567890",
    "é 日本語 😀😀 \0",
    "<0x0A> <s>",
]
# protobuf is not there, which transformers wants in order to read a tokenizer.model.
WITHOUT_PROTOBUF = """
import json, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("google.protobuf"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = [tokenizer(text)["input_ids"] for text in json.loads(sys.argv[2])]
texts = [tokenizer.decode(each, skip_special_tokens=True) for each in ids]
print(json.dumps([ids, texts]))
"""


def differing(model: bytes, texts: list[str]) -> list[str]:
    """The texts whose ids, or whose text again, differ between the two libraries."""
    pieces = SentencePieceProcessor(model_proto=model)
    ours = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(model)))
    ours.encode_special_tokens = True  # "<s>" in a text is a text, as SentencePiece reads it
    different = []
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False).ids
        if ids != pieces.encode(text) or ours.decode(ids) != pieces.decode(ids):
            different.append(text)
    return different


@pytest.fixture(scope="module")
def model() -> bytes:
    return (SHIPPED / "tokenizer.model").read_bytes()


def test_the_shipped_files_belong_together(model):
    assert json.loads((SHIPPED / "tokenizer.json").read_text()) == tokenizer_json(model)


def test_odd_texts(model):
    assert differing(model, ODD) == []


def test_held_out_stories(model):
    if not CORPUS.is_file():
        pytest.skip("the text that it was trained on is not beside the project")
    assert differing(model, CORPUS.read_text().split("\n<|endoftext|>\n")[-300:]) == []


@pytest.mark.slow
def test_the_whole_corpus(model):
    if not CORPUS.is_file():
        pytest.skip("the text that it was trained on is not beside the project")
    texts = CORPUS.read_text().split("\n<|endoftext|>\n")
    assert len(texts) > 18_000
    assert differing(model, texts) == []


def test_a_text_beyond_ascii():
    words = "straße été naïve 日本 日本語 こんにちは мир 世界 ∑x² 😀 42 1999".split()
    texts = [" ".join(words[n % 12 :] + words[: n % 7]) + "\n" for n in range(60)]
    assert differing(train_tokenizer(texts, 340), texts + ODD) == []


@pytest.mark.parametrize("special", [False, True])
def test_either_file_gives_our_loader_the_same_ids(special):
    own = SentencePieceTokenizer(
        SHIPPED / "tokenizer.model", TokenSettings(open_checkpoint(SHIPPED))
    )
    loaded = load_tokenizer(SHIPPED)
    assert type(loaded) is not SentencePieceTokenizer
    # Where a space follows a control token, tokenizer.json makes two of it, and tokenizer.model keeps it.
    for text in [*ODD, "a <s>b", "</s>", "x</s>y <unk>z"] + ["a <s> b"] * (not special):
        ids = loaded.encode(text, special=special)
        assert ids == own.encode(text, special=special)
        assert loaded.decode(ids) == own.decode(ids)
    for name in ("vocab_size", "bos_id", "eos_id", "named", "control"):
        assert getattr(loaded, name) == getattr(own, name)


@pytest.mark.slow
def test_transformers_reads_it_without_protobuf():
    require("transformers")
    texts = [text for text in ODD if "<s>" not in text]  # a token to transformers, a text to us
    command = [sys.executable, "-c", WITHOUT_PROTOBUF, str(SHIPPED), json.dumps(texts)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    ours = load_tokenizer(SHIPPED)
    ids = [ours.encode(text) for text in texts]
    assert json.loads(result.stdout) == [ids, [ours.decode(each) for each in ids]]
