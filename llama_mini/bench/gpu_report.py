"""What a GPU is to show, in one file: `python -m llama_mini.bench --gpu-report OUT`."""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from ..checkpoint.files import replace
from ..cli import choose_device
from .norm import bench_norms


def write_report(out: Path) -> None:
    """Measure on the CUDA GPU that is there, and write the results as JSON to `out`."""
    choose_device("cuda")
    report = {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "norm": [asdict(result) for result in bench_norms(["cuda"])],
    }
    replace(out, lambda file: file.write_text(json.dumps(report, indent=1)))
