"""Every activation and all logits against what transformers computed and tests/activations keeps."""

import json
from pathlib import Path

import pytest
import torch

from llama_mini import record
from llama_mini.checkpoint import parse_config
from tests.support.fixtures import (
    ACTIVATIONS,
    EMBEDDING_STD,
    HALVES,
    SHAPES,
    check,
    check_half_norm,
    check_half_rope,
    check_in_chunks,
    load_case,
    load_case_model,
)

pytestmark = pytest.mark.oldest


def names_by_hand(blocks: int) -> list[str]:
    names = ["embed"]
    for n in range(blocks):
        names += [f"blocks.{n}.pre_attention_norm"]
        names += [f"blocks.{n}.attention.{letter}" for letter in "qkv"]
        names += [f"blocks.{n}.attention", f"blocks.{n}.pre_ffn_norm"]
        names += [f"blocks.{n}.ffn", f"blocks.{n}"]
    return [*names, "final_norm", "lm_head"]


@pytest.mark.parametrize("name", SHAPES)
def test_every_activation_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    case = load_case(name)
    check(load_case_model(case, tmp_path), case)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_do_not_depend_on_how_the_prompt_is_cut(name: str, tmp_path: Path) -> None:
    case = load_case(name)
    check_in_chunks(load_case_model(case, tmp_path), case)


@pytest.mark.parametrize("name", SHAPES)
def test_names_come_in_the_order_in_which_transformers_computes(name: str, tmp_path: Path) -> None:
    case = load_case(name)
    expected = names_by_hand(SHAPES[name]["num_hidden_layers"])
    assert list(case.reference) == expected
    assert list(record(load_case_model(case, tmp_path), case.tokens)) == expected


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_norm_in_half_precision(dtype: torch.dtype) -> None:
    check_half_norm(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rope_in_half_precision(dtype: torch.dtype) -> None:
    check_half_rope(dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_every_activation_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    for name in SHAPES:
        case = load_case(name)
        model = load_case_model(case, tmp_path, device="cuda")
        check(model, case._replace(tokens=case.tokens.to("cuda")))


@pytest.mark.parametrize("name", SHAPES)
def test_the_stored_weights_let_a_fault_show(name: str) -> None:
    case = load_case(name)
    assert case.tokens.shape[1] >= 6
    norms = [weight for weight in case.weights.values() if weight.dim() == 1]
    assert all(norm.min() >= 0.5 and norm.max() <= 1.5 and norm.std() > 0.2 for norm in norms)
    spread = EMBEDDING_STD.get(name, 0.02)
    assert case.weights["model.embed_tokens.weight"].std().item() == pytest.approx(spread, rel=0.05)
    for key, weight in case.weights.items():
        if key.endswith("_proj.weight"):
            assert weight.std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=0.1)


def test_the_cases_cover_the_shapes() -> None:
    configs = {
        name: parse_config(json.loads(load_case(name).metadata["config"])) for name in SHAPES
    }
    heads = {name: (c.num_attention_heads, c.num_key_value_heads) for name, c in configs.items()}
    assert [name for name, (h, g) in heads.items() if g in (1, h)] == ["mha_untied", "mqa"]
    assert configs["gqa_tied"].tie_word_embeddings
    own = configs["own_head_dim"]
    assert own.head_dim != own.hidden_size // own.num_attention_heads
    assert configs["llama3_scaling"].rope.rope_type == "llama3"
    length = load_case("llama3_scaling").tokens.shape[1]
    assert length > configs["llama3_scaling"].rope.original_max_position_embeddings
    assert configs["linear_scaling"].rope.rope_type == "linear"
    assert configs["qwen3"].qk_norm
    for name in SHAPES:
        assert (ACTIVATIONS / f"{name}.safetensors").stat().st_size < 150_000
