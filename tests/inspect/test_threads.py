"""Looking inside a model beside other threads that use it: each result is that of the same call alone."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn

from llama_mini import generate, record
from llama_mini.inspect.norm_report import norm_rows, outcomes
from llama_mini.inspect.record import twin
from tests.support.fixtures import SHAPES, draw_tokens, random_llama, strengthen

ROUNDS = 8


@pytest.fixture(scope="module")
def model():
    model = random_llama(**{**SHAPES["qwen3"], "num_hidden_layers": 4})
    strengthen(model, seed=0)
    return model


def bits(result: object) -> object:
    if isinstance(result, dict):
        return {name: tensor.numpy().tobytes() for name, tensor in result.items()}
    return repr(result)


def recording(model: nn.Module, seed: int) -> Callable[[], object]:
    tokens = draw_tokens((1, 6 + seed), seed=seed)
    return lambda: record(model, tokens)


def generating(model: nn.Module, seed: int) -> Callable[[], object]:
    tokens = draw_tokens((1, 5), seed=seed).tolist()
    return lambda: generate(model, tokens, max_new_tokens=12, stop_ids=())


def reporting(model: nn.Module, seed: int) -> Callable[[], object]:
    tokens = draw_tokens((1, 7), seed=seed)
    return lambda: norm_rows(model, tokens)


def dropping(model: nn.Module, seed: int) -> Callable[[], object]:
    tokens = draw_tokens((1, 7), seed=seed)
    return lambda: outcomes(model, tokens, ["final_norm", "blocks.2.pre_ffn_norm"])


@pytest.mark.parametrize(
    "work",
    [
        (recording, recording),
        (recording, generating),
        (dropping, generating),
        (dropping, recording),
        (reporting, dropping),
        (recording, generating, reporting, dropping),
    ],
    ids=lambda work: "-".join(w.__name__ for w in work),
)
def test_each_result_is_that_of_the_call_alone(model, work):
    calls = [make(model, seed) for seed, make in enumerate(work)]
    alone = [bits(call()) for call in calls]
    start = Barrier(len(calls))

    def beside(call: Callable[[], object]) -> list[object]:
        start.wait(timeout=60)
        return [bits(call()) for _ in range(ROUNDS)]

    with ThreadPoolExecutor(len(calls)) as pool:
        for results, expected in zip(pool.map(beside, calls), alone, strict=True):
            assert results == [expected] * ROUNDS


def test_a_twin_shares_the_weights_and_nothing_that_changes(model):
    model.blocks[1].extra = model.blocks[0].ffn  # one module in two places stays one
    seen = []
    handle = model.embed.register_forward_hook(lambda *_: seen.append(1))
    try:
        own = twin(model)
        assert [n for n, _ in own.named_modules()] == [n for n, _ in model.named_modules()]
        assert own.blocks[1].extra is own.blocks[0].ffn
        mine, theirs = dict(own.named_parameters()), dict(model.named_parameters())
        assert all(mine[name] is theirs[name] for name in theirs)
        assert not {*map(id, own.modules())} & {*map(id, model.modules())}
        own(draw_tokens((1, 3), seed=0))
        assert seen == [1]  # hooks of others come along
        own.embed.register_forward_hook(lambda *_: seen.append(2))
        own.set_submodule("final_norm", nn.Identity())
        own.config = None
        model(draw_tokens((1, 3), seed=0))
        assert seen == [1, 1]
        assert not isinstance(model.final_norm, nn.Identity)
    finally:
        handle.remove()
        del model.blocks[1].extra


def test_gradients_and_modes_are_as_they_were(model):
    with torch.enable_grad():
        record(model, draw_tokens((1, 3), seed=0))
        norm_rows(model, draw_tokens((1, 3), seed=0))
        assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())
