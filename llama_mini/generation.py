"""From logits to tokens: sampling, batches of prompts of unequal length, and the loop that feeds
each token back.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from operator import index

import torch
from torch import Tensor

from .cache import KVCache
from .config import LlamaConfig
from .model import Llama


def sample(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one id per row of `logits` (b, vocab) -> (b,).

    Temperature 0 takes the likeliest. `top_k` keeps exactly that many ids; `top_p` the fewest
    likeliest ids whose probabilities reach it (nucleus sampling, Holtzman et al. 2019,
    arXiv:1904.09751), at least one; None keeps all. A `ValueError` for parameters out of range and
    for logits that are NaN or all minus infinity.
    """
    require_sampling(temperature, top_k, top_p)
    ids = draw(logits, temperature, top_k, top_p, generator)
    if (ids == NONE).any():
        raise ValueError(NO_TOKEN)
    return ids


NONE = -1
STRIDE = 256  # room for new tokens that a cache begins with when max_new_tokens is None
NO_TOKEN = (
    "the logits hold NaN or infinity, and no token can be drawn from them: "
    "the weights are damaged, or their dtype is too narrow"
)


def draw(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """`sample` without synchronising with the GPU: NONE where no id can be drawn."""
    logits = logits.float()
    highest = logits.amax(-1, keepdim=True)  # NaN where any is NaN
    broken = ~highest.isfinite().squeeze(-1)
    if temperature < torch.finfo(torch.float32).tiny:  # below, division is not exact
        return logits.argmax(-1).masked_fill(broken, NONE)
    # The highest is 0, so that a tiny temperature cannot overflow.
    logits = (logits - highest) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kept, ids = logits.topk(top_k)
        logits = torch.full_like(logits, -math.inf).scatter(-1, ids, kept)
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        kept, ids = probabilities.sort(descending=True, stable=True)
        beyond = kept.cumsum(-1) - kept >= top_p
        beyond[..., 0] = False  # a top_p of 0, also one too small for float32
        probabilities = torch.zeros_like(probabilities).scatter(
            -1, ids, kept.masked_fill(beyond, 0)
        )
    # An exponential race: the id with the smallest Exp(1) / probability wins. torch.multinomial draws the
    # same, but synchronises to check the probabilities.
    clocks = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / clocks).argmax(-1).masked_fill(broken, NONE)


def stream(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | None = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_ids: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    vocab_size: int | None = None,
    agree: Callable[[Tensor], tuple[Tensor, list[int]]] | None = None,
    cache: KVCache | None = None,
) -> Iterator[list[int | None]]:
    """Continue every prompt (a list of ids); yields, token by token, one new id per prompt, None
    for those that have ended.

    A prompt ends with the first of `stop_ids` (yielded too; None: the checkpoint's own, (): none)
    or at `max_new_tokens` (None: at the end of the context). Ids from `vocab_size` on (rows that
    only pad the embedding) are never drawn. `agree` takes the drawn ids (b,), NONE where none could be
    drawn, and returns those that every process of one model must use, as a tensor and as a list
    (speed/ranks.py). `cache` holds the first positions of the prompts, which are not computed again, and
    grows with the text. A `ValueError`, before any work, for prompts that are empty, hold other ids than
    the model's, or do not fit its context together with the new tokens.
    """
    require_sampling(temperature, top_k, top_p)
    prompts = _lists(prompts)
    stops = frozenset(_lists([model.config.eos_token_id if stop_ids is None else stop_ids])[0])
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size is {vocab_size}: it must be 1 or more; None is all of it")
    require_prompts(model.config, prompts, 1 if max_new_tokens is None else max_new_tokens)
    lengths = {len(prompt) for prompt in prompts}
    if cache is not None and cache.length and (len(lengths) != 1 or cache.length >= max(lengths)):
        raise ValueError(
            f"the cache holds {cache.length} positions: prompts of one length above that can go on "
            f"from there, and these have {sorted(lengths)}"
        )
    width, device = max(lengths, default=0), model.embed.weight.device
    end = model.config.context() if max_new_tokens is None else width + max_new_tokens
    if not prompts or end == width:
        return iter(())
    if cache is None:
        room = end if max_new_tokens is not None else min(end, width + STRIDE)
        cache = KVCache(model.config, len(prompts), room, device, model.embed.weight.dtype)

    @torch.inference_mode()
    def steps(cache: KVCache) -> Iterator[list[int | None]]:
        # Left-padded, so that every row's last token stands in the last column and one step appends
        # to all of them.
        rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        tokens = torch.tensor(rows, dtype=torch.long, device=device)[:, cache.length :]
        padding = torch.tensor([width - len(p) for p in prompts], dtype=torch.long, device=device)
        columns = torch.arange(end, dtype=torch.long, device=device)
        live = [True] * len(prompts)
        while any(live) and (seen := cache.length + tokens.shape[1]) < end:
            if seen > cache.capacity:
                cache.grow(min(end, 2 * seen))
            positions = mask = None
            if len(lengths) > 1:
                queries = columns[cache.length : seen]
                positions = (queries - padding[:, None]).clamp(min=0)
                mask = padded_mask(queries, columns[:seen], padding)
            logits = model(tokens, cache=cache, positions=positions, mask=mask, last_only=True)
            drawn = draw(logits[:, -1, :vocab_size], temperature, top_k, top_p, generator)
            # The only wait for the device.
            drawn, ids = (drawn, drawn.tolist()) if agree is None else agree(drawn)
            if NONE in ids:
                raise ValueError(f"at new token {seen - width + 1} {NO_TOKEN}")
            new = [token if alive else None for token, alive in zip(ids, live, strict=True)]
            yield new
            live = [token is not None and token not in stops for token in new]
            tokens = drawn[:, None]

    return steps(cache)


def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | None = 64,
    **options: object,
) -> list[list[int]]:
    """The new ids of every prompt, its stop id included; options as for `stream`."""
    prompts = _lists(prompts)
    outputs: list[list[int]] = [[] for _ in prompts]
    for step_ids in stream(model, prompts, max_new_tokens, **options):  # type: ignore[arg-type]
        for output, token in zip(outputs, step_ids, strict=True):
            if token is not None:
                output.append(token)
    return outputs


def _lists(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    try:
        return [[index(token) for token in prompt] for prompt in prompts]
    except TypeError:
        raise ValueError(
            "prompts must be a list of prompts, each a list of token ids (of a text: "
            "tokenizer.encode(text)), and stop_ids a list of ids"
        ) from None


def padded_mask(queries: Tensor, keys: Tensor, padding: Tensor) -> Tensor:
    """Causal order over columns `queries` (t,) and `keys` (s,), less each row's `padding` (b,)
    first ones: (b, 1, t, s).

    A padding column sees itself: softmax over nothing would be NaN, and NaN times a weight of 0 is
    NaN in every row.
    """
    causal = keys <= queries[:, None]
    real = keys >= padding[:, None]
    return (causal & real[:, None] | (keys == queries[:, None]))[:, None]


def require_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise a `ValueError` that names the sampling parameter that is out of range."""
    if not _within(temperature, 0, torch.finfo(torch.float64).max):
        raise ValueError(f"temperature is {temperature}: it must be 0 (take the likeliest) or more")
    if top_k is not None and not (hasattr(top_k, "__index__") and top_k >= 1):
        raise ValueError(f"top_k is {top_k}: it must be 1 or more; leave it out to keep every id")
    if top_p is not None and not _within(top_p, 0, 1):
        raise ValueError(f"top_p is {top_p}: it must lie between 0 and 1")


def _within(value: float, low: float, high: float) -> bool:
    return (
        not isinstance(value, (str, bytes)) and hasattr(value, "__float__") and low <= value <= high
    )


def require_prompts(
    config: LlamaConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Raise a `ValueError` unless the model can read every prompt and write `max_new_tokens` behind
    it.
    """
    if not hasattr(max_new_tokens, "__index__") or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: it must be 0 or more")
    for prompt in prompts:
        if len(prompt) == 0:
            raise ValueError("a prompt holds no tokens: give it at least one, such as the BOS id")
        for token in prompt:
            if not 0 <= token < config.vocab_size:
                raise ValueError(
                    f"token id {token} is not in the model's vocabulary of {config.vocab_size}"
                )
        length = len(prompt) + max_new_tokens
        if length > config.max_position_embeddings:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones do not fit the model's "
                f"context of {config.max_position_embeddings} positions"
            )
        config.require_in_window(length)
