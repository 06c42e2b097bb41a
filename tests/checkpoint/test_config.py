"""What a config says is used, known to be harmless, or refused in one line that names key and file."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_mini import Llama, LlamaConfig, RopeConfig
from llama_mini.checkpoint import parse_config, read_config
from llama_mini.checkpoint.saving import config_values, same
from llama_mini.rope import inverse_frequencies
from tests.support.fixtures import SHAPES, require

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MISTRAL = {"model_type": "mistral", "num_key_value_heads": 2}
QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 2}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
META: dict[str, Any] = {
    "dim": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "vocab_size": 32000,
    "norm_eps": 1e-5,
}


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


# Sizes and numbers


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "32", True, [32], {}, math.nan, 10**30])
@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ],
)
def test_a_size_must_be_a_positive_integer(tmp_path, key, wrong):
    message = complaint({**BASE, key: wrong}, tmp_path)
    assert f"{key} must be a positive integer" in message
    assert repr(wrong) in message


@pytest.mark.parametrize(
    "wrong", [0, -1e-5, "1e-5", True, [1.0], math.nan, math.inf, 1e39, 10**400]
)
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_a_number_must_be_positive_and_finite(tmp_path, key, wrong):
    message = complaint({**BASE, key: wrong}, tmp_path)
    assert f"{key} must be a positive number" in message
    assert len(message) < 300


@pytest.mark.parametrize("key", [key for key in BASE if key != "model_type"])
@pytest.mark.parametrize("null", [False, True])
def test_a_size_that_is_missing_or_null(tmp_path, key, null):
    values = {**BASE, key: None}
    if not null:
        del values[key]
    assert f"lacks {key}" in complaint(values, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 5}, "hidden_size 32 is not a multiple of num_attention_heads 5"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        (
            {"num_key_value_heads": 8},
            "num_attention_heads 4 is not a multiple of num_key_value_heads 8",
        ),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings must be true or false, not 'true'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, not 1"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window must be a positive integer"),
        (MISTRAL | {"sliding_window": "4096"}, "sliding_window must be a positive integer"),
        (QWEN3 | {"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        (QWEN3 | {"layer_types": ["chunked_attention"]}, "layer_types is ['chunked_attention']"),
        (QWEN3 | {"layer_types": ["sliding_attention"] * 2}, "no sliding_window says how wide"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id"),
        ({"eos_token_id": [2, None]}, "eos_token_id must be a token id"),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'"),
        ({"torch_dtype": "int8"}, "dtype is 'int8'"),
        ({"torch_dtype": 16}, "dtype is 16"),
        ({"model_type": 5}, "model_type is 5"),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"no_rope_layers": 3}, "no_rope_layers is 3"),
    ],
)
def test_values_that_do_not_go_together(tmp_path, changes, words):
    assert words in complaint({**BASE, **changes}, tmp_path)


NOT_OBJECTS = {
    "empty": "",
    "cut": "{",
    "list": "[]",
    "number": "5",
    "null": "null",
    "text": '"llama"',
    "python": "{'a': 1}",
    "byte order mark": "\ufeff{}",
    "deep": "[" * 10**5,
}


@pytest.mark.parametrize("text", NOT_OBJECTS.values(), ids=list(NOT_OBJECTS))
@pytest.mark.parametrize("name", ["config.json", "params.json", "generation_config.json"])
def test_a_file_that_is_no_json_object(tmp_path, name, text):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    if name == "params.json":
        (tmp_path / "config.json").unlink()
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name) as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value)


def test_a_file_that_git_lfs_has_not_fetched(tmp_path):
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    with pytest.raises(ValueError, match=r"config\.json.*Git LFS pointer"):
        read_config(tmp_path)


def test_a_file_that_is_not_utf8(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"config\.json cannot be read as JSON"):
        read_config(tmp_path)


def test_no_folder_and_no_config(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no config\.json .* and no params\.json"):
        read_config(tmp_path)


def test_not_a_dict():
    with pytest.raises(ValueError, match="must be a JSON object, not list"):
        parse_config([BASE])  # type: ignore[arg-type]


# What a key left out means


def test_defaults_are_those_of_transformers():
    """eps 1e-6 where the file does not say; the others as LlamaConfig there."""
    config = parse_config(BASE)
    assert config == LlamaConfig(64, 32, 48, 2, 4)
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-6, 2048)
    assert config.rope == RopeConfig(10000.0, "default")
    assert not config.tie_word_embeddings
    assert not config.qk_norm
    assert (config.sliding_window, config.dtype) == (None, None)
    assert config.eos_token_id == ()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_defaults_of_each_family_are_those_of_transformers(family):
    values = {**BASE, "model_type": family, "num_key_value_heads": 2}
    theirs = require("transformers").AutoConfig.for_model(**values)
    ours = parse_config(values)
    for key in (
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
    ):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert ours.rope.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_key_value_heads_that_only_a_default_would_give(tmp_path, family):
    message = complaint({**BASE, "model_type": family}, tmp_path)
    assert "lacks num_key_value_heads" in message


@pytest.mark.parametrize(
    "key",
    "head_dim num_key_value_heads rope_scaling rope_parameters rope_theta eos_token_id bos_token_id "
    "tie_word_embeddings max_position_embeddings rms_norm_eps torch_dtype dtype architectures "
    "sliding_window layer_types quantization_config attention_bias hidden_act no_rope_layers foo".split(),
)
def test_null_means_left_out(key):
    assert parse_config({**BASE, key: None}) == parse_config(BASE)


def test_null_window_of_mistral_is_no_window():
    values = {**BASE, "model_type": "mistral", "num_key_value_heads": 2}
    assert parse_config(values).sliding_window == 4096
    assert parse_config({**values, "sliding_window": None}).sliding_window is None
    del values["model_type"]
    named = {**values, "architectures": ["MistralForCausalLM"]}
    assert parse_config(named).sliding_window == 4096


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 16}, None),
        ({"sliding_window": 16, "use_sliding_window": False}, None),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, None),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, 16),
        ({"sliding_window": 16, "use_sliding_window": True}, None),
        (
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention"] * 2,
            },
            None,
        ),
        (
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            16,
        ),
    ],
)
def test_window_of_qwen3_is_that_of_transformers(changes, window):
    values = {**BASE, "model_type": "qwen3", "num_key_value_heads": 2, **changes}
    theirs = require("transformers").AutoConfig.for_model(**values)
    assert ("sliding_attention" in theirs.layer_types) == (window is not None)
    assert parse_config(values).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_sliding_window": "yes"}, "use_sliding_window must be true or false, not 'yes'"),
        (
            {"use_sliding_window": True, "max_window_layers": "1"},
            "max_window_layers must be an integer",
        ),
        (
            {"use_sliding_window": True, "num_hidden_layers": "2"},
            "num_hidden_layers must be a positive",
        ),
    ],
)
def test_window_of_qwen3_of_the_wrong_type(tmp_path, changes, words):
    values = {**BASE, "model_type": "qwen3", "num_key_value_heads": 2, "sliding_window": 16}
    assert words in complaint({**values, **changes}, tmp_path)


def test_the_class_tells_the_family_where_model_type_does_not():
    values = {key: value for key, value in BASE.items() if key != "model_type"}
    values |= {"num_key_value_heads": 2, "architectures": ["Qwen3ForCausalLM"]}
    assert parse_config(values).qk_norm
    values["architectures"] = ["LLaMAForCausalLM"]  # as the first conversions wrote it
    assert not parse_config(values).qk_norm


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
    values = {**BASE, "max_position_embeddings": 4096, **changes}
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
        **BASE,
        "max_position_embeddings": 4096,
        "rope_scaling": {"rope_type": "llama3", **rope},
    }
    theirs = require("transformers").AutoConfig.for_model(**json.loads(json.dumps(values)))
    expected = theirs.rope_parameters["original_max_position_embeddings"]
    assert parse_config(values).rope.original_max_position_embeddings == expected == 4096


# Token ids and dtype


@pytest.mark.parametrize("value", [1, None, -1, 1.0, "<s>", [1, 2]])
def test_the_bos_of_the_config_is_not_read(value):
    """Where a BOS goes is the tokenizer's to say."""
    assert parse_config({**BASE, "bos_token_id": value}) == parse_config(BASE)
    assert "bos_token_id" not in {field.name for field in dataclasses.fields(LlamaConfig)}


@pytest.mark.parametrize(
    ("value", "ids"),
    [(2, (2,)), ([128001, 128008], (128001, 128008)), ([], ()), (0, (0,)), (-1, ()), (None, ())],
)
def test_eos_is_an_id_a_list_or_nothing(value, ids):
    assert parse_config({**BASE, "eos_token_id": value}).eos_token_id == ids


def test_stop_ids_of_the_generation_config(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5], "temperature": 0.6}')
    assert read({**BASE, "eos_token_id": 5}, tmp_path).eos_token_id == (7, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert read({**BASE, "eos_token_id": 5}, tmp_path).eos_token_id == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "5"}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id must be"):
        read(BASE, tmp_path)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
def test_both_names_of_the_dtype(key, value):
    assert parse_config({**BASE, key: value}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "dtype"), [("half", "float16"), ("torch.half", "float16"), ("double", "float64")]
)
def test_torchs_other_names_of_a_dtype(name, dtype):
    assert getattr(torch, name.removeprefix("torch.")) is getattr(torch, dtype)
    assert parse_config({**BASE, "torch_dtype": name}).dtype == dtype


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
    config = parse_config({**BASE, "head_dim": 64, **values})
    assert config.rope == rope
    transformers = require("transformers")
    theirs = transformers.LlamaConfig(**{**BASE, "head_dim": 64}, max_position_embeddings=131072)
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
    config = parse_config({**BASE, "rope_theta": 10**20, "rms_norm_eps": 1})
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
    assert words in complaint({**BASE, **changes}, tmp_path)


@pytest.mark.parametrize(
    "rope_type", ["dynamic", "yarn", "longrope", "su", "mrope", "proportional"]
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_scaling_that_is_refused_by_name(tmp_path, key, name, rope_type):
    message = complaint({**BASE, key: {name: rope_type, "factor": 4.0}}, tmp_path)
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
    message = complaint({**BASE, **changes}, tmp_path)
    assert f"{key} is {changes[key]}" in message
    assert "blocks without rotary positions" in message


def test_all_blocks_with_rotary_positions_are_fine():
    values = {**BASE, "no_rope_layers": [1, 1], "no_rope_layer_interval": 4}
    assert parse_config(values) == parse_config(BASE)


# Shapes that follow


def test_explicit_head_dim():
    """The shape of Qwen3-0.6B, where heads times head_dim is not hidden_size."""
    values = {
        **BASE,
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    with torch.device("meta"):
        attention = Llama(parse_config(values)).blocks[0].attention
    assert attention.q_proj.weight.shape == (2048, 1024)
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (1024, 1024)
    assert attention.o_proj.weight.shape == (1024, 2048)
    assert attention.q_norm.weight.shape == attention.k_norm.weight.shape == (128,)


@pytest.mark.parametrize("name", SHAPES)
def test_parameter_count_is_that_of_the_model(name):
    config = parse_config(SHAPES[name])
    with torch.device("meta"):
        model = Llama(config)
    # parameters() gives a tied head once.
    assert config.parameter_count() == sum(weight.numel() for weight in model.parameters())


# Meta's params.json


@pytest.mark.parametrize(
    ("changes", "width", "context"),
    [
        ({"multiple_of": 256}, 11008, 4096),  # Llama 2 7B
        ({"dim": 5120, "n_heads": 40, "multiple_of": 256}, 13824, 4096),  # Llama 2 13B
        (
            {
                "n_kv_heads": 8,
                "multiple_of": 1024,
                "ffn_dim_multiplier": 1.3,
                "rope_theta": 500000.0,
            },
            14336,
            8192,
        ),  # Llama 3 8B
        (
            {
                "dim": 2048,
                "n_kv_heads": 8,
                "multiple_of": 256,
                "ffn_dim_multiplier": 1.5,
                "rope_theta": 500000.0,
                "use_scaled_rope": True,
                "rope_scale_factor": 32,
            },
            8192,
            131072,
        ),  # Llama 3.2 1B
        ({"ffn_dim_multiplier": None, "max_seq_len": 512}, 11008, 512),
        ({"ffn_dim_multiplier": 1.3, "multiple_of": 1}, 14198, 4096),  # 14199 if rounded only once
    ],
)
def test_width_and_context_from_params_json(tmp_path, changes, width, context):
    config = read({**META, **changes}, tmp_path, "params.json")
    assert (config.intermediate_size, config.max_position_embeddings) == (width, context)
    assert config.num_key_value_heads == changes.get("n_kv_heads", {**META, **changes}["n_heads"])
    assert (config.rope.rope_type == "llama3") == ("use_scaled_rope" in changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_eps": None}, "params.json lacks norm_eps"),
        ({"n_layers": None}, "params.json lacks n_layers"),
        ({"dim": "4096"}, "dim must be a positive integer"),
        ({"n_kv_heads": 0}, "n_kv_heads must be a positive integer"),
        ({"multiple_of": -1}, "multiple_of must be a positive integer"),
        ({"ffn_dim_multiplier": math.nan}, "ffn_dim_multiplier must be a positive number"),
        ({"norm_eps": "1e-5"}, "norm_eps must be a positive number"),
        ({"rope_theta": -1}, "rope_theta must be a positive number"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer"),
        ({"use_scaled_rope": True}, 'add the model\'s own, "rope_scale_factor": 8 for Llama 3.1'),
        ({"use_scaled_rope": "yes", "rope_scale_factor": 8}, "use_scaled_rope is 'yes'"),
        ({"rope_scale_factor": 8}, "use_scaled_rope is False, and rope_scale_factor is 8"),
        ({"quantization_args": {"scheme": "int4"}}, "quantization_args is {'scheme': 'int4'}"),
        ({"moe": {"num_experts": 8}}, "moe is {'num_experts': 8}"),
        ({"hidden_dim": "11008"}, "hidden_dim must be a positive integer"),
        ({"head_dim": 127}, "head_dim 127 is odd"),
        (
            {"moe": {"num_experts": 8}, "yarn": {"beta": 8}, "alibi": True},
            "alibi is True, moe is {'num_experts': 8}, yarn is {'beta': 8}",
        ),
    ],
)
def test_params_json_that_is_refused(tmp_path, changes, words):
    assert words in complaint({**META, **changes}, tmp_path, "params.json")


def test_config_json_wins_over_params_json(tmp_path):
    (tmp_path / "params.json").write_text(json.dumps(META))
    assert read(BASE, tmp_path).hidden_size == 32


def test_open_vocabulary_without_a_checkpoint():
    with pytest.raises(
        ValueError, match=r"write the number of rows of tok_embeddings\.weight in its place"
    ):
        parse_config({**META, "vocab_size": -1})
