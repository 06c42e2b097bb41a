"""RMSNorm by its values and beside LayerNorm; and what the README says of where the norms stand.

Its claims are tried on random models whose parts all matter, on the checkpoint in weights/, and on
stories260K where that is at hand.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_mini import Llama, RMSNorm, load_model, load_tokenizer, record
from llama_mini.checkpoint import parse_config
from llama_mini.model import Block
from tests.support.fixtures import BASE, SHAPES, SHIPPED, draw_tokens, strengthen

PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the"


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def rms_norm(x: Tensor | list[float], weight: float = 1.0, eps: float = 1e-8) -> Tensor:
    x = torch.as_tensor(x)
    norm = RMSNorm(x.shape[-1], eps).to(x.dtype)
    norm.weight.fill_(weight)
    return norm(x)


def layer_norm(x: Tensor | list[float], eps: float = 1e-8) -> Tensor:
    x = torch.as_tensor(x)
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def root_mean_square(x: Tensor) -> Tensor:
    return x.double().pow(2).mean(-1).sqrt()


# By its values


@pytest.mark.parametrize("value", [256.0, 65504.0])
def test_float16_squares_do_not_overflow(value):
    assert rms_norm(torch.full((8,), value, dtype=torch.float16)).tolist() == [1.0] * 8


@pytest.mark.parametrize(("eps", "expected"), [(1e-5, 0.0316), (1e-6, 0.0995), (1e-12, 1.0)])
def test_float16_squares_do_not_vanish(eps, expected):
    x = torch.full((8,), 1e-4, dtype=torch.float16)  # its square is below the smallest float16
    assert rms_norm(x, eps=eps).tolist() == pytest.approx([expected] * 8, rel=1e-3)  # seen 5.1e-4


def test_back_to_the_dtype_of_the_input_and_then_times_the_weight():
    x = torch.tensor([1.0, 1.0, 1.0, 0.984375])
    assert rms_norm(x)[0].item() == pytest.approx(1.00390625, abs=1e-5)  # 1 in bfloat16
    assert rms_norm(x.bfloat16(), weight=1.5)[0].item() == 1.5
    assert (rms_norm(x)[0] * 1.5).bfloat16().item() == 1.5078125  # the other order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_weight_does_not_widen_the_output(dtype):
    assert RMSNorm(8, 1e-5)(torch.ones(2, 8, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize(("eps", "expected"), [(1e-5, 0.3015), (1e-6, 0.7071)])
def test_eps_is_inside_the_root_and_comes_from_the_file(eps, expected):
    config = parse_config({**BASE, "rms_norm_eps": eps})
    norms = [module for module in Llama(config).modules() if isinstance(module, RMSNorm)]
    x = torch.full((BASE["hidden_size"],), 1e-3)
    for norm in norms:
        assert norm(x).tolist() == pytest.approx([expected] * len(x), abs=5e-5)


@pytest.mark.parametrize("given", [{}, {"rms_norm_eps": None}], ids=["left out", "null"])
def test_eps_left_out_is_one_millionth(given):
    values = {key: value for key, value in BASE.items() if key != "rms_norm_eps"}
    assert parse_config({**values, **given}).rms_norm_eps == 1e-6


def test_zeros_stay_zeros():
    assert rms_norm(torch.zeros(3, 4)).tolist() == [[0.0] * 4] * 3


# Beside LayerNorm: the README's table


def test_worked_examples():
    x = torch.tensor([3.0, 1.0, -2.0, 4.0])
    assert root_mean_square(x).item() == pytest.approx(2.74, abs=0.005)
    assert rms_norm(x).tolist() == pytest.approx([1.10, 0.37, -0.73, 1.46], abs=0.005)
    assert x.mean().item() == 1.5
    assert x.std(correction=0).item() == pytest.approx(2.29, abs=0.005)
    assert layer_norm(x).tolist() == pytest.approx([0.65, -0.22, -1.53, 1.09], abs=0.005)
    assert rms_norm([2.0, -1.0, 3.0], 1.5).tolist() == pytest.approx(
        [1.3887, -0.6944, 2.0831], abs=5e-5
    )


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_scaling_the_input_changes_nothing(norm):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert (norm(7 * x) - norm(x)).abs().max() < 4e-6  # seen 4.8e-7


def test_the_output_has_rms_one_and_only_layer_norm_takes_the_mean_away():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) + 1
    for norm in (rms_norm, layer_norm):
        assert root_mean_square(norm(x)).tolist() == pytest.approx([1.0] * 5, abs=5e-7)  # 7.7e-8
    assert layer_norm(x).mean(-1).abs().max() < 3e-7  # seen 3.2e-8
    assert rms_norm(x).mean(-1).abs().min() > 0.5


def test_a_shift_changes_rms_norm_and_not_layer_norm():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert (layer_norm(x + 5) - layer_norm(x)).abs().max() < 8e-6  # seen 8.9e-7
    assert (rms_norm(x + 5) - rms_norm(x)).abs().max() > 1


def test_without_a_mean_the_two_are_the_same():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    x = x - x.mean(-1, keepdim=True)
    assert (layer_norm(x) - rms_norm(x)).abs().max() < 2e-6  # seen 2.4e-7


# Where they stand: the README's sentences


def random_model(shape: str) -> tuple[Llama, Tensor]:
    model = Llama(parse_config({**SHAPES[shape], "num_hidden_layers": 3})).eval()
    strengthen(model, seed=1)
    return model, draw_tokens((1, 12), seed=2)


def real_model(folder: Path) -> tuple[Llama, Tensor]:
    ids = load_tokenizer(folder).encode(PROMPT)
    return load_model(folder, dtype=torch.float32), torch.tensor([ids])


@pytest.fixture(params=["random", "random with QK-norm", "shipped", "stories260K"])
def case(request) -> tuple[Llama, Tensor]:
    """A model and a prompt (1, t) for it."""
    if request.param == "stories260K":
        return real_model(request.getfixturevalue("stories260k"))
    if request.param == "shipped":
        return real_model(SHIPPED)
    return random_model("qwen3" if "QK" in request.param else "gqa_tied")


def relative(changed: Tensor, logits: Tensor) -> float:
    """The largest difference over the largest logit."""
    return ((changed - logits).abs().max() / logits.abs().max()).item()


def logits_with(module: nn.Module, hook: Callable, model: Llama, tokens: Tensor) -> Tensor:
    """Logits with what `module` reads (one tensor) passed through `hook` first."""
    handle = module.register_forward_pre_hook(lambda _, inputs: (hook(inputs[0]), *inputs[1:]))
    try:
        return model(tokens)
    finally:
        handle.remove()


def test_two_norms_a_block_and_one_before_the_head(case):
    model, _ = case
    norms = [name for name, module in model.named_modules() if isinstance(module, RMSNorm)]
    on_the_stream = [name for name in norms if ".attention." not in name]
    places = ("pre_attention_norm", "pre_ffn_norm")
    expected = [f"blocks.{n}.{place}" for n in range(len(model.blocks)) for place in places]
    assert on_the_stream == [*expected, "final_norm"]
    in_the_heads = len(norms) - len(on_the_stream)
    assert in_the_heads == (2 * len(model.blocks) if model.config.qk_norm else 0)


def test_the_residual_path_is_clean(case):
    """The stream is the embedding plus the deltas, to the bit: no norm, no scale stands on it."""
    model, tokens = case
    seen = record(model, tokens)
    x = seen["embed"]
    for n in range(len(model.blocks)):
        assert torch.equal(
            model.blocks[n].pre_attention_norm(x), seen[f"blocks.{n}.pre_attention_norm"]
        )
        x = x + seen[f"blocks.{n}.attention"]
        assert torch.equal(model.blocks[n].pre_ffn_norm(x), seen[f"blocks.{n}.pre_ffn_norm"])
        x = x + seen[f"blocks.{n}.ffn"]
        assert torch.equal(x, seen[f"blocks.{n}"])
    assert torch.equal(model.final_norm(x), seen["final_norm"])


def test_sublayers_that_add_nothing_leave_the_embedding_as_it_is(case, monkeypatch):
    model, tokens = case
    for block in model.blocks:
        block.attention.o_proj.weight.zero_()
        block.ffn.down_proj.weight.zero_()
    logits = model.lm_head(model.final_norm(model.embed(tokens)))
    assert torch.equal(model(tokens), logits)
    monkeypatch.setattr(Block, "forward", post_norm)
    assert relative(model(tokens), logits) > 0.01  # its norms stand on the path itself


def post_norm(block: Block, x: Tensor, *rest: object) -> Tensor:
    x = block.pre_attention_norm(x + block.attention(x, *rest))
    return block.pre_ffn_norm(x + block.ffn(x))


def test_post_norm_is_another_model(case, monkeypatch):
    model, tokens = case
    logits = model(tokens)
    monkeypatch.setattr(Block, "forward", post_norm)
    assert relative(model(tokens), logits) > 0.1


def test_the_stream_grows_with_depth(case):
    model, tokens = case
    names = ["embed", *(f"blocks.{n}" for n in range(len(model.blocks)))]
    seen = record(model, tokens, names)
    sizes = [root_mean_square(seen[name]).median().item() for name in names]
    assert sizes[-1] > 2 * sizes[0]
    assert sizes[-1] > sizes[len(sizes) // 2] > sizes[0]


def test_the_final_norm_takes_the_scale_of_the_stream_away(case):
    model, tokens = case
    logits = model(tokens)
    louder = logits_with(model.final_norm, lambda x: 10 * x, model, tokens)
    assert relative(louder, logits) < 3e-5  # seen 3.4e-6: eps


def test_without_the_final_norm_the_scale_reaches_the_logits(case):
    model, tokens = case
    logits = model(tokens)
    model.final_norm = nn.Identity()
    bare = model(tokens)
    assert relative(bare, logits) > 0.1
    louder = logits_with(model.final_norm, lambda x: 10 * x, model, tokens)
    assert relative(louder, 10 * bare) < 4e-6  # seen 4.6e-7


def test_every_block_norm_counts(case):
    model, tokens = case
    logits = model(tokens)
    for block in model.blocks:
        for place in ("pre_attention_norm", "pre_ffn_norm"):
            norm = getattr(block, place)
            setattr(block, place, nn.Identity())
            assert relative(model(tokens), logits) > 1e-3
            setattr(block, place, norm)


def test_rms_norm_only_scales(case):
    """What leaves a norm is, position by position, what reached it, times one number and the weight."""
    model, tokens = case
    seen = record(model, tokens, ["embed", "blocks.0.pre_attention_norm"])
    norm = model.blocks[0].pre_attention_norm
    x, y = seen["embed"], seen["blocks.0.pre_attention_norm"]
    scale = 1 / (root_mean_square(x).pow(2) + norm.eps).sqrt()[..., None]
    assert relative(y, x * scale * norm.weight) < 1e-6  # seen 1e-7


def test_a_shift_of_the_stream_passes_through(case):
    model, tokens = case
    logits = model(tokens)
    assert relative(logits_with(model.final_norm, lambda x: x + 5, model, tokens), logits) > 0.1
    rms = model.final_norm
    model.final_norm = nn.LayerNorm(rms.weight.shape[0], rms.eps, bias=False)
    model.final_norm.weight.copy_(rms.weight)
    logits = model(tokens)
    assert (
        relative(logits_with(model.final_norm, lambda x: x + 5, model, tokens), logits) < 2e-6
    )  # 2.6e-7


@pytest.mark.parametrize("projection", ["q_proj", "k_proj"])
def test_qk_norm_takes_the_scale_of_queries_and_keys_away(case, projection):
    model, tokens = case
    logits = model(tokens)
    for block in model.blocks:
        getattr(block.attention, projection).weight *= 10
    change = relative(model(tokens), logits)
    if model.config.qk_norm:
        assert change < 5e-5  # seen 6.1e-6: eps
    else:
        assert change > 0.01
