"""Text to ids and back, on small tokenizers trained here, in the styles of Llama 2, Llama 3 and Qwen.

Their own files are not here: what these tests say of a family, they say of files laid out as its files
are (back end, normalizers, post-processor, settings), with a vocabulary of some hundred pieces.
"""

import json
import string
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from llama_mini.checkpoint.tokenizer import Tokenizer, load_tokenizer
from tests.support.fixtures import require
from tests.support.tokenizers import (
    KINDS,
    LLAMA3_TOKENS,
    TEXT,
    train_sentencepiece,
    write_byte_level,
    write_json,
    write_sentencepiece,
)

HELD_OUT = [
    "Hello",
    " Hello  world ",
    "\n\nüber\t日本 😸🏳️‍🌈",
    "</s>",
    "a</s>b <|eot_id|>",
    "<0x41>",
    "Ġ",
    "",
    " ",
    "\x00",
]


# Where the BOS goes: on files in the style of each family


@pytest.mark.parametrize(
    ("kind", "count"), [("sentencepiece", 1), ("llama2", 1), ("llama3", 1), ("qwen", 0)]
)
def test_bos_by_the_tokenizers_own_rule(
    loaded: dict[str, Tokenizer], kind: str, count: int
) -> None:
    tokenizer = loaded[kind]
    plain = tokenizer.encode("Hello", bos=False)
    assert tokenizer.encode("Hello") == [tokenizer.bos_id] * count + plain
    assert tokenizer.encode("") == [tokenizer.bos_id] * count
    assert tokenizer.encode("", bos=False) == []
    assert tokenizer.bos_id not in plain
    assert tokenizer.eos_id is not None
    if count:
        assert tokenizer.encode("Hello", bos=True) == tokenizer.encode("Hello")
    else:
        with pytest.raises(ValueError, match="names no bos_token"):
            tokenizer.encode("Hello", bos=True)


@pytest.mark.parametrize("kind", ["sentencepiece", "llama2", "llama3"])
@pytest.mark.parametrize(("setting", "count"), [(True, 1), (False, 0), (None, 1)])
def test_add_bos_token_overrules(
    folders: dict[str, Path], tmp_path: Path, kind: str, setting: bool | None, count: int
) -> None:
    """A key that is null is the same as the key left out."""
    for file in folders[kind].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    bos = LLAMA3_TOKENS[0] if kind == "llama3" else "<s>"
    write_json(tmp_path / "tokenizer_config.json", add_bos_token=setting, bos_token=bos)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Hello").count(tokenizer.bos_id) == count
    assert tokenizer.encode("Hello", bos=True).count(tokenizer.bos_id) == 1


def test_add_bos_token_where_the_file_has_no_rule(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path, ["<s>"], None, add_bos_token=True, bos_token="<s>")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("Hi")[0] == tokenizer.bos_id
    tokenizer = load_tokenizer(write_byte_level(tmp_path, ["<s>"], None, bos_token="<s>"))
    assert tokenizer.bos_id not in tokenizer.encode("Hi")


def test_eos_is_never_appended(folders: dict[str, Path], tmp_path: Path) -> None:
    model = tokenizers.Tokenizer.from_file(str(folders["llama2"] / "tokenizer.json"))
    model.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    model.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("Hello")[0] == 1
    assert 2 not in load_tokenizer(tmp_path).encode("Hello")
    folder = write_sentencepiece(tmp_path / "sentencepiece")
    write_json(folder / "tokenizer_config.json", add_eos_token=True)
    assert load_tokenizer(folder).encode("Hello").count(2) == 0
    assert load_tokenizer(folder).encode("Hello").count(1) == 1


@pytest.mark.parametrize("kind", ["llama2", "llama3", "qwen"])
@pytest.mark.parametrize("explicit", [False, True])
def test_same_ids_as_transformers(
    folders: dict[str, Path], tmp_path: Path, kind: str, explicit: bool
) -> None:
    """Where `add_bos_token` and the file agree; transformers 5 ignores it beside a tokenizer.json."""
    transformers = require("transformers")
    for file in folders[kind].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folders[kind] / "tokenizer_config.json").read_text())
    setting = {"add_bos_token": kind != "qwen"} if explicit else {}
    write_json(tmp_path / "tokenizer_config.json", **(config | setting))
    ours = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    for text in [*HELD_OUT, *TEXT]:
        plain = theirs.encode(text, split_special_tokens=True)
        assert ours.encode(text) == plain
        assert ours.encode(text, special=True) == theirs.encode(text)
        assert ours.decode(plain) == theirs.decode(plain, skip_special_tokens=True)


def test_folder_saved_by_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers 5 writes Llama's tokenizer anew, with Metaspace where version 4 had normalizers."""
    transformers = require("transformers")
    model = json.loads((folders["llama2"] / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    theirs = transformers.LlamaTokenizer(model["vocab"], merges, add_bos_token=True)
    theirs.save_pretrained(tmp_path)
    assert "Metaspace" in (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    ours = load_tokenizer(tmp_path)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (1, 2, len(theirs))
    for text in [*HELD_OUT, *TEXT]:
        plain = theirs.encode(text, split_special_tokens=True)
        assert ours.encode(text) == plain
        assert ours.encode(text, special=True) == theirs.encode(text)
        assert ours.decode(plain) == theirs.decode(plain, skip_special_tokens=True)


# Control tokens in a prompt


@pytest.mark.parametrize("kind", KINDS)
def test_control_text_is_plain_unless_asked(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    assert len(tokenizer.control) >= 3
    for text, token in tokenizer.control.items():
        for prompt in (text, f"a{text}b", f"{text} {text}"):
            plain = tokenizer.encode(prompt, bos=False)
            assert token not in plain
            assert tokenizer.decode(plain) == prompt
            parsed = tokenizer.encode(prompt, bos=False, special=True)
            assert parsed.count(token) == prompt.count(text)
            assert text not in tokenizer.decode(parsed)


@pytest.mark.parametrize("kind", KINDS)
def test_literal_control_text_in_a_template(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    text, token = next((t, i) for t, i in tokenizer.control.items() if t != "<unk>")
    prompt = f"{text}x{text}y"
    ids = tokenizer.encode(
        prompt, bos=False, special=True, literal=[(len(text) + 1, len(text) + 2)]
    )
    assert ids.count(token) == 1
    assert ids[0] == token
    space = " " if kind == "llama2" else ""  # that file puts one after every control token's text
    assert tokenizer.decode(ids) == f"x{text}{space}y"


def test_control_token_that_is_also_an_ordinary_piece(tmp_path: Path) -> None:
    """Unigram vocabularies, and SentencePiece's user-defined pieces, match it in any text."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((c, -5.0) for c in string.printable), ("▁", -5.0)]
    model = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    model.add_special_tokens(["<unk>", "</s>"])
    model.save(str(tmp_path / "tokenizer.json"))
    folder = write_sentencepiece(tmp_path / "spm", user_defined_symbols=["<|im_end|>", "<think>"])
    write_json(folder / "special_tokens_map.json", additional_special_tokens=["<|im_end|>"])
    for tokenizer, text in [
        (load_tokenizer(tmp_path), "</s>"),
        (load_tokenizer(folder), "<|im_end|>"),
    ]:
        token = tokenizer.control[text]
        plain = tokenizer.encode(f"hi{text} there", bos=False)
        assert token not in plain
        assert tokenizer.decode(plain) == f"hi{text} there"
        assert token in tokenizer.encode(f"hi{text} there", special=True)
    # Any text may be unknown: <unk> is a control token that stays.
    write_json(tmp_path / "tokenizer_config.json", unk_token="<unk>")
    assert load_tokenizer(tmp_path).encode("hi日")[-1] == 0
    # What is not a control token is a piece like any other.
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("a<think>b", bos=False)[-2:-1]) == "<think>"


# Added tokens beside a SentencePiece model: ids from the file


def test_added_tokens_of_sentencepiece(folders: dict[str, Path], tmp_path: Path) -> None:
    model = (folders["sentencepiece"] / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(model)
    write_json(
        tmp_path / "tokenizer_config.json",
        added_tokens_decoder={
            "423": {"content": "<think>", "special": False},
            "421": {"content": "<|im_end|>", "special": True, "rstrip": True},
            "420": {"content": "<|im_start|>", "special": True},
            "424": {"content": "<think>?", "special": False},
            "1": {"content": "<s>", "special": True},
        },
        eos_token={"content": "<|im_end|>"},
    )
    write_json(tmp_path / "added_tokens.json", **{"<think>": 423, "<|im_end|>": 421, "<pad>": 422})
    write_json(tmp_path / "special_tokens_map.json", pad_token="<pad>", eos_token="</s>")
    tokenizer = load_tokenizer(tmp_path)
    bare = load_tokenizer(folders["sentencepiece"])
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 421, 425)
    assert tokenizer.control["<pad>"] == 422
    text = "<|im_start|>Once<think>upon<|im_end|>\n a"
    once, upon = (bare.encode(f"{i}", bos=False) for i in ("Once", "\nupon"))
    newline = bare.encode("\n", bos=False)
    inside = [i for i in upon if i not in newline]
    ids = tokenizer.encode(text, bos=False, special=True)
    assert ids[0] == 420
    assert ids.count(421) == 1
    assert ids[ids.index(423) + 1 : ids.index(421)] == inside
    assert once != ids[1 : ids.index(423)]  # no space after a token, as transformers' legacy=False
    assert tokenizer.decode(ids) == "Once<think>upona"  # <|im_end|> takes in the space after it
    plain = tokenizer.encode(text, bos=False)
    assert {420, 421} & set(plain) == set()
    assert 423 in plain
    assert tokenizer.decode(plain) == text
    assert tokenizer.encode("<think>?", bos=False) == [424]  # the longest counts
    write_json(tmp_path / "tokenizer_config.json", legacy=True)
    legacy = load_tokenizer(tmp_path).encode("<think>Once", bos=False)
    assert legacy == [423, *once]


def test_an_added_token_of_spaces_that_takes_in_more(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """The first and longest match counts, and what it takes in is in front of it."""
    model = (folders["sentencepiece"] / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(model)
    added = {"420": {"content": "    ", "lstrip": True, "special": False}}
    write_json(tmp_path / "tokenizer_config.json", added_tokens_decoder=added)
    tokenizer = load_tokenizer(tmp_path)
    a, space = tokenizer.encode("a", bos=False), tokenizer.encode(" ", bos=False)[-1:]
    for text, ids in (
        ("a    ", [*a, 420]),
        ("a\n    ", [*a, 420]),
        ("a      ", [*a, 420, *space, *space]),
        ("    ", [420]),
        ("a   ", [*a, *space * 3]),  # three are not four
    ):
        assert tokenizer.encode(text, bos=False) == ids, text
    assert tokenizer.decode([*a, 420]) == "a    "


def test_tokens_named_only_beside_a_tokenizer_json(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    file = (folders["llama3"] / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(file)
    size = load_tokenizer(tmp_path).vocab_size
    write_json(
        tmp_path / "tokenizer_config.json",
        added_tokens_decoder={str(size): {"content": "<new>", "special": True}},
        eos_token="<new>",
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (size, size + 1)
    assert tokenizer.encode("a<new>", special=True)[-1] == size
    write_json(
        tmp_path / "tokenizer_config.json",
        added_tokens_decoder={str(size + 3): {"content": "<new>", "special": True}},
    )
    with pytest.raises(ValueError, match=rf"'<new>' the id {size}.* {size + 3}"):
        load_tokenizer(tmp_path)


# Round trips


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40)
    | st.text(" <s>/|a\n", max_size=20)
)
def test_round_trip(loaded: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = loaded[kind]
    for ids in (tokenizer.encode(text), tokenizer.encode(text, bos=False)):
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", HELD_OUT)
def test_same_text_as_the_libraries(
    folders: dict[str, Path], loaded: dict[str, Tokenizer], text: str
) -> None:
    model = sentencepiece.SentencePieceProcessor(
        model_file=str(folders["sentencepiece"] / "tokenizer.model")
    )
    ids = loaded["sentencepiece"].encode(text, bos=False)
    assert ids == model.encode(text)
    assert loaded["sentencepiece"].decode(ids) == model.decode(ids)
    for kind in ("llama2", "llama3", "qwen"):
        reference = tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
        ids = loaded[kind].encode(text)
        assert loaded[kind].decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_sentencepiece_without_a_leading_space(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path, add_dummy_prefix=False))
    for text in ("Once", " Once", "  "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_lone_surrogate(loaded: dict[str, Tokenizer], kind: str) -> None:
    with pytest.raises(ValueError, match=r"character 2 of the text is U\+D83D, a lone surrogate"):
        loaded[kind].encode("ab\ud83d")


def test_real_checkpoint(stories260k: Path) -> None:
    tokenizer = load_tokenizer(stories260k)
    ids = tokenizer.encode("Once upon a time")
    assert ids == [1, 403, 407, 261, 378]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (512, 1, 2)
    assert tokenizer.decode(ids) == "Once upon a time"


def test_the_leading_space_goes_where_no_piece_begins_with_one(tmp_path):
    train_sentencepiece(tmp_path / "tokenizer.model", vocab_size=289)  # bytes and letters only
    tokenizer = load_tokenizer(tmp_path)
    for text in ("The quick", "a", "é"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
