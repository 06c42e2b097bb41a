"""The fast form on a GPU, as far as a CPU can tell: what a step computes, and what is captured, kept and
refused. In the place of a CUDA graph stands the step itself, which reads the same tensors again.
"""

import contextlib
import copy
import dataclasses
import gc
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from llama_mini import KVCache, Llama, RMSNorm, compare, generate, stream
from llama_mini.model import Attend, Attention
from llama_mini.speed import all_cores, graphs
from llama_mini.speed.graphs import GraphLlama, fast_on_cuda, span_of
from llama_mini.speed.row import PartLinear, RowAttend, RowAttention, RowLinear, run_step
from tests.support.fixtures import (
    SHAPES,
    load_case,
    load_case_model,
    logits_in_chunks,
    random_llama,
    strengthen,
)

PROMPTS = [[5, 9, 2, 33, 7], [60, 1], [3], [8, 8, 8, 40, 41, 42, 12], [17, 30, 4]]


@pytest.fixture
def captured(monkeypatch):
    """The graphs that were made, in the order of their capture."""
    made = []

    class Replayed:
        def __init__(self, step, pool, stream):
            self.step, self.place, self.replays = step, (pool, stream), 0
            made.append(self)

        def __call__(self):
            self.replays += 1
            return self.step().clone()

    monkeypatch.setattr(graphs, "StepGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    return made


@pytest.fixture
def uncompiled(monkeypatch):
    """What would be compiled runs as it stands: at once, and the same but for the order of sums."""

    def step(*inputs):
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            return run_step(*inputs)

    monkeypatch.setattr(GraphLlama, "run", lambda self: step)


def make(**changes) -> Llama:
    model = random_llama(**changes)
    strengthen(model, seed=3, embedding_std=1.0)
    return model


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("uncompiled")
def test_steps_give_the_stored_activations(name, tmp_path, captured):
    case = load_case(name)
    fast = fast_on_cuda(load_case_model(case, tmp_path))
    t = case.tokens.shape[1]
    for sizes in (
        [1] * t,
        [t - 3, 1, 1, 1],
    ):  # every slot of the cache that is not written holds NaN
        logits = logits_in_chunks(fast, case.tokens, sizes)
        assert (
            compare(case.reference, {"lm_head": logits})["lm_head"].relative <= 5e-6
        )  # observed: 5e-7
    assert len(captured) == 1  # the second cache took over what the first had


@pytest.mark.usefixtures("uncompiled")
def test_the_same_text_alone_in_ragged_batches_and_in_turns(captured):
    model = make()
    fast = fast_on_cuda(model)
    for prompts in (PROMPTS[:1], PROMPTS, PROMPTS[:2], PROMPTS[:1], PROMPTS):
        assert generate(fast, prompts, 8) == generate(model, prompts, 8)
    assert len(captured) == 3  # of as many batch sizes
    streams = [[stream(each, [prompt], 9) for prompt in PROMPTS[:2]] for each in (model, fast)]
    texts = [list(zip(*each, strict=True)) for each in streams]
    assert texts[0] == texts[1]
    assert len({graph.place for graph in captured}) == 1  # one pool, one stream


@pytest.mark.usefixtures("uncompiled")
def test_long_texts_change_graphs_and_memory_stays_bounded(captured):
    model = make(max_position_embeddings=2048)
    fast = fast_on_cuda(model)
    tokens = torch.arange(515)[None] % 64
    sizes = [254, 1, 1, 1, 253, 1, 1, 1, 1, 1]
    plain, own = (logits_in_chunks(each, tokens, sizes) for each in (model, fast))
    assert (plain - own).abs().max() <= 4e-6 * plain.abs().max()  # observed: 4e-7
    assert len(captured) == 3  # up to 256, 512 and 768 positions
    for batch in range(1, 9):
        generate(fast, PROMPTS[1:2] * batch, 3)
    gc.collect()
    assert len(fast.arenas) <= graphs.KEPT


@pytest.mark.usefixtures("uncompiled")
def test_what_is_compiled_serves_the_first_step_and_a_static_cache_has_room_for_its_spans(captured):
    model = make(max_position_embeddings=2048)
    fast = fast_on_cuda(model)
    fast.compiled = compiled = lambda *inputs: None
    short, longer = (KVCache(model.config, capacity=n) for n in (256, 257))
    fast(torch.tensor([[4]]), cache=short)
    assert fast.compiled is compiled
    del short
    longer.length = 256
    for each in longer.keys + longer.values:
        each.zero_()
    fast(
        torch.tensor([[4]]), cache=longer
    )  # attends over 512, of which 256 have no place in the former
    held, *_ = fast.leases[longer].inputs(span_of(257))
    assert {each.shape[3] for each in held} == {512}


def test_spans_are_few_and_little_too_long():
    lengths = range(1, 131073)
    assert all(n <= span_of(n) <= max(256, n * 1.26) + 256 for n in lengths)
    assert len({span_of(n) for n in lengths}) <= 40


CHANGES = {
    "weights loaded by assignment": lambda m: m.load_state_dict(
        {name: weight * 1.5 for name, weight in m.state_dict().items()}, assign=True
    ),
    "data assigned": lambda m: setattr(
        m.blocks[1].ffn.up_proj.weight, "data", m.blocks[1].ffn.up_proj.weight * 3
    ),
    "eps": lambda m: [setattr(n, "eps", 5.0) for n in m.modules() if isinstance(n, RMSNorm)],
    "scale": lambda m: [setattr(n, "scale", 3.0) for n in m.modules() if isinstance(n, Attend)],
    "a hook": lambda m: m.blocks[1].attention.attend.register_forward_hook(lambda *a: 2 * a[2]),
    "config": lambda m: setattr(
        m,
        "config",
        dataclasses.replace(m.config, rope=dataclasses.replace(m.config.rope, rope_theta=5.0)),
    ),
    "a block left out": lambda m: m.blocks.__delitem__(0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("uncompiled", "captured")
def test_what_is_changed_after_a_capture_is_seen(change):
    model, other = make(), make()
    fast = fast_on_cuda(other)
    tokens = torch.tensor([[*range(20), 5, 9, 2]])
    before = logits_in_chunks(fast, tokens, [20, 1, 1, 1])
    for each in (model, fast):
        CHANGES[change](each)
    plain, own = (logits_in_chunks(each, tokens, [20, 1, 1, 1])[:, -3:] for each in (model, fast))
    assert (plain - before[:, -3:]).abs().max() > 1e-3 * plain.abs().max()
    assert (own - plain).abs().max() <= 4e-6 * plain.abs().max()  # observed: 5e-7


@pytest.mark.usefixtures("uncompiled", "captured")
def test_cache_tensors_replaced_grown_and_shared_are_seen():
    model = make()
    fast = fast_on_cuda(model)
    results = []
    for each in (model, fast):
        cache = KVCache(model.config, batch=2, capacity=5)
        each(torch.tensor([[5, 9, 2], [1, 2, 3]]), cache=cache)
        each(torch.tensor([[4], [7]]), cache=cache)
        for held in (cache.keys, cache.values):  # what beam search does
            held[:] = [tensor[[1, 0]] for tensor in held]
        each(torch.tensor([[4], [7]]), cache=cache)
        cache.grow(300)
        results.append(each(torch.tensor([[4], [7]]), cache=cache))
        results.append(each(torch.tensor([[4, 3], [7, 9]]), cache=cache))  # through the plain path
    for plain, own in zip(results[:2], results[2:], strict=True):
        assert (plain - own).abs().max() <= 4e-6 * plain.abs().max()


@pytest.mark.usefixtures("uncompiled")
def test_settings_make_graphs_of_their_own_and_autocast_none(captured):
    model = make()
    fast = fast_on_cuda(model)
    generate(fast, PROMPTS[:1], 3)
    replays = captured[0].replays
    with torch.autocast("cpu", torch.bfloat16):
        generate(fast, PROMPTS[:1], 3)
    assert (len(captured), captured[0].replays) == (1, replays)
    products = torch.backends.cuda.matmul
    for change, undo in (
        (lambda: torch.set_float32_matmul_precision("high"),) * 2,
        (
            lambda: setattr(products, "allow_bf16_reduced_precision_reduction", False),
            lambda: setattr(products, "allow_bf16_reduced_precision_reduction", True),
        ),
        (
            lambda: torch.use_deterministic_algorithms(True),
            lambda: torch.use_deterministic_algorithms(False),
        ),
        # The older switch and the newer one; torch cannot tell its precision by the former any more.
        (
            lambda: setattr(products, "allow_tf32", False),
            lambda: setattr(products, "fp32_precision", "none"),
        ),
    ):
        before = len(captured)
        try:
            change()
            generate(fast, PROMPTS[:1], 3)
            generate(fast, PROMPTS[:1], 3)
        finally:
            undo()
        assert len(captured) == before + 1
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("uncompiled", "captured")
def test_masks_positions_and_what_is_refused():
    model = make()
    fast = fast_on_cuda(model)
    prompt, token = torch.tensor([[5, 9, 2]] * 2), torch.tensor([[4]] * 2)
    seen = torch.tensor([True, False, True, True])
    for mask in (None, seen[None], seen.expand(2, 1, 4), seen.flip(0).expand(2, 1, 1, 4)):
        for positions in (None, torch.tensor([7]), torch.tensor([[7], [9]])):
            results = []
            for each in (model, fast):
                cache = KVCache(model.config, batch=2, capacity=8)
                each(prompt, cache=cache)
                results.append(each(token, cache=cache, mask=mask, positions=positions))
                assert cache.length == 4
            assert (results[0] - results[1]).abs().max() <= 4e-6 * results[0].abs().max()
    with pytest.raises(ValueError, match="it must be bool"):
        fast(token, cache=cache, mask=torch.zeros(1, 5))
    full = KVCache(model.config, capacity=2)
    fast(prompt[:1, :2], cache=full)
    with pytest.raises(ValueError, match="room for 2 positions and holds 2"):
        fast(token[:1], cache=full)
    plain = Llama(dataclasses.replace(model.config, sliding_window=3)).requires_grad_(False)
    windowed = fast_on_cuda(plain)
    cache = KVCache(windowed.config, capacity=8)
    windowed(prompt[:1], cache=cache)
    with pytest.raises(ValueError, match="sliding_window of 3"):
        windowed(token[:1], cache=cache)


@pytest.mark.usefixtures("uncompiled")
def test_a_step_that_is_to_be_differentiated_is_not_replayed(captured):
    fast = fast_on_cuda(make()).requires_grad_(True)
    cache = KVCache(fast.config, capacity=8)
    assert fast(torch.tensor([[4]]), cache=cache).requires_grad
    assert not captured
    with torch.no_grad():
        fast(torch.tensor([[4]]), cache=cache)
    assert captured


def test_a_capture_waits_for_what_ran_and_a_replay_leaves_earlier_logits_alone(monkeypatch):
    logits, events = torch.zeros(3), []

    class Graph:
        def replay(self):
            logits.add_(1)

    @contextlib.contextmanager
    def capture(*given, capture_error_mode):
        events.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    graph = graphs.StepGraph(lambda: events.append("step") or logits, "pool", "stream")
    assert events == ["step", "wait", "capture", "step"]
    assert [int(each[0]) for each in (graph(), graph())] == [1, 2]


@pytest.mark.usefixtures("uncompiled", "captured")
def test_the_smallest_static_cache_that_serves_is_taken():
    fast, token = fast_on_cuda(make()), torch.tensor([[4]])
    caches = [KVCache(fast.config, capacity=capacity) for capacity in (300, 20)]
    for each in caches:
        fast(token, cache=each)
    del caches, each
    gc.collect()
    assert [arena.longest for arena in fast.arenas] == [512, 256]
    fast(token, cache=(cache := KVCache(fast.config, capacity=20)))
    assert fast.leases[cache].longest == 256


@pytest.mark.usefixtures("uncompiled")
def test_layers_are_constructed_and_the_model_given_stays():
    model = make(**SHAPES["qwen3"])
    kinds = [type(module) for module in model.modules()]
    for given in (model, all_cores(model)):
        fast = fast_on_cuda(given)
        mine, theirs = dict(fast.named_parameters()), dict(model.named_parameters())
        assert mine.keys() == theirs.keys()
        assert all(mine[name] is theirs[name] for name in mine)
        assert {type(m) for m in fast.modules()} >= {
            GraphLlama,
            RowLinear,
            PartLinear,
            RowAttention,
            RowAttend,
        }
        assert not {type(m) for m in fast.modules()} & {Llama, nn.Linear, Attend, Attention}
    assert [type(module) for module in model.modules()] == kinds

    class Other(Llama):
        pass

    with pytest.raises(ValueError, match="Other"):
        fast_on_cuda(Other(model.config))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match="plain model"):
            copied(fast)


@pytest.mark.slow
def test_one_compilation_serves_every_span_capacity_and_mode(captured, monkeypatch):
    """Through_blocks is traced as ever, and run by torch itself in the place of generated code."""
    torch._dynamo.reset()
    counters.clear()
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, options, **kw: compile_(f, backend="aot_eager", **kw)
    )
    model = make(max_position_embeddings=2048)
    fast = fast_on_cuda(model)
    for inference in (True, False):
        with torch.inference_mode(inference), torch.no_grad():
            for capacity, length in ((40, 7), (257, 255), (576, 512), (2048, 1023), (2048, 2046)):
                logits = []
                for each in (model, fast):
                    cache = KVCache(model.config, 1, capacity)
                    each(torch.arange(length)[None] % 64, cache=cache)
                    logits.append(each(torch.tensor([[4]]), cache=cache))
                assert (logits[0] - logits[1]).abs().max() <= 4e-6 * logits[0].abs().max()
    assert counters["stats"]["unique_graphs"] == 1
    for batch in (2, 3):
        assert generate(fast, PROMPTS[:1] * batch, 3) == generate(model, PROMPTS[:1] * batch, 3)
    compiled = counters["stats"]["unique_graphs"]
    for batch in (1, 2, 3):
        generate(fast, PROMPTS[:1] * batch, 3)
    assert counters["stats"]["unique_graphs"] == compiled
    other = make(rms_norm_eps=5.0)  # code of one model is never run for another
    assert generate(fast_on_cuda(other), PROMPTS[:1], 6) == generate(other, PROMPTS[:1], 6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype):
    model = make(max_position_embeddings=1024).to("cuda", dtype)
    fast = fast_on_cuda(model)
    tokens = torch.tensor([[*range(40), 5, 9, 2]], device="cuda")
    plain, own = (logits_in_chunks(e, tokens, [40, 1, 1, 1]) for e in (model, fast))
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert (plain - own).abs().max() <= bound * plain.abs().max()
    if dtype == torch.float32:
        for prompts in (PROMPTS[:1], PROMPTS):  # beyond one span, and ragged
            text = generate(model, prompts, max_new_tokens=300)
            assert generate(fast, prompts, max_new_tokens=300) == text
