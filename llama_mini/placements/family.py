"""What the loader has to know of a family of models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..config import LlamaConfig
from ..model import Llama

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
