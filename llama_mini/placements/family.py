"""What the loader has to know of a family of models."""

import re
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..config import SIZES, LlamaConfig
from ..model import Llama, RMSNorm
from .base import Decoder, FamilyBlock, FamilyConfig
from .files import NAMES
from .keys import SHARED, read, renamed

# Of the names that a family renames, those that transformers takes as well (`attribute_map`).
ALIASES = {"hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"}
Split = Callable[[str, Tensor, LlamaConfig], dict[str, Tensor]]


@dataclass(frozen=True)
class Family:
    """One family: how its config becomes a model, and how its files name and lay out the tensors.

    `model_type`, `architecture`: its name in a config.json, and that of its class in transformers.
    `model`: makes the model of a config. `config`: reads the keys of a config.json (nulls left out,
    except those in `nullable`); `keys` are those that it reads. `reads`: further keys that
    transformers' class reads: of those that refusals.py knows only the built-in value is done here, and
    the others change nothing in a forward pass; None is any that refusals.py knows. `names`: our names of
    the modules that hold tensors, and the files', N for the number of a block. `split`: takes our name of
    a stored tensor, the tensor and the config, and returns the model's tensors by name, as views: the
    parts of a fused tensor, a transpose, or the tensor itself. It sees tensors on the meta device too.
    `float32`: what stays in that dtype whatever the model's. `constant`: a pattern for the names of tables
    that files may hold, and that are made anew.
    """

    model_type: str
    architecture: str
    model: Callable[[Any], Llama]
    config: Callable[[dict[str, Any]], LlamaConfig]
    keys: frozenset[str]
    names: dict[str, str]
    split: Split | None = None
    reads: frozenset[str] | None = None
    nullable: frozenset[str] = frozenset()
    float32: frozenset[str] = frozenset()
    constant: str = ""


def as_given(text: str, given: Iterable[str], renames: dict[str, str]) -> str:
    """An error's text with keys under the names that the file has for them, or the family."""
    theirs = {ours: name for name, ours in reversed(renames.items())}
    theirs |= {renames[name]: name for name in given if name in renames}
    for name in theirs.keys() - given:
        text = re.sub(rf"\b{name}\b", theirs[name], text)
    return text


def family(
    model_type: str,
    architecture: str,
    decoder: type[Llama] = Decoder,
    norm: type[nn.Module] = RMSNorm,
    block: Any = FamilyBlock,
    config: type[LlamaConfig] = FamilyConfig,
    *,
    keys: Set[str] = frozenset(),
    unshared: Set[str] = frozenset(),
    required: tuple[str, ...] = (),
    renames: dict[str, str] | None = None,
    fields: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    names: dict[str, str] = NAMES,
    split: Split | None = None,
    reads: Set[str] = frozenset({"hidden_act"}),
    nullable: Set[str] = frozenset(),
    float32: Set[str] = frozenset(),
    constant: str = "",
    **defaults: Any,
) -> Family:
    """The record of a family whose models are decoder(config, norm, block), of blocks made as
    block(config, norm).

    Of config.json it reads `SHARED` without `unshared`, and `keys`; `required` are those that may not be
    left out beside `SIZES`; `renames` are other names of some. `fields` makes of all of them what a config
    says under other names. `defaults` are fields of the config where nothing else says them.
    """
    renames = renames or {}
    ours = {*renames.values()} - ALIASES  # no key of the family's: transformers does not read it
    read_keys = ((SHARED | keys) - unshared - ours) | renames.keys()

    def parse(given: dict[str, Any]) -> LlamaConfig:
        values = renamed({key: given[key] for key in given if key in read_keys}, renames)
        try:
            more = fields(values) if fields else {}
            return read(
                config, values | more, read_keys | ours | {*more}, (*SIZES, *required), **defaults
            )
        except ValueError as error:
            raise ValueError(as_given(str(error), given, renames)) from None

    return Family(
        model_type,
        architecture,
        lambda values: decoder(values, norm, block),
        parse,
        frozenset(read_keys),
        names,
        split,
        frozenset(reads),
        frozenset(nullable),
        frozenset(float32),
        constant,
    )
