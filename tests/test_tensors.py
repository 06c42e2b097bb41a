"""Every tensor that the package makes names its dtype and its device: what a program sets as default
changes nothing.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llama_mini import KVCache, generate, load_model, record

PACKAGE = Path(__file__).resolve().parents[1] / "llama_mini"
BOTH = {"dtype", "device"}
# What makes a tensor of nothing, and what it has to name.
MAKERS = dict.fromkeys("tensor zeros ones empty full arange linspace eye rand randn".split(), BOTH)
MAKERS |= {
    "randint": BOTH,
    "randperm": BOTH,
    "tril_indices": BOTH,
    "triu_indices": BOTH,
    "logspace": BOTH,
}
MAKERS |= {"as_tensor": BOTH, "empty_strided": BOTH, "normal": BOTH, "frombuffer": {"dtype"}}


def unnamed(source: str) -> Iterator[tuple[int, str, set[str]]]:
    """Line, function, and what it leaves to torch's defaults.

    Left out: parameters in the `__init__` of a module, which follow the defaults as torch's own do.
    """
    tree = ast.parse(source)
    skipped = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "nn.Parameter"
        for node in ast.walk(call)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or node in skipped:
            continue
        module, _, name = ast.unparse(node.func).rpartition(".")
        if module != "torch" or name not in MAKERS:
            continue
        given = {keyword.arg for keyword in node.keywords}
        if None not in given and MAKERS[name] - given:  # None: **options
            yield node.lineno, ast.unparse(node.func), MAKERS[name] - given


def test_every_tensor_names_its_dtype_and_device():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 40
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name} leaves {', '.join(sorted(missing))} to torch's default"
        for path in files
        for line, name, missing in unnamed(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_the_check_can_fail():
    assert list(unnamed("torch.zeros(3)")) == [(1, "torch.zeros", BOTH)]
    assert list(unnamed("torch.arange(3, device=x.device)")) == [(1, "torch.arange", {"dtype"})]
    assert list(unnamed("torch.ones(3, dtype=torch.long, device='cpu')")) == []


DEFAULTS = [torch.bfloat16, torch.float64, torch.device("meta")]


@pytest.mark.parametrize("default", DEFAULTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_program_sets_as_default_changes_nothing(checkpoint, default, dtype):
    """Loading, generating, recording, a cache: the bits of a run without it."""
    prompt = [1, 5, 9, 200, 7]

    def results() -> tuple[list[list[int]], dict[str, torch.Tensor]]:
        model = load_model(checkpoint, dtype=dtype)
        assert {weight.device.type for weight in model.parameters()} == {"cpu"}
        tokens = torch.tensor([prompt], dtype=torch.long, device="cpu")
        cache = KVCache(model.config, capacity=8, device="cpu", dtype=dtype)
        activations = record(model, tokens)
        activations["cached"] = model(tokens, cache=cache)
        return generate(model, [prompt, prompt[:2]], max_new_tokens=6), activations

    ids, activations = results()
    try:
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
        else:
            torch.set_default_device(default)
        other_ids, others = results()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert other_ids == ids
    assert others.keys() == activations.keys()
    for name, value in activations.items():
        assert torch.equal(others[name], value), name
        assert others[name].dtype == value.dtype
