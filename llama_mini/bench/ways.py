"""The ways to generate text that are measured, in turn, so that all of them meet the same neighbours."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache import KVCache
from ..checkpoint import Checkpoint
from ..checkpoint.names import HUGGING_FACE, translate
from ..generation import stream
from ..model import Llama
from .limits import rate

LIMITS = {
    "operations": ("matmul",),
    "bytes": ("copy", "read", "linears"),
}  # of what a phase asks for


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
    cache = KVCache.for_model(model, len(prompt), prompt.shape[1] + new_tokens)
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
    return Pass(times[1] - times[0], step, torch.tensor(ids, dtype=torch.long, device="cpu").T)


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


@torch.inference_mode()
def measure(
    ways: dict[str, Callable[[], Pass]],
    limits: dict[str, tuple[Callable[[], object], float]],
    work: dict[str, tuple[str, float, float]],
    runs: int,
) -> dict[str, Any]:
    """Every way in turn, `runs` times, and after each what the machine gives at that moment: for each way
    and phase the medians of its figures, and for "limits" those of the machine.

    `work` says of a phase what it asks for (as LIMITS names it), the tokens that it gives, and how much
    of the former that takes. Shares and ratios are taken within a run.
    """
    for function, _ in limits.values():
        function()
    found: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for _ in range(runs):
        seconds: dict[tuple[str, str], float] = {}
        for name, way in ways.items():
            passed = way()
            machine = {
                limit: rate(function, amount) for limit, (function, amount) in limits.items()
            }
            for limit, given in machine.items():
                found["limits", limit].append(given)
            for phase, took in (("prefill", passed.prefill), ("decode", passed.step)):
                asked, tokens, amount = work[phase]
                seconds[name, phase] = took
                found[name, phase, "seconds"].append(took)
                found[name, phase, "tokens_per_second"].append(tokens / took)
                found[name, phase, f"{asked}_per_second"].append(amount / took)
                for limit in LIMITS[asked]:
                    share = (1 if limit == "linears" else amount) / took / machine[limit]
                    found[name, phase, f"of_{limit}"].append(share)
        for (name, phase), took in seconds.items():
            theirs = [
                t for (w, p), t in seconds.items() if p == phase and w.startswith("transformers")
            ]
            if theirs:
                found[name, phase, "to_transformers"].append(min(theirs) / took)
    report: dict[str, Any] = {name: {"prefill": {}, "decode": {}} for name in ways} | {"limits": {}}
    for (name, *path, key), values in found.items():
        (report[name][path[0]] if path else report[name])[key] = middle(values)
    return report


def middle(values: Iterable[float]) -> dict[str, float]:
    """Median of the values, and half their interquartile range."""
    quarters = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64, device="cpu")
    numbers = torch.tensor([*values], dtype=torch.float64, device="cpu")
    low, median, high = numbers.quantile(quarters).tolist()
    return {"median": median, "spread": (high - low) / 2}


def same_tokens(ids: Tensor, reference: Tensor) -> int:
    """How many columns are equal before the first in which any row differs."""
    return int((ids == reference).all(0).long().cumprod(0).sum())
