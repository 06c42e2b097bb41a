"""Meta's params.json: widths, lengths, and what is refused."""

import json
import math
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llama_mini import read_config
from llama_mini.checkpoint import parse_config
from tests.support.configs import LEAST, complaint, read

META: dict[str, Any] = {
    "dim": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "vocab_size": 32000,
    "norm_eps": 1e-5,
}


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
    assert read(LEAST, tmp_path).hidden_size == 32


def test_open_vocabulary_without_a_checkpoint():
    with pytest.raises(
        ValueError, match=r"write the number of rows of tok_embeddings\.weight in its place"
    ):
        parse_config({**META, "vocab_size": -1})


def test_a_vocabulary_that_nothing_says(tmp_path):
    (tmp_path / "params.json").write_text(json.dumps({**META, "vocab_size": -1}))
    save_file({"norm.weight": torch.ones(4)}, tmp_path / "consolidated.00.safetensors")
    with pytest.raises(ValueError, match=r"tok_embeddings\.weight, and its vocab_size is -1"):
        read_config(tmp_path)


@pytest.mark.parametrize(("window", "theta"), [(None, 1000000.0), (4096, 10000.0)])
def test_mistrals_defaults(window, theta):
    given = {**META, "hidden_dim": 14336} | ({"sliding_window": window} if window else {})
    config = parse_config(given)
    assert (config.rope.rope_theta, config.max_position_embeddings) == (theta, 32768)
