"""Every activation of a forward pass by name: what a port to another framework is held against.

Names, in forward order: embed; in each block N blocks.N.pre_attention_norm, blocks.N.attention.q,
.k, .v (q and k after rotation), blocks.N.attention, blocks.N.pre_ffn_norm, blocks.N.ffn, blocks.N;
then final_norm, lm_head. A family with other parts has theirs, under their own names. Shapes are
(b, t, m), but (b, h, t, d) for q, (b, g, t, d) for k and v, and (b, t, vocab) for lm_head. A trace
file also holds `tokens` (b, t).
"""

import copy
import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..checkpoint.files import replace
from ..model import Llama

# The parts of a block in forward order, in every family; "" is the block itself.
IN_BLOCK = (
    *("pre_attention_norm", "attention.q", "attention.k", "attention.v", "attention"),
    *("post_attention_norm", "pre_ffn_norm", "ffn", "post_ffn_norm", "other", ""),
)
Model = TypeVar("Model", bound=nn.Module)


class Difference(NamedTuple):
    """The largest difference between two tensors, and that over the largest absolute value of the
    reference.
    """

    absolute: float
    relative: float


def twin(model: Model) -> Model:
    """The same modules as new objects, on the same weights and with the same hooks.

    What is hooked or replaced in it, nobody else meets who uses the model: another thread, say.
    """
    made: dict[nn.Module, Any] = {module: copy.copy(module) for module in model.modules()}
    for own in made.values():
        for name, value in list(vars(own).items()):
            if isinstance(value, dict):  # its parameters, modules, hooks
                vars(own)[name] = value.copy()
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, last = name.rpartition(".")
        if name:
            setattr(made[model.get_submodule(parent)], last, made[module])
    return made[model]


def names_of(model: Llama) -> list[str]:
    """Every name that `record` knows, in forward order."""
    names: list[str] = []
    for name, _ in model.named_modules():
        part = re.sub(r"^blocks\.\d+\.?", "", name)
        if part == "attention.attend":
            names += [name.removesuffix("attend") + letter for letter in "qkv"]
        elif name not in ("", "blocks") and "." not in part:
            names.append(name)
    return sorted(names, key=forward_order)


def forward_order(name: str) -> tuple[int, int, int, str]:
    """What activations are sorted by."""
    block = re.fullmatch(r"blocks\.(\d{1,9})(?:\.(.+))?", name)
    if block:
        part = block[2] or ""
        return 1, int(block[1]), IN_BLOCK.index(part if part in IN_BLOCK else "other"), name
    return {"embed": 0, "final_norm": 2, "lm_head": 3}.get(name, 4), 0, 0, name


def matching(patterns: Iterable[str], names: list[str]) -> list[str]:
    """The names that match any pattern; a `ValueError` for a pattern that matches none."""
    wanted: set[str] = set()
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(
                f"no activation is named {pattern!r}; names look like {', '.join(names[:5])} ..."
            )
        wanted.update(matched)
    return [name for name in names if name in wanted]


@torch.no_grad()
def record(model: Llama, tokens: Tensor, names: Iterable[str] = ("*",)) -> dict[str, Tensor]:
    """The activations of `model(tokens)`, tokens (b, t), on the CPU, by name in forward order.

    `names` are patterns such as "blocks.*.pre_ffn_norm": only what they match is kept, and each is
    moved as it comes. A `ValueError` for a pattern that matches nothing. Other threads may use the
    model meanwhile.
    """
    wanted = matching(names, names_of(model))
    kept: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> None:
        if name in wanted:
            kept[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def watch(name: str, module: nn.Module) -> None:
        def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            for letter, tensor in zip("qkv", inputs, strict=False):
                keep(name.removesuffix("attend") + letter, tensor)

        if name.endswith(".attend"):
            module.register_forward_pre_hook(before)
        else:
            module.register_forward_hook(lambda _, inputs, output: keep(name, output))

    own = twin(model)
    for name, module in own.named_modules():
        watch(name, module)
    # All logits of a long prompt are large: without them where nobody asked for them.
    own(tokens, last_only=not any(forward_order(name)[0] > 1 for name in wanted))
    return {name: kept[name] for name in wanted if name in kept}


def compare(
    reference: Mapping[str, Tensor], activations: Mapping[str, Tensor]
) -> dict[str, Difference]:
    """The largest difference under every name that both hold, in forward order; infinite where only
    one is NaN.

    A `ValueError` when no name is shared, or when two tensors of one name differ in shape.
    """
    shared = sorted((reference.keys() & activations.keys()) - {"tokens"}, key=forward_order)
    if not shared:
        raise ValueError("the two have no name in common")
    differences = {}
    for name in shared:
        apart = distances(name, reference[name], activations[name])
        largest = float(apart.max()) if apart.numel() else 0.0
        values = reference[name].double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
        scale = values.max().item() if values.numel() else 0.0
        relative = largest / scale if scale else math.inf if largest else 0.0
        differences[name] = Difference(largest, relative)
    return differences


def distances(name: str, reference: Tensor, other: Tensor) -> Tensor:
    """How far the values under `name` are apart, in float64; infinite where only one is NaN."""
    if reference.shape != other.shape:
        raise ValueError(
            f"{name} is {tuple(reference.shape)} in the reference and {tuple(other.shape)} in the other"
        )
    if reference.is_complex() or other.is_complex():
        raise ValueError(f"{name} is complex: compare real and imaginary parts apart")
    a, b = reference.double(), other.to(reference.device).double()
    exact = [not tensor.is_floating_point() for tensor in (reference, other)]
    if any(exact) and any((x.abs() >= 2**53).any() for x in (a, b)):  # beyond float64's 53 bits
        if not all(exact):
            raise ValueError(f"{name} holds integers in one of the two alone, and beyond 2^53")
        pairs = zip(reference.flatten().tolist(), other.flatten().tolist(), strict=True)
        apart = torch.tensor([abs(x - y) for x, y in pairs], dtype=torch.float64, device="cpu")
        return apart.view(reference.shape)
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


def save_trace(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a trace file; an `OSError` when it cannot be written."""
    from safetensors.torch import save_file

    replace(Path(path), lambda file: save_file(tensors, file, metadata))


def load_trace(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a trace file, whoever wrote it."""
    from safetensors.torch import load_file

    from ..checkpoint.untrusted import read_header, require_file

    require_file(Path(path))
    try:
        read_header(Path(path))  # bounds it
        return load_file(path)
    except Exception as error:
        what = "is no trace file, which is one in safetensors as `inspect record` writes it"
        raise ValueError(f"{path} {what}: {error}") from None
