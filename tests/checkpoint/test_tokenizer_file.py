"""Which file of a folder is its tokenizer, and what is said of one that is damaged or not supported."""

import base64
import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from llama_mini.checkpoint import tokenizer_file
from llama_mini.checkpoint.tokenizer import load_tokenizer
from tests.support.tokenizers import TEXT, write_json


def test_tokenizer_json_wins(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"never opened")
    file = folders["llama3"] / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(file.read_bytes())
    assert load_tokenizer(tmp_path).encode("Hi") == load_tokenizer(folders["llama3"]).encode("Hi")


def test_tiktoken_is_named(tmp_path: Path) -> None:
    lines = [f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)]
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    with pytest.raises(ValueError, match=r"tokenizer\.model is a tiktoken file.*tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\xff",
        b"{",
        b"{}",
        b"[]",
        b"null",
        b"not it",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    ],
)
def test_damaged_file(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=name) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["sentencepiece", "llama2"])
def test_truncated_file(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    name = "tokenizer.model" if kind == "sentencepiece" else "tokenizer.json"
    data = (folders[kind] / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=name):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"3": "<x>"}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"three": {"content": "<x>"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", '{"bos_token": 7}'),
        ("special_tokens_map.json", '{"additional_special_tokens": [7]}'),
        ("special_tokens_map.json", '{"eos_token": {"lstrip": false}}'),
        ("added_tokens.json", '{"<x>": "many"}'),
        ("added_tokens.json", '{"<x>": -1}'),
        ("added_tokens.json", '{"<x>": null}'),
    ],
)
def test_damaged_settings(folders: dict[str, Path], tmp_path: Path, name: str, text: str) -> None:
    model = (folders["sentencepiece"] / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        load_tokenizer(tmp_path)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_tokenizer(tmp_path / "typo")
    (tmp_path / "spiece.model").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"spiece\.model is not read.*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_unknown_decoder_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    model = tokenizers.Tokenizer.from_file(str(folders["llama3"] / "tokenizer.json"))
    model.decoder = decoders.WordPiece()
    model.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"WordPiece.*not supported"):
        load_tokenizer(tmp_path)


def test_padding_and_truncation_of_the_file_are_off(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = tokenizers.Tokenizer.from_file(str(folders["llama3"] / "tokenizer.json"))
    model.enable_truncation(4)
    model.enable_padding(length=4)
    model.save(str(tmp_path / "tokenizer.json"))
    for text in ("a", TEXT[0]):
        for special in (False, True):
            ids = load_tokenizer(tmp_path).encode(text, special=special)
            assert ids == load_tokenizer(folders["llama3"]).encode(text, special=special)


def test_a_text_that_grows_too_much_and_a_file_that_is_too_long(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = json.loads((folders["llama3"] / "tokenizer.json").read_text())
    twice = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    grown = {"type": "Sequence", "normalizers": [twice] * 7}
    write_json(tmp_path / "tokenizer.json", **values | {"normalizer": grown})
    with pytest.raises(ValueError, match="normalizer makes 128 characters of one, at most 64"):
        load_tokenizer(tmp_path)
    monkeypatch.setattr(tokenizer_file, "FILE_BYTES", 10)
    with pytest.raises(ValueError, match="longer than 10 bytes"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "can"), [({"String": "a"}, False), ({"String": ""}, True), ({"Regex": "a"}, True)]
)
def test_patterns_that_can_end_the_library_in_a_panic(pattern: dict, can: bool) -> None:
    step = {"type": "Replace", "pattern": pattern, "content": "b"}
    assert tokenizer_file.can_panic({"normalizer": step}) == can
    assert tokenizer_file.can_panic({"pre_tokenizer": {"pretokenizers": [step]}}) == can


@pytest.mark.parametrize("defined", [{}, {"<x>": {"ids": [1, 2], "tokens": ["<x>"]}}])
def test_a_token_that_a_post_processor_does_not_define_is_named(defined: dict) -> None:
    single = [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A"}}]
    step = {"type": "TemplateProcessing", "single": single, "special_tokens": defined}
    with pytest.raises(ValueError, match="does not define '<x>'"):
        tokenizer_file.require_processor(Path("tokenizer.json"), {"processors": [step]})


def test_pieces_beyond_the_table_of_bytes_and_a_space_that_stays(tmp_path: Path) -> None:
    model = tokenizers.Tokenizer(models.WordLevel({"\u2603": 0, "\u2581a": 1}, unk_token="\u2603"))
    for decoder, texts in (
        (decoders.ByteLevel(), ["\u2603", "\u2581a"]),
        (decoders.Metaspace(prepend_scheme="never"), ["\u2603", " a"]),
        (decoders.Metaspace(prepend_scheme="always"), ["\u2603", "a"]),
    ):
        model.decoder = decoder
        model.save(str(tmp_path / "tokenizer.json"))
        assert [load_tokenizer(tmp_path).decode([n]) for n in (0, 1)] == texts
