"""What a config says of rotary positions: every layout, scaling, length, and what is refused."""

import json
import math
from typing import Any

import pytest
import torch

from llama_mini import LlamaConfig, RopeConfig
from llama_mini.checkpoint import parse_config
from llama_mini.checkpoint.saving import config_values, same
from llama_mini.rope import inverse_frequencies
from tests.support.configs import LEAST, complaint
from tests.support.fixtures import require

LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


# Length


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "max_sequence_length": 16384}, 16384),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 10240),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 1e30}}, 2**31 - 1),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 4096),
        ({"max_sequence_length": 8192}, 8192),
        ({"max_sequence_length": 2048}, 4096),
        ({"max_sequence_length": None}, 4096),
        ({"max_position_embeddings": None}, 2048),
        (
            {"max_position_embeddings": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            4096,
        ),
    ],
)
def test_length_with_linear_scaling(changes, length):
    """Times the factor, as vLLM reads it, and never less than max_sequence_length."""
    values = {**LEAST, "max_position_embeddings": 4096, **changes}
    assert parse_config(values).max_position_embeddings == length


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.5, 4.0, 3.7])
@pytest.mark.parametrize("length", [7, 4096])
def test_length_with_linear_scaling_is_written_as_it_is_read(factor, length):
    rope = RopeConfig(rope_type="linear", factor=factor)
    config = LlamaConfig(64, 32, 48, 2, 4, max_position_embeddings=length, rope=rope)
    assert same(parse_config(config_values(config, "float32", 1, 2)), config)


def test_llama3_scaling_without_its_original_length_takes_max_position_embeddings():
    rope = {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
    values = {
        **LEAST,
        "max_position_embeddings": 4096,
        "rope_scaling": {"rope_type": "llama3", **rope},
    }
    theirs = require("transformers").AutoConfig.for_model(**json.loads(json.dumps(values)))
    expected = theirs.rope_parameters["original_max_position_embeddings"]
    assert parse_config(values).rope.original_max_position_embeddings == expected == 4096


# RoPE

STYLES: list[tuple[str, dict[str, Any], RopeConfig]] = [
    ("v5", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(5e5)),
    ("v5 bare", {"rope_parameters": {"rope_theta": 5e5}}, RopeConfig(5e5)),
    ("v4", {"rope_theta": 500000, "rope_scaling": None}, RopeConfig(5e5)),
    ("v4 default", {"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, RopeConfig(5e5)),
    ("v4 empty", {"rope_theta": 5e5, "rope_scaling": {}}, RopeConfig(5e5)),
    ("whole", {"rope_theta": 5e5, "partial_rotary_factor": 1.0}, RopeConfig(5e5)),
    (
        "v5 linear",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4}},
        RopeConfig(5e5, "linear", 4.0),
    ),
    (
        "v4 linear",
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        RopeConfig(5e5, "linear", 4.0),
    ),
    (
        "v5 llama3",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        RopeConfig(5e5, "llama3", **LLAMA3),
    ),
    (
        "v4 llama3",
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        RopeConfig(5e5, "llama3", **LLAMA3),
    ),
    (
        "v4 both names of the type",
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "type": "llama3", **LLAMA3}},
        RopeConfig(5e5, "llama3", **LLAMA3),
    ),
    (
        "both at once",
        {
            "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        },
        RopeConfig(5e5, "llama3", **LLAMA3),
    ),
    (
        "original length outside",
        {
            "rope_theta": 5e5,
            "original_max_position_embeddings": 8192,
            "rope_scaling": {
                "rope_type": "llama3",
                **LLAMA3,
                "original_max_position_embeddings": None,
            },
        },
        RopeConfig(5e5, "llama3", **LLAMA3),
    ),
]


@pytest.mark.parametrize(
    ("values", "rope"), [style[1:] for style in STYLES], ids=[s[0] for s in STYLES]
)
def test_every_layout_of_rope_gives_the_frequencies_of_transformers(values, rope):
    config = parse_config({**LEAST, "head_dim": 64, **values})
    assert config.rope == rope
    transformers = require("transformers")
    theirs = transformers.LlamaConfig(**{**LEAST, "head_dim": 64}, max_position_embeddings=131072)
    theirs.rope_parameters = {
        "rope_type": rope.rope_type,
        "rope_theta": rope.rope_theta,
        "factor": 4.0,
    }
    if rope.rope_type == "llama3":
        theirs.rope_parameters |= LLAMA3
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    assert torch.equal(inverse_frequencies(config.rope, 64), rotary.inv_freq)


def test_a_theta_beyond_64_bits():
    config = parse_config({**LEAST, "rope_theta": 10**20, "rms_norm_eps": 1})
    assert inverse_frequencies(config.rope, 8).tolist() == pytest.approx([1, 1e-5, 1e-10, 1e-15])
    assert type(config.rms_norm_eps) is float


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "two different rope_theta in one config: 500000.0 and 10000.0",
        ),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
            },
            "two different rope_theta",
        ),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            "two different factor",
        ),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            "two different rope_type",
        ),
        (
            {
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"rope_type": "llama3", **LLAMA3},
            },
            "two different original_max_position_embeddings",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "llama3", **LLAMA3}},
            "rope_scaling names two types: linear, llama3",
        ),
        ({"rope_scaling": {"type": "linear"}}, "RoPE scaling 'linear' lacks factor"),
        (
            {"rope_scaling": {"type": "linear", "factor": None}},
            "RoPE scaling 'linear' lacks factor",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "'llama3' lacks low_freq_factor, high_freq_factor, original_max_position_embeddings",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor must be a positive number"),
        ({"rope_parameters": {"rope_theta": math.nan}}, "rope_theta must be a positive number"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "high_freq_factor 1.0 must be above low_freq_factor 1.0",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    **LLAMA3,
                    "original_max_position_embeddings": 8e3,
                }
            },
            "original_max_position_embeddings must be a positive integer",
        ),
        ({"rope_scaling": {"type": 4}}, "type is 4"),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            "full_attention is ",
        ),
        *(
            ({"rope_scaling": wrong}, f"must be a JSON object, not {wrong!r}")
            for wrong in ("linear", 0, [], False)
        ),
        *(
            ({"rope_parameters": wrong}, f"must be a JSON object, not {wrong!r}")
            for wrong in ("", 1e4)
        ),
    ],
)
def test_rope_that_is_refused(tmp_path, changes, words):
    assert words in complaint({**LEAST, **changes}, tmp_path)


@pytest.mark.parametrize(
    "rope_type", ["dynamic", "yarn", "longrope", "su", "mrope", "proportional"]
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_scaling_that_is_refused_by_name(tmp_path, key, name, rope_type):
    message = complaint({**LEAST, key: {name: rope_type, "factor": 4.0}}, tmp_path)
    assert f"{key} asks for {rope_type!r} RoPE scaling, which is not supported" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"no_rope_layers": [1, 1, 1, 0]},
        {"no_rope_layer_interval": 4},
        {"no_rope_layers": [False, True]},
    ],
)
def test_blocks_without_rotary_positions_are_refused(tmp_path, changes):
    (key,) = changes
    message = complaint({**LEAST, **changes}, tmp_path)
    assert f"{key} is {changes[key]}" in message
    assert "blocks without rotary positions" in message


def test_all_blocks_with_rotary_positions_are_fine():
    values = {**LEAST, "no_rope_layers": [1, 1], "no_rope_layer_interval": 4}
    assert parse_config(values) == parse_config(LEAST)
