"""The fast form: the same text as the plain model, how far its numbers differ, and what it leaves alone."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from llama_mini import KVCache, Llama, compare, generate, stream
from llama_mini.checkpoint import parse_config
from llama_mini.model import Attend
from llama_mini.speed import fast
from llama_mini.speed.fast import FastLlama, RowAttend, RowLinear, StepGraph, fast_model
from tests.support.fixtures import SHAPES, load_case, load_case_model, logits_in_chunks, strengthen

PROMPTS = [[5, 9, 2, 33, 7], [60, 1], [3], [8, 8, 8, 40, 41, 42, 12], [17, 30, 4]]


@pytest.fixture
def uncompiled(monkeypatch):
    """What would be compiled runs as it stands: at once, and the same but for the order of sums."""
    monkeypatch.setattr(fast, "compiled", lambda function: function)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


@pytest.fixture
def quickly_compiled(monkeypatch):
    """Traced as ever, but run by torch itself in the place of generated code."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def make(name: str = "own_head_dim", **changes: object) -> Llama:
    model = Llama(parse_config({**SHAPES[name], **changes})).eval().requires_grad_(False)
    strengthen(model, seed=3, embedding_std=1.0)
    return model


def test_compiled_once_it_writes_the_same_text():
    torch._dynamo.reset()
    counters.clear()
    model = make()
    swift = fast_model(model)
    for prompt in PROMPTS:
        text = generate(model, [prompt], max_new_tokens=20)
        assert generate(swift, [prompt], max_new_tokens=20) == text
    assert len(set(text[0])) > 3  # a text that says something
    assert counters["stats"]["unique_graphs"] == 1
    # Observed: 4e-7 of the largest logit, here and on SmolLM2-135M.
    tokens = torch.tensor([PROMPTS[0] + text[0]])
    sizes = [5, *[1] * (tokens.shape[1] - 5)]
    plain, own = (logits_in_chunks(each, tokens, sizes) for each in (model, swift))
    assert (own - plain).abs().max() <= 4e-6 * plain.abs().max()


@pytest.mark.parametrize("name", ["mqa", "own_head_dim", "qwen3"])
@pytest.mark.usefixtures("uncompiled")
def test_steps_give_the_stored_activations(name, tmp_path):
    case = load_case(name)
    swift = fast_model(load_case_model(case, tmp_path))
    for sizes in ([1] * 9, [6, 1, 1, 1]):  # every slot that is not written holds NaN
        logits = logits_in_chunks(swift, case.tokens, sizes)
        assert compare(case.reference, {"lm_head": logits})["lm_head"].relative <= 5e-6


@pytest.mark.usefixtures("uncompiled")
def test_a_span_beyond_what_is_written_changes_nothing(monkeypatch):
    model = make()
    tokens = torch.tensor([PROMPTS[0] + PROMPTS[3]])
    exact = logits_in_chunks(fast_model(model), tokens, [2, *[1] * 10])
    monkeypatch.setattr(fast, "SPAN", {"cpu": 8})
    wide = logits_in_chunks(fast_model(model), tokens, [2, *[1] * 10])
    assert (wide - exact).abs().max() <= 1e-5 * exact.abs().max()  # observed: 2e-7


@pytest.mark.usefixtures("uncompiled")
def test_ragged_batches():
    model = make()
    swift = fast_model(model)
    for prompts in (PROMPTS, PROMPTS[:2], PROMPTS * 3):  # few rows, and more than ROWS
        text = generate(model, prompts, max_new_tokens=8)
        assert generate(swift, prompts, max_new_tokens=8) == text


@pytest.mark.usefixtures("uncompiled")
def test_a_mask_in_each_form_and_what_is_refused():
    model = make()
    swift = fast_model(model)
    prompt, token = torch.tensor([[5, 9, 2]] * 2), torch.tensor([[4]] * 2)
    seen = torch.tensor([True, False, True, True])
    for mask in (seen[None], seen.expand(2, 1, 4), seen.expand(2, 1, 1, 4)):
        results = []
        for each in (model, swift):
            cache = KVCache(model.config, batch=2, capacity=8)
            each(prompt, cache=cache)
            results.append(each(token, cache=cache, mask=mask))
            assert cache.length == 4
            with pytest.raises(ValueError, match="it must be bool"):
                each(token, cache=cache, mask=mask.float())
            with pytest.raises(ValueError, match=r"batch 1 in torch\.float32"):
                each(token[:1], cache=cache)
        assert (results[0] - results[1]).abs().max() <= 1e-5 * results[0].abs().max()
    full = KVCache(model.config, capacity=2)
    swift(prompt[:1, :2], cache=full)
    with pytest.raises(ValueError, match="room for 2 positions and holds 2"):
        swift(token[:1], cache=full)


@pytest.mark.usefixtures("uncompiled")
def test_the_plain_model_stays_as_it_is():
    model = make("qwen3")
    kinds = [type(module) for module in model.modules()]
    before = model(torch.tensor([PROMPTS[0]]))
    swift = fast_model(model)
    generate(swift, PROMPTS[:1], max_new_tokens=4)
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(model(torch.tensor([PROMPTS[0]])), before)
    mine, theirs = dict(swift.named_parameters()), dict(model.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(mine[name] is theirs[name] for name in mine)  # no weight is copied
    assert isinstance(swift, FastLlama)
    assert {type(m) for m in swift.modules()} >= {RowLinear, RowAttend}
    assert not {type(m) for m in swift.modules()} & {Llama, nn.Linear, Attend}


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_positions_and_masks_reach_the_compiled_step():
    """The compiler takes a tensor that stands in two places for one input, also where it is not."""
    model = make(num_hidden_layers=2)
    swift = fast_model(model)
    prompt, token = torch.tensor([[5, 9, 2]]), torch.tensor([[4]])
    seen = torch.tensor([[True, False, True, True]])
    for positions in (None, torch.tensor([3]), torch.tensor([9]), torch.tensor([[9]])):
        for mask in (None, seen):
            logits = []
            for each in (model, swift):
                cache = KVCache(model.config, capacity=8)
                each(prompt, cache=cache)
                logits.append(each(token, cache=cache, positions=positions, mask=mask))
            assert (logits[0] - logits[1]).abs().max() <= 3e-6 * logits[0].abs().max()  # seen: 3e-7
    for prompts in ([[5, 9], [7, 1]], PROMPTS[:2], PROMPTS[1:3]):
        assert generate(swift, prompts, 6) == generate(model, prompts, 6)


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_two_models_of_one_shape_do_not_share_code():
    """Conditions on a model are not checked before a step, so its code must be its own."""
    models = [make(), make(rms_norm_eps=5.0)]
    swift = [fast_model(model) for model in models]
    texts = [generate(model, PROMPTS[:1], max_new_tokens=12) for model in models]
    assert texts[0] != texts[1]
    assert [generate(each, PROMPTS[:1], max_new_tokens=12) for each in swift] == texts


def test_16_bits_are_closer_to_exact_than_in_the_plain_model(uncompiled, monkeypatch):
    """Steps and emulated long passes sum in float32, and round less often."""
    monkeypatch.setattr(fast, "EMULATED", {torch.bfloat16})
    model = make().bfloat16()
    exact = make()
    exact.load_state_dict(model.state_dict())
    tokens = torch.tensor([[*range(40), 5, 9, 2]])
    sizes = [40, 1, 1, 1]
    wanted = logits_in_chunks(exact, tokens, sizes)
    errors = [
        (logits_in_chunks(each, tokens, sizes).float() - wanted).square().mean().sqrt()
        for each in (model, fast_model(model))
    ]
    assert errors[1] < errors[0] < 0.05 * wanted.square().mean().sqrt()


@pytest.mark.slow
def test_without_a_compiler_it_says_so(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    with pytest.raises(ValueError, match=r"cannot compile a step.*No working C\+\+ compiler"):
        generate(fast_model(make()), PROMPTS[:1], max_new_tokens=3)


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="on cpu and cuda, and the model is on meta"):
        fast_model(make().to("meta"))


def test_emulated_dtypes(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False}, False)
    assert fast.emulated() == {torch.bfloat16}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"sve": True}, False)  # another kind
    assert fast.emulated() == set()


@pytest.mark.usefixtures("uncompiled")
def test_few_rows_are_sums(monkeypatch):
    layer = RowLinear(24, 10, bias=False)
    for rows in (1, 3, 9):
        x = torch.randn(rows, 1, 24)
        product = layer(x)
        assert product.shape == (rows, 1, 10)
        assert torch.equal(product, F.linear(x, layer.weight)) == (rows > fast.ROWS["cpu"])
        assert torch.allclose(product, F.linear(x, layer.weight), atol=1e-6)
    monkeypatch.undo()
    assert torch.equal(
        layer(x[:1]), F.linear(x[:1], layer.weight)
    )  # not compiled: the plain product


def test_what_a_graph_returns_stays_when_it_runs_again(monkeypatch):
    """CUDA graphs write to the same memory each time; here with a stand-in for them."""
    graphs = []

    class Graph:
        def replay(self):
            self.owner.logits.copy_(self.step(*self.owner.inputs))

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(Graph()) or graphs[-1])
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)

    def step(tokens, slot):
        return tokens * 2.0 + slot

    graph = StepGraph(step, (torch.tensor([[1]]), torch.tensor([5])))
    graphs[0].owner, graphs[0].step = graph, step
    first = graph((torch.tensor([[1]]), torch.tensor([5])))
    second = graph((torch.tensor([[4]]), torch.tensor([6])))
    assert (first.item(), second.item()) == (7, 14)


@pytest.mark.usefixtures("uncompiled")
def test_a_cache_is_not_kept():
    model = make()
    swift = fast_model(model)
    cache = KVCache(model.config, capacity=8)
    swift(torch.tensor([[5, 9]]), cache=cache)
    swift(torch.tensor([[5]]), cache=cache)
    assert len(swift.graphs) == 1
    alive = weakref.ref(cache)
    del cache
    gc.collect()
    assert alive() is None
    assert not swift.graphs


@pytest.mark.usefixtures("uncompiled")
def test_two_generations_interleave():
    model = make()
    texts = []
    for each in (model, fast_model(model)):
        streams = [stream(each, [prompt], 9) for prompt in PROMPTS[:2]]
        texts.append(list(zip(*streams, strict=True)))
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_every_batch_size_has_code_of_its_own():
    """Else the ninth would meet the compiler's limit for one function."""
    model = make(num_hidden_layers=1)
    swift = fast_model(model)
    for batch in range(1, 11):
        prompts = [[5, 9]] * batch
        assert generate(swift, prompts, 3) == generate(model, prompts, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    model = make(max_position_embeddings=1024).to("cuda", dtype)
    swift = fast_model(model)
    tokens = torch.tensor([[*range(40), 5, 9, 2]], device="cuda")
    plain, own = (logits_in_chunks(e, tokens, [40, 1, 1, 1]) for e in (model, swift))
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert (plain - own).abs().max() <= bound * plain.abs().max()
    if dtype == torch.float32:
        for prompts in (PROMPTS[:1], PROMPTS):  # beyond one span, and ragged
            text = generate(model, prompts, max_new_tokens=300)
            assert generate(swift, prompts, max_new_tokens=300) == text
