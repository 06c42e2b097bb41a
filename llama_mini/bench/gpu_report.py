"""What a GPU is to show, in one command: `python -m llama_mini.bench --gpu-report OUT`.

Each part has a time limit of its own: what fails is written down, and the next begins.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cache import KVCache
from ..checkpoint.files import replace
from ..cli import choose_device, require_place
from ..generation import generate
from ..model import Attend, Llama
from ..speed import fast_model
from .norm import bench_norms
from .shapes import SHAPES, random_model, shape_config
from .ways import as_transformers, synchronize, through_transformers

SPEED = {  # the options of the benchmark, and its seconds
    "1.1B, batch 1": ("--shape tinyllama-1.1b --prompt-tokens 4096 --new-tokens 64", 80),
    "1.1B, batch 32": ("--shape tinyllama-1.1b --batch 32 --prompt-tokens 128 --new-tokens 64", 70),
    "8B, batch 1": ("--shape llama-3.1-8b --prompt-tokens 512 --new-tokens 48", 100),
}
COMMON = "--compile --against transformers --runs 2 --json"
IDS = 64
LENGTHS = (2, 31, 32, 33, 65, 129, 513, 4097)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError after so many seconds."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"it took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def small(device: torch.device, positions: int = 1024) -> Llama:
    return random_model(shape_config("stories", positions), device, torch.float32)


def same_ids(device: torch.device) -> dict[str, Any]:
    """Greedy ids on the CPU, on the device, of the fast form there and of transformers there: how many are
    those of the CPU.
    """
    own = small(torch.device("cpu"))
    there = small(torch.device("cpu")).to(device)
    prompt = [[*range(1, 20)]]
    first, *others = (
        generate(m, prompt, IDS, stop_ids=())[0] for m in (own, there, fast_model(there))
    )
    reference = as_transformers(SHAPES["stories"] | {"max_position_embeddings": 1024}, there)
    reference.generation_config.eos_token_id = None
    tokens = torch.tensor(prompt, dtype=torch.long, device=device)
    others.append(through_transformers(reference, tokens, IDS, None).ids[0].tolist())
    agree = [sum(a == b for a, b in zip(first, text, strict=True)) for text in others]
    return dict(zip(("device", "fast", "transformers"), agree, strict=True)) | {"of": IDS}


@torch.inference_mode()
def replay(device: torch.device) -> dict[str, Any]:
    """The fast form's steps around 256 positions, two caches taking turns, beside the plain ones; and, bit
    for bit, a replay beside the step that was captured.
    """
    model = small(device)
    fast, worst, compared, same = fast_model(model), 0.0, 0, 0
    uncaptured: Any = getattr(fast, "uncaptured", None)  # on a CPU nothing is captured
    tokens = torch.arange(1, 265, dtype=torch.long, device=device)[None]
    caches = {
        name: [KVCache.for_model(model, 1, 300) for _ in range(2)] for name in ("plain", "fast")
    }
    for each, name in ((model, "plain"), (fast, "fast")):
        for n, cache in enumerate(caches[name]):
            each(tokens[:, n : 253 + n], cache=cache, last_only=True)
    for step in range(6):
        for n in range(2):
            token = tokens[:, 253 + step + n :][:, :1]
            plain = model(token, cache=caches["plain"][n])
            replayed = fast(token, cache=caches["fast"][n])
            worst = max(worst, relative(replayed, plain))
            if uncaptured is not None:
                compared += 1
                same += torch.equal(replayed, uncaptured(caches["fast"][n]))
    bits = {"replays": compared, "of these the same bits as uncaptured": same}
    return {"largest difference, of the largest logit": worst, **bits}


def relative(x: Tensor, reference: Tensor) -> float:
    return float((x - reference).abs().max() / reference.abs().max())


@torch.inference_mode()
def no_wait(device: torch.device) -> dict[str, Any]:
    """A replayed step waits for nothing: torch raises where it does."""
    fast = fast_model(small(device))
    cache, token = KVCache.for_model(fast, 1, 64), torch.ones(1, 1, dtype=torch.long, device=device)
    for _ in range(3):
        fast(token, cache=cache)
    with waits_forbidden(device):
        for _ in range(3):
            fast(token, cache=cache)
    return {"steps without a wait": 3}


@contextmanager
def waits_forbidden(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def memory(device: torch.device) -> dict[str, Any]:
    """Bytes allocated after the second and the last of 20 generations."""
    fast, held = fast_model(small(device)), []
    for _ in range(20):
        generate(fast, [[1, 2, 3]], IDS, stop_ids=())
        synchronize(device)
        held.append(torch.cuda.memory_allocated() if device.type == "cuda" else 0)
    return {"grown by": held[-1] - held[1], "bytes": held[-1]}


@torch.inference_mode()
def attend(device: torch.device) -> dict[str, Any]:
    """One query over keys of many lengths in bfloat16, beside float64; microseconds of the first call."""
    results = {}
    for s in LENGTHS:
        generator = torch.Generator("cpu").manual_seed(s)
        draw = partial(torch.randn, device="cpu", dtype=torch.bfloat16, generator=generator)
        sizes = ((1, 32, 1, 128), (1, 8, s, 128), (1, 8, s, 128))
        q, k, v = (draw(size).to(device) for size in sizes)
        synchronize(device)
        began = time.perf_counter()
        heads = Attend()(q, k, v, None)
        synchronize(device)
        elapsed = time.perf_counter() - began
        exact = Attend()(q.double(), k.double(), v.double(), None)
        results[str(s)] = {"error": relative(heads.double(), exact), "microseconds": elapsed * 1e6}
    return results


def speed(options: str, seconds: int, device: torch.device) -> dict[str, Any]:
    """The benchmark's report, from a process of its own."""
    command = [sys.executable, "-m", "llama_mini.bench", *options.split(), *COMMON.split()]
    done = subprocess.run(
        [*command, "--device", device.type], capture_output=True, text=True, timeout=seconds
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().split("\n")[-1])
    return dict(json.loads(done.stdout))


def norms(device: torch.device) -> dict[str, Any]:
    return {"ways": [asdict(result) for result in bench_norms([device.type])]}


PARTS: dict[str, tuple[Callable[[torch.device], dict[str, Any]], int]] = {
    "same ids": (same_ids, 50),
    "replay": (replay, 35),
    "no wait": (no_wait, 30),
    "memory": (memory, 30),
    "attend": (attend, 30),
    **{name: (partial(speed, options, s), s + 5) for name, (options, s) in SPEED.items()},
    "norms": (norms, 30),
}


def measured(device: torch.device) -> dict[str, Any]:
    """What each part found, or why it found nothing, and its seconds."""
    report: dict[str, Any] = {}
    for name, (part, seconds) in PARTS.items():
        began = time.perf_counter()
        try:
            with limited(seconds):
                found: dict[str, Any] = part(device)
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}".split("\n")[0]}
        report[name] = {**found, "seconds": time.perf_counter() - began}
    return report


def table(report: dict[str, Any]) -> str:
    """The report in Markdown: a row for each part, or for each way of a benchmark."""
    lines = ["| part | result |", "|---|---|"]
    for name, found in report["parts"].items():
        ways = found.get("ways", [])
        if ways and "decode" in ways[0]:
            for way in ways:
                rates = [
                    way[phase]["tokens_per_second"]["median"] for phase in ("prefill", "decode")
                ]
                lines.append(
                    f"| {name}, {way['way']} | {rates[0]:,.0f} and {rates[1]:,.1f} tokens/s |"
                )
        else:
            plain = {k: v for k, v in found.items() if k not in ("ways", "seconds")}
            lines.append(f"| {name} | {json.dumps(plain) if plain else 'in the JSON file'} |")
    return "\n".join([f"torch {report['torch']}, {report['device']}", "", *lines, ""])


def write_report(out: Path, device_name: str = "cuda") -> None:
    """Measure on the CUDA GPU that is there; write JSON to `out`, and a table beside it, with `.md`."""
    device, beside = choose_device(device_name), out.with_suffix(".md")
    if out == beside:
        raise ValueError(f"--gpu-report {out}: .md is the table's; name the JSON file otherwise")
    for path in (out, beside):
        require_place(path, "--gpu-report")
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    report: dict[str, Any] = {"torch": torch.__version__, "device": name, "parts": measured(device)}
    replace(out, lambda file: file.write_text(json.dumps(report, indent=1)))
    replace(beside, lambda file: file.write_text(table(report)))
