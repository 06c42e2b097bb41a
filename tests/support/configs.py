"""A config with the keys that it has to have, and what reading one gives or says."""

import json
from pathlib import Path
from typing import Any

import pytest

from llama_mini import LlamaConfig, read_config
from tests.support.fixtures import BASE

REQUIRED = (
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
).split()
LEAST = {key: BASE[key] for key in REQUIRED}


def read(values: Any, folder: Path, name: str = "config.json") -> LlamaConfig:
    (folder / name).write_text(json.dumps(values))
    return read_config(folder)


def complaint(values: Any, folder: Path, name: str = "config.json") -> str:
    """The error for these values, which is one line that names the file."""
    with pytest.raises(ValueError) as error:  # noqa: PT011  # each test reads the message
        read(values, folder, name)
    message = str(error.value)
    assert str(folder / name) in message
    assert "\n" not in message
    return message
