"""Look inside a model, or say how well it predicts a text.

python -m llama_mini.inspect record --model FOLDER --prompt TEXT --out trace.safetensors
python -m llama_mini.inspect compare reference.safetensors other.safetensors
python -m llama_mini.inspect norms --model FOLDER --prompt TEXT [--json] [--plot norms.svg]
python -m llama_mini.inspect perplexity FILE --model FOLDER
"""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import Checkpoint, load_model, load_tokenizer, open_checkpoint, require_memory
from ..checkpoint.hub import META_FILES
from ..checkpoint.untrusted import require_file, utf8
from ..cli import DEVICES, choose_device, require_place, run_command, table
from ..config import shown
from ..generation import require_prompts
from ..model import Llama
from . import perplexity
from .norm_report import norm_rows, norms_of, outcomes, report
from .picture import plot, require_plot
from .record import compare, distances, forward_order, load_trace, matching, record, save_trace

TOLERANCE = 1e-5


def load(
    options: argparse.Namespace, checkpoint: Checkpoint, ids: list[int], window: int | None = None
) -> tuple[Llama, torch.Tensor]:
    """The model, and the ids as tokens (1, t), once it is known that it can read them, `window` at once."""
    device, dtype, t = choose_device(options.device), getattr(torch, options.dtype), len(ids)
    most = min(window or t, t)
    pieces = [ids[i : i + most] for i in range(0, t, most)] if ids else [ids]
    require_prompts(checkpoint.config, pieces, 0)
    require_memory(checkpoint, device, dtype, most, all_logits=True)
    tokens = torch.tensor([ids], dtype=torch.long, device=device)
    return load_model(checkpoint, device, dtype), tokens


def record_command(options: argparse.Namespace) -> None:
    require_place(Path(options.out), "--out")
    checkpoint = open_checkpoint(options.model)
    require_no_checkpoint(Path(options.out), checkpoint)
    ids = load_tokenizer(checkpoint).encode(options.prompt)
    model, tokens = load(options, checkpoint, ids)
    activations = record(model, tokens, options.names or ("*",))
    metadata = {"prompt": options.prompt, "dtype": options.dtype, "torch": torch.__version__}
    save_trace(options.out, {"tokens": tokens.cpu(), **activations}, metadata)
    print(f"{options.out}: {len(activations)} activations of {len(ids)} tokens")


def require_no_checkpoint(out: Path, checkpoint: Checkpoint) -> None:
    """Raise a `ValueError` where a trace in the file `out` would replace a file of the checkpoint, or be
    read as one.
    """
    folder, weights = checkpoint.folder, {tensor.file for tensor in checkpoint.stored.values()}
    files = {path for path in folder.iterdir() if path.suffix != ".safetensors"} | weights
    same = out.exists() and any(out.samefile(file) for file in files if file.exists())
    read = out.name in ("model.safetensors", *META_FILES)
    if same or (read and out.parent.resolve() == folder.resolve()):
        raise ValueError(f"--out {out}: that is a file of the checkpoint {folder}; name another")


def compare_command(options: argparse.Namespace) -> int:
    """Print the differences in forward order; 1 unless every name is in both files and agrees."""
    tolerance, paths = options.tolerance, (options.reference, options.other)
    if not tolerance >= 0:
        raise ValueError(f"--tolerance is {tolerance}: it must be 0 or more")
    a, b = map(load_trace, paths)
    if "tokens" in a and "tokens" in b and a["tokens"].tolist() != b["tokens"].tolist():
        raise ValueError(f"{paths[0]} and {paths[1]} were recorded on different tokens")
    names = sorted((a.keys() | b.keys()) - {"tokens"}, key=forward_order)
    wanted = matching(options.names or ("*",), names)
    a, b = ({name: x for name, x in trace.items() if name in wanted} for trace in (a, b))
    differences = compare(a, b)
    first = next(
        (n for n, difference in differences.items() if difference.relative > tolerance), None
    )
    rows = [("name", "absolute", "relative", "")]
    for name, (absolute, relative) in differences.items():
        mark = "<- first above the tolerance" if name == first else ""
        rows.append((shown(name), f"{absolute:.2e}", f"{relative:.2e}", mark))
    lines = [table(rows)]
    missing = 0
    for path, only in zip(paths, (a.keys() - b.keys(), b.keys() - a.keys()), strict=True):
        missing += len(only)
        if only:
            lines.append(f"only in {path}: {', '.join(shown(n) for n in wanted if n in only)}")
    if first is not None:
        absolute, relative = differences[first]
        line = f"first to differ: {shown(first)}, by {absolute:.3g} ({relative:.3g} of its largest value)"
        lines.append(line + hint(first, a[first], b[first], tolerance))
    else:
        says = f"the {len(differences)} names in both agree within {tolerance:g} of their largest value"
        lines.append(f"{says}; {missing} are in one file alone" if missing else says)
    with suppress(BrokenPipeError):  # whoever reads only the head of it: the exit code is the same
        print("\n".join(lines), flush=True)
    return int(first is not None or missing > 0)


def hint(name: str, reference: torch.Tensor, other: torch.Tensor, tolerance: float) -> str:
    """What a difference suggests that spares position 0 of (b, t, m) or (b, h, t, d), or nothing."""
    apart = distances(name, reference, other)
    if apart.dim() < 3 or not apart[..., 0, :].max() <= tolerance * reference.abs().max():
        return ""
    which = "rotation" if name.endswith((".q", ".k")) else "rotation, or the mask"
    return f"; position 0 agrees and later ones do not: {which}?"


def norms_command(options: argparse.Namespace) -> None:
    if options.plot:
        require_plot(Path(options.plot))
    checkpoint = open_checkpoint(options.model)
    tokenizer = load_tokenizer(checkpoint)
    ids = tokenizer.encode(options.prompt)
    model, tokens = load(options, checkpoint, ids)
    rows, norms = norm_rows(model, tokens), norms_of(model)
    in_the_middle = [n for n in norms if n.startswith(f"blocks.{len(model.blocks) // 2}.")]
    dropped = [options.drop] if options.drop else in_the_middle[-1:]
    results = outcomes(model, tokens, [*(["final_norm"] * ("final_norm" in norms)), *dropped])
    if options.plot:
        name = Path(options.model).resolve().name  # a hub model's folder is named by a hash
        title = f"{name}: the residual stream and its norms, {len(ids)} tokens"
        plot(rows, Path(options.plot), title)

    def text_of(token: int) -> str:
        if token >= tokenizer.vocab_size:  # a row that only pads the embedding
            return f"id {token}"
        decoder = tokenizer.stream_decoder(ids)
        return repr(decoder.push(token) + decoder.flush())

    if options.json:
        values = {
            "tokens": ids,
            "norms": [asdict(row) for row in rows],
            "next_token": [{**asdict(r), "text": text_of(r.token)} for r in results],
        }
        print(json.dumps(values, indent=1))
    else:
        print(report(rows, results, text_of))


def perplexity_command(options: argparse.Namespace) -> None:
    file = Path(options.file)
    require_file(file)
    text = utf8(file, file.read_bytes())
    checkpoint = open_checkpoint(options.model)
    window, stride = perplexity.sizes(checkpoint.config, options.window, options.stride)
    model, tokens = load(options, checkpoint, load_tokenizer(checkpoint).encode(text), window)
    found = perplexity.loss(model, tokens, window, stride)
    rows = {
        "perplexity": f"{found.perplexity:,.4f}",
        "nats per token": f"{found.nats / found.tokens:.4f}",
        "nats per character": f"{found.nats / len(text):.4f}",
        "tokens predicted": f"{found.tokens:,}",
        "window, stride": f"{window}, {stride} tokens",
    }
    print(table([*rows.items()]))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m llama_mini.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int | None], does: str) -> Any:
        sub = commands.add_parser(name, help=does, description=does, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub.add_argument

    add = command("record", record_command, "every activation of a forward pass, into a file")
    of_a_prompt = [add]
    add("--out", required=True, metavar="FILE", help="trace file to write (safetensors)")
    add("--names", action="append", metavar="PATTERN", help="keep only these, as 'blocks.*.ffn'")

    add = command(
        "compare", compare_command, "two such files: exit code 0 if all names are in both and agree"
    )
    add("reference", metavar="REFERENCE")
    add("other", metavar="OTHER")
    add("--names", action="append", metavar="PATTERN", help="compare only these, as 'blocks.*.ffn'")
    add(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="differences up to this share of the largest value under a name count as equal (default 1e-5)",
    )

    add = command("norms", norms_command, "what every norm does on a prompt")
    of_a_prompt.append(add)
    add(
        "--drop",
        metavar="NORM",
        help="the norm to leave out beside final_norm (default: the last of the middle block)",
    )
    add("--json", action="store_true", help="print every number as JSON")
    add("--plot", metavar="FILE", help="draw the stream and its norms: a .png or .svg file")

    of_a_model = [*of_a_prompt]
    add = command("perplexity", perplexity_command, "how well a model predicts a text file")
    of_a_model.append(add)
    add("file", metavar="FILE", help="text in UTF-8, one document")
    add(
        "--window",
        type=int,
        metavar="N",
        help=f"tokens read at once (default: the context, at most {perplexity.WINDOW})",
    )
    add("--stride", type=int, metavar="N", help="tokens between windows (default: half a window)")

    for add in of_a_prompt:
        add("--prompt", required=True, metavar="TEXT")
    for add in of_a_model:
        add("--model", required=True, metavar="FOLDER", help="checkpoint folder or hub name")
        add("--device", default="cpu", choices=DEVICES)
        add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return run_command(lambda: options.run(options))


if __name__ == "__main__":
    sys.exit(main())
