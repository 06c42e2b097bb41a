"""The shape of a decoder, in Hugging Face's field names, as a checkpoint's config gives it."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint.refusals import family_of, listed, refuse, said, short, shown

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# What transformers takes for keys that a family's config leaves out, where it is not what Llama
# does.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"max_position_embeddings": 131072},
    "qwen3": {"max_position_embeddings": 32768, "head_dim": 128},
}
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
META_KEYS = frozenset(
    "dim n_layers n_heads n_kv_heads vocab_size multiple_of ffn_dim_multiplier norm_eps rope_theta "
    "use_scaled_rope rope_scale_factor max_seq_len max_batch_size".split()
)
DTYPES = ("float32", "bfloat16", "float16", "float64")
# The largest known of the files read here has 1.2 MB; parsed, one takes 30 times its size.
JSON_BYTES = 4 * 2**20


def _require_positive(key: str, value: Any, *kinds: type) -> None:
    """Raise a `ValueError` unless the value is a number that float32, or an integer that the size of
    a tensor, can be.
    """
    low, high = (1e-38, 1e38) if float in kinds else (1, 2**31 - 1)
    if type(value) not in kinds or not low <= value <= high:
        kind = "number" if float in kinds else "integer"
        raise ValueError(f"{key} must be a positive {kind} ({low} to {high}), not {short(value)}")


@dataclass(frozen=True)
class RopeConfig:
    """Base and scaling of the rotary frequencies (see rope.py); lengths in positions."""

    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_KEYS:
            raise ValueError(
                f"rope_type is {short(self.rope_type)}: this RoPE scaling is not supported; supported: "
                f"{', '.join(ROPE_KEYS)}"
            )
        for key in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor"):
            _require_positive(key, getattr(self, key), int, float)
            # A float, since torch takes ints of 64 bits only.
            object.__setattr__(self, key, float(getattr(self, key)))
        _require_positive(
            "original_max_position_embeddings", self.original_max_position_embeddings, int
        )
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor "
                f"{self.low_freq_factor}"
            )


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a decoder.

    None stands for: as many key/value heads as query heads; a head_dim of hidden_size /
    num_attention_heads; no sliding window. `eos_token_id` holds every id that ends a text, `dtype`
    the name of the dtype that the checkpoint was saved in.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = None  # type: ignore[assignment]  # always an int once made
    head_dim: int = None  # type: ignore[assignment]  # always an int once made
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_token_id: tuple[int, ...] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        for key in SIZES:
            _require_positive(key, getattr(self, key), int)
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.num_attention_heads}, and no head_dim is given"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        for key in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
            _require_positive(key, getattr(self, key), int)
        _require_positive("rms_norm_eps", self.rms_norm_eps, int, float)
        object.__setattr__(self, "rms_norm_eps", float(self.rms_norm_eps))
        if self.sliding_window is not None:
            _require_positive("sliding_window", self.sliding_window, int)
        if not isinstance(self.tie_word_embeddings, bool):
            raise ValueError(
                f"tie_word_embeddings must be true or false, not {short(self.tie_word_embeddings)}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, and RoPE turns pairs")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype is {short(self.dtype)}: it must be one of {', '.join(DTYPES)}")

    def parameter_count(self) -> int:
        """The number of parameters of a model of this shape, a tied head counted once."""
        m, d, h, g = (
            self.hidden_size,
            self.head_dim,
            self.num_attention_heads,
            self.num_key_value_heads,
        )
        attention = 2 * m * h * d + 2 * m * g * d + (2 * d if self.qk_norm else 0)
        block = attention + 3 * m * self.intermediate_size + 2 * m
        embeddings = self.vocab_size * m * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * block + m

    def require_in_window(self, length: int) -> None:
        """Raise a `ValueError` when `length` positions reach beyond the sliding window: attention
        here is always full.
        """
        if self.sliding_window is not None and length > self.sliding_window:
            raise ValueError(
                f"{length} positions reach beyond this checkpoint's sliding_window of "
                f"{self.sliding_window}, and sliding-window attention is not supported: use a shorter "
                "prompt or fewer new tokens"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LlamaConfig":
        """The config in a Hugging Face `config.json` or a Meta `params.json`, already parsed; a
        `ValueError` names what is missing, wrong or not supported.
        """
        if not isinstance(values, dict):
            raise ValueError(f"a config must be a JSON object, not {type(values).__name__}")
        # A key that is present and null means the same as the key left out.
        given = {key: value for key, value in values.items() if value is not None}
        if "dim" in given and "hidden_size" not in given:
            return cls(**_from_meta(given))
        if "sliding_window" not in values and family_of(given) == "mistral":
            # Except here: null says "no window", and transformers' default is a window.
            given["sliding_window"] = 4096
        return cls(**_from_hugging_face(given))

    @classmethod
    def from_checkpoint(cls, folder: str | Path) -> "LlamaConfig":
        """The config of a checkpoint folder, with the stop ids of its `generation_config.json`
        where there is one.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        path = folder / "config.json"
        if not is_there(path):
            path = folder / "params.json"
        if not is_there(path):
            raise FileNotFoundError(
                f"{folder} holds no config.json (Hugging Face) and no params.json (Meta)"
            )
        generation = folder / "generation_config.json"
        stops = read_json(generation).get("eos_token_id") if is_there(generation) else None
        values = read_json(path)
        if path.name == "params.json" and values.get("vocab_size") == -1:
            from .checkpoint.weights import stored_vocab_size  # which needs this module

            values["vocab_size"] = stored_vocab_size(folder)
        try:
            config = cls.from_dict(values)
        except ValueError as error:
            raise ValueError(error if str(path) in str(error) else f"{path}: {error}") from None
        try:
            eos = dict.fromkeys(_token_ids("eos_token_id", stops) + config.eos_token_id)
        except ValueError as error:
            raise ValueError(f"{generation}: {error}") from None
        return dataclasses.replace(config, eos_token_id=tuple(eos))


def is_there(path: Path) -> bool:
    """Whether `path` is a file; a `ValueError` for what stands there and is none.

    Links are followed wherever they lead: a hub cache is made of links, large files are often kept on
    another disk, and what is behind one is only ever read as the format that it claims. One that leads
    nowhere is an error, and not a file left out.
    """
    try:
        if path.is_file():
            return True
        there = os.path.lexists(path)
    except OSError as error:  # no permission, a name too long
        raise ValueError(f"{path} cannot be opened: {error.strerror}") from None
    if there:
        what = (
            "a link that leads to no file"
            if path.is_symlink()
            else "no file but a folder or device"
        )
        raise ValueError(f"{path} is {what}")
    return False


def unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a `ValueError` for one that gives two values to a name."""
    values = dict(pairs)
    if len(values) != len(pairs):
        for name, value in pairs:
            if value != values[name]:
                raise ValueError(
                    f"{short(name)} is there twice, as {short(value)} and as {short(values[name])}"
                )
    return values


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`; a `ValueError` that names it when there is none."""
    try:
        if path.stat().st_size > JSON_BYTES:
            raise ValueError(f"it is longer than {JSON_BYTES} bytes")
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unambiguous)
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {said(error)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def _token_ids(key: str, value: Any) -> tuple[int, ...]:
    """Token ids as configs write them: a number, a list or null; -1 in old files is none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ValueError(
            f"{key} must be a token id, a list of token ids or null, not {short(value)}"
        )
    return tuple(token for token in ids if token >= 0)


def _require_keys(values: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    missing = [key for key in keys if key not in values]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")


def _from_hugging_face(given: dict[str, Any]) -> dict[str, Any]:
    refuse(given)
    family = family_of(given)
    # transformers' default number of key/value heads differs between the other families, so it has
    # to be named there.
    _require_keys(
        given, SIZES if family == "llama" else (*SIZES, "num_key_value_heads"), "the config"
    )
    plain = {field.name for field in dataclasses.fields(LlamaConfig)} - {"rope", "qk_norm"}
    fields = FAMILY_DEFAULTS[family] | {key: given[key] for key in plain if key in given}
    fields["qk_norm"] = family == "qwen3"
    fields["rope"] = _rope(given)
    fields["sliding_window"] = _window(given, family)
    fields["eos_token_id"] = _token_ids("eos_token_id", given.get("eos_token_id"))
    fields["dtype"] = given.get("dtype", given.get("torch_dtype"))
    if isinstance(fields["dtype"], str):
        fields["dtype"] = fields["dtype"].removeprefix("torch.")
    return fields


def _rope(given: dict[str, Any]) -> RopeConfig:
    """RoPE as transformers 5 writes it (`rope_parameters`) and as older files do (`rope_theta` and
    `rope_scaling`).
    """
    ropes = [(key, given[key]) for key in ("rope_parameters", "rope_scaling") if key in given]
    found = [_rope_fields(key, value) for key, value in ropes if value != {}]
    rope_type = found[0]["rope_type"] if found else "default"
    plain = ("rope_theta", "original_max_position_embeddings")[: 1 + (rope_type == "llama3")]
    found.append({key: given[key] for key in plain if key in given})
    fields: dict[str, Any] = {}
    for part in found:
        for key, value in part.items():
            if key in fields and fields[key] != value:
                raise ValueError(
                    f"two different {key} in one config: {short(fields[key])} and {short(value)}"
                )
            fields[key] = value
    _require_keys(fields, ROPE_KEYS[rope_type], f"RoPE scaling {rope_type!r}")
    return RopeConfig(**fields)


def _rope_fields(key: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"{key} must be a JSON object, not {short(values)}")
    fields = {name: value for name, value in values.items() if value is not None}
    names = {
        fields.pop(name) for name in ("type", "rope_type") if isinstance(fields.get(name), str)
    }
    if len(names) > 1:
        raise ValueError(f"{key} names two types: {shown(', '.join(sorted(names)))}")
    rope_type = names.pop() if names else "default"
    if rope_type not in ROPE_KEYS:
        raise ValueError(
            f"{key} asks for {short(rope_type)} RoPE scaling, which is not supported; supported: "
            f"{', '.join(ROPE_KEYS)}"
        )
    if fields.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{key}: partial_rotary_factor other than 1 is not supported")
    for name, value in fields.items():
        if name != "rope_theta" and name not in ROPE_KEYS[rope_type]:
            raise ValueError(
                f"{key}: {shown(name)} is {short(value)}: this key is not known for rope_type {rope_type!r}"
            )
    return {**fields, "rope_type": rope_type}


def _window(given: dict[str, Any], family: str) -> int | None:
    """The sliding window that is active in at least one block, or None."""
    window, layers = given.get("sliding_window"), given.get("layer_types", [])
    full, sliding = "full_attention", "sliding_attention"
    if not isinstance(layers, list) or any(layer not in (full, sliding) for layer in layers):
        raise ValueError(f"layer_types is {short(layers)}: only {full} is supported")
    if sliding in layers and window is None:
        raise ValueError(f"layer_types names {sliding}, and no sliding_window says how wide")
    if family == "qwen3":
        asked = given.get("use_sliding_window", False)
        if not isinstance(asked, bool):
            raise ValueError(f"use_sliding_window must be true or false, not {short(asked)}")
        first = given.get("max_window_layers", 28)
        if type(first) is not int:
            raise ValueError(f"max_window_layers must be an integer, not {short(first)}")
        _require_positive("num_hidden_layers", given["num_hidden_layers"], int)
        # Blocks from max_window_layers on have it, unless layer_types says which.
        active = sliding in layers if layers else first < given["num_hidden_layers"]
        return window if asked and active else None
    return window


def _from_meta(given: dict[str, Any]) -> dict[str, Any]:
    """Fields from Meta's `params.json`; the width of the FFN follows from three of its keys as in
    Meta's own code.
    """
    _require_keys(given, ("dim", "n_layers", "n_heads", "vocab_size", "norm_eps"), "params.json")
    unknown = sorted(given.keys() - META_KEYS)
    if unknown:
        raise ValueError(
            f"{listed(given, unknown)}: not known in params.json, and may change the output"
        )
    for key in ("dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of"):
        _require_positive(key, given.get(key, 256), int)
    multiple, multiplier = given.get("multiple_of", 256), given.get("ffn_dim_multiplier", 1.0)
    _require_positive("ffn_dim_multiplier", multiplier, int, float)
    _require_positive("norm_eps", given["norm_eps"], int, float)
    if given["vocab_size"] == -1:
        raise ValueError(
            "vocab_size is -1: write the number of rows of tok_embeddings.weight in its place"
        )
    width = int(multiplier * int(2 * 4 * given["dim"] / 3))
    rope = RopeConfig(rope_theta=given.get("rope_theta", 10000.0))
    scaled, factor = given.get("use_scaled_rope", False), given.get("rope_scale_factor")
    if scaled is True and factor is not None:
        rope = dataclasses.replace(rope, rope_type="llama3", factor=factor)
    elif scaled is True:
        raise ValueError(
            "use_scaled_rope is true without a rope_scale_factor: add the model's own, "
            '"rope_scale_factor": 8 for Llama 3.1 and 3.3, 32 for Llama 3.2'
        )
    elif scaled is not False or factor is not None:
        raise ValueError(
            f"use_scaled_rope is {short(scaled)}, and rope_scale_factor is {short(factor)}: true goes "
            "with a factor, false with none"
        )
    # The file does not say how long a context is: Llama 3.1's, Llama 3's or Llama 2's, by what it
    # does say.
    context = 131072 if rope.rope_type == "llama3" else 8192 if rope.rope_theta >= 500000 else 4096
    return {
        "vocab_size": given["vocab_size"],
        "hidden_size": given["dim"],
        "intermediate_size": -(-width // multiple) * multiple,
        "num_hidden_layers": given["n_layers"],
        "num_attention_heads": given["n_heads"],
        "num_key_value_heads": given.get("n_kv_heads"),
        "max_position_embeddings": given.get("max_seq_len", context),
        "rms_norm_eps": given["norm_eps"],
        "rope": rope,
    }
