"""An odd value under any key of any family is a ValueError of one line, or changes nothing that breaks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from llama_mini.checkpoint.configs import parse_config, read_keys
from llama_mini.config import LlamaConfig
from llama_mini.placements import FAMILIES
from llama_mini.placements.gpt import BLOOM_KEYS, GPT_KEYS, NEOX_KEYS
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
    with pytest.raises(ValueError, match=key):
        parse_config({**values, key: odd})


RENAMED = [
    ("openai-gpt", "n_embd n_layer n_head n_positions layer_norm_epsilon afn"),
    ("gpt2", "n_embd n_layer n_head n_positions layer_norm_epsilon activation_function n_inner"),
    ("gpt_neox", "layer_norm_eps rotary_pct rotary_emb_base"),
    ("phi", "layer_norm_eps qk_layernorm"),
    ("gemma2", "hidden_activation"),
    ("gemma3_text", "hidden_activation"),
    ("cohere", "layer_norm_eps use_qk_norm"),
    ("cohere2", "layer_norm_eps"),
    ("bloom", "n_embed n_layer n_head layer_norm_epsilon"),
]


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, keys in RENAMED for key in keys.split()]
)
def test_an_error_names_the_key_that_the_file_has(name, key):
    with safe_open(FAMILIES_FOLDER / f"{name}.safetensors", framework="pt") as stored:
        values = json.loads(stored.metadata()["config"])
    renames = {**GPT_KEYS, **BLOOM_KEYS, **NEOX_KEYS}
    values = {k: v for k, v in values.items() if k not in ("rope_parameters", renames.get(key))}
    with pytest.raises(ValueError, match=rf"^{key}\b"):
        parse_config({**values, key: -1})


@pytest.mark.parametrize(("name", "key"), [("gpt2", "n_embd"), ("bloom", "n_embed")])
def test_a_key_that_is_missing_goes_by_the_name_of_the_family(name, key):
    with pytest.raises(ValueError, match=f"lacks {key}"):
        parse_config({"model_type": name, "vocab_size": 96, "n_layer": 3, "n_head": 4})


@pytest.mark.parametrize(
    ("name", "key", "odd"),
    [
        ("cohere", "use_qk_norm", "false"),
        ("phi", "qk_layernorm", 1),
        ("smollm3", "use_sliding_window", 1),
        ("ernie4_5", "use_bias", 0),
        # transformers takes null for false, and leaving the key out for true.
        ("youtu", "rope_interleave", None),
        ("deepseek_v3", "rope_interleave", None),
        ("deepseek_v3", "norm_topk_prob", None),
        # And here for all of each head, where leaving it out means a part.
        ("phi", "partial_rotary_factor", None),
        ("glm", "partial_rotary_factor", None),
        ("glm4", "partial_rotary_factor", None),
        ("youtu", "head_dim", 6),
        ("deepseek_v3", "head_dim", 6),
        ("deepseek_v3", "qk_rope_head_dim", -1),
        ("deepseek_v3", "qk_rope_head_dim", 7),
        ("deepseek_v3", "qk_nope_head_dim", 0),
    ],
)
def test_what_would_mean_something_else_is_refused(name, key, odd):
    with safe_open(FAMILIES_FOLDER / f"{name}.safetensors", framework="pt") as stored:
        values = json.loads(stored.metadata()["config"])
    values.get("rope_parameters", {}).pop("partial_rotary_factor", None)
    with pytest.raises(ValueError, match=rf"^{key} .*{odd}"):
        parse_config({**values, key: odd})


@pytest.mark.parametrize("name", ["olmo3", "gemma3_text"])
def test_a_rope_for_each_kind_of_block(name):
    """One for all would be read as none by transformers."""
    with safe_open(FAMILIES_FOLDER / f"{name}.safetensors", framework="pt") as stored:
        values = json.loads(stored.metadata()["config"])
    flat = {"rope_type": "default", "rope_theta": 77.0}
    with pytest.raises(ValueError, match=r"rope_parameters.*full_attention"):
        parse_config({**values, "rope_parameters": flat})
    with pytest.raises(ValueError, match=r"^rope_scaling .*77"):
        parse_config({**values, "rope_scaling": 77})
    own = values["rope_parameters"]
    _, config, unread = read_keys({**values, "rope_parameters": {**flat, **own}})
    assert config == parse_config(values)
    assert unread == {f"rope_parameters.{key}": value for key, value in flat.items()}


def test_heads_that_make_no_pairs():
    with safe_open(FAMILIES_FOLDER / "diffllama.safetensors", framework="pt") as stored:
        values = json.loads(stored.metadata()["config"])
    config = parse_config({**values, "num_attention_heads": 6, "num_key_value_heads": 3})
    with pytest.raises(ValueError, match="num_key_value_heads is 3"):
        FAMILIES["diffllama"].model(config)


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


def test_a_part_of_a_head_that_makes_no_pairs():
    """Other families turn one number more; transformers' Phi widens the head."""
    with safe_open(FAMILIES_FOLDER / "phi.safetensors", framework="pt") as stored:
        values = json.loads(stored.metadata()["config"])
    d = values["hidden_size"] // values["num_attention_heads"]
    values["rope_parameters"]["partial_rotary_factor"] = 3 / d
    with pytest.raises(ValueError, match="3 numbers of each head"):
        FAMILIES["phi"].model(parse_config(values))
