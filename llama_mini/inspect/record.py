"""Every activation of a forward pass by name: what a port to another framework is held against.

    python -m llama_mini.inspect.record --model FOLDER --prompt TEXT --out trace.safetensors
    python -m llama_mini.inspect.record --compare reference.safetensors other.safetensors

Names, in forward order: embed; in each block N blocks.N.pre_attention_norm, blocks.N.attention.q,
.k, .v (q and k after rotation), blocks.N.attention, blocks.N.pre_ffn_norm, blocks.N.ffn, blocks.N;
then final_norm, lm_head. Shapes are (b, t, m), but (b, h, t, d) for q, (b, g, t, d) for k and v,
and (b, t, vocab) for lm_head. A trace file also holds `tokens` (b, t).
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint.files import replace
from ..checkpoint.refusals import shown
from ..cli import DEVICES, choose_device, run_command
from ..model import Llama

IN_BLOCK = (
    "pre_attention_norm",
    "attention.q",
    "attention.k",
    "attention.v",
    "attention",
    "pre_ffn_norm",
    "ffn",
)


class Difference(NamedTuple):
    """The largest difference between two tensors, and that over the largest absolute value of the
    reference.
    """

    absolute: float
    relative: float


def names_of(model: Llama) -> list[str]:
    """Every name that `record` knows, in forward order."""
    blocks = range(len(model.blocks))
    inside = [
        f"blocks.{n}" + (f".{part}" if part else "") for n in blocks for part in (*IN_BLOCK, "")
    ]
    return ["embed", *inside, "final_norm", "lm_head"]


@torch.no_grad()
def record(model: Llama, tokens: Tensor, names: Iterable[str] = ("*",)) -> dict[str, Tensor]:
    """The activations of `model(tokens)`, tokens (b, t), on the CPU, by name in forward order.

    `names` are patterns such as "blocks.*.pre_ffn_norm": only what they match is kept, and each is
    moved as it comes. A `ValueError` for a pattern that matches nothing.
    """
    every = names_of(model)
    wanted: set[str] = set()
    for pattern in names:
        matched = [name for name in every if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(
                f"no activation is named {pattern!r}; names look like {', '.join(every[:5])} ..."
            )
        wanted.update(matched)
    kept: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> None:
        if name in wanted:
            kept[name] = tensor.detach().cpu().contiguous()

    def output(name: str) -> Callable[[Any, Any, Tensor], None]:
        return lambda module, inputs, result: keep(name, result)

    def q_k_v(prefix: str, module: Any, inputs: tuple[Tensor, ...]) -> None:
        for letter, tensor in zip("qkv", inputs[:3], strict=True):
            keep(f"{prefix}.{letter}", tensor)

    handles = []
    try:
        for name in every:
            if name.endswith((".q", ".k", ".v")):
                continue
            module = model.get_submodule(name)
            handles.append(module.register_forward_hook(output(name)))
            if name.endswith(".attention"):
                attend = model.get_submodule(f"{name}.attend")
                handles.append(attend.register_forward_pre_hook(partial(q_k_v, name)))
        # All logits of a long prompt are large: without them where nobody asked for them.
        model(tokens, last_only=not wanted & {"final_norm", "lm_head"})
    finally:
        for handle in handles:
            handle.remove()
    return {name: kept[name] for name in every if name in kept}


def compare(
    reference: Mapping[str, Tensor], activations: Mapping[str, Tensor]
) -> dict[str, Difference]:
    """The largest difference under every name that both hold, in forward order; infinite where only
    one is NaN.

    A `ValueError` when no name is shared, or when two tensors of one name differ in shape.
    """
    shared = sorted((reference.keys() & activations.keys()) - {"tokens"}, key=_forward_order)
    if not shared:
        raise ValueError("the two have no name in common")
    differences = {}
    for name in shared:
        a, b = reference[name], activations[name]
        if a.shape != b.shape:
            raise ValueError(
                f"{name} is {tuple(a.shape)} in the reference and {tuple(b.shape)} in the other"
            )
        if a.is_complex() or b.is_complex():
            raise ValueError(f"{name} is complex: compare real and imaginary parts apart")
        a, b = a.double(), b.to(a.device).double()
        same = (a == b) | (a.isnan() & b.isnan())
        distance = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        largest = distance.max().item() if distance.numel() else 0.0
        scale = (
            a.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max().item() if a.numel() else 0.0
        )
        differences[name] = Difference(
            largest, largest / scale if scale else math.inf if largest else 0.0
        )
    return differences


def _forward_order(name: str) -> tuple[int, int, int, str]:
    block = re.fullmatch(r"blocks\.(\d{1,9})(?:\.(.+))?", name)
    if block:
        part = block[2]
        place = IN_BLOCK.index(part) if part in IN_BLOCK else len(IN_BLOCK)
        return 1, int(block[1]), place, name
    return {"embed": 0, "final_norm": 2, "lm_head": 3}.get(name, 4), 0, 0, name


def save_trace(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a trace file; an `OSError` when it cannot be written."""
    from safetensors.torch import save_file

    replace(Path(path), lambda file: save_file(tensors, file, metadata))


def load_trace(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a trace file, whoever wrote it."""
    from safetensors.torch import load_file

    from ..checkpoint.weights import require_header

    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    require_header(Path(path))
    try:
        return load_file(path)
    except Exception as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from None


def _compare_files(reference: str, other: str, tolerance: float) -> int:
    """Print the differences in forward order; 1 when one is above the tolerance."""
    if not tolerance >= 0:
        raise ValueError(f"--tolerance is {tolerance}: it must be 0 or more")
    a, b = load_trace(reference), load_trace(other)
    if "tokens" in a and "tokens" in b and a["tokens"].tolist() != b["tokens"].tolist():
        raise ValueError(f"{reference} and {other} were recorded on different tokens")
    differences = compare(a, b)
    first = next(
        (name for name, (_, relative) in differences.items() if relative > tolerance), None
    )
    print(f"{'name':<32} {'absolute':>10} {'relative':>10}")
    for name, (absolute, relative) in differences.items():
        mark = "  <- first above the tolerance" if name == first else ""
        print(f"{shown(name):<32} {absolute:10.2e} {relative:10.2e}{mark}")
    for path, only in ((reference, a.keys() - b.keys()), (other, b.keys() - a.keys())):
        if only - {"tokens"}:
            names = map(shown, sorted(only - {"tokens"}, key=_forward_order))
            print(f"only in {path}: {', '.join(names)}")
    if first is None:
        print(
            f"the {len(differences)} names in both agree within a relative difference of {tolerance:g}"
        )
        return 0
    absolute, relative = differences[first]
    print(
        f"first to differ: {shown(first)}, by {absolute:.3g} ({relative:.3g} of its largest value)"
    )
    return 1


def _record_to_file(options: argparse.Namespace) -> None:
    from ..checkpoint.memory import require_memory
    from ..checkpoint.tokenizer import load_tokenizer
    from ..checkpoint.weights import load_model, open_checkpoint
    from ..generation import require_prompts

    device, dtype = choose_device(options.device), getattr(torch, options.dtype)
    checkpoint = open_checkpoint(options.model)
    ids = load_tokenizer(options.model).encode(options.prompt)
    require_prompts(checkpoint.config, [ids], 0)
    require_memory(checkpoint, device, dtype, len(ids), all_logits=True)
    model = load_model(options.model, device, dtype)
    tokens = torch.tensor([ids])
    activations = record(model, tokens.to(device), options.names or ("*",))
    metadata = {"prompt": options.prompt, "dtype": options.dtype, "torch": torch.__version__}
    save_trace(options.out, {"tokens": tokens, **activations}, metadata)
    print(f"{options.out}: {len(activations)} activations of {tokens.shape[1]} tokens")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m llama_mini.inspect.record",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", metavar="FOLDER", help="checkpoint folder or hub name")
    parser.add_argument("--prompt", metavar="TEXT")
    parser.add_argument("--out", metavar="FILE", help="trace file to write (safetensors)")
    parser.add_argument(
        "--names", action="append", metavar="PATTERN", help="keep only these, as 'blocks.*.ffn'"
    )
    parser.add_argument("--device", default="cpu", choices=DEVICES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument(
        "--compare", nargs=2, metavar=("REFERENCE", "OTHER"), help="two trace files"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="relative difference that counts as equal"
    )
    options = parser.parse_args(arguments)
    if options.compare:
        reference, other = options.compare
        return run_command(lambda: _compare_files(reference, other, options.tolerance))
    if not (options.model and options.prompt is not None and options.out):
        parser.error("give --model, --prompt and --out, or --compare")
    return run_command(lambda: _record_to_file(options))


if __name__ == "__main__":
    sys.exit(main())
