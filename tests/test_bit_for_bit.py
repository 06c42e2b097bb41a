"""Bit for bit against transformers itself, on checkpoint folders that it wrote."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import llama_mini.model
from llama_mini import RMSNorm, generate, load_model, load_tokenizer
from llama_mini.checkpoint import parse_config
from tests.support.fixtures import (
    BASE,
    HALVES,
    LINEAR,
    LLAMA3,
    SHAPES,
    STORIES260K_TEXT,
    draw_tokens,
    reference_model,
    require,
)

transformers = require("transformers")

DTYPES = (torch.float32, *HALVES)
BEGINNINGS = (
    "Once upon a time, there was a",
    "One day, a big dog saw a",
    "The sun was hot and the cat",
    "Tom and Sue went to the park",
    "She was sad, so her mom said",
)


def theirs(folder: Path, dtype: torch.dtype) -> nn.Module:
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=dtype, attn_implementation="sdpa").eval()


@torch.no_grad()
def require_equal(folder: Path, tokens: Tensor, dtype: torch.dtype) -> None:
    expected = theirs(folder, dtype)(tokens).logits
    logits = load_model(folder, dtype=dtype)(tokens)
    assert logits.dtype == dtype
    off = (logits.float() - expected.float()).abs().max().item()
    assert torch.equal(logits, expected), f"logits differ by {off:.2g}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder per shape, as `save_pretrained` writes it."""
    root = tmp_path_factory.mktemp("shapes")
    for name in SHAPES:
        reference_model(name).save_pretrained(root / name)
    return {name: root / name for name in SHAPES}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_logits(name: str, dtype: torch.dtype, folders: dict[str, Path]) -> None:
    for shape in ((1, 1), (1, 6), (2, 40)):
        require_equal(folders[name], draw_tokens(shape, seed=shape[1]), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gqa_tied", "own_head_dim"])
def test_logits_of_a_sharded_checkpoint(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reference_model(name).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) >= 4
    require_equal(tmp_path, draw_tokens((2, 12), seed=1), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_a_checkpoint_saved_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    reference_model("own_head_dim").to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path).lm_head.weight.dtype == torch.bfloat16
    require_equal(tmp_path, draw_tokens((2, 12), seed=1), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_a_real_checkpoint(dtype: torch.dtype, stories260k: Path) -> None:
    tokens = load_tokenizer(stories260k).encode(STORIES260K_TEXT)
    require_equal(stories260k, torch.tensor([tokens]), dtype)


def test_logits_at_far_positions(folders: dict[str, Path]) -> None:
    tokens = draw_tokens((1, 250), seed=2)
    for name in ("mha_untied", "llama3_scaling"):
        require_equal(folders[name], tokens, torch.bfloat16)


def require_same_greedy(folder: Path, prompts: list[list[int]]) -> None:
    """200 tokens each; prompts of one length, which transformers takes in one batch without padding."""
    reference = theirs(folder, torch.float32)
    reference.generation_config.eos_token_id = None
    ids = torch.tensor(prompts)
    options = {"max_new_tokens": 200, "do_sample": False, "pad_token_id": 0}
    texts = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
    expected = texts[:, ids.shape[1] :].tolist()
    assert all(len(row) == 200 and len(set(row)) >= 15 for row in expected)  # no trivial loop
    model = load_model(folder, dtype=torch.float32)
    assert generate(model, prompts, max_new_tokens=200, stop_ids=()) == expected


def test_greedy_tokens(folders: dict[str, Path]) -> None:
    require_same_greedy(folders["llama3_scaling"], draw_tokens((5, 12), seed=0).tolist())


def test_greedy_tokens_of_a_real_checkpoint(stories260k: Path) -> None:
    encode = load_tokenizer(stories260k).encode
    require_same_greedy(stories260k, [encode(text)[:8] for text in BEGINNINGS])


def test_greedy_text_of_a_real_checkpoint(stories260k: Path) -> None:
    tokenizer = load_tokenizer(stories260k)
    prompt, whole = tokenizer.encode("Once upon a time"), tokenizer.encode(STORIES260K_TEXT)
    assert whole[: len(prompt)] == prompt
    model = load_model(stories260k, dtype=torch.float32)
    (new,) = generate(model, [prompt], max_new_tokens=len(whole) - len(prompt))
    assert prompt + new == whole
    assert tokenizer.decode(prompt + new) == STORIES260K_TEXT


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype: torch.dtype) -> None:
    reference = transformers.models.llama.modeling_llama.LlamaRMSNorm(96, eps=1e-5)
    norm = RMSNorm(96, eps=1e-5)
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1.0, 300.0):
        x = (torch.randn(4, 50, 96, generator=generator) * scale).to(dtype)
        weight = nn.Parameter(torch.empty(96).uniform_(0.5, 1.5, generator=generator).to(dtype))
        norm.weight = reference.weight = weight
        assert torch.equal(norm(x), reference(x))
        # A float32 weight widens what transformers gives, and not what we give.
        norm.weight = reference.weight = nn.Parameter(weight.float())
        assert norm(x).dtype == dtype
        assert torch.equal(norm(x), reference(x).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "scaling", [BASE["rope_parameters"], LINEAR, LLAMA3], ids=lambda s: s["rope_type"]
)
def test_rope(scaling: dict[str, Any], dtype: torch.dtype) -> None:
    values = {**BASE, "head_dim": 64, "rope_parameters": scaling}
    modeling = transformers.models.llama.modeling_llama
    reference = modeling.LlamaRotaryEmbedding(transformers.AutoConfig.for_model(**values))
    positions = torch.arange(0, 8192, 7)
    q = torch.randn(1, 4, len(positions), 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    k = q[:, ::2]
    expected = modeling.apply_rotary_pos_emb(q, k, *reference(q, positions[None]))
    rope = parse_config(values).rope
    cos, sin = llama_mini.model.cos_sin(rope, 64, positions, dtype)
    for x, turned in zip((q, k), expected, strict=True):
        assert torch.equal(llama_mini.model.rotate(x, cos, sin), turned)
