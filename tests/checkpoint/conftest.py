"""Small tokenizers in the style of each family, as folders and loaded."""

from pathlib import Path

import pytest

from llama_mini.checkpoint.tokenizer import Tokenizer, load_tokenizer
from tests.support.tokenizers import (
    LLAMA3_TOKENS,
    write_byte_level,
    write_llama2_json,
    write_sentencepiece,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "sentencepiece": write_sentencepiece(root / "sentencepiece"),
        "llama2": write_llama2_json(root / "llama2"),
        "llama3": write_byte_level(
            root / "llama3",
            LLAMA3_TOKENS,
            "<|begin_of_text|>",
            tokenizer_class="PreTrainedTokenizerFast",
            bos_token="<|begin_of_text|>",
            eos_token="<|eot_id|>",
        ),
        "qwen": write_byte_level(
            root / "qwen",
            ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            None,
            tokenizer_class="PreTrainedTokenizerFast",
            add_bos_token=False,
            bos_token=None,
            eos_token="<|im_end|>",
        ),
    }


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(folder) for name, folder in folders.items()}
