"""Load, prefill and decode of a model, beside the limits of the machine and transformers."""

import argparse
import gc
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import Checkpoint, load_model, open_checkpoint, require_memory
from ..cli import choose_device, peak_memory
from ..config import LlamaConfig
from ..generation import require_prompts
from ..model import Llama
from ..speed import all_cores, fast_model
from .limits import Work, limits
from .shapes import SHAPES, random_model, shape_config
from .ways import (
    Pass,
    as_transformers,
    import_transformers,
    load_transformers,
    measure,
    middle,
    same_tokens,
    synchronize,
    through_model,
    through_stream,
    through_transformers,
)


def read_files(files: Iterable[Path]) -> None:
    """Into memory of its own, which a loader that does not map needs too."""
    for file in files:
        file.read_bytes()


def measure_load(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, runs: int
) -> tuple[Llama, dict[str, Any]]:
    """The model of a checkpoint, and what loading it takes beside reading its files."""
    files = sorted({tensor.file for tensor in checkpoint.stored.values()})
    size, model, times = sum(file.stat().st_size for file in files), None, []
    read_files(files)
    for _ in range(runs):
        del model  # memory holds one at a time
        gc.collect()
        began = time.perf_counter()
        read_files(files)
        read = time.perf_counter()
        model = load_model(checkpoint, device, dtype)
        if device.type == "cpu":  # one number of each page: a mapped file is there when it is read
            for parameter in model.parameters():
                parameter.view(-1)[:: 4096 // parameter.element_size()].sum()
        synchronize(device)
        times.append((time.perf_counter() - read, read - began))
    assert model is not None  # there is at least one run
    return model, {
        "seconds": middle(load for load, _ in times),
        "bytes_per_second": middle(size / load for load, _ in times),
        "of_reading": middle(load / read for load, read in times),
    }


def lengths(config: LlamaConfig, t: int | None, n: int | None) -> tuple[int, int]:
    """Prompt and new tokens: what is given, or 512 and 64, or what the context leaves of these."""
    room = config.context()
    if n is None:
        n = max(2, min(64, room // 2 if t is None else room - t))
    return max(1, min(512, room - n)) if t is None else t, n


def bench_model(options: argparse.Namespace) -> dict[str, Any]:
    """All measurements of a checkpoint or a shape, as the JSON report holds them."""
    b = options.batch
    for name, least in {"batch": 1, "prompt_tokens": 1, "new_tokens": 2, "runs": 1}.items():
        if (value := getattr(options, name)) is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value}: it must be {least} or more")
    device = choose_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, options.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    if options.shape is None:
        checkpoint = open_checkpoint(options.model)
        config = checkpoint.config
        t, n = lengths(config, options.prompt_tokens, options.new_tokens)
    else:
        t, n = options.prompt_tokens or 512, options.new_tokens or 64
        config = shape_config(options.shape, t + n)
    generator = torch.Generator("cpu").manual_seed(0)
    prompt = torch.randint(
        config.vocab_size, (b, t), generator=generator, dtype=torch.long, device="cpu"
    )
    require_prompts(config, prompt.tolist(), n)
    prompt = prompt.to(device)
    if options.against:
        import_transformers()  # before any work, if it is not there

    memory, load = {"before": peak_memory(device)}, None
    if options.shape is None:
        require_memory(checkpoint, device, dtype, b * t, b * n, graphs=options.compile)
        model, load = measure_load(checkpoint, device, dtype, options.runs)
    else:
        model = random_model(config, device, dtype)
    work = Work(model)
    # The first pass of each way is not measured.
    warm = {"plain": through_model(work.model, prompt, n)}
    ways: dict[str, Callable[[], Pass]] = {"plain": partial(through_model, model, prompt, n)}

    def add(name: str, way: Callable[..., Pass], *arguments: Any) -> None:
        ways[name] = partial(way, *arguments)
        warm[name] = ways[name]()

    fastest, its_name = model, "plain"
    if device.type == "cpu":
        fastest, its_name = all_cores(model), "all cores"
        add(its_name, through_model, fastest, prompt, n)
    add(f"{its_name}, stream", through_stream, fastest, prompt, n)
    memory["peak"] = peak_memory(device)  # before others take theirs
    first_step = {}
    if options.compile:
        fast: Any = fast_model(model)
        first_step["compiled"] = through_model(fast, prompt, 2).step
        add("compiled", through_model, fast, prompt, n)
        add("compiled, stream", through_stream, fast, prompt, n)
        memory["peak_compiled"] = peak_memory(device)
    if options.against:
        reference = (
            load_transformers(checkpoint, device, dtype)
            if options.shape is None
            else as_transformers(SHAPES[options.shape], model)
        )
        add("transformers", through_transformers, reference, prompt, n, None)
        if device.type == "cuda":
            add("transformers, static", through_transformers, reference, prompt, n, "static")

    step_bytes = sum(work.bytes[1:]) / (n - 1)
    asked = {
        "prefill": ("operations", b * t, work.operations[0]),
        "decode": ("bytes", b, step_bytes),
    }
    figures = measure(ways, limits(model, b), asked, options.runs)
    return {
        "model": {
            "name": options.shape or options.model,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "weight_bytes": sum(parameter.nbytes for parameter in model.parameters()),
            "device": device.type,
            "dtype": str(dtype).removeprefix("torch."),
            "batch": b,
            "prompt_tokens": t,
            "new_tokens": n,
            "runs": options.runs,
            "prefill_operations": work.operations[0],
            "step_bytes": step_bytes,
        },
        "memory": memory,
        "load": load,
        "limits": figures["limits"],
        "ways": [
            {
                "way": name,
                **figures[name],
                "same_tokens": same_tokens(warm[name].ids, warm["plain"].ids),
                "first_step_seconds": first_step.get(name),
            }
            for name in ways
        ],
    }
