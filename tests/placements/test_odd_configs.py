"""An odd value under any key of any family is a ValueError of one line, or changes nothing that breaks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from llama_mini.checkpoint.configs import parse_config
from llama_mini.config import LlamaConfig
from llama_mini.placements import FAMILIES
from tests.support.placements import FAMILIES_FOLDER

ODD: list[Any] = [
    "x",
    -1,
    0,
    [],
    {},
    None,
    True,
    float("inf"),
    2**40,
    [0],
    {"a": 1},
    [None],
    [["a"]],
]
ODD += [
    {"full_attention": None},
    {"rope_type": 5},
    {"rope_type": "dynamic", "alpha": "x"},
    [1, 0, 1],
]
ODD += [{"partial_rotary_factor": value} for value in ("x", -1, [])]
MORE = "rope_scaling rope_theta sliding_window_pattern partial_rotary_factor layer_types".split()


@pytest.mark.parametrize("file", sorted(FAMILIES_FOLDER.glob("*")), ids=lambda file: file.stem)
def test_odd_values(file: Path) -> None:
    with safe_open(file, framework="pt") as stored:
        values = json.loads(stored.metadata()["config"])
    refused: list[str] = []
    for key in [*values, *MORE]:
        for odd in ODD:
            try:
                assert isinstance(parse_config({**values, key: odd}), LlamaConfig)
            except ValueError as error:
                refused.append(str(error))
    assert len(refused) > len(ODD)
    assert not [message for message in refused if "\n" in message]


@pytest.mark.parametrize(
    ("name", "key", "odd"),
    [
        ("gemma3_text", "query_pre_attn_scalar", 0),
        ("granite", "residual_multiplier", "0.22"),
        ("gpt_neox", "use_parallel_residual", 1),
        ("deepseek_v3", "n_group", 1.5),
        ("gpt2", "activation_function", ["relu"]),
        ("phi", "partial_rotary_factor", 1.5),
    ],
)
def test_keys_of_a_family_are_checked_by_name(name, key, odd):
    with safe_open(FAMILIES_FOLDER / f"{name}.safetensors", framework="pt") as stored:
        values = json.loads(stored.metadata()["config"])
    values.get("rope_parameters", {}).pop("partial_rotary_factor", None)
    ours = "hidden_act" if key == "activation_function" else key
    with pytest.raises(ValueError, match=ours):
        parse_config({**values, key: odd})


def test_heads_that_make_no_pairs():
    with safe_open(FAMILIES_FOLDER / "diffllama.safetensors", framework="pt") as stored:
        values = json.loads(stored.metadata()["config"])
    with pytest.raises(ValueError, match="num_key_value_heads is 3"):
        parse_config({**values, "num_attention_heads": 6, "num_key_value_heads": 3})


# Names that our configs have and these classes do not read: each gives the logits that transformers gives
# without it. Checked with transformers 5.24.
UNREAD = [
    *((name, "rms_norm_eps", 0.3) for name in ("openai-gpt", "gpt2", "bloom", "gpt_neox", "phi")),
    *((name, "rms_norm_eps", 0.3) for name in ("cohere", "cohere2")),
    *((name, "hidden_act", "relu") for name in ("openai-gpt", "gpt2", "gemma2", "gemma3_text")),
    *((name, "head_dim", 20) for name in ("openai-gpt", "gpt2", "bloom")),
    *((name, "num_key_value_heads", 1) for name in ("openai-gpt", "gpt2", "bloom")),
    *((name, "rope_scaling", {"rope_type": "linear", "factor": 3.0}) for name in ("gpt2", "bloom")),
    ("gpt2", "intermediate_size", 40),
    ("gpt_neox", "rope_theta", 77),
    ("gpt_neox", "partial_rotary_factor", 0.5),
    ("cohere", "qk_norm", True),
]
OURS = {"rms_norm_eps": "layer_norm_epsilon layer_norm_eps", "hidden_act": "activation_function"}


@pytest.mark.parametrize(("name", "key", "value"), UNREAD)
def test_our_names_are_no_keys_of_a_family(name, key, value):
    with safe_open(FAMILIES_FOLDER / f"{name}.safetensors", framework="pt") as stored:
        values = json.loads(stored.metadata()["config"])
    without = {k: v for k, v in values.items() if k not in (key, *OURS.get(key, "").split())}
    for given in (values, without, {k: v for k, v in without.items() if k != "rope_parameters"}):
        own = {k: v for k, v in given.items() if k != key}
        assert parse_config({**own, key: value}) == parse_config(own)


def test_attention_that_sees_later_positions_is_refused():
    for file in FAMILIES_FOLDER.glob("*"):
        with safe_open(file, framework="pt") as stored:
            values = json.loads(stored.metadata()["config"])
        with pytest.raises(ValueError, match="is_causal is False"):
            parse_config({**values, "is_causal": False})
        assert parse_config({**values, "is_causal": True}) == parse_config(values)


@pytest.mark.parametrize(
    ("name", "key"), [("granite", "residual_multiplier"), ("cohere", "logit_scale")]
)
def test_an_integer_beyond_64_bits_is_a_number(name, key):
    with safe_open(FAMILIES_FOLDER / f"{name}.safetensors", framework="pt") as stored:
        values = json.loads(stored.metadata()["config"])
    config = parse_config({**values, key: 10**30})
    assert type(getattr(config, key)) is float
    assert config == parse_config({**values, key: 1e30})


@pytest.mark.parametrize(
    "odd", [{"n_group": 8}, {"n_group": 3}, {"topk_group": 5}, {"num_experts_per_tok": 5}]
)
def test_experts_that_no_group_can_give(odd):
    with safe_open(FAMILIES_FOLDER / "deepseek_v3.safetensors", framework="pt") as stored:
        values = json.loads(stored.metadata()["config"])
    sizes = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    family = FAMILIES["deepseek_v3"]
    with torch.device("meta"):
        family.model(parse_config({**values, **sizes}))
        with pytest.raises(ValueError, match=r"n_routed_experts 8 in n_group \d"):
            family.model(parse_config({**values, **sizes, **odd}))
