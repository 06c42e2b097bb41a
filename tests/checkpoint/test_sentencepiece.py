"""A `tokenizer.model` alone: its own rules at the ends of a text, and none of them inside."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from llama_mini.checkpoint.tokenizer import Tokenizer, load_tokenizer
from tests.support.fixtures import require
from tests.support.tokenizers import write_json, write_sentencepiece

LLAMA = {"tokenizer_class": "LlamaTokenizer"}
# An ordinary piece of each, with the space and without it.
WORDS = ("hello ASSISTANT USER: the quick brown fox. hello ASSISTANT: ", "the hello USER lo he llo")


def write(folder: Path, config: dict[str, Any] | None = None, **options: Any) -> Path:
    """A model that knows a few words, in a folder that transformers takes for a Llama's."""
    write_sentencepiece(folder, sentences=WORDS * 8, **({"vocab_size": 330} | options))
    write_json(folder / "tokenizer_config.json", **LLAMA, **(config or {}))
    write_json(folder / "config.json", model_type="llama")
    return folder


def pieces(folder: Path, tokenizer: Tokenizer, text: str) -> list[str]:
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = tokenizer.encode(text, bos=False, special=True)
    return [model.id_to_piece(i) for i in ids]


@pytest.mark.parametrize("legacy", [None, False, True])
@pytest.mark.parametrize("prefix", [None, True, False])
@pytest.mark.parametrize("single_spaces", [True, False])
@pytest.mark.parametrize("dummy", [True, False])
def test_same_ids_as_transformers(
    tmp_path: Path, dummy: bool, single_spaces: bool, prefix: bool | None, legacy: bool | None
) -> None:
    """Where that follows the model: its own class puts a space before a text whatever the model says,
    keeps runs of spaces, and takes the first space of a text for the one that it would put.
    """
    transformers = require("transformers")
    config = {"add_prefix_space": prefix, "legacy": legacy}
    config = {name: value for name, value in config.items() if value is not None}
    options = {"add_dummy_prefix": dummy, "remove_extra_whitespaces": single_spaces}
    folder = write(tmp_path, config, **options)
    tokenizer = load_tokenizer(folder)
    write_json(
        folder / "tokenizer_config.json",
        **LLAMA,
        **({"legacy": legacy} if legacy is not None else {}),
        add_prefix_space=dummy if prefix is None else prefix,
    )
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in (
        "hello",
        "hello USER",
        "<s> hello </s> ASSISTANT: </s>hello",
        "hello </s>",
        "</s>hello </s> the",
        "<s></s> hello<s>hello",
        "he</s>\n</s> llo",
    ):
        ids = tokenizer.encode(text, bos=False, special=True)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("single_spaces", [True, False])
def test_a_space_behind_a_control_token(tmp_path: Path, single_spaces: bool) -> None:
    """The values themselves; OpenLLaMA's first model is one that removes spaces."""
    folder = write(tmp_path, remove_extra_whitespaces=single_spaces)
    tokenizer = load_tokenizer(folder)
    for text, expected in (
        ("</s> ASSISTANT:", ["</s>", "▁ASSISTANT", ":"]),
        ("<s> hello", ["<s>", "▁hello"]),
        ("<s>hello", ["<s>", *pieces(folder, tokenizer, "<s>hello")[1:]]),
        ("hello </s>hello", ["▁hello", "▁", "</s>", *pieces(folder, tokenizer, "<s>hello")[1:]]),
    ):
        assert pieces(folder, tokenizer, text) == expected, text
    assert "▁hello" not in pieces(folder, tokenizer, "<s>hello")


def test_spaces_that_the_model_removes(tmp_path: Path) -> None:
    """Of a run of spaces one stays, beside a control token as between words; none at a text's ends."""
    folder = write(tmp_path, remove_extra_whitespaces=True)
    tokenizer = load_tokenizer(folder)
    for text, single in (
        ("  hello   USER  ", "hello USER"),
        ("hello  </s>   USER ", "hello </s> USER"),
        ("   ", ""),
        ("</s>  ", "</s>"),
    ):
        assert tokenizer.encode(text, special=True) == tokenizer.encode(single, special=True), text
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in ("  hello   USER  ", "hello", "", "  ", "\n\n", "a\tb", "▁ ▁a"):
        assert tokenizer.encode(text, bos=False) == model.encode(text), text


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc", "nmt_nfkc_cf"])
@pytest.mark.parametrize("dummy", [True, False])
def test_same_ids_as_the_library(tmp_path: Path, kind: str, rule: str, dummy: bool) -> None:
    """A text without control tokens is the library's own, whatever the model's normalizer does."""
    folder = write(
        tmp_path,
        model_type=kind,
        normalization_rule_name=rule,
        add_dummy_prefix=dummy,
        vocab_size=300 if kind == "bpe" else 287,
        user_defined_symbols=["<think>"],
    )
    tokenizer = load_tokenizer(folder)
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in (
        "hello",
        " HELLO\u3000\uff35\uff33\uff25\uff32 ",
        "ﬁ ﷺ é",
        "\t\n x",
        "a<think> b",
        "▁",
        "\x00",
    ):
        ids = tokenizer.encode(text, bos=False)
        assert ids == model.encode(text), text
        assert tokenizer.decode(ids) == model.decode(ids), text


@pytest.mark.parametrize("way", ["model", "config"])
def test_no_space_before_a_text(tmp_path: Path, way: str) -> None:
    """`he llo`, and decoding takes away no space that was not put there."""
    config = {"add_prefix_space": False} if way == "config" else {}
    folder = write(tmp_path, config, add_dummy_prefix=way == "config")
    tokenizer = load_tokenizer(folder)
    assert not pieces(folder, tokenizer, "hello")[0].startswith("▁")
    for text in ("hello", " hello", "  hello", " "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    decoder = tokenizer.stream_decoder()
    assert decoder.push(tokenizer.encode(" hello", bos=False)[0]) == " hello"


def test_the_config_can_ask_for_a_space(tmp_path: Path) -> None:
    folder = write(tmp_path, {"add_prefix_space": True}, add_dummy_prefix=False)
    assert pieces(folder, load_tokenizer(folder), "hello") == ["▁hello"]


def test_tokenizer_json_decides(tmp_path: Path) -> None:
    """The settings of the other file's spaces are none of its."""
    folder = write(tmp_path, {"add_prefix_space": False})
    transformers = require("transformers")
    write_json(folder / "tokenizer_config.json", **LLAMA)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "json")
    config = json.loads((tmp_path / "json" / "tokenizer_config.json").read_text())
    write_json(tmp_path / "json" / "tokenizer_config.json", **config | {"add_prefix_space": False})
    tokenizer = load_tokenizer(tmp_path / "json")
    assert pieces(folder, tokenizer, "hello") == ["▁hello"]
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_names_that_are_empty(tmp_path: Path) -> None:
    """As in the first conversions of Llama: the model's own names stay."""
    empty: dict[str, Any] = {
        "bos_token": "",
        "eos_token": {"content": "", "lstrip": False},
        "unk_token": "",
    }
    tokenizer = load_tokenizer(write(tmp_path, empty))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 330)


def test_spaces_behind_words_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, treat_whitespace_as_suffix=True)
    with pytest.raises(ValueError, match=r"tokenizer\.model.*'a '"):
        load_tokenizer(folder)


def test_gemma(tmp_path: Path) -> None:
    """Its marks of turns are ordinary pieces of the model, which its settings name special."""
    marks = ["<start_of_turn>", "<end_of_turn>"]
    unused = [f"<unused{number}>" for number in range(99)]
    folder = write(
        tmp_path,
        add_dummy_prefix=False,
        user_defined_symbols=[*marks, *unused],
        vocab_size=430,
        bos_piece="<bos>",
        eos_piece="<eos>",
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    listed = {
        str(model.piece_to_id(text)): {"content": text, "special": text in marks}
        for text in (*marks, *unused)
    }
    config = {"added_tokens_decoder": listed, "bos_token": "<bos>", "eos_token": "<eos>"}
    write_json(folder / "tokenizer_config.json", **config)
    tokenizer = load_tokenizer(folder)
    first, last = (tokenizer.control[mark] for mark in marks)
    text = "<start_of_turn>user\nhello<unused7><end_of_turn>"
    ids = tokenizer.encode(text, special=True)
    assert (ids[0], ids[1], ids[-1]) == (tokenizer.bos_id, first, last)
    assert model.piece_to_id("<unused7>") in ids
    assert tokenizer.decode(ids) == "user\nhello<unused7>"
    plain = tokenizer.encode(text)
    assert not {first, last} & set(plain)
    assert tokenizer.decode(plain) == text


def test_a_normalizer_makes_no_control_token(tmp_path: Path) -> None:
    """SentencePiece finds a piece of its own in the text that its normalizer has made."""
    wide = "\uff1c|im_end|\uff1e"
    options = {"normalization_rule_name": "nmt_nfkc", "user_defined_symbols": ["<|im_end|>"]}
    folder = write(tmp_path, {"eos_token": "<|im_end|>"}, **options)
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_id in model.encode(wide)
    assert tokenizer.eos_id not in tokenizer.encode(f"the {wide}")
    text = f"the {wide} the<|im_end|>"
    ids = tokenizer.encode(text, special=True, literal=[(4, 14)])
    assert ids.count(tokenizer.eos_id) == 1
    assert ids[-1] == tokenizer.eos_id
    assert tokenizer.decode(ids) == "the <|im_end|> the"
