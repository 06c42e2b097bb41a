"""Measure the model, or its norm alone, against what the machine can do.

    python -m llama_mini.bench --model FOLDER --against transformers
    python -m llama_mini.bench --shape tinyllama-1.1b --device cuda --compile
    python -m llama_mini.bench --norm

--model, --shape: load, prefill and decode of a checkpoint, or of random weights in a known shape.
--norm: the ways to compute RMSNorm.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..cli import choose_device, run_command
from .gpu_report import write_report
from .model import bench_model
from .norm import bench_norms, norm_table
from .shapes import SHAPES
from .table import model_table
from .ways import import_transformers


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
    what.add_argument("--gpu-report", metavar="OUT", help="what a GPU is to show, into a JSON file")
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
        add("--compile", action="store_true", help="measure the compiled decoder as well"),
        add("--batch", type=int, default=1, metavar="N", help="prompts at once (default 1)"),
        add(
            "--prompt-tokens", type=int, metavar="N", help="default 512, or what the context leaves"
        ),
        add(
            "--new-tokens",
            type=int,
            metavar="N",
            help="default 64, or half of the context; the first comes from the prefill",
        ),
        add("--runs", type=int, default=5, metavar="N", help="default 5"),
        add("--against", choices=["transformers"], help="measure it in the same run"),
    ]
    options = parser.parse_args(arguments)
    alone = "--norm" if options.norm else "--gpu-report" if options.gpu_report else None
    if not alone and options.model is None and options.shape is None:
        parser.error(
            "say what to measure: --model FOLDER, --shape NAME, --norm or --gpu-report OUT"
        )
    given = [a.option_strings[0] for a in of_models if getattr(options, a.dest) != a.default]
    if alone and given:
        parser.error(f"{', '.join(given)}: not with {alone}")
    return run_command(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    if options.gpu_report:
        return write_report(Path(options.gpu_report))
    machine: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    there = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    if "cuda" in there:
        machine["gpu"] = torch.cuda.get_device_name()
    if options.norm:
        devices = [choose_device(options.device).type] if options.device else there
        results = bench_norms(devices)
        report: dict[str, Any] = {"norm": [asdict(result) for result in results]}
        tables = [
            f"{device}\n{norm_table([r for r in results if r.device == device])}"
            for device in devices
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
