"""The config.json of nearly fifty public models: read as transformers does, and as large as they are."""

import json
from typing import Any

import pytest
import torch

from llama_mini.checkpoint import parse_config
from llama_mini.checkpoint.configs import read_keys
from llama_mini.rope import inverse_frequencies
from tests.support.fixtures import require
from tests.support.real_configs import REAL

NOTED = {
    "smollm2-135m": {"rope_interleaved", "is_llama_config"},
    "smollm2-360m": {"rope_interleaved", "is_llama_config"},
    "from-gguf": {"_model_name_or_path"},
    "from-a-trainer": {
        "use_flash_attention_2",
        "neftune_noise_alpha",
        "sliding_window",
        "use_sliding_window",
    },
}


@pytest.mark.parametrize("name", REAL)
def test_a_public_config(name):
    values, parameters = REAL[name]
    _, config, unread = read_keys(values)
    assert config.parameter_count() == parameters
    assert set(unread) == NOTED.get(name, set())
    assert config.max_position_embeddings >= values["max_position_embeddings"]


@pytest.mark.parametrize("name", REAL)
def test_a_public_config_is_read_as_transformers_reads_it(name):
    transformers = require("transformers")
    values: dict[str, Any] = json.loads(json.dumps(REAL[name][0]))
    ours, theirs = parse_config(values), transformers.AutoConfig.for_model(**values)
    for key in (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim rms_norm_eps tie_word_embeddings"
    ).split():
        assert getattr(ours, key) == getattr(theirs, key), key
    module = __import__(
        type(theirs).__module__.replace("configuration", "modeling"), fromlist=["x"]
    )
    prefix = type(theirs).__name__.removesuffix("Config")
    embedding = getattr(module, f"{prefix}RotaryEmbedding")(theirs)
    assert torch.equal(embedding.inv_freq, inverse_frequencies(ours.rope, ours.head_dim))
    eos = theirs.eos_token_id
    named = values.get("eos_token_id")
    assert ours.eos_token_id == ((tuple(eos) if isinstance(eos, list) else (eos,)) if named else ())
