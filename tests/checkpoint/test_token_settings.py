"""What the JSON files beside a tokenizer say of tokens, read without a tokenizer."""

from pathlib import Path

import pytest

from llama_mini.checkpoint.opening import Checkpoint
from llama_mini.checkpoint.token_settings import TokenSettings
from tests.support.tokenizers import write_json


def settings(folder: Path, **files: dict) -> TokenSettings:
    for name, values in files.items():
        write_json(folder / f"{name}.json", **values)
    return TokenSettings(Checkpoint(folder))


def test_an_empty_name_names_nothing(tmp_path: Path) -> None:
    """Llama's first conversions have them."""
    read = settings(tmp_path, special_tokens_map={"bos_token": "", "eos_token": {"content": ""}})
    assert (read.named, read.special) == ({}, {})


def test_names_of_a_tokenizers_own_are_read(tmp_path: Path) -> None:
    read = settings(tmp_path, tokenizer_config={"image_token": "<image>", "some_token": 5})
    assert read.named == {"image_token": "<image>"}
    assert read.special["<image>"].special


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("extra", [["<a>", "<b>"], {"x": "<a>", "y": "<b>"}])
def test_further_special_tokens_in_both_forms(key, extra, tmp_path: Path) -> None:
    assert settings(tmp_path, special_tokens_map={key: extra}).special.keys() == {"<a>", "<b>"}


def test_added_tokens_are_special_where_another_file_says_so(tmp_path: Path) -> None:
    files = {"added_tokens": {"<think>": 5, "<end>": 6}, "special_tokens_map": {"x_token": "<end>"}}
    think, end = (settings(tmp_path, **files).added[n] for n in (5, 6))
    assert (think.special, think.normalized) == (False, True)
    assert (end.special, end.normalized) == (True, False)


def test_half_a_character_is_no_token(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"special_tokens_map.*ud800"):
        settings(tmp_path, special_tokens_map={"bos_token": "<\ud800>"})
