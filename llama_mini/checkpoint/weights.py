"""From an opened checkpoint to a model: shapes, dtypes, the tied head, and one exact accounting."""

import dataclasses
import errno
import mmap
import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..config import LlamaConfig, short
from ..model import Llama
from ..placements.family import Family
from .headers import DTYPES, INDEX, Stored
from .names import TIED, in_any_block, translate
from .opening import Checkpoint, open_checkpoint
from .untrusted import said, some, unreadable

Part = Callable[[str, Tensor], Tensor]


class NoInit(TorchFunctionMode):
    """Within it, modules are made without initial values.

    On the meta device there are none to draw, and yet `normal_` there imports torch's compiler, which
    takes longer than most loads (observed: 1.4 s and 80 MB).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def load_model(
    source: str | Path | Checkpoint,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Llama:
    """The model of a checkpoint (a folder, a hub name, or one that is open), ready for inference on
    `device`, all parameters in `dtype`.

    `dtype` None is the checkpoint's own. The parameters are frozen; to train them, call
    `requires_grad_(True)`: the files never change. Errors: `FileNotFoundError` for what is not there;
    `ValueError` for what is not supported, before a weight is read, and for tensors that do not fit
    the config: one error lists every one that is missing, unexpected or of another shape.
    """
    checkpoint = open_checkpoint(source)
    model = build(checkpoint)
    model.load_state_dict(read_state(checkpoint, device, dtype), assign=True)
    return model.eval().requires_grad_(False)  # or a cache would keep every step's graph alive


def check_weights(model: Llama, checkpoint: Checkpoint) -> None:
    """Raise a ValueError that names every tensor of a loaded model that holds NaN or infinity, as its
    file names it.
    """
    problems: list[str] = []
    origin: dict[str, Stored] = {}
    for name, tensor in checkpoint.stored.items():
        origin |= dict.fromkeys(_parts_on_meta(name, tensor, checkpoint), tensor)
    for name, weight in model.named_parameters():
        lowest, highest = weight.aminmax()  # both NaN if there is one
        if lowest.isfinite() and highest.isfinite():
            continue
        names = TIED if name in TIED and checkpoint.config.tie_word_embeddings else (name,)
        tensor = next(origin[name] for name in names if name in origin)
        nans, infinite = weight.isnan().sum().item(), weight.isinf().sum().item()
        problems.append(
            f"{tensor.file.name} holds {tensor.name} with {nans} NaN and {infinite} infinite"
        )
    if problems:
        raise ValueError(
            f"{tensor.file.parent} has weights that are not finite in {weight.dtype}: {_fold(problems)}"
        )


def build(checkpoint: Checkpoint) -> Llama:
    """The checkpoint's model without memory (on the meta device), after checking that the stored tensors
    fit it exactly.
    """
    config, stored, family = checkpoint.config, checkpoint.stored, checkpoint.family
    problems = [tensor.problem for tensor in stored.values() if tensor.problem]
    config_name = checkpoint.config_path.name
    files = sorted({tensor.file for tensor in stored.values()})
    folder = checkpoint.folder
    where = ", ".join(file.name for file in files[:3]) + (", ..." if len(files) > 3 else "")
    numbers = [re.match(r"blocks\.([0-9]{1,9})\.", name) for name in stored]
    blocks = 1 + max((int(number[1]) for number in numbers if number), default=-1)
    if blocks > 100 + len(stored) // 4:  # each would have 9: blocks without tensors are not made
        raise ValueError(
            f"{folder} does not fit its {config_name}: {where} holds {len(stored)} tensors, and their "
            f"names count {blocks} blocks"
        )
    if blocks != config.num_hidden_layers:
        problems.append(
            f"num_hidden_layers is {config.num_hidden_layers}, and there are {blocks} blocks in {where}"
        )
    try:
        with torch.device("meta"), NoInit():
            layers = max(1, min(blocks, config.num_hidden_layers))
            model = family.model(dataclasses.replace(config, num_hidden_layers=layers))
    except (RuntimeError, TypeError, OverflowError, ValueError) as error:
        raise ValueError(
            f"{folder / config_name}: no model of these sizes can be made: {said(error)}"
        ) from None
    expected = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    held: set[str] = set()
    for name, tensor in stored.items():
        says = f"{tensor.file.name} holds {tensor.name}"
        parts = _parts_on_meta(name, tensor, checkpoint)
        held.update(parts or [name])
        if tensor.problem:
            continue
        if not parts:
            problems.append(f"{says} {short(tensor.shape)}, which the config's sizes do not divide")
        for part, shape in parts.items():
            of = "" if part == name else f", whose part {part} is {shape}"
            if part not in expected and part.endswith(".bias"):
                problems.append(f"{says}: biases are not supported")
            elif part not in expected:
                problems.append(
                    f"{says} {short(tensor.shape)}, which a model of this config does not have"
                )
            elif shape != expected[part]:
                problems.append(
                    f"{says} {short(tensor.shape)}{of}, and the config says {expected[part]}"
                )
    tied = config.tie_word_embeddings and any(name in held for name in TIED)
    for name, shape in expected.items():
        if name not in held and not (tied and name in TIED):
            untied = " (tie_word_embeddings is false)" if name == TIED[1] else ""
            problems.append(
                f"{translate(name, family.names) or name} {shape} is missing from {where}{untied}"
            )
    if problems:
        what = _fold(problems)
        against = [config_name] + [INDEX] * ("the index" in what)
        raise ValueError(f"{folder} does not fit its {' and '.join(against)}: {what}")
    return model


def _parts_on_meta(name: str, tensor: Stored, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The parameters that a stored tensor fills, and their shapes; none where it does not divide."""
    split = checkpoint.family.split
    if split is None:
        return {name: tensor.shape}
    with suppress(RuntimeError, ValueError, IndexError):
        whole = torch.empty(tensor.shape, dtype=torch.float32, device="meta")
        return {
            part: tuple(view.shape) for part, view in split(name, whole, checkpoint.config).items()
        }
    return {}


def read_state(
    checkpoint: Checkpoint,
    device: str | torch.device,
    dtype: torch.dtype | None,
    part: Part | None = None,
) -> dict[str, nn.Parameter]:
    """The parameters of a checkpoint that `build` has checked; `dtype` and `part` as for `load_model`
    and `read_tensors`.
    """
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(
            f"dtype is {dtype!r}: it must be one of {', '.join(map(str, DTYPES.values()))}"
        )
    config, stored = checkpoint.config, checkpoint.stored
    dtype = own_dtype(checkpoint) if dtype is None else dtype
    tensors = read_tensors(stored, device, dtype, config, checkpoint.family, part)
    state = {name: nn.Parameter(tensor) for name, tensor in tensors}
    if config.tie_word_embeddings:
        tie(state, stored)
    return state


def own_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What the config names, or else the dtype of the embedding (float32 if `build` will refuse that)."""
    if checkpoint.config.dtype is not None:
        return getattr(torch, checkpoint.config.dtype)
    own = next((checkpoint.stored[n].dtype for n in TIED if n in checkpoint.stored), "")
    return DTYPES.get(own, torch.float32)


def read_tensors(
    stored: dict[str, Stored],
    device: str | torch.device,
    dtype: torch.dtype,
    config: LlamaConfig,
    family: Family,
    part: Part | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors one by one, on `device` in `dtype`; what needs no conversion is mapped from its
    file and not copied.

    `part` takes what is wanted of a stored tensor (whole heads), by its name; None takes it all.
    """
    files: dict[Path, MappedFile] = {}
    for name, tensor in stored.items():
        file = files.get(tensor.file) or files.setdefault(tensor.file, MappedFile(tensor.file))
        whole = file.tensor(tensor)
        wanted = part(name, whole) if part else whole
        kept = in_any_block(name) in family.float32
        # Before the split: of a part of a transposed matrix, a copy in another dtype would be turned back.
        wanted = wanted.to(device, torch.float32 if kept else dtype)
        yield from (family.split(name, wanted, config) if family.split else {name: wanted}).items()
        if whole.dtype != dtype or torch.device(device).type != "cpu":
            file.drop(tensor)


# Linux's MAP_NORESERVE, which Python's mmap does not name: without it the system refuses a private mapping
# that is larger than its memory. 0 where the number is another one.
NO_RESERVE = (
    0x4000
    if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "riscv64", "s390x")
    else 0
)


class MappedFile:
    """A safetensors file in memory, as one mapping that is shared by all its tensors.

    The mapping is private: a page that is written to (by an optimizer) becomes this process's own copy, and
    the file never changes. The others stay pages of the file: they take no memory that cannot be had
    back, and none is set aside for them, so that a file can be larger than the memory.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                if hasattr(mmap, "MAP_PRIVATE"):
                    flags = mmap.MAP_PRIVATE | NO_RESERVE
                    kinds = mmap.PROT_READ | mmap.PROT_WRITE
                    self._map = mmap.mmap(file.fileno(), 0, flags=flags, prot=kinds)
                else:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) == errno.ENOMEM:  # which is no fault of the file
                raise ValueError(
                    f"{path} does not fit the address space that this process may have: it has "
                    f"{path.stat().st_size:,} bytes (ulimit -v sets the bound)"
                ) from None
            raise unreadable(path, error) from None

    def tensor(self, stored: Stored) -> Tensor:
        """A view of the mapping, with a storage of its own: what saves or pickles one tensor takes that
        tensor's bytes, not the file's.
        """
        dtype, entry = DTYPES[stored.dtype], stored.entry
        data = torch.frombuffer(
            self._map, dtype=torch.uint8, count=entry.end - entry.begin, offset=entry.begin
        )
        if entry.begin % dtype.itemsize:  # old files are not aligned
            data = data.clone()
        return data.view(dtype).view(stored.shape)

    def drop(self, stored: Stored) -> None:
        """Give back the pages of a tensor that has been copied: they would count on top of the copies."""
        if not hasattr(self._map, "madvise"):
            return
        begin, end = -(-stored.entry.begin // mmap.PAGESIZE), stored.entry.end // mmap.PAGESIZE
        if begin < end:
            length = (end - begin) * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, begin * mmap.PAGESIZE, length)


def tie(state: dict[str, nn.Parameter], stored: dict[str, Stored]) -> None:
    """Make the embedding and the head of a tied checkpoint one parameter; refuse two that differ."""
    embed, head = (state.get(name) for name in TIED)
    if embed is not None and head is not None and not torch.equal(embed, head):
        ours, theirs = (stored[name] for name in TIED)
        raise ValueError(
            f"{theirs.file}: tie_word_embeddings is true, and {theirs.name} differs from {ours.name}: "
            "set it to false in config.json to use both"
        )
    one = embed if embed is not None else head
    assert one is not None  # build() requires one of them
    state.update(dict.fromkeys(TIED, one))


def _fold(problems: list[str]) -> str:
    """Up to 100 problems in one line; those that differ only in the number of the block are one."""
    alike: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        before, *rest = re.split(r"(?<=layers\.)([0-9]+)(?=\.)", problem, maxsplit=1)
        number, after = rest or ("", "")
        alike.setdefault((before, after), []).append(number)
    folded = [
        before + (numbers[0] if len(numbers) == 1 else "{" + ",".join(numbers) + "}") + after
        for (before, after), numbers in alike.items()
    ]
    return some(folded, 100, "; ")
