"""What a config says is used, known to be harmless, or refused in one line that names key and file."""

import dataclasses
import json
import math

import pytest
import torch

from llama_mini import Llama, LlamaConfig, RopeConfig
from llama_mini.checkpoint import parse_config, read_config
from tests.support.configs import LEAST, complaint, read
from tests.support.fixtures import SHAPES, require

MISTRAL = {"model_type": "mistral", "num_key_value_heads": 2}
QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 2}


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
    message = complaint({**LEAST, key: wrong}, tmp_path)
    assert f"{key} must be a positive integer" in message
    assert repr(wrong) in message


@pytest.mark.parametrize(
    "wrong", [0, -1e-5, "1e-5", True, [1.0], math.nan, math.inf, 1e39, 10**400]
)
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_a_number_must_be_positive_and_finite(tmp_path, key, wrong):
    message = complaint({**LEAST, key: wrong}, tmp_path)
    assert f"{key} must be a positive number" in message
    assert len(message) < 300


@pytest.mark.parametrize("key", [key for key in LEAST if key != "model_type"])
@pytest.mark.parametrize("null", [False, True])
def test_a_size_that_is_missing_or_null(tmp_path, key, null):
    values = {**LEAST, key: None}
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
    assert words in complaint({**LEAST, **changes}, tmp_path)


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
    (tmp_path / "config.json").write_text(json.dumps(LEAST))
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
        parse_config([LEAST])  # type: ignore[arg-type]


# What a key left out means


def test_defaults_are_those_of_transformers():
    """eps 1e-6 where the file does not say; the others as LlamaConfig there."""
    config = parse_config(LEAST)
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
    values = {**LEAST, "model_type": family, "num_key_value_heads": 2}
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
    message = complaint({**LEAST, "model_type": family}, tmp_path)
    assert "lacks num_key_value_heads" in message


@pytest.mark.parametrize(
    "key",
    "head_dim num_key_value_heads rope_scaling rope_parameters rope_theta eos_token_id bos_token_id "
    "tie_word_embeddings max_position_embeddings rms_norm_eps torch_dtype dtype architectures "
    "sliding_window layer_types quantization_config attention_bias hidden_act no_rope_layers foo".split(),
)
def test_null_means_left_out(key):
    assert parse_config({**LEAST, key: None}) == parse_config(LEAST)


def test_null_window_of_mistral_is_no_window():
    values = {**LEAST, "model_type": "mistral", "num_key_value_heads": 2}
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
    values = {**LEAST, "model_type": "qwen3", "num_key_value_heads": 2, **changes}
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
    values = {**LEAST, "model_type": "qwen3", "num_key_value_heads": 2, "sliding_window": 16}
    assert words in complaint({**values, **changes}, tmp_path)


def test_the_class_tells_the_family_where_model_type_does_not():
    values = {key: value for key, value in LEAST.items() if key != "model_type"}
    values |= {"num_key_value_heads": 2, "architectures": ["Qwen3ForCausalLM"]}
    assert parse_config(values).qk_norm
    values["architectures"] = ["LLaMAForCausalLM"]  # as the first conversions wrote it
    assert not parse_config(values).qk_norm


# Token ids and dtype


@pytest.mark.parametrize("value", [1, None, -1, 1.0, "<s>", [1, 2]])
def test_the_bos_of_the_config_is_not_read(value):
    """Where a BOS goes is the tokenizer's to say."""
    assert parse_config({**LEAST, "bos_token_id": value}) == parse_config(LEAST)
    assert "bos_token_id" not in {field.name for field in dataclasses.fields(LlamaConfig)}


@pytest.mark.parametrize(
    ("value", "ids"),
    [(2, (2,)), ([128001, 128008], (128001, 128008)), ([], ()), (0, (0,)), (-1, ()), (None, ())],
)
def test_eos_is_an_id_a_list_or_nothing(value, ids):
    assert parse_config({**LEAST, "eos_token_id": value}).eos_token_id == ids


def test_stop_ids_of_the_generation_config(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5], "temperature": 0.6}')
    assert read({**LEAST, "eos_token_id": 5}, tmp_path).eos_token_id == (7, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert read({**LEAST, "eos_token_id": 5}, tmp_path).eos_token_id == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "5"}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id must be"):
        read(LEAST, tmp_path)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
def test_both_names_of_the_dtype(key, value):
    assert parse_config({**LEAST, key: value}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "dtype"), [("half", "float16"), ("torch.half", "float16"), ("double", "float64")]
)
def test_torchs_other_names_of_a_dtype(name, dtype):
    assert getattr(torch, name.removeprefix("torch.")) is getattr(torch, dtype)
    assert parse_config({**LEAST, "torch_dtype": name}).dtype == dtype


# Shapes that follow


def test_explicit_head_dim():
    """The shape of Qwen3-0.6B, where heads times head_dim is not hidden_size."""
    values = {
        **LEAST,
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
