"""Text that arrives id by id is the text that all ids give at once."""

from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from llama_mini.checkpoint.tokenizer import Tokenizer, load_tokenizer
from tests.support.tokenizers import KINDS, TEXT, write_json


@pytest.mark.parametrize("kind", KINDS)
def test_stream_equals_decode_at_every_length(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    ids = tokenizer.encode("".join(TEXT) + "😸 ünd <s>")
    for length in range(len(ids) + 1):
        decoder = tokenizer.stream_decoder()
        pieces = [decoder.push(token) for token in ids[:length]]
        pieces.append(decoder.flush())
        assert "".join(pieces) == tokenizer.decode(ids[:length])
        assert decoder.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_stream_of_any_ids(loaded: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = loaded[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    cut = data.draw(st.integers(0, len(ids)))
    decoder = tokenizer.stream_decoder()
    whole = "".join(decoder.push(token) for token in ids) + decoder.flush()
    assert whole == tokenizer.decode(ids)
    assert "".join(tokenizer.decode([i]) for i in ids if i in tokenizer.control.values()) == ""
    prompt = tokenizer.decode(ids[:cut])
    if "\ufffd" not in prompt:  # a prompt is text, so it does not end inside a character
        decoder = tokenizer.stream_decoder(ids[:cut])
        added = "".join(decoder.push(token) for token in ids[cut:]) + decoder.flush()
        assert prompt + added == whole


def byte_ids(folder: Path, data: bytes) -> list[int]:
    """The ids of the tokens that stand for one byte each."""
    names = [f"<0x{byte:02X}>" for byte in data]
    if (folder / "tokenizer.model").is_file():
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        return [model.piece_to_id(name) for name in names]
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if model.token_to_id(names[0]) is None:  # GPT-2's alphabet of bytes
        names = [{0xF0: "ð", 0x9F: "Ł", 0x98: "ĺ", 0xB8: "\u00b8"}[byte] for byte in data]
    return [model.token_to_id(name) for name in names]


@pytest.mark.parametrize("kind", KINDS)
def test_character_of_four_bytes_shows_with_its_fourth(
    folders: dict[str, Path], loaded: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = loaded[kind]
    ids = byte_ids(folders[kind], b"\xf0\x9f\x98\xb8")
    assert len(set(ids)) == 4
    decoder = tokenizer.stream_decoder(tokenizer.encode("a"))
    assert [decoder.push(token) for token in ids] == ["", "", "", "😸"]
    assert decoder.flush() == ""
    for length in (1, 2, 3):
        decoder = tokenizer.stream_decoder(tokenizer.encode("a"))
        assert [decoder.push(token) for token in ids[:length]] == [""] * length
        assert (decoder.flush(), decoder.flush()) == ("\ufffd", "")


@pytest.mark.parametrize("kind", KINDS)
def test_continuation_keeps_its_space(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    prompt = tokenizer.encode("Once upon")
    ids = tokenizer.encode("Once upon a time")
    assert ids[: len(prompt)] == prompt
    continued = tokenizer.stream_decoder(prompt)
    assert "".join(map(continued.push, ids[len(prompt) :])) == " a time"
    if kind in ("sentencepiece", "llama2"):  # by itself, a text starts without the space
        assert tokenizer.decode(ids[len(prompt) :]) == "a time"


def test_work_for_each_token_is_constant(loaded: dict[str, Tokenizer]) -> None:
    """Each id is looked up once, however long the text already is."""
    for tokenizer in loaded.values():
        ids = tokenizer.encode(TEXT[0], bos=False) * 20
        decoder = tokenizer.stream_decoder()
        seen = []
        look_up = tokenizer.text_bytes
        tokenizer.text_bytes = lambda i, seen=seen, look_up=look_up: seen.append(i) or look_up(i)
        try:
            for token in ids:
                decoder.push(token)
        finally:
            del tokenizer.text_bytes
        assert seen == ids


@pytest.mark.parametrize("kind", KINDS)
def test_id_outside_the_vocabulary(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    tokenizer.decode([tokenizer.vocab_size - 1])
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token id {token} .* {tokenizer.vocab_size}"):
            tokenizer.decode([token])


def test_vocab_size_counts_gaps(folders: dict[str, Path], tmp_path: Path) -> None:
    """The largest id counts, not the number of tokens: the ids between decode to nothing."""
    model = (folders["sentencepiece"] / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(model)
    write_json(tmp_path / "added_tokens.json", **{"<far>": 900})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 901
    assert tokenizer.decode([800, 900]) == "<far>"
    vocab = {"a": 0, "b": 7}
    model = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    model.decoder = decoders.ByteLevel()
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "added_tokens.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 8
    assert tokenizer.decode([0, 5, 7]) == "ab"
