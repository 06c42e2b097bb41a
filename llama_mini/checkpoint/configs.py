"""From the keys of a config file to a `LlamaConfig`."""

from typing import Any

from ..config import LlamaConfig
from ..placements.family import Family
from .meta import META_LLAMA
from .refusals import family_of, refuse, unread


def parse_config(values: dict[str, Any]) -> LlamaConfig:
    """The config in a Hugging Face `config.json` or a Meta `params.json`, already parsed; a
    `ValueError` names what is missing, wrong or not supported.
    """
    return read_keys(values)[1]


def read_keys(values: dict[str, Any]) -> tuple[Family, LlamaConfig, dict[str, Any]]:
    """The family and the config that a config file asks for, and the keys that nothing reads; errors as
    for `parse_config`.
    """
    if not isinstance(values, dict):
        raise ValueError(f"a config must be a JSON object, not {type(values).__name__}")
    if values.get("dim") is not None and values.get("hidden_size") is None:
        return META_LLAMA, META_LLAMA.config(without_nulls(values)), {}
    family = family_of(without_nulls(values))
    given = without_nulls(values, family.nullable)
    refuse(given, family)
    config = family.config(given)
    return family, config, unread(without_nulls(given), family)


def without_nulls(values: dict[str, Any], keep: frozenset[str] = frozenset()) -> dict[str, Any]:
    """A key that is present and null means the same as the key left out, except those in `keep`."""
    return {key: value for key, value in values.items() if value is not None or key in keep}
