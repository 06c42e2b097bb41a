"""An odd value under any key of any family is a ValueError of one line, or changes nothing that breaks."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from llama_mini.checkpoint.configs import parse_config
from llama_mini.config import LlamaConfig
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
