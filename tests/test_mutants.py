"""Wrong models: each must fail the very check that the right one passes, or that check proves nothing.

A mutant is a function that spoils a loaded model, or through a MonkeyPatch the code under it. The tables
have a line for each: what is wrong, how, the stored case that has to show it, and by how much the logits
have to move.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

import llama_mini.model as code
from llama_mini import KVCache, Llama, RMSNorm
from llama_mini.cache import BlockCache
from llama_mini.rope import inverse_frequencies
from tests.support.fixtures import (
    HALVES,
    check,
    check_half_norm,
    check_half_rope,
    check_in_chunks,
    load_case,
    load_case_model,
)

Patch = pytest.MonkeyPatch
Spoil = Callable[[Llama, Patch], None]
right_cos_sin, rotate, right_append = code.cos_sin, code.rotate, BlockCache.append


def replace(owner: Any, name: str, wrong: Any) -> Spoil:
    return lambda model, patch: patch.setattr(owner, name, wrong)


# Norms


def swap_norms(model: Llama, patch: Patch) -> None:
    for block in model.blocks:
        block.pre_attention_norm, block.pre_ffn_norm = block.pre_ffn_norm, block.pre_attention_norm


def swap_q_norm_and_k_norm(model: Llama, patch: Patch) -> None:
    for block in model.blocks:
        attention = block.attention
        attention.q_norm, attention.k_norm = attention.k_norm, attention.q_norm


def drop(*names: str) -> Spoil:
    def spoil(model: Llama, patch: Patch) -> None:
        for name in names:
            model.set_submodule(name, nn.Identity())

    return spoil


def eps(value: float) -> Spoil:
    def spoil(model: Llama, patch: Patch) -> None:
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.eps = value

    return spoil


def norm(wrong: Callable[[RMSNorm, Tensor], Tensor]) -> Spoil:
    return replace(RMSNorm, "forward", wrong)


def layer_norm(self: RMSNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], self.weight, None, self.eps)


def without_weight(self: RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], None, self.eps)


def one_plus_weight(self: RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


def sum_of_squares(self: RMSNorm, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps) * self.weight


def eps_outside_the_root(self: RMSNorm, x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


def over_all_heads(self: RMSNorm, x: Tensor) -> Tensor:
    axes = (1, 3) if x.dim() == 4 else -1
    return x * torch.rsqrt(x.pow(2).mean(axes, keepdim=True) + self.eps) * self.weight


def cast_after_the_weight(self: RMSNorm, x: Tensor) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    return (h * self.weight.float()).to(x.dtype)


def statistics_in_half(self: RMSNorm, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


# Blocks


def block(wrong: Callable[..., Tensor]) -> Spoil:
    return replace(code.Block, "forward", wrong)


def post_norm(self: code.Block, x: Tensor, *how: Any) -> Tensor:
    x = self.pre_attention_norm(x + self.attention(x, *how))
    return self.pre_ffn_norm(x + self.ffn(x))


def norm_the_delta(self: code.Block, x: Tensor, *how: Any) -> Tensor:
    x = x + self.pre_attention_norm(self.attention(x, *how))
    return x + self.pre_ffn_norm(self.ffn(x))


def norm_the_stream(self: code.Block, x: Tensor, *how: Any) -> Tensor:
    x = self.pre_attention_norm(x)
    x = self.pre_ffn_norm(x + self.attention(x, *how))
    return x + self.ffn(x)


def side_by_side(self: code.Block, x: Tensor, *how: Any) -> Tensor:
    attention = self.attention(self.pre_attention_norm(x), *how)
    return x + attention + self.ffn(self.pre_ffn_norm(x))


def one_residual(self: code.Block, x: Tensor, *how: Any) -> Tensor:
    h = self.attention(self.pre_attention_norm(x), *how)
    return x + self.ffn(self.pre_ffn_norm(h))


def reverse_blocks(model: Llama, patch: Patch) -> None:
    model.blocks = model.blocks[::-1]


# Feed-forward network


def ffn(wrong: Callable[[code.SwiGLU, Tensor], Tensor]) -> Spoil:
    return replace(code.SwiGLU, "forward", wrong)


def gate_and_up_swapped(self: code.SwiGLU, x: Tensor) -> Tensor:
    return self.down_proj(F.silu(self.up_proj(x)) * self.gate_proj(x))


def gelu(self: code.SwiGLU, x: Tensor) -> Tensor:
    return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


def silu_of_the_product(self: code.SwiGLU, x: Tensor) -> Tensor:
    return self.down_proj(F.silu(self.gate_proj(x) * self.up_proj(x)))


# Attention


def attend(pattern: str = "b g s d -> b (g r) s d", scale: float | None = None) -> Spoil:
    def wrong(self: code.Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        k, v = (repeat(x, pattern, r=q.shape[1] // x.shape[1]) for x in (k, v))
        causal = mask is None and q.shape[2] > 1
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)

    return replace(code.Attend, "forward", wrong)


def attention(turn: Callable[..., Any], merge: str = "b h t d -> b t (h d)") -> Spoil:
    """`turn` stands for the norms and the rotation of q, k and v."""

    def wrong(
        self: code.Attention, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, cache: Any
    ) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        split = (rearrange(p(x), "b t (h d) -> b h t d", d=self.head_dim) for p in projections)
        q, k, v = turn(self, *split, cos, sin)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.o_proj(rearrange(self.attend(q, k, v, mask), merge))

    return replace(code.Attention, "forward", wrong)


def as_it_is(self, q, k, v, cos, sin):
    return rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin), v


def norm_after_rotation(self, q, k, v, cos, sin):
    return self.q_norm(rotate(q, cos, sin)), self.k_norm(rotate(k, cos, sin)), v


def no_rotation(self, q, k, v, cos, sin):
    return q, k, v


def queries_alone(self, q, k, v, cos, sin):
    return rotate(q, cos, sin), k, v


def values_too(self, q, k, v, cos, sin):
    return rotate(q, cos, sin), rotate(k, cos, sin), rotate(v, cos, sin)


def backwards(self, q, k, v, cos, sin):
    return rotate(q, cos, -sin), rotate(k, cos, -sin), v


def queries_one_ahead(self, q, k, v, cos, sin):
    step = (table[:, :, 1:2] for table in (cos, sin))  # position 1
    return rotate(rotate(q, cos, sin), *step), rotate(k, cos, sin), v


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def mask(diagonal: Callable[[int, int], int]) -> Spoil:
    """`diagonal(t, past)` as for torch.tril. A row left with nothing sees the first key."""

    def wrong(t: int, past: int, device: torch.device) -> Tensor:
        seen = torch.ones(t, past + t, dtype=torch.bool).tril(diagonal(t, past))
        seen[:, 0] |= ~seen.any(1)
        return seen[None, None]

    return replace(code, "causal_mask", wrong)


# RoPE


def rope(**changes: Any) -> Spoil:
    def spoil(model: Llama, patch: Patch) -> None:
        changed = dataclasses.replace(model.config.rope, **changes)
        model.config = dataclasses.replace(model.config, rope=changed)

    return spoil


def positions(shift: Callable[[Tensor], Tensor]) -> Spoil:
    def wrong(rope: Any, head_dim: int, positions: Tensor, dtype: torch.dtype) -> Any:
        return right_cos_sin(rope, head_dim, shift(positions), dtype)

    return replace(code, "cos_sin", wrong)


def angles_in_half(rope: Any, head_dim: int, positions: Tensor, dtype: torch.dtype) -> Any:
    angles = positions[:, None].to(dtype) * inverse_frequencies(rope, head_dim).to(dtype)
    return angles.cos()[None, None], angles.sin()[None, None]


def frequencies_in_half(rope: Any, head_dim: int, positions: Tensor, dtype: torch.dtype) -> Any:
    frequencies = inverse_frequencies(rope, head_dim).to(dtype).float()
    angles = positions[:, None].float() * frequencies
    return angles.cos().to(dtype)[None, None], angles.sin().to(dtype)[None, None]


def rotate_in_float32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(x.float(), cos.float(), sin.float()).to(x.dtype)


# Embedding, head, cache


def scale_embeddings(model: Llama, patch: Patch) -> None:
    scale = model.config.hidden_size**0.5
    model.embed.register_forward_hook(lambda module, inputs, output: output * scale)


def untie(model: Llama, patch: Patch) -> None:
    weight = model.embed.weight
    torch.manual_seed(0)
    model.lm_head.weight = nn.Parameter(torch.randn_like(weight) * weight.std())


def one_for_all_blocks(self: KVCache, block: int) -> BlockCache:
    return BlockCache(self.keys[0], self.values[0], self.length)


def unwritten_slots_too(self: BlockCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    right_append(self, k, v)
    return self.keys, self.values


class Mutant(NamedTuple):
    wrong: str
    spoil: Spoil
    case: str = "own_head_dim"
    moves: float = 0.1  # observed: 0.49 at least, and 0.093 for the one line that says less


IN_ONE_PASS = [
    Mutant("norms of a block swapped", swap_norms),
    Mutant("no pre_attention_norm", drop("blocks.0.pre_attention_norm")),
    Mutant("no pre_attention_norm in the last block", drop("blocks.1.pre_attention_norm")),
    Mutant("no pre_ffn_norm", drop("blocks.0.pre_ffn_norm")),
    Mutant("no pre_ffn_norm in the last block", drop("blocks.1.pre_ffn_norm")),
    Mutant("no final norm", drop("final_norm")),
    Mutant("no norm at all", norm(lambda self, x: x)),
    Mutant("post-norm", block(post_norm)),
    Mutant("norms on the deltas", block(norm_the_delta)),
    Mutant("norms on the stream", block(norm_the_stream)),
    Mutant("attention and FFN side by side", block(side_by_side)),
    Mutant("one residual for two sublayers", block(one_residual)),
    Mutant("blocks in reverse order", reverse_blocks),
    Mutant("LayerNorm", norm(layer_norm)),
    Mutant("norm without its weight", norm(without_weight)),
    Mutant("norm weight plus one", norm(one_plus_weight)),
    Mutant("sum of squares, not mean", norm(sum_of_squares)),
    Mutant("eps 1e-6, not 1e-5", eps(1e-6), "small_embeddings"),
    Mutant("eps 1e-6, not 1e-5, embeddings of 0.02", eps(1e-6), moves=0.05),
    Mutant("eps left out", eps(0.0), "small_embeddings"),
    Mutant("eps outside the root", norm(eps_outside_the_root), "small_embeddings"),
    Mutant("no norm on q", drop("blocks.0.attention.q_norm", "blocks.1.attention.q_norm"), "qwen3"),
    Mutant("no norm on k", drop("blocks.0.attention.k_norm", "blocks.1.attention.k_norm"), "qwen3"),
    Mutant("q_norm and k_norm swapped", swap_q_norm_and_k_norm, "qwen3"),
    Mutant("norms on q and k after rotation", attention(norm_after_rotation), "qwen3"),
    Mutant("norms on q and k over all heads", norm(over_all_heads), "qwen3"),
    Mutant("gate and up swapped", ffn(gate_and_up_swapped)),
    Mutant("GELU for SiLU", ffn(gelu)),
    Mutant("SiLU of the product", ffn(silu_of_the_product)),
    Mutant("key/value heads tiled", attend("b g s d -> b (r g) s d")),
    Mutant("no 1/sqrt(d)", attend(scale=1.0)),
    Mutant("1/sqrt(hidden/heads), not 1/sqrt(d)", attend(scale=8**-0.5)),
    Mutant("heads merged the wrong way round", attention(as_it_is, "b h t d -> b t (d h)")),
    Mutant("mask shows the next token", mask(lambda t, past: past + 1)),
    Mutant("mask hides the token itself", mask(lambda t, past: past - 1)),
    Mutant("no mask", mask(lambda t, past: past + t)),
    Mutant("no rotation", attention(no_rotation)),
    Mutant("queries rotated, keys not", attention(queries_alone)),
    Mutant("values rotated too", attention(values_too)),
    Mutant("rotation backwards", attention(backwards)),
    Mutant("queries one position ahead", attention(queries_one_ahead)),
    Mutant("interleaved pairs", replace(code, "rotate", interleaved)),
    Mutant("theta 10000, not 500", rope(rope_theta=10000.0)),
    Mutant("theta 10000, not 100", rope(rope_theta=10000.0), "llama3_scaling"),
    Mutant("no llama3 scaling", rope(rope_type="default"), "llama3_scaling"),
    Mutant("no linear scaling", rope(rope_type="default"), "linear_scaling"),
    Mutant("linear for llama3 scaling", rope(rope_type="linear"), "llama3_scaling"),
    Mutant("llama3 factor 16, not 8", rope(factor=16.0), "llama3_scaling"),
    Mutant("linear factor 2, not 4", rope(factor=2.0), "linear_scaling"),
    Mutant("low_freq_factor 1, not 0.5", rope(low_freq_factor=1.0), "llama3_scaling"),
    Mutant("high_freq_factor 4, not 2", rope(high_freq_factor=4.0), "llama3_scaling"),
    Mutant("length 32, not 16", rope(original_max_position_embeddings=32), "llama3_scaling"),
    Mutant("positions doubled", positions(lambda p: 2 * p)),
    Mutant("embeddings scaled by sqrt(m)", scale_embeddings),
    Mutant("tied head not tied", untie, "gqa_tied"),
]

# Seen only where a cache holds what came before.
IN_CHUNKS = [
    Mutant("positions restart in every chunk", positions(lambda p: p - p[:1])),
    Mutant("positions behind the cache one too high", positions(lambda p: p + p[:1].sign())),
    Mutant("positions behind the cache one too low", positions(lambda p: p - p[:1].sign())),
    Mutant("a chunk masked as if nothing came before", mask(lambda t, past: 0)),
    Mutant("a chunk sees its own future", mask(lambda t, past: past + t if past else 0)),
    Mutant("one cache for all blocks", replace(KVCache, "__getitem__", one_for_all_blocks)),
    Mutant("slots not yet written are read", replace(BlockCache, "append", unwritten_slots_too)),
]

# Seen only in half precision.
CASTS = [
    ("norm cast after the weight", norm(cast_after_the_weight), check_half_norm),
    ("norm statistics in half", norm(statistics_in_half), check_half_norm),
    ("angles in half", replace(code, "cos_sin", angles_in_half), check_half_rope),
    ("frequencies in half", replace(code, "cos_sin", frequencies_in_half), check_half_rope),
    ("rotation in float32", replace(code, "rotate", rotate_in_float32), check_half_rope),
]

# The stand-ins of the mutants above with nothing wrong in them.
CONTROLS = [
    ("attend", attend()),
    ("attention", attention(as_it_is)),
    ("mask", mask(lambda t, past: past)),
    ("rope", rope()),
    ("positions", positions(lambda p: p)),
    ("eps", eps(1e-5)),
]


@pytest.mark.parametrize("mutant", IN_ONE_PASS, ids=lambda mutant: mutant.wrong)
def test_a_wrong_model_fails(mutant: Mutant, tmp_path: Path, monkeypatch: Patch) -> None:
    case = load_case(mutant.case)
    model = load_case_model(case, tmp_path)
    check(model, case)
    mutant.spoil(model, monkeypatch)
    with pytest.raises(AssertionError, match="differs by"):
        check(model, case)
    with torch.no_grad():
        moved = (model(case.tokens) - case.reference["lm_head"]).abs().max()
    assert moved > mutant.moves


@pytest.mark.parametrize("mutant", IN_CHUNKS, ids=lambda mutant: mutant.wrong)
def test_a_wrong_cache_fails(mutant: Mutant, tmp_path: Path, monkeypatch: Patch) -> None:
    case = load_case(mutant.case)
    model = load_case_model(case, tmp_path)
    check_in_chunks(model, case)
    mutant.spoil(model, monkeypatch)
    with pytest.raises(AssertionError, match="differs by"):
        check_in_chunks(model, case)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("spoil", "check_half"),
    [line[1:] for line in CASTS],
    ids=[line[0] for line in CASTS],
)
def test_a_wrong_order_of_casts_fails(
    spoil: Spoil,
    check_half: Callable[[torch.dtype], None],
    dtype: torch.dtype,
    monkeypatch: Patch,
) -> None:
    check_half(dtype)
    spoil(None, monkeypatch)
    with pytest.raises(AssertionError, match="differ"):
        check_half(dtype)


@pytest.mark.parametrize("spoil", [c[1] for c in CONTROLS], ids=[c[0] for c in CONTROLS])
@pytest.mark.parametrize("name", ["own_head_dim", "qwen3"])
def test_a_stand_in_with_nothing_wrong_passes(
    spoil: Spoil, name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    case = load_case(name)
    model = load_case_model(case, tmp_path)
    spoil(model, monkeypatch)
    check(model, case)
    check_in_chunks(model, case)


def test_the_readme_counts_the_wrong_models():
    readme = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    number = len(IN_ONE_PASS) + len(IN_CHUNKS) + len(CASTS)
    assert f"| {number} wrong models:" in readme
