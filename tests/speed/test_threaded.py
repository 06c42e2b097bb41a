"""One token's products made sooner on a CPU: the same bits, and only where they are."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from llama_mini import KVCache, load_model
from llama_mini.model import Llama
from llama_mini.speed import all_cores, threaded
from llama_mini.speed.private import hooked
from llama_mini.speed.threaded import TRIALS, ThreadedLinear, as_vector, in_parts
from tests.support.fixtures import SHIPPED

X = torch.linspace(-1, 1, 512).view(1, 1, -1)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.setattr(threaded, "EXACT", {})
    monkeypatch.setattr(threaded, "EMULATED", set())
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def split(monkeypatch):
    """The shapes of the products that were made another way."""
    shapes = []

    def spy(x, weight, n):
        shapes.append((n, *weight.shape))
        return in_parts(x, weight, n)

    def spy_vector(x, weight):
        shapes.append((1, *weight.shape))
        return as_vector(x, weight)

    monkeypatch.setattr(threaded, "in_parts", spy)
    monkeypatch.setattr(threaded, "as_vector", spy_vector)
    return shapes


def make(rows: int, columns: int = 512, dtype: torch.dtype = torch.float32) -> ThreadedLinear:
    layer = nn.Linear(columns, rows, bias=False, dtype=dtype)
    return ThreadedLinear(layer).requires_grad_(False)


@pytest.mark.parametrize("offset", range(0, 16, 3))  # of a weight in its file, in numbers
@pytest.mark.parametrize("rows", [256, 576, 1000, 4096, 4098])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_moves(rows, offset, dtype, split):
    layer = make(rows, dtype=dtype)
    numbers = torch.empty(rows * 512 + 16, dtype=dtype)
    layer.weight.data = numbers[offset : offset + rows * 512].view(rows, 512).copy_(layer.weight)
    x = X.to(dtype, copy=True)
    strange = x.as_strided((1, 1, 512), (512, 1, 1))  # contiguous, says torch
    for each in (x, x, strange):
        assert torch.equal(layer(each), F.linear(each, layer.weight))
    assert (len(split) > TRIALS) == any(threaded.EXACT.values())


def test_parts_make_the_whole():
    layer = make(576)
    for n in (2, 3, 4):
        assert torch.allclose(in_parts(X, layer.weight, n), F.linear(X, layer.weight), atol=1e-6)


def in_another_order(x, weight, n=1):
    """The sums of the products in blocks of 64, as another routine might make them."""
    products = x.float().view(-1, 64) * weight.float().view(len(weight), -1, 64)
    return products.sum(-1).sum(-1).to(x.dtype).view(1, 1, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_that_differ_stay_whole(dtype, monkeypatch):
    """Also where all but 8 bits of a sum are dropped, which hide most other orders from most inputs."""
    layer, other = make(576, dtype=dtype), make(576, dtype=dtype)
    x = X.to(dtype)
    for way in ("in_parts", "as_vector"):
        monkeypatch.setattr(threaded, way, in_another_order)
    assert torch.equal(layer(x), F.linear(x, layer.weight))
    assert list(threaded.EXACT.values()) == [False]
    for way in ("in_parts", "as_vector"):
        monkeypatch.setattr(threaded, way, pytest.fail)  # nor is it tried again
    assert torch.equal(other(x), F.linear(x, other.weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_shows_nothing_decides_nothing(dtype, split):
    layer, x = make(512, dtype=dtype), X.to(dtype)
    layer.weight.copy_(torch.eye(512))
    assert torch.equal(layer(x), F.linear(x, layer.weight))
    assert (threaded.EXACT, split) == ({}, [])


def test_what_changes_is_decided_anew(split):
    layer = make(512)

    def check() -> None:
        assert torch.equal(layer(X), F.linear(X, layer.weight))

    check()
    layer.weight.data = layer.weight.data.t()  # the same numbers in the same place
    check()
    layer.load_state_dict({"weight": torch.randn(512, 512)}, assign=True)
    check()
    torch.set_num_threads(1)
    split.clear()
    check()
    assert split == []
    torch.set_num_threads(2)
    layer.bfloat16()
    x = X.bfloat16()
    assert torch.equal(layer(x), F.linear(x, layer.weight))
    with pytest.raises(RuntimeError):
        layer(x[..., :1])


def test_all_threads_or_as_many_as_divide_the_rows(split):
    for threads, n in ((2, 2), (3, 3), (5, 4)):
        torch.set_num_threads(threads)
        layer = make(576)  # 144 blocks
        assert torch.equal(layer(X), F.linear(X, layer.weight))
        assert {each[0] for each in split} == {n}
        split.clear()


class Quantised(torch.Tensor):
    """A tensor with products of its own, as libraries for quantisation make them."""


def test_what_stays_whole(split, monkeypatch):
    layer = make(576)
    with torch.autocast("cpu"):
        layer(X)
    layer(X.expand(2, 1, -1))  # a batch, or a prompt, is a matrix product
    layer(X.expand(1, 2, -1))
    layer(X[0])
    layer.half()(X.half())
    make(64)(X)
    make(64, dtype=torch.bfloat16)(X.bfloat16())
    make(577)(X)
    make(576)(X.clone().requires_grad_()).sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        make(576)(X)
    with FakeTensorMode(allow_non_fake_inputs=True):
        make(576)(torch.empty(1, 1, 512))
    subclassed = make(576)
    subclassed.weight = nn.Parameter(subclassed.weight.as_subclass(Quantised), False)
    subclassed(X)
    trained = make(576).requires_grad_()
    trained(X).sum().backward()
    assert trained.weight.grad is not None
    with monkeypatch.context() as patch:  # slower there than torch's own way
        patch.setattr(threaded, "EMULATED", {torch.bfloat16})
        make(576, dtype=torch.bfloat16)(X.bfloat16())
    torch.set_num_threads(1)
    make(576)(X)
    assert (split, threaded.EXACT) == ([], {})


def test_a_layer_in_two_places_and_a_buffer():
    layer = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(layer, layer)
    model.register_buffer("table", torch.ones(3))
    faster = all_cores(model)
    assert [type(each) for each in faster] == [ThreadedLinear] * 2
    assert faster[0].weight is faster[1].weight is layer.weight
    assert faster.table is model.table


def test_layers_on_another_device_are_left_alone():
    layers = nn.Sequential(nn.Linear(4, 4, bias=False, device="meta"), nn.Linear(4, 4, bias=False))
    assert [type(layer) for layer in all_cores(layers)] == [nn.Linear, ThreadedLinear]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_all_cores_writes_the_same_bits(dtype, split):
    plain = load_model(SHIPPED, dtype=dtype)
    before = torch.get_rng_state()
    model = all_cores(plain)
    caches = [KVCache(model.config, capacity=16, dtype=dtype) for _ in range(2)]
    for ids in ([5, 9, 2], [33], [7], [60]):
        logits = [
            each(torch.tensor([ids]), cache=cache, last_only=True)
            for each, cache in zip((model, plain), caches, strict=True)
        ]
        assert torch.equal(*logits)
    assert torch.equal(torch.get_rng_state(), before)
    assert threaded.EXACT
    for (*shape, _, _, _), exact in threaded.EXACT.items():
        products = sum(each[1:] == tuple(shape) for each in split)
        assert products >= TRIALS + 3 if exact else products <= TRIALS  # there are three new tokens


def test_the_model_given_stays_as_it_is():
    plain = load_model(SHIPPED)
    parts = {name: (module, type(module)) for name, module in plain.named_modules()}
    model = all_cores(plain)
    assert {name: (module, type(module)) for name, module in plain.named_modules()} == parts
    assert not any(isinstance(module, ThreadedLinear) for module in plain.modules())
    assert type(model) is Llama
    assert {type(module) for module in model.modules()} & {nn.Linear, ThreadedLinear} == {
        ThreadedLinear
    }
    assert {m.training for m in model.modules()} == {False}
    mine, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(mine[name] is theirs[name] for name in mine)  # no weight is copied
    assert model.lm_head.weight is model.embed.weight
    copies = (copy.deepcopy(model), all_cores(model))
    for each in copies:
        assert {type(m) for m in each.modules()} == {type(m) for m in model.modules()}


@pytest.mark.parametrize(
    "register",
    [
        lambda module: module.register_forward_hook(print),
        lambda module: module.register_forward_pre_hook(print),
        lambda module: module.register_full_backward_hook(print),
        lambda module: module.register_full_backward_pre_hook(print),
    ],
)
def test_a_hook_is_not_lost_in_silence(register):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.SiLU())
    kept = register(model[1])  # this layer is copied, with its hook
    assert hooked(all_cores(model)[1])
    kept.remove()
    handle = register(model[0])
    with pytest.raises(ValueError, match="0 has a hook"):
        all_cores(model)
    handle.remove()
    assert not hooked(all_cores(model)[0])


@pytest.mark.slow
def test_speed_is_imported_without_the_compiler():
    code = "import sys, llama_mini.speed; print('torch._inductor' in sys.modules, 'triton' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
