"""Whether a model fits: what a run will take of the memory, against what is at hand, before a weight is
read.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from ..cache import cache_bytes
from .headers import DTYPES
from .opening import Checkpoint, open_checkpoint
from .weights import build, own_dtype


def require_memory(
    source: str | Path | Checkpoint,
    device: torch.device,
    dtype: torch.dtype | None,
    prompt_tokens: int,
    new_tokens: int = 0,
    all_logits: bool = False,
    share: float = 1.0,
    graphs: bool = False,
) -> None:
    """Raise a `ValueError` with the bytes needed and at hand unless these fit: the weights in `dtype`
    (None: the embedding's), keys and values of all tokens, the prompt's widest activations, logits.

    Weights that stay mapped to their file count nothing: the system may drop their pages and read
    them again, so a model larger than the memory still runs, at the pace of the disk. `share` of
    the model is what this memory is to hold. With `graphs`, a GPU's fast form holds a static cache, which
    takes over what the cache has. Where the system does not say what is at hand, nothing is
    refused.
    """
    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    dtype = own_dtype(checkpoint) if dtype is None else dtype
    weights = 0
    for name, tensor in checkpoint.stored.items():
        moved = checkpoint.reorders and name.endswith(("q_proj.weight", "k_proj.weight"))
        if device.type != "cpu" or DTYPES.get(tensor.dtype) != dtype or moved:
            weights += math.prod(tensor.shape) * dtype.itemsize
    cache = cache_bytes(config, 1, prompt_tokens + new_tokens, dtype)
    if (
        graphs and device.type == "cuda"
    ):  # a quarter longer at most, or 256, and a little (speed/graphs.py)
        longer = (prompt_tokens + new_tokens) * 5 // 4 + 256 + 16
        cache += cache_bytes(config, 1, longer, dtype)
    ffn = 3 * prompt_tokens * config.intermediate_size * dtype.itemsize  # up, silu(gate), product
    logits = (prompt_tokens if all_logits else 1) * config.vocab_size * 4  # float32, to sample from
    needed, at_hand = int(share * (weights + cache + ffn)) + logits, bytes_at_hand(device)
    if at_hand is None or needed <= at_hand:
        return
    build(checkpoint)  # a config with sizes that its files do not have is the better reason
    raise ValueError(
        f"the model needs {needed:,} bytes of memory ({device.type}; in all, weights {weights:,}, keys and "
        f"values {cache:,}, activations {ffn + logits:,}), and {at_hand:,} are at hand: take a "
        "narrower --dtype, fewer tokens, or a smaller model"
    )


def bytes_at_hand(device: torch.device, root: Path = Path("/")) -> int | None:
    """What can be taken without others being ended or swapped out; None where the system does not say.

    On the CPU what Linux calls available, or what the control groups of this process leave of it.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return max(0, min([int(kilobytes) * 1024, *_left_by_groups(root)]))


def _left_by_groups(root: Path) -> Iterator[int]:
    """Bytes below each memory limit on this process, in control groups of version 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup" / controllers
        most, used = ("max", "current") if not controllers else ("limit_in_bytes", "usage_in_bytes")
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):  # inside a container, the group itself is the top
            if not folder.is_relative_to(top):
                break
            try:
                limit, taken = (
                    int((folder / f"memory.{name}").read_text()) for name in (most, used)
                )
                pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
                # Pages of files can be dropped. Version 1 counts groups within under total_.
                stat = {name.removeprefix("total_"): int(number) for name, number in pairs}
                yield limit - taken + stat.get("inactive_file", 0) + stat.get("active_file", 0)
            except (OSError, ValueError):  # "max": no limit; or no such file here
                continue
