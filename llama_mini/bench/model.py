"""Load, prefill and decode of a model, beside the limits of the machine and transformers: measured in turn,
so that all of them meet the same neighbours. The command is `python -m llama_mini.bench --model FOLDER`.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import KVCache
from ..checkpoint import Checkpoint, load_model, open_checkpoint, parse_config, require_memory
from ..checkpoint.names import HUGGING_FACE, translate
from ..checkpoint.weights import NoInit
from ..cli import choose_device, peak_memory
from ..config import LlamaConfig
from ..generation import require_prompts, stream
from ..model import Llama
from ..speed import all_cores, fast_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KEYS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads max_position_embeddings rope_theta tie_word_embeddings"
).split()
# What `config.json` says of each; random weights are as fast as trained ones.
SHAPES: dict[str, dict[str, Any]] = {
    name: {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        **dict(zip(KEYS, values, strict=True)),
        **more,
    }
    for name, values, more in (
        ("stories", (4096, 256, 704, 6, 8, 4, 512, 1e4, True), {}),  # train.py's own
        ("smollm2-135m", (49152, 576, 1536, 30, 9, 3, 8192, 1e5, True), {}),
        ("tinyllama-1.1b", (32000, 2048, 5632, 22, 32, 4, 2048, 1e4, False), {}),
        (
            "llama-3.2-1b",
            (128256, 2048, 8192, 16, 32, 8, 131072, 5e5, True),
            {"rope_scaling": {**LLAMA3, "factor": 32.0}},
        ),
        (
            "llama-3.1-8b",
            (128256, 4096, 14336, 32, 32, 8, 131072, 5e5, False),
            {"rope_scaling": LLAMA3},
        ),
    )
}
# Far more than any processor caches; and matrices that keep all of it busy.
BUFFER_BYTES = {"cpu": 2**28, "cuda": 2**30}
MATRIX = {"cpu": 1024, "cuda": 8192}


class Pass(NamedTuple):
    """One prompt read and continued: seconds to the first new token and of each later one, and the ids
    (b, n).
    """

    prefill: float
    step: float
    ids: Tensor


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@torch.inference_mode()
def through_model(model: Llama, prompt: Tensor, new_tokens: int) -> Pass:
    """Greedy decoding of `prompt` (b, t) without a look at any id."""
    weight = model.embed.weight
    synchronize(weight.device)
    began = time.perf_counter()
    capacity = prompt.shape[1] + new_tokens
    cache = KVCache(model.config, len(prompt), capacity, weight.device, weight.dtype)
    ids = [model(prompt, cache=cache, last_only=True)[:, -1].argmax(-1, keepdim=True)]
    synchronize(weight.device)
    first = time.perf_counter()
    for _ in range(new_tokens - 1):
        ids.append(model(ids[-1], cache=cache, last_only=True)[:, -1].argmax(-1, keepdim=True))
    synchronize(weight.device)
    step = (time.perf_counter() - first) / (new_tokens - 1)
    return Pass(first - began, step, torch.cat(ids, 1).cpu())


def through_stream(model: Llama, prompt: Tensor, new_tokens: int) -> Pass:
    """The same by `stream`."""
    prompts = prompt.tolist()
    synchronize(prompt.device)
    times, ids = [time.perf_counter()], []
    for step_ids in stream(model, prompts, new_tokens, stop_ids=()):
        times.append(time.perf_counter())
        ids.append(step_ids)
    step = (times[-1] - times[1]) / (new_tokens - 1)
    return Pass(times[1] - times[0], step, torch.tensor(ids).T)


def through_transformers(
    reference: Any, prompt: Tensor, new_tokens: int, cache: str | None
) -> Pass:
    """The same by the `generate` of a transformers model; `cache` "static" compiles it on a GPU."""
    times: list[float] = []

    def mark(ids: Tensor, scores: object, **options: object) -> Tensor:
        if not times:
            synchronize(ids.device)
            times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    synchronize(prompt.device)
    began = time.perf_counter()
    output = reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        cache_implementation=cache,
        stopping_criteria=[mark],  # called after every token
    )
    synchronize(prompt.device)
    step = (time.perf_counter() - times[0]) / (new_tokens - 1)
    return Pass(times[0] - began, step, output[:, prompt.shape[1] :].cpu())


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"--against transformers: it cannot be imported ({error}): pip install transformers"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def load_transformers(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Any:
    """The same checkpoint as a transformers model."""
    folder = checkpoint.folder
    if not (folder / "config.json").is_file():
        raise ValueError(f"--against transformers: {folder} holds no config.json, which it needs")
    model_class = import_transformers().AutoModelForCausalLM
    reference = model_class.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return reference.to(device).eval().requires_grad_(False)


def as_transformers(values: dict[str, Any], model: Llama) -> Any:
    """A transformers model of the config `values` that shares the weights of `model`."""
    transformers, weight = import_transformers(), model.embed.weight
    config = transformers.AutoConfig.for_model(**values)
    with torch.device(weight.device):
        reference = transformers.AutoModelForCausalLM.from_config(
            config, dtype=weight.dtype, attn_implementation="sdpa"
        )
    state = {translate(name, HUGGING_FACE): w for name, w in model.state_dict().items()}
    reference.load_state_dict(state, assign=True)
    return reference.eval().requires_grad_(False)


def random_model(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Llama:
    """A `Llama` with random weights, drawn in `dtype` on `device`."""
    with torch.device("meta"), NoInit():
        model = Llama(config)
    generator = torch.Generator(device).manual_seed(0)
    state: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():  # a tied head comes once, as the embedding
        weight = torch.ones(parameter.shape, device=device, dtype=dtype)
        if weight.dim() == 2:
            std = 0.02 if name == "embed.weight" else weight.shape[1] ** -0.5
            weight.normal_(0, std, generator=generator)
        state[name] = nn.Parameter(weight, requires_grad=False)
    state.setdefault("lm_head.weight", state["embed.weight"])
    model.load_state_dict(state, assign=True)
    return model.eval()


def bare_linears(model: Llama, batch: int) -> Callable[[], object]:
    """Every linear layer of the model on one token per row, in order, and nothing else; on a GPU as one
    CUDA graph, or the launches would be what is measured.
    """
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    inputs = {weight.shape[1]: weight.new_ones(batch, 1, weight.shape[1]) for weight in weights}

    def call() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    if not weights[0].is_cuda:
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def limits(model: Llama, batch: int) -> dict[str, tuple[Callable[[], object], float]]:
    """What the machine is measured by, each with the amount of one call: copy and read in bytes, matmul
    in floating-point operations, linears in steps.
    """
    weight = model.embed.weight
    device, n = weight.device, MATRIX[weight.device.type]
    x = torch.ones(BUFFER_BYTES[device.type] // 4, device=device)
    y = torch.empty_like(x)
    a, b = torch.randn(2, n, n, device=device).to(weight.dtype)
    c = torch.empty_like(a)
    return {
        "copy": (lambda: y.copy_(x), 2 * x.nbytes),
        "read": (lambda: x.sum(), x.nbytes),
        "matmul": (lambda: torch.mm(a, b, out=c), 2 * n**3),
        "linears": (bare_linears(model, batch), 1),
    }


def rate(
    function: Callable[[], object], amount: float, device: torch.device, seconds: float = 0.1
) -> float:
    """`amount` per second of calling `function` for about `seconds`."""
    calls = 1
    while True:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        elapsed = time.perf_counter() - began
        if elapsed >= seconds:
            return amount * calls / elapsed
        calls *= 2


def prefill_operations(model: Llama, batch: int, t: int) -> int:
    """Floating-point operations of a prompt: its matrix products, the head's on the last position only."""
    config = model.config
    layers = [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    linears = t * sum(layer.weight.numel() for layer in layers) + model.lm_head.weight.numel()
    # Pairs of a query and a key, each multiplied once for q k and once for v.
    seen = t * (t + 1) // 2
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * 2 * seen
    return 2 * batch * (linears + attention)


def step_bytes(model: Llama, batch: int, prompt_tokens: int, new_tokens: int) -> int:
    """Bytes that a decode step has to read: the weights, and the cache as filled on average."""
    config, weight = model.config, model.embed.weight
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if not config.tie_word_embeddings:  # of the embedding it reads a row
        weights -= weight.nbytes
    row = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    # From one position more than the prompt has, to all but the last new one.
    positions = 2 * prompt_tokens + new_tokens  # twice the mean
    return weights + batch * row * positions * weight.element_size()


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
        "reading_seconds": middle(read for _, read in times),
    }


def middle(values: Iterable[float]) -> dict[str, float]:
    """Median of the values, and half their interquartile range."""
    quarters = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, median, high = torch.tensor([*values], dtype=torch.float64).quantile(quarters).tolist()
    return {"median": median, "spread": (high - low) / 2}


def same_tokens(ids: Tensor, reference: Tensor) -> int:
    """How many columns are equal before the first in which any row differs."""
    return int((ids == reference).all(0).long().cumprod(0).sum())


def bench_model(options: argparse.Namespace) -> dict[str, Any]:
    """All measurements of a checkpoint or a shape, as the JSON report holds them."""
    b, t, n = options.batch, options.prompt_tokens, options.new_tokens
    for name, least in {"batch": 1, "prompt_tokens": 1, "new_tokens": 2, "runs": 1}.items():
        if getattr(options, name) < least:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} {getattr(options, name)}: it must be {least} or more")
    device = choose_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, options.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    values: dict[str, Any] = {}
    if options.shape is None:
        checkpoint = open_checkpoint(options.model)
        config = checkpoint.config
    elif options.shape in SHAPES:
        values = dict(SHAPES[options.shape])  # weights without training know no end of context
        values["max_position_embeddings"] = max(values["max_position_embeddings"], t + n)
        config = parse_config(values)
    else:
        raise ValueError(f"--shape {options.shape}: it must be one of {', '.join(SHAPES)}")
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(config.vocab_size, (b, t), generator=generator)
    require_prompts(config, prompt.tolist(), n)
    prompt = prompt.to(device)
    if options.against:
        import_transformers()  # before any work, if it is not there

    memory, load = {"before": peak_memory(device)}, None
    if options.shape is None:
        require_memory(checkpoint, device, dtype, b * t, b * n)
        model, load = measure_load(checkpoint, device, dtype, options.runs)
    else:
        model = random_model(config, device, dtype)
    model = all_cores(model)
    ways: dict[str, Callable[[], Pass]] = {
        "plain": partial(through_model, model, prompt, n),
        "plain, stream": partial(through_stream, model, prompt, n),
    }
    warm = {name: way() for name, way in ways.items()}  # the first pass of each is not measured
    memory["peak"] = peak_memory(device)  # before others take theirs
    first_step = {}
    if options.compile:
        fast: Any = fast_model(model)
        ways["compiled"] = partial(through_model, fast, prompt, n)
        ways["compiled, stream"] = partial(through_stream, fast, prompt, n)
        first_step["compiled"] = through_model(fast, prompt, 2).step
        warm |= {name: ways[name]() for name in ("compiled", "compiled, stream")}
        memory["peak_compiled"] = peak_memory(device)
    if options.against:
        reference = (
            load_transformers(checkpoint, device, dtype)
            if options.shape is None
            else as_transformers(values, model)
        )
        caches = {"transformers": None} | (
            {"transformers, static": "static"} if device.type == "cuda" else {}
        )
        for name, cache in caches.items():
            ways[name] = partial(through_transformers, reference, prompt, n, cache)
            warm[name] = ways[name]()

    rounds = measure_rounds(ways, limits(model, b), device, options.runs)
    work = {
        "prefill_tokens": b * t,
        "prefill_operations": prefill_operations(model, b, t),
        "step_tokens": b,
        "step_bytes": step_bytes(model, b, t, n),
    }
    every = [sample.machine for samples in rounds.values() for sample in samples]
    return {
        "model": {
            "name": options.shape or options.model,
            "parameters": config.parameter_count(),
            "weight_bytes": sum(parameter.nbytes for parameter in model.parameters()),
            "device": device.type,
            "dtype": str(dtype).removeprefix("torch."),
            "batch": b,
            "prompt_tokens": t,
            "new_tokens": n,
            "runs": options.runs,
            **work,
        },
        "memory": memory,
        "load": load,
        "limits": {limit: middle(machine[limit] for machine in every) for limit in every[0]},
        "ways": [
            {
                "way": name,
                **summary(name, rounds, work),
                "same_tokens": same_tokens(warm[name].ids, warm["plain"].ids),
                "first_step_seconds": first_step.get(name),
            }
            for name in ways
        ],
    }


class Sample(NamedTuple):
    """A pass, and the rates of the machine right after it, by name."""

    prefill: float
    step: float
    machine: dict[str, float]


@torch.inference_mode()
def measure_rounds(
    ways: dict[str, Callable[[], Pass]],
    yardsticks: dict[str, tuple[Callable[[], object], float]],
    device: torch.device,
    runs: int,
) -> dict[str, list[Sample]]:
    """Every way in turn, `runs` times, and after each what the machine gives at that moment."""
    for function, _ in yardsticks.values():
        function()
    rounds: dict[str, list[Sample]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, way in ways.items():
            prefill, step, _ids = way()
            machine = {
                limit: rate(function, amount, device)
                for limit, (function, amount) in yardsticks.items()
            }
            rounds[name].append(Sample(prefill, step, machine))
    return rounds


def summary(name: str, rounds: dict[str, list[Sample]], work: dict[str, Any]) -> dict[str, Any]:
    """Prefill and decode of one way: medians, every share and ratio taken within its run."""
    samples = rounds[name]
    others = [rounds[way] for way in rounds if way.startswith("transformers")]
    operations, moved = work["prefill_operations"], work["step_bytes"]
    prefill = {
        "seconds": middle(s.prefill for s in samples),
        "tokens_per_second": middle(work["prefill_tokens"] / s.prefill for s in samples),
        "operations_per_second": middle(operations / s.prefill for s in samples),
        "of_matmul": middle(operations / s.prefill / s.machine["matmul"] for s in samples),
    }
    decode = {
        "seconds": middle(s.step for s in samples),
        "tokens_per_second": middle(work["step_tokens"] / s.step for s in samples),
        "bytes_per_second": middle(moved / s.step for s in samples),
        "of_copy": middle(moved / s.step / s.machine["copy"] for s in samples),
        "of_read": middle(moved / s.step / s.machine["read"] for s in samples),
        "of_linears": middle(1 / s.step / s.machine["linears"] for s in samples),
    }
    if others:
        best = list(zip(*others, strict=True))  # the ways of transformers, run by run
        prefill["to_transformers"] = middle(
            min(o.prefill for o in same) / s.prefill for s, same in zip(samples, best, strict=True)
        )
        decode["to_transformers"] = middle(
            min(o.step for o in same) / s.step for s, same in zip(samples, best, strict=True)
        )
    return {"prefill": prefill, "decode": decode}
