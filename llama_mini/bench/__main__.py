"""Measure the model, or its norm alone, against what the machine can do.

    python -m llama_mini.bench --model FOLDER --against transformers
    python -m llama_mini.bench --shape tinyllama-1.1b --device cuda --compile
    python -m llama_mini.bench --norm

--model, --shape: load, prefill and decode of a checkpoint, or of random weights in a known shape
(bench_model.py). --norm: the ways to compute RMSNorm (bench_norm.py).
"""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from ..cli import choose_device, run_command
from .model import SHAPES, bench_model, import_transformers
from .norm import bench_norms, table

WAYS = {
    "plain": "Llama called with a cache, argmax, ids kept on the device, synchronised only at the ends",
    "compiled": "the same with fast_model (fast.py) in its place",
    "... stream": "through `stream`, which users call: every id comes back to Python",
    "transformers": "its greedy generate with sdpa on the same prompt; static: static cache, compiled",
}
COLUMNS = {
    "+-": "after a median over the runs: half of the range that holds the middle half of them",
    "of reading": "seconds over those that reading the same files takes, from the page cache",
    "of matmul": "arithmetic of the model per second over that of one large matrix product in its dtype",
    "GB/s": "load: of the files; decode: weights and filled cache of one step over its time",
    "of copy": "that rate over the rate of copying a large tensor, counted as one read and one write",
    "of read": "that rate over the rate of summing a large tensor: decoding only reads",
    "of linears": "time of F.linear alone, on one token with every weight in turn, over that of a step",
    "to transf.": "tokens/s over those of transformers, the faster of its ways",
    "same": "how many new tokens are the plain way's, up to the first in any row that is not",
    "first, s": "seconds of the first one-token step, which compiles, or finds that on disk",
}


def model_table(report: dict[str, Any]) -> str:
    """The report as text, and what each row and column holds."""
    model, memory, load = report["model"], report["memory"], report["load"]
    lines = [
        f"{model['name']}: {model['parameters']:,} parameters, {model['dtype']} on {model['device']}; "
        f"batch {model['batch']}, {model['prompt_tokens']} prompt tokens, {model['new_tokens']} new, "
        f"{model['runs']} runs",
        "",
        f"limits   copy {both(report['limits']['copy'], 1e-9)} GB/s, "
        f"read {both(report['limits']['read'], 1e-9)} GB/s, "
        f"matmul {both(report['limits']['matmul'], 1e-9)} GFLOP/s, "
        f"bare linears {both(report['limits']['linears'])} steps/s",
    ]
    if load:
        lines.append(
            f"load     {both(load['seconds'], 1, 3)} s, {both(load['bytes_per_second'], 1e-9, 2)} GB/s, "
            f"{load['of_reading']['median']:.2f} of reading"
        )
    compiled = memory.get("peak_compiled")
    lines.append(
        f"memory   peak {memory['peak'] / 1e6:,.0f} MB, {memory['before'] / 1e6:,.0f} MB of it before "
        f"the weights of {model['weight_bytes'] / 1e6:,.0f} MB came"
        + (f"; compiled {compiled / 1e6:,.0f} MB" if compiled else "")
    )
    columns = {
        "prefill": {"GFLOP/s": "operations_per_second", "of matmul": "of_matmul"},
        "decode": {
            "GB/s": "bytes_per_second",
            "of copy": "of_copy",
            "of read": "of_read",
            "of linears": "of_linears",
        },
    }
    for phase, keys in columns.items():
        names = [*keys, "to transf.", *["same", "first, s"] * (phase == "decode")]
        heading = "".join(f" {name:>10}" for name in names)
        lines += ["", f"{phase:<22} {'tokens/s':>10} {'+-':>7}{heading}"]
        for row in report["ways"]:
            numbers = row[phase]
            rates = numbers["tokens_per_second"]
            cells = [
                f"{numbers[key]['median'] / 1e9:,.1f}"
                if key.endswith("_per_second")
                else f"{numbers[key]['median']:.0%}"
                for key in keys.values()
            ]
            ratio = numbers.get("to_transformers")
            cells.append(f"{ratio['median']:.2f}" if ratio else "")
            if phase == "decode":
                cells.append(str(row["same_tokens"]))
                first = row["first_step_seconds"]
                cells.append("" if first is None else f"{first:.1f}")
            line = "".join(f" {cell:>10}" for cell in cells)
            lines.append(
                f"{row['way']:<22} {rates['median']:>10,.1f} {rates['spread']:>7,.1f}{line}".rstrip()
            )
    explained = {**WAYS, **COLUMNS}
    return "\n".join([*lines, "", *(f"{name:<12} {text}" for name, text in explained.items())])


def both(number: dict[str, float], scale: float = 1.0, digits: int = 1) -> str:
    """A median and its spread."""
    return f"{number['median'] * scale:,.{digits}f} +- {number['spread'] * scale:,.{digits}f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m llama_mini.bench",
        description=(__doc__ or "").split("\n")[0],
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", metavar="FOLDER", help="a checkpoint folder or hub name")
    what.add_argument("--shape", metavar="NAME", help=f"random weights: {', '.join(SHAPES)}")
    what.add_argument("--norm", action="store_true", help="what a fused RMSNorm saves")
    add = parser.add_argument
    add(
        "--device", choices=["cpu", "cuda"], help="default: the GPU; --norm: each one that is there"
    )
    add("--json", action="store_true", help="print every number as one JSON object")
    of_models = [
        add(
            "--dtype",
            choices=["float32", "bfloat16", "float16"],
            help="default: float32 on the CPU, bfloat16 on a GPU",
        ),
        add(
            "--compile", action="store_true", help="measure the compiled decoder of fast.py as well"
        ),
        add("--batch", type=int, default=1, metavar="N", help="prompts at once (default 1)"),
        add("--prompt-tokens", type=int, default=512, metavar="N", help="default 512"),
        add(
            "--new-tokens",
            type=int,
            default=64,
            metavar="N",
            help="the first comes from the prefill",
        ),
        add("--runs", type=int, default=5, metavar="N", help="default 5"),
        add("--against", choices=["transformers"], help="measure it in the same run"),
    ]
    options = parser.parse_args(arguments)
    if not options.norm and options.model is None and options.shape is None:
        parser.error("say what to measure: --model FOLDER, --shape NAME or --norm")
    given = [a.option_strings[0] for a in of_models if getattr(options, a.dest) != a.default]
    if options.norm and given:
        parser.error(f"{', '.join(given)}: not with --norm")
    return run_command(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    machine: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    there = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    if "cuda" in there:
        machine["gpu"] = torch.cuda.get_device_name()
    if options.norm:
        devices = [choose_device(options.device).type] if options.device else there
        results = bench_norms(devices)
        report: dict[str, Any] = {"norm": [asdict(result) for result in results]}
        tables = [
            f"{device}\n{table([r for r in results if r.device == device])}" for device in devices
        ]
    else:
        report = bench_model(options)
        if options.against:
            machine["transformers"] = import_transformers().__version__
        tables = [model_table(report)]
    if options.json:
        print(json.dumps({"machine": machine, **report}, indent=1))
    else:
        print(
            "\n\n".join([", ".join(f"{name} {value}" for name, value in machine.items()), *tables])
        )


if __name__ == "__main__":
    sys.exit(main())
