"""Rotary positions: values worked out by hand or with the original code of each layout."""

import dataclasses
from pathlib import Path

import pytest
import torch

from llama_mini import Llama, RopeConfig, load_model
from llama_mini.checkpoint.names import META
from llama_mini.checkpoint.weights import read_tensors
from llama_mini.rope import cos_sin, inverse_frequencies, rotate
from tests.support.models import TINY

pytestmark = pytest.mark.oldest

LLAMA3 = RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)


@torch.no_grad()
def tables_of(model: Llama, positions: torch.Tensor | None, t: int) -> tuple[torch.Tensor, ...]:
    """Cosine and sine as a forward pass hands them to the first block: two (positions, d/2)."""
    seen: list[torch.Tensor] = []
    hook = model.blocks[0].attention.register_forward_pre_hook(
        lambda _, inputs: seen.extend(inputs[1:3])
    )
    batch = 1 if positions is None else positions.shape[0]
    model(torch.zeros(batch, t, dtype=torch.int64), positions=positions)
    hook.remove()
    return tuple(table.flatten(0, -2) for table in seen)


def rotate_at(position: int, x: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_sin(RopeConfig(), x.shape[-1], torch.tensor([position]), torch.float32)
    return rotate(x.view(1, 1, 1, -1), cos, sin).flatten()


def test_half_split_pairs():
    turned = rotate_at(1, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert turned.tolist() == pytest.approx([-1.98411, 1.95990, 2.46238, 4.01980], abs=1e-5)  # 2e-6


def test_interleaved_pairs_are_half_split_pairs_in_another_order():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    turned = rotate_at(1, x[[0, 2, 1, 3]])[[0, 2, 1, 3]]
    assert turned.tolist() == pytest.approx([-1.14264, 1.92208, 2.95985, 4.02980], abs=1e-5)  # 4e-6


def test_position_257_stays_257_in_bfloat16():
    model = Llama(TINY).to(torch.bfloat16)
    cos, _ = tables_of(model, None, 258)
    # Seen 0.0010, and half a step of bfloat16 is 0.0020; cos 256 is -0.03979.
    assert cos[257, 0].item() == pytest.approx(0.81931, abs=2**-9)


def test_8192_positions_are_8192_rows_in_bfloat16():
    """Of positions in bfloat16 only 897 would differ; of frequencies in it every row would, and the
    far ones would be off by 2.
    """
    model = Llama(dataclasses.replace(TINY, head_dim=64)).to(torch.bfloat16)
    tables = tables_of(model, torch.arange(8192).view(64, 128), 128)
    assert {table.dtype for table in tables} == {torch.bfloat16}
    assert torch.cat(tables, dim=-1).unique(dim=0).shape[0] == 8192
    frequencies = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angles = torch.arange(8192, dtype=torch.float64)[:, None] * frequencies
    for table, exact in zip(tables, (angles.cos(), angles.sin()), strict=True):
        assert (table - exact).abs().max() < 2**-8  # seen 0.0021


def test_frequencies_after_a_load_through_the_meta_device(checkpoint: Path):
    """At position 1 the angles are the frequencies."""
    model = load_model(checkpoint, dtype=torch.float32)
    assert not list(model.buffers())  # nothing that a load could leave unfilled
    cos, sin = (table[1] for table in tables_of(model, None, 2))
    one = torch.ones(1)
    assert torch.equal(torch.stack([cos[:1], sin[:1]]), torch.stack([one.cos(), one.sin()]))
    frequencies = torch.atan2(sin, cos)
    assert len(frequencies) == model.config.head_dim // 2 == 4
    assert frequencies.isfinite().all()
    assert (frequencies.diff() < 0).all()
    expected = [1.0, 0.1, 0.01, 0.001]  # theta 10000
    assert frequencies.tolist() == pytest.approx(expected, rel=5e-7)  # seen 6e-8


def test_llama3_scaling():
    plain = inverse_frequencies(RopeConfig(500000.0), 64)
    scaled = inverse_frequencies(LLAMA3, 64)
    ratio = scaled / plain
    assert torch.equal(scaled[:15], plain[:15])
    assert ratio[15:18].tolist() == pytest.approx(
        [0.60557, 0.30374, 0.10345], abs=1e-5
    )  # seen 3e-6
    assert torch.equal(scaled[18:], plain[18:] / 32)
    assert scaled[-1].item() == pytest.approx(9.4183e-8, rel=5e-6)  # seen 7e-7


def test_llama3_scaling_applies_at_every_position():
    """From the first on, and not past the original length alone: each divided pair turns 1/32 as far."""
    positions = torch.tensor([1, 2, 31, 8191, 8192, 8193, 100000])
    plain = cos_sin(RopeConfig(500000.0), 64, positions, torch.float64)
    scaled = cos_sin(LLAMA3, 64, positions, torch.float64)
    for there, here in zip(plain, scaled, strict=True):
        assert torch.equal(there[0, 0, :, :15], here[0, 0, :, :15])
    angles = [
        torch.atan2(sin, cos)[0, 0, :, 31] for cos, sin in (plain, scaled)
    ]  # under half a turn
    assert (angles[0] / angles[1]).tolist() == pytest.approx([32.0] * 7, rel=1e-6)  # seen 1.1e-7


def test_linear_scaling_divides_every_frequency():
    plain = inverse_frequencies(RopeConfig(), 16)
    assert torch.equal(
        inverse_frequencies(RopeConfig(rope_type="linear", factor=4.0), 16), plain / 4
    )


@pytest.mark.parametrize("rope_type", ["dynamic", "yarn", "longrope", "su", "ntk"])
def test_other_scalings_are_refused_by_name(rope_type):
    with pytest.raises(ValueError, match=rope_type):
        RopeConfig(rope_type=rope_type)


def test_positions_of_each_row():
    positions = torch.tensor([[0, 1, 2], [5, 6, 7]])
    cos, sin = cos_sin(RopeConfig(), 8, positions, torch.float32)
    assert cos.shape == sin.shape == (2, 1, 3, 4)
    assert torch.equal(cos[1], cos_sin(RopeConfig(), 8, positions[1], torch.float32)[0][0])


def test_meta_rows_are_reordered_for_q_and_k_by_their_own_heads_and_never_for_v(tmp_path):
    from safetensors.torch import save_file

    from llama_mini.checkpoint.headers import read_headers
    from llama_mini.checkpoint.meta import META_LLAMA

    config = dataclasses.replace(TINY, head_dim=4)
    rows = {"wq": 16, "wk": 8, "wv": 8}
    weights = {
        f"layers.0.attention.{name}.weight": torch.arange(n * 8.0).view(n, 8)
        for name, n in rows.items()
    }
    save_file(weights, tmp_path / "consolidated.00.safetensors")
    stored = read_headers(tmp_path, {theirs: ours for ours, theirs in META.items()})
    read = dict(read_tensors(stored, "cpu", torch.float32, config, META_LLAMA))
    order = [0, 2, 1, 3]
    for ours, theirs in (("q", "wq"), ("k", "wk"), ("v", "wv")):
        source = weights[f"layers.0.attention.{theirs}.weight"]
        expected = source if ours == "v" else source.view(-1, 4, 8)[:, order].reshape(source.shape)
        assert torch.equal(read[f"blocks.0.attention.{ours}_proj.weight"], expected)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LLAMA3.factor = 8.0
