"""Rotary positions: values worked out by hand or with the original code of each layout."""

import dataclasses

import pytest
import torch

from llama_mini import Llama, LlamaConfig, RopeConfig
from llama_mini.checkpoint import META, read_tensors
from llama_mini.rope import cos_sin, inverse_frequencies, rotate

LLAMA3 = RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)


def rotate_at(position: int, x: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_sin(RopeConfig(), x.shape[-1], torch.tensor([position]), torch.float32)
    return rotate(x.view(1, 1, 1, -1), cos, sin).flatten()


def test_half_split_pairs():
    turned = rotate_at(1, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert turned.tolist() == pytest.approx([-1.98411, 1.95990, 2.46238, 4.01980], abs=1e-5)


def test_interleaved_pairs_are_half_split_pairs_in_another_order():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    turned = rotate_at(1, x[[0, 2, 1, 3]])[[0, 2, 1, 3]]
    assert turned.tolist() == pytest.approx([-1.14264, 1.92208, 2.95985, 4.02980], abs=1e-5)


def test_position_257_stays_257_in_bfloat16():
    config = LlamaConfig(11, 16, 16, 1, 2, head_dim=8)
    model = Llama(config).to(torch.bfloat16)
    seen = []
    model.blocks[0].attention.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[1:3]))
    with torch.no_grad():
        model(torch.zeros(1, 258, dtype=torch.int64))
    cos = seen[0][0, 0, 257, 0].item()
    assert cos == pytest.approx(0.81931, abs=2**-9)  # half a bfloat16 step; cos 256 is -0.03979
    cos, _ = cos_sin(RopeConfig(), 64, torch.arange(8192), torch.float32)
    angles = torch.arange(8192)[:, None].float() * inverse_frequencies(RopeConfig(), 64)
    assert angles[:, 0].unique().numel() == 8192
    assert torch.equal(cos[0, 0], angles.cos())


def test_frequencies_after_the_meta_device():
    with torch.device("meta"):
        model = Llama(LlamaConfig(11, 64, 16, 1, 1))
    assert not list(model.buffers())  # nothing that a load could leave unfilled
    frequencies = inverse_frequencies(model.config.rope, model.config.head_dim)
    assert frequencies[0] == 1.0
    assert frequencies.isfinite().all()
    assert (frequencies.diff() < 0).all()


def test_llama3_scaling():
    plain = inverse_frequencies(RopeConfig(500000.0), 64)
    scaled = inverse_frequencies(LLAMA3, 64)
    ratio = scaled / plain
    assert torch.equal(scaled[:15], plain[:15])
    assert ratio[15:18].tolist() == pytest.approx([0.60557, 0.30374, 0.10345], abs=1e-5)
    assert ratio[18:].tolist() == pytest.approx([1 / 32] * 14, rel=1e-6)
    assert scaled[-1].item() == pytest.approx(9.4183e-8, rel=1e-4)


def test_llama3_scaling_applies_at_every_position():
    short = torch.arange(1, 9)
    plain, _ = cos_sin(RopeConfig(500000.0), 64, short, torch.float64)
    scaled, _ = cos_sin(LLAMA3, 64, short, torch.float64)
    assert not torch.equal(plain, scaled)


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

    from llama_mini.checkpoint import read_headers

    config = LlamaConfig(11, 8, 16, 1, 4, 2, head_dim=4)
    rows = {"wq": 16, "wk": 8, "wv": 8}
    weights = {
        f"layers.0.attention.{name}.weight": torch.arange(n * 8.0).view(n, 8)
        for name, n in rows.items()
    }
    save_file(weights, tmp_path / "consolidated.00.safetensors")
    stored = read_headers(tmp_path, {theirs: ours for ours, theirs in META.items()})
    read = dict(read_tensors(stored, "cpu", torch.float32, config))
    order = [0, 2, 1, 3]
    for ours, theirs in (("q", "wq"), ("k", "wk"), ("v", "wv")):
        source = weights[f"layers.0.attention.{theirs}.weight"]
        expected = source if ours == "v" else source.view(-1, 4, 8)[:, order].reshape(source.shape)
        assert torch.equal(read[f"blocks.0.attention.{ours}_proj.weight"], expected)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LLAMA3.factor = 8.0
