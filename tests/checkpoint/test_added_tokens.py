"""Added, special and named tokens: found where transformers finds them, and never in a user's text."""

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from llama_mini.checkpoint.token_settings import AddedToken
from llama_mini.checkpoint.tokenizer import load_tokenizer
from llama_mini.checkpoint.tokenizer_file import panics
from tests.support.fixtures import require
from tests.support.tokenizers import TEXT, write_byte_level, write_json, write_sentencepiece

FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}


def write_added(
    folder: Path, *added: AddedToken, normalizer: Any = None, model: Any = None, **config: Any
) -> Path:
    """A tokenizer.json whose pieces are bytes, with these added tokens from id 256 on."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(model or models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens([tokenizers.AddedToken(**asdict(token)) for token in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", **FAST, **config)
    return folder


def change(folder: Path, **values: Any) -> Path:
    """The folder, with other values in its tokenizer.json."""
    file = json.loads((folder / "tokenizer.json").read_text())
    write_json(folder / "tokenizer.json", **file | values)
    return folder


END, THINK = "<|im_end|>", "<think>"
WIDE = "\uff1c|im_end|\uff1e"  # NFKC makes it the one above
SPACED = AddedToken(END, lstrip=True, rstrip=True, normalized=False, special=True)
OBJECT = {"__type": "AddedToken", "content": END, "lstrip": False, "rstrip": False}
OBJECT |= {"normalized": True, "single_word": False}
TEXTS = [
    f"a {END} b",
    f"a{END}b  {END}{END}\n x",
    f"{THINK} word <|IM_END|> wordy {THINK}\n\n{END}",
    f"{WIDE} x",
]


@pytest.mark.parametrize(
    ("added", "config"),
    [
        ([SPACED], {"eos_token": END}),
        ([SPACED], {"eos_token": OBJECT}),
        ([SPACED], {"additional_special_tokens": [END], "pad_token": END}),
        ([], {"eos_token": END, "added_tokens_decoder": {"256": asdict(SPACED)}}),
        ([], {"added_tokens_decoder": {"256": {"content": "<THINK>"}}}),
        ([], {"eos_token": OBJECT | {"lstrip": True}}),
        ([], {"eos_token": END}),
        ([SPACED], {"added_tokens_decoder": {"256": asdict(AddedToken(END, special=True))}}),
        ([], {"eos_token": OBJECT | {"lstrip": True}, "pad_token": END}),
        ([AddedToken(END, rstrip=True)], {"eos_token": END}),
        ([AddedToken(END, single_word=True, special=True)], {"eos_token": END}),
        ([AddedToken(THINK), SPACED], {"eos_token": END, "bos_token": "<s>"}),
        ([AddedToken(THINK, rstrip=True, special=True), SPACED], {"image_token": THINK}),
    ],
)
@pytest.mark.parametrize("normalizer", [None, normalizers.Lowercase(), normalizers.NFKC()])
def test_flags_as_in_transformers(
    tmp_path: Path, added: list[AddedToken], config: dict[str, Any], normalizer: Any
) -> None:
    """No flag is reset because a token is named too."""
    transformers = require("transformers")
    folder = write_added(tmp_path, *added, normalizer=normalizer, **config)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    assert ours.eos_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        assert ours.encode(text, special=True) == theirs.encode(text), text


def test_what_a_token_takes_in(tmp_path: Path) -> None:
    """The value that transformers gives, for where it is not installed."""
    for config in ({}, {"eos_token": END}, {"eos_token": OBJECT}):
        tokenizer = load_tokenizer(write_added(tmp_path, SPACED, **config))
        a, b = tokenizer.encode("a"), tokenizer.encode("b")
        assert tokenizer.encode(f"a {END} b", special=True) == [*a, 256, *b]
        assert tokenizer.decode(tokenizer.encode(f"a {END} b")) == f"a {END} b"


def test_a_normalizer_that_writes_added_tokens_otherwise(tmp_path: Path) -> None:
    """Llama 2's early files put a space before each of them too, by name only."""
    token = AddedToken("<S>", normalized=True, special=True)
    for normalizer in (normalizers.Lowercase(), normalizers.Prepend("▁")):
        folder = write_added(tmp_path, token, normalizer=normalizer)
        processor = {"type": "TemplateProcessing", "pair": []}
        processor["single"] = [{"SpecialToken": {"id": "<S>", "type_id": 0}}]
        processor["single"].append({"Sequence": {"id": "A", "type_id": 0}})
        processor["special_tokens"] = {"<S>": {"id": "<S>", "ids": [256], "tokens": ["<S>"]}}
        tokenizer = load_tokenizer(change(folder, post_processor=processor))
        assert tokenizer.bos_id == 256
        assert tokenizer.encode("a")[0] == 256
        assert 256 not in tokenizer.encode("<S>", bos=False)
        assert "<S>" not in tokenizer.decode([256])


def test_which_file_names_a_token(tmp_path: Path) -> None:
    """special_tokens_map.json comes first, unless tokenizer_config.json lists the added tokens."""
    two = (AddedToken("<a>", special=True), AddedToken("<b>", special=True))
    folder = write_added(tmp_path, *two, eos_token="<a>")
    write_json(folder / "special_tokens_map.json", eos_token={"content": "<b>"})
    assert load_tokenizer(folder).eos_id == 257
    listed = {str(256 + n): asdict(token) for n, token in enumerate(two)}
    write_json(folder / "tokenizer_config.json", eos_token="<a>", added_tokens_decoder=listed)
    assert load_tokenizer(folder).eos_id == 256


def test_a_named_token_without_an_id_follows_the_others(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        write_added(tmp_path / "json", SPACED, bos_token="<s>", pad_token="<p>")
    )
    assert (tokenizer.bos_id, tokenizer.control["<p>"], tokenizer.vocab_size) == (257, 258, 259)
    folder = write_sentencepiece(tmp_path / "model")
    write_json(folder / "tokenizer_config.json", pad_token="<p>", eos_token="</s>")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.control["<p>"], tokenizer.eos_id, tokenizer.vocab_size) == (420, 2, 421)
    assert tokenizer.encode("<p>", bos=False, special=True) == [420]
    assert 420 not in tokenizer.encode("<p>")


@pytest.mark.parametrize("place", ["tokenizer_config.json", "added_tokens.json"])
@pytest.mark.parametrize("token_id", [5, 256, 258])
@pytest.mark.parametrize("kind", ["json", "model"])
def test_no_token_takes_the_id_of_another(
    tmp_path: Path, kind: str, place: str, token_id: int
) -> None:
    """Nor one beyond a gap that the library would close (transformers gives that token another id)."""
    if kind == "json":
        write_added(tmp_path, AddedToken(THINK))
    else:
        write_sentencepiece(tmp_path)
        token_id = min(token_id, 257)
    values: dict[str, Any] = {"<new>": token_id}
    if place == "tokenizer_config.json":
        values = {"added_tokens_decoder": {str(token_id): {"content": "<new>"}}}
    write_json(tmp_path / place, **values)
    with pytest.raises(
        ValueError, match=rf"'<new>'.*{place}.* {token_id}|{place}.*'<new>'.* {token_id}"
    ):
        load_tokenizer(tmp_path)


def test_one_text_has_one_id(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path)
    for text, ids in (("<s>", "420"), ("<new>", "420 421")):
        added = {token_id: {"content": text} for token_id in ids.split()}
        write_json(tmp_path / "tokenizer_config.json", added_tokens_decoder=added)
        with pytest.raises(ValueError, match=rf"tokenizer_config\.json.*{text}.*420"):
            load_tokenizer(tmp_path)


def test_ids_in_the_file_itself(tmp_path: Path) -> None:
    folder = write_added(tmp_path, AddedToken(THINK))
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    for token_id in (7, 300):
        change(folder, added_tokens=[added[0] | {"id": token_id}])
        with pytest.raises(ValueError, match=f"{THINK}' the id 256.* {token_id}"):
            load_tokenizer(folder)


def test_two_pieces_with_one_id(tmp_path: Path) -> None:
    folder = write_added(tmp_path)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    change(folder, model=model | {"vocab": model["vocab"] | {"ab": 7}})
    with pytest.raises(ValueError, match=r"tokenizer\.json.*'ab' one id, 7"):
        load_tokenizer(folder)


def test_dropout_is_for_training(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path, [], None)
    expected = load_tokenizer(folder).encode(TEXT[0])
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    change(folder, model=model | {"dropout": 0.9})
    tokenizer = load_tokenizer(folder)
    for _ in range(5):
        assert tokenizer.encode(TEXT[0]) == expected
        assert tokenizer.encode(TEXT[0], special=True) == expected


@pytest.mark.parametrize(
    ("steps", "supported"),
    [
        ("Replace ByteFallback Fuse Strip", True),
        ("Replace ByteFallback Fuse", True),
        ("ByteLevel", True),
        ("Strip Replace ByteFallback Fuse", False),
        ("Replace ByteFallback Strip", False),
        ("ByteFallback Fuse Replace", False),
        ("Metaspace Fuse Strip", False),
        ("ByteLevel Metaspace", False),
    ],
)
def test_order_of_a_decoder(tmp_path: Path, steps: str, supported: bool) -> None:
    made = {
        "Replace": {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        "Strip": {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        "Metaspace": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        "ByteLevel": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
    }
    listed = [made.get(step, {"type": step}) for step in steps.split()]
    folder = change(write_added(tmp_path), decoder={"type": "Sequence", "decoders": listed})
    if supported:
        load_tokenizer(folder)
    else:
        with pytest.raises(ValueError, match=f"tokenizer.json.*{steps}.*order"):
            load_tokenizer(folder)


# A user's text, whatever prepares it


@pytest.mark.parametrize(
    ("normalizer", "text"),
    [
        (normalizers.NFKC(), WIDE),
        (normalizers.Lowercase(), "<|IM_END|>"),
        (normalizers.Replace("@", "|"), "<@im_end@>"),
        (normalizers.Replace(tokenizers.Regex("#+"), ""), "<|im##_end|>"),
        (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), "<|ím_énd|>"),
        (normalizers.Strip(), f" {END} "),
    ],
)
@pytest.mark.parametrize("normalized", [True, False])
def test_no_normalizer_makes_a_control_token(
    tmp_path: Path, normalizer: Any, text: str, normalized: bool
) -> None:
    token = AddedToken(END, normalized=normalized, special=True)
    tokenizer = load_tokenizer(write_added(tmp_path, token, normalizer=normalizer, eos_token=END))
    assert 256 not in tokenizer.encode(f"a{text}b")
    prompt = f"{END}a {text} b{END}"
    said = [(len(END), len(prompt) - len(END))]
    ids = tokenizer.encode(prompt, special=True, literal=said)
    assert [n for n, token_id in enumerate(ids) if token_id == 256] == [0, len(ids) - 1]
    # Part of one by the template and part by a message is none either.
    assert tokenizer.encode(prompt, special=True, literal=[(0, 3)])[0] != 256
    last = (len(prompt) - 2, len(prompt))
    assert tokenizer.encode(prompt, special=True, literal=[last])[-1] != 256


def test_the_spaces_of_a_message_are_no_part_of_a_control_token(tmp_path: Path) -> None:
    """A token that takes in spaces beside it stays the template's, even where they are a message's."""
    tokenizer = load_tokenizer(write_added(tmp_path, SPACED, eos_token=END))
    prompt = f"{END}  a  {END}"
    said = [(len(END), len(prompt) - len(END))]
    assert tokenizer.encode(prompt, special=True, literal=said) == [
        256,
        *tokenizer.encode("a"),
        256,
    ]
    prompt = f"{END}a {END}  b"
    ids = tokenizer.encode(prompt, special=True, literal=[(len(END), len(prompt))])
    assert (ids[0], ids.count(256)) == (256, 1)
    assert tokenizer.decode(ids) == f"a {END}  b"  # with its spaces


def test_a_named_token_is_read_as_any_text(tmp_path: Path) -> None:
    """In the pieces that the text has without it, though the file does not call it special."""
    plain = load_tokenizer(write_byte_level(tmp_path, [], None)).encode("a little girl")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens(["little"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("a little girl") != plain
    write_json(tmp_path / "tokenizer_config.json", eos_token="little")
    assert load_tokenizer(tmp_path).encode("a little girl") == plain


def test_an_unknown_that_ends_a_text(tmp_path: Path) -> None:
    """GPT-2 and its kin have one token for all: a text with its name in it does not end there."""
    names = {f"{name}_token": END for name in ("bos", "eos", "unk")}
    tokenizer = load_tokenizer(write_added(tmp_path, AddedToken(END, special=True), **names))
    assert 256 not in tokenizer.encode(f"a{END}")
    ids = tokenizer.encode(f"{END}a{END}", special=True, literal=[(len(END), 99)])
    assert ids.count(256) == 1
    model = models.BPE(vocab={"a": 0, END: 1}, merges=[], unk_token=END)
    tokenizer = load_tokenizer(write_added(tmp_path, model=model, **names))
    assert tokenizer.encode("aa") == [0, 0]
    with pytest.raises(ValueError, match=r"control token"):
        tokenizer.encode("aba")


def test_text_that_only_a_control_token_can_write(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1}
    model = models.BPE(vocab=vocab, merges=[])
    tokenizer = load_tokenizer(write_added(tmp_path, model=model, eos_token="b"))
    with pytest.raises(ValueError, match=r"the text holds 'b'.*control token"):
        tokenizer.encode("ab")
    model = models.BPE(vocab={"a": 0, "b": 1, "x": 2, "bx": 3}, merges=[("b", "x")])
    tokenizer = load_tokenizer(write_added(tmp_path, model=model, eos_token="bx", pad_token="b"))
    with pytest.raises(ValueError, match=r"the text holds 'bx'.*control token"):
        tokenizer.encode("abx")


# Many tokens, threads, panics, sizes


def test_many_added_tokens(tmp_path: Path) -> None:
    """Observed 1 s, and 6 s on a busy machine; a regular expression of 10,000 tokens took 73 s for 3.5 kB
    of text, of which there is 25 times as much here.
    """
    tokens = {f"<|speech_{number}|>": {"special": number % 2 == 0} for number in range(40_000)}
    folder = write_sentencepiece(tmp_path)
    added = {
        str(420 + n): {"content": text, **flags} for n, (text, flags) in enumerate(tokens.items())
    }
    write_json(folder / "tokenizer_config.json", added_tokens_decoder=added)
    began = time.process_time()
    tokenizer = load_tokenizer(folder)
    text = "Once upon a <|speech_7|> time <|speech_8|> " * 2000
    ids, special = tokenizer.encode(text), tokenizer.encode(text, special=True)
    assert time.process_time() - began < 60
    assert (ids.count(427), ids.count(428), special.count(428)) == (2000, 0, 2000)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", ["json", "model"])
def test_threads_share_a_tokenizer(tmp_path: Path, kind: str) -> None:
    if kind == "json":
        write_added(tmp_path, SPACED, AddedToken(THINK), eos_token=END)
    else:
        write_sentencepiece(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = f"a {END} b</s> {THINK} c" * 3
    expected = {flag: tokenizer.encode(text, special=flag) for flag in (True, False)}
    assert expected[True] != expected[False]
    wrong = []

    def work(special: bool) -> None:
        for _ in range(1500):
            if tokenizer.encode(text, special=special) != expected[special]:
                wrong.append(special)

    threads = [threading.Thread(target=work, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_panic_is_one_line_of_ours(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_added(tmp_path)
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    tokenizer = load_tokenizer(change(folder, pre_tokenizer=split))
    with pytest.raises(
        ValueError, match=r"tokenizer\.json does not encode this text .*retry-limit"
    ) as caught:
        tokenizer.encode("a" * 40 + "c")
    assert "download" not in str(caught.value)  # it encodes others
    empty = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "y"}
    change(folder, normalizer=empty)
    with suppress(ValueError):  # what the library makes of it differs between its versions
        load_tokenizer(folder).encode("abc")
    assert capfd.readouterr() == ("", "")


def test_what_others_write_to_standard_error_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with panics(Path("x"), "fails"):
        os.write(2, b"of another thread\n")
    assert capfd.readouterr().err == "of another thread\n"


def test_a_text_too_long_for_so_many_tokens(tmp_path: Path) -> None:
    """No text of fewer tokens has more bytes."""
    for folder in (
        write_byte_level(tmp_path / "json", [END], None),
        write_sentencepiece(tmp_path / "model"),
    ):
        tokenizer = load_tokenizer(folder)
        for text in (*TEXT, "".join(TEXT), "日本語 😸", " " * 50):
            tokens = tokenizer.encode(text, bos=False)
            assert len(text.encode()) <= tokenizer.most_bytes(len(tokens))
            assert tokenizer.most_bytes(2) == 2 * tokenizer.most_bytes(1) < 1000
