"""The decoder as a user calls it: shapes, names, norm placement, attention, the cache."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llama_mini.model
from llama_mini import KVCache, Llama
from llama_mini.cache import causal_mask
from llama_mini.model import Attend, RMSNorm
from tests.support.fixtures import draw_tokens
from tests.support.models import CLOSE, CONFIG, make, off

pytestmark = pytest.mark.oldest


@pytest.fixture(scope="module")
def model() -> Llama:
    return make()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return draw_tokens((2, 11), seed=1, vocab_size=61)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def test_no_bias_no_buffer_no_global_state(model):
    assert not [name for name, _ in model.named_parameters() if "bias" in name]
    assert not list(model.named_buffers())
    source = Path(llama_mini.model.__file__).read_text()
    assert not re.search(r"register_buffer|bias=True|^global |_CACHE", source, re.MULTILINE)
    assert len(source.splitlines()) <= 230


def test_norm_class_can_be_exchanged(tokens):
    layer_norm = Llama(CONFIG, norm=nn.LayerNorm)
    assert sum(isinstance(module, nn.LayerNorm) for module in layer_norm.modules()) == 5
    assert layer_norm(tokens).shape == (2, 11, 61)


def test_tied_head_is_one_tensor():
    tied = Llama(dataclasses.replace(CONFIG, tie_word_embeddings=True))
    assert tied.lm_head.weight is tied.embed.weight


def test_attention_scale_is_one_over_root_head_dim():
    q = torch.zeros(1, 1, 1, 128)
    k = torch.zeros(1, 1, 2, 128)
    q[..., 0], k[0, 0, 0, 0] = 1.0, 128**0.5  # one score is 1 after the scale, the other 0
    v = torch.eye(128)[:2].view(1, 1, 2, 128)
    weights = Attend()(q, k, v, None)[0, 0, 0, :2]
    expected = torch.tensor([1.0, 0.0]).softmax(0)
    assert off(weights, expected) < 5e-7  # seen 0; a scale of 1/sqrt(64) would be off by 0.07


def test_four_query_heads_over_two_key_value_heads():
    q = torch.zeros(1, 4, 1, 8)
    k = torch.zeros(1, 2, 3, 8)
    v = torch.stack([torch.full((3, 8), 10.0), torch.full((3, 8), 20.0)])[None]
    heads = Attend()(q, k, v, None)[0, :, 0, 0]
    assert heads.tolist() == pytest.approx([10.0, 10.0, 20.0, 20.0])


def test_two_queries_over_five_positions_see_four_and_five_keys(model, tokens):
    seen = []
    hook = model.blocks[0].attention.attend.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[3])
    )
    cache = KVCache(CONFIG, batch=2, capacity=5)
    model(tokens[:, :3], cache=cache)
    model(tokens[:, 3:5], cache=cache)
    hook.remove()
    assert seen[0] is None
    assert seen[1].sum(-1).flatten().tolist() == [4, 5]


@pytest.mark.parametrize(
    "chunks", [[11], [1] * 11, [6, 1, 1, 1, 1, 1], [5, 6], [1, 10], [2, 3, 6], [10, 1]]
)
def test_any_chunking_gives_the_logits_of_one_pass(model, tokens, chunks):
    cache = KVCache(CONFIG, batch=2, capacity=13)
    for tensor in cache.keys + cache.values:
        tensor.fill_(float("nan"))  # a slot never written is never read
    pieces = [model(piece, cache=cache) for piece in tokens.split(chunks, dim=1)]
    assert cache.length == 11
    assert off(torch.cat(pieces, dim=1), model(tokens)) < CLOSE


def test_every_split_of_a_prompt_in_two(model, tokens):
    whole = model(tokens)
    for cut in range(1, 11):
        cache = KVCache(CONFIG, batch=2, capacity=11)
        model(tokens[:, :cut], cache=cache)
        last = model(tokens[:, cut:], cache=cache, last_only=True)
        assert last.shape == (2, 1, 61)
        assert off(last, whole[:, -1:]) < CLOSE


def test_positions_continue_after_the_prompt(model, tokens):
    cache = KVCache(CONFIG, batch=2, capacity=9)
    model(tokens[:, :6], cache=cache)
    for position in (6, 7, 8):
        token = tokens[:, position : position + 1]
        full = model(tokens[:, : position + 1])[:, -1:]
        one_off = model(token, cache=cache, positions=torch.tensor([position - 1]))
        assert off(one_off, full) > 0.01
        cache.length -= 1  # the next call writes over it
        assert off(model(token, cache=cache), full) < CLOSE


def test_two_interleaved_generations_do_not_disturb_each_other(model, tokens):
    first, second = (KVCache(CONFIG, batch=1, capacity=11) for _ in range(2))
    rows = []
    for step in range(11):
        a = model(tokens[:1, step : step + 1], cache=first)
        b = model(tokens[1:, step : step + 1], cache=second)
        rows.append(torch.cat([a, b]))
    assert off(torch.cat(rows, dim=1), model(tokens)) < CLOSE


def test_cache_overflow_names_both_numbers(model, tokens):
    cache = KVCache(CONFIG, batch=2, capacity=12)
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match=r"room for 12 positions and holds 11, so 2 more"):
        model(tokens[:, :2], cache=cache)
    assert cache.length == 11


def test_cache_of_another_batch_or_dtype_is_refused(model, tokens):
    with pytest.raises(ValueError, match="made for batch 3"):
        model(tokens, cache=KVCache(CONFIG, batch=3, capacity=12))
    with pytest.raises(ValueError, match="bfloat16"):
        model(tokens, cache=KVCache(CONFIG, batch=2, capacity=12, dtype=torch.bfloat16))


@pytest.mark.parametrize("form", ["b t s", "b 1 t s"])
def test_left_padded_batch_equals_single_runs(model, tokens, form):
    short, long = tokens[0, :1], tokens[1, :3]
    padded = torch.stack([torch.cat([torch.zeros(2, dtype=torch.int64), short]), long])
    real = torch.tensor([[False, False, True], [True, True, True]])
    mask = torch.ones(3, 3, dtype=torch.bool).tril() & real[:, None]
    mask = mask if form == "b t s" else mask[:, None]
    positions = torch.tensor([[0, 0, 0], [0, 1, 2]])
    logits = model(padded, positions=positions, mask=mask)
    assert logits.isfinite().all()
    assert off(logits[0, 2:], model(short[None])[0]) < CLOSE
    assert off(logits[1], model(long[None])[0]) < CLOSE


def test_mask_of_two_axes_is_shared_by_all_rows(model, tokens):
    causal = torch.ones(11, 11, dtype=torch.bool).tril()
    assert off(model(tokens, mask=causal), model(tokens)) < CLOSE


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_mask_that_is_not_bool_is_refused(model, tokens, dtype):
    """Added to the scores, ones and zeros would hide nothing."""
    causal = torch.ones(11, 11).tril().to(dtype)
    with pytest.raises(ValueError, match=rf"mask is {dtype}: it must be bool"):
        model(tokens, mask=causal)


def test_causal_order_is_an_explicit_mask_on_mps(monkeypatch):
    """There, is_causal in half precision lets queries see the future."""
    assert causal_mask(3, 0, torch.device("cpu")) is None
    here = torch.ones
    monkeypatch.setattr("torch.ones", lambda *shape, dtype, device: here(*shape, dtype=dtype))
    mask = causal_mask(3, 0, torch.device("mps"))
    assert mask.tolist() == [[[[True, False, False], [True, True, False], [True, True, True]]]]
    assert causal_mask(1, 4, torch.device("mps")) is None


def test_last_only_computes_one_row_of_logits(model, tokens):
    rows = []
    hook = model.lm_head.register_forward_pre_hook(
        lambda _, inputs: rows.append(inputs[0].shape[1])
    )
    last = model(tokens, last_only=True)
    hook.remove()
    assert rows == [1]
    assert off(last, model(tokens)[:, -1:]) < CLOSE


def test_sliding_window_is_refused_beyond_it(tokens):
    model = make(dataclasses.replace(CONFIG, sliding_window=10))
    model(tokens[:, :10])
    with pytest.raises(ValueError, match=r"11 positions .* sliding_window of 10"):
        model(tokens)


def test_qk_norm_stands_before_rotation():
    model = make(dataclasses.replace(CONFIG, qk_norm=True, num_hidden_layers=1))
    seen = {}
    attention = model.blocks[0].attention
    attention.q_norm.register_forward_hook(lambda _, inputs, output: seen.update(normed=output))
    attention.attend.register_forward_pre_hook(lambda _, inputs: seen.update(q=inputs[0]))
    model(torch.tensor([[3, 5]]))
    # Position 0 is not turned; position 1 is, and a rotation keeps the length of every pair.
    assert torch.equal(seen["normed"][:, :, 0], seen["q"][:, :, 0])
    assert off(seen["normed"][:, :, 1], seen["q"][:, :, 1]) > 0.1
    assert off(seen["normed"].norm(dim=-1), seen["q"].norm(dim=-1)) < 4e-6  # seen 4.8e-7


@pytest.mark.parametrize(("batch", "length"), [(1, 4096), (2, 2048)])
def test_grouped_attention_takes_linear_memory_and_copies_no_key(monkeypatch, batch, length):
    from torch.utils._python_dispatch import TorchDispatchMode

    largest, read = 0, []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return result

    def watched(q, k, v, **options):
        read.extend(tensor.untyped_storage().nbytes() for tensor in (k, v))
        return kernel(q, k, v, **options)

    kernel = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    # Laid out as the projections leave them, so that a batch and its heads are no single axis.
    q, k, v = (torch.randn(batch, length, heads, 8).transpose(1, 2) for heads in (4, 2, 2))
    with Watch():
        Attend()(q, k, v, None)
    size = k.untyped_storage().nbytes()
    assert read == [size, size]  # as large as the keys, not as large as the queries
    assert largest <= 4 * q.untyped_storage().nbytes()  # the scores are 512 or 256 times as large


def test_more_queries_than_one_over_more_keys_need_a_mask():
    """is_causal would show the first query the first key only."""
    q, k = torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match="2 queries over 5 keys"):
        Attend()(q, k, k, None)


def test_scale_of_the_scores_can_be_set():
    q, k = torch.ones(1, 1, 1, 4), torch.tensor([1.0, 0.0]).view(1, 1, 2, 1).expand(1, 1, 2, 4)
    attend = Attend()
    attend.scale = 1.0
    assert attend(q, k, k, None)[0, 0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(-4)))


@pytest.mark.parametrize("tokens", ["hi", [[1, 2]], torch.tensor([1, 2]), torch.zeros(1, 2)])
def test_what_is_no_batch_of_tokens_is_refused(model, tokens):
    with pytest.raises(ValueError, match=r"tokens must be a tensor of token ids \(b, t\)"):
        model(tokens)


def test_no_positions_too_few_and_a_negative_cache_length_are_refused(model, tokens):
    with pytest.raises(ValueError, match=r"\(2, 0\)"):
        model(torch.zeros(2, 0, dtype=torch.int64))
    with pytest.raises(ValueError, match="1 positions do not fit 11 tokens"):
        model(tokens, positions=torch.tensor([0]))
    cache = KVCache(CONFIG, batch=2, capacity=12)
    cache.length = -1
    with pytest.raises(ValueError, match="length is -1"):
        model(tokens, cache=cache)


def test_causal_order_holds_from_4096_keys_on(model):
    """A later token changes no earlier logit, however long the context."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=1, max_position_embeddings=8192)
    long = make(config)
    tokens = draw_tokens((1, 4097), seed=2, vocab_size=61)
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 61
    before, after = long(tokens), long(changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert off(before[:, -1], after[:, -1]) > 0.1
    cache = KVCache(config, batch=1, capacity=4097)
    long(tokens[:, :4090], cache=cache)
    assert off(long(tokens[:, 4090:], cache=cache), before[:, 4090:]) < CLOSE


def test_a_norm_prints_its_size_and_eps():
    assert repr(RMSNorm(48, 1e-5)) == "RMSNorm(48, eps=1e-05)"


def test_a_block_class_can_be_given(tokens):
    class Twice(llama_mini.model.Block):
        def forward(self, x, *rest):
            return super().forward(super().forward(x, *rest), *rest)

    model = Llama(CONFIG, block=Twice).eval()
    assert {type(block) for block in model.blocks} == {Twice}
    assert model(tokens).shape == (2, 11, 61)
