"""What the keys of a Hugging Face config mean that most families share."""

import dataclasses
from collections.abc import Callable, Iterator, Set
from typing import Any, TypeVar

from ..config import SIZES, LlamaConfig, RopeConfig, require_bool, require_positive, short, shown

# Scalings of the rotary frequencies, and what each needs.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
TORCH_NAMES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
}  # torch.half is torch.float16
FULL, SLIDING, NOPE = "full_attention", "sliding_attention", "nope_"
KINDS = {FULL, SLIDING}
# What `shared` reads.
SHARED = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings max_sequence_length rms_norm_eps "
    "rope_theta rope_scaling rope_parameters original_max_position_embeddings tie_word_embeddings "
    "eos_token_id torch_dtype dtype model_type architectures".split()
)


def shared(
    given: dict[str, Any], required: tuple[str, ...] = SIZES, **defaults: Any
) -> dict[str, Any]:
    """Fields of a `LlamaConfig` from the keys of a config, nulls left out.

    `required`: keys that may not be left out. `defaults`: what transformers takes for others, where
    that is not what it takes for Llama.
    """
    require_keys(given, required, "the config")
    fields = {field.name for field in dataclasses.fields(LlamaConfig)}
    plain = (fields & SHARED) - {"rope"}
    values = defaults | {key: given[key] for key in plain if key in given}
    values["rope"] = rope = read_rope(given)
    default = values.get("max_position_embeddings", LlamaConfig.max_position_embeddings)
    values["max_position_embeddings"] = read_length(given, rope, default)
    values["eos_token_id"] = token_ids("eos_token_id", given.get("eos_token_id"))
    dtype = given.get("dtype", given.get("torch_dtype"))
    dtype = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    values["dtype"] = TORCH_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    return values


def token_ids(key: str, value: Any) -> tuple[int, ...]:
    """Token ids as configs write them: a number, a list or null; -1 in old files is none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ValueError(
            f"{key} must be a token id, a list of token ids or null, not {short(value)}"
        )
    return tuple(token for token in ids if token >= 0)


def require_keys(values: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    missing = [key for key in keys if key not in values]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")


def read_rope(given: dict[str, Any]) -> RopeConfig:
    """RoPE as transformers 5 writes it (`rope_parameters`) and as older files do (`rope_theta` and
    `rope_scaling`).
    """
    found = list(_ropes(given))
    rope_type = found[0][1]["rope_type"] if found else "default"
    known = ("rope_theta", "rope_type", *ROPE_KEYS[rope_type])
    parts = [{name: value for name, value in part.items() if name in known} for _, part in found]
    plain = ("rope_theta", "original_max_position_embeddings")[: 1 + (rope_type == "llama3")]
    parts.append({key: given[key] for key in plain if key in given})
    fields: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key in fields and fields[key] != value:
                raise ValueError(
                    f"two different {key} in one config: {short(fields[key])} and {short(value)}"
                )
            fields[key] = value
    if rope_type == "llama3" and "max_position_embeddings" in given:  # transformers' default
        original = given["max_position_embeddings"]
        fields.setdefault("original_max_position_embeddings", original)
    require_keys(fields, ROPE_KEYS[rope_type], f"RoPE scaling {rope_type!r}")
    return RopeConfig(**fields)


def unread_rope(given: dict[str, Any], keys: frozenset[str]) -> dict[str, Any]:
    """The keys of a config's RoPE that its rope_type does not read, as `rope_scaling.mscale`.

    `keys` are those that the family reads; it may have a RoPE for each kind of block.
    """
    ropes = given.get("rope_parameters")
    if isinstance(ropes, dict) and (kinds := ropes.keys() & KINDS):
        parts = ({"rope_parameters": ropes[kind] or {}} for kind in kinds)
        beside = {f"rope_parameters.{name}": ropes[name] for name in ropes.keys() - kinds}
        return beside | {k: v for part in parts for k, v in unread_rope(part, keys).items()}
    turned_in_part = {"partial_rotary_factor", "rotary_pct"} & keys  # GPT-NeoX's name for it
    return {
        f"{key}.{name}": value
        for key, part in _ropes(given, strict=False)
        for name, value in part.items()
        if name not in ("rope_theta", "rope_type", *ROPE_KEYS.get(part["rope_type"], part))
        and not (name == "partial_rotary_factor" and turned_in_part)
    }


def _ropes(given: dict[str, Any], strict: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """The RoPE of a config under each name that it goes by, checked, with its `rope_type`; `strict`
    refuses one that only a family's own code knows.
    """
    for key in ("rope_parameters", "rope_scaling"):
        values = given.get(key, {})
        if not isinstance(values, dict):
            raise ValueError(f"{key} must be a JSON object, not {short(values)}")
        fields = {name: value for name, value in values.items() if value is not None}
        if not fields:
            continue
        names = {fields.pop(name) for name in ("type", "rope_type") if name in _strings(fields)}
        if len(names) > 1:
            raise ValueError(f"{key} names two types: {shown(', '.join(sorted(names)))}")
        rope_type = names.pop() if names else "default"
        if strict and rope_type not in ROPE_KEYS:
            raise ValueError(
                f"{key} asks for {short(rope_type)} RoPE scaling, which is not supported; supported: "
                f"{', '.join(ROPE_KEYS)}"
            )
        for name, value in fields.items():
            # One for each kind of block; and a type that is no name, which transformers cannot read either.
            if isinstance(value, dict) or name in ("type", "rope_type"):
                raise ValueError(f"{key}: {shown(name)} is {short(value)}, which is not supported")
        # The default type of Llama's class takes no notice of it, and the others rotate a part.
        part = fields.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0))
        if rope_type != "default" and part != 1.0:
            raise ValueError(
                f"{key}: partial_rotary_factor is {short(part)}: with rope_type {rope_type!r}, "
                "rotating only a part of each head is not supported"
            )
        yield key, {**fields, "rope_type": rope_type}


def _strings(values: dict[str, Any]) -> set[str]:
    return {name for name, value in values.items() if isinstance(value, str)}


def read_length(given: dict[str, Any], rope: RopeConfig, default: int) -> int:
    """The most positions that a checkpoint is made for: linear scaling multiplies what it was trained for,
    and some files name the result themselves (vicuna-16k).

    Other files name the scaled length and the factor, and get a bound that is too large: what lies
    beyond reads worse, and nothing is refused that would work.
    """
    length, named = (
        given.get("max_position_embeddings", default),
        given.get("max_sequence_length", 1),
    )
    require_positive("max_position_embeddings", length, int)
    require_positive("max_sequence_length", named, int)
    if rope.rope_type == "linear":
        length = max(length, int(min(length * rope.factor, 2**31 - 1)))
    return max(length, named)


def read_layer_types(given: dict[str, Any]) -> list[str]:
    """Which blocks have full and which have sliding-window attention; [] where the config does not say."""
    layers, full, sliding = given.get("layer_types", []), "full_attention", "sliding_attention"
    if not isinstance(layers, list) or any(layer not in (full, sliding) for layer in layers):
        raise ValueError(f"layer_types is {short(layers)}: only {full} is supported")
    if sliding in layers and given.get("sliding_window") is None:
        raise ValueError(f"layer_types names {sliding}, and no sliding_window says how wide")
    return layers


C = TypeVar("C", bound=LlamaConfig)


def renamed(given: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A config under the names that most families use; a `ValueError` for two values of one key."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = names.get(key, key)
        if name in values and values[name] != value:
            raise ValueError(
                f"{key} is {short(value)}, and another key says {short(values[name])}: they mean the same"
            )
        values[name] = value
    return values


def read(
    kind: type[C],
    given: dict[str, Any],
    keys: Set[str] = SHARED,
    required: tuple[str, ...] = SIZES,
    rope_theta: float = 10000.0,
    **defaults: Any,
) -> C:
    """A config of `kind` from those keys of a config.json that are among `keys`.

    `defaults`, and `rope_theta`: what transformers takes for keys left out.
    """
    given = {key: value for key, value in given.items() if key in keys}
    ropes = [given]
    for key in ("rope_parameters", "rope_scaling"):
        rope = given.get(key)
        if isinstance(rope, dict):
            ropes.append(rope)
            if "partial_rotary_factor" in keys and rope.get("partial_rotary_factor") is not None:
                given = {**given, "partial_rotary_factor": rope["partial_rotary_factor"]}
                given[key] = {k: v for k, v in rope.items() if k != "partial_rotary_factor"}
    if all(rope.get("rope_theta") is None for rope in ropes):
        given = {**given, "rope_theta": rope_theta}
    values = shared(given, required, **defaults)
    own = {field.name for field in dataclasses.fields(kind)} - SHARED
    return kind(**values | {key: given[key] for key in own if key in given})


def declared(kind: type[LlamaConfig]) -> frozenset[str]:
    """The fields that a class of configs itself adds: keys of config.json under the same names."""
    return frozenset(vars(kind).get("__annotations__", {}))


MOST = 10000  # blocks: a config that asks for more is refused when its tensors are counted


def read_windows(
    given: dict[str, Any], full: Callable[[int], bool], window: int | None = 4096
) -> dict[str, Any]:
    """The window of a config, and the kind of every block: `full` says which see all keys, unless
    `layer_types` does. `window` is what transformers takes where no key says it.
    """
    require_positive("num_hidden_layers", given.get("num_hidden_layers"), int)
    blocks = min(given["num_hidden_layers"], MOST)
    layers = read_layer_types(given) or [FULL if full(n) else SLIDING for n in range(blocks)]
    if len(layers) != blocks:
        raise ValueError(f"layer_types names {len(layers)} blocks, and num_hidden_layers {blocks}")
    window = given.get("sliding_window", window)
    if window is not None or SLIDING in layers:
        require_positive("sliding_window", window, int)
    return {"sliding_window": window, "layer_types": tuple(layers)}


def still(kinds: dict[str, Any], kind: str) -> dict[str, Any]:
    """What `read_windows` read, with blocks of one kind that do not rotate."""
    names = (NOPE + name if name == kind else name for name in kinds["layer_types"])
    return {**kinds, "layer_types": tuple(names)}


def read_near_and_far(given: dict[str, Any]) -> dict[str, Any]:
    """The windows of Gemma 3, five of six blocks by default, and the two rotations."""
    windows = read_windows(given, read_pattern(given, every=6))
    near = given.get("rope_local_base_freq", 10000.0)
    return windows | read_kinds(given, theta=1e6, near=near)


def only_full(given: dict[str, Any]) -> dict[str, Any]:
    """The window of MiniMax, whose layer_types have to say that no block has linear attention."""
    if "layer_types" not in given:
        raise ValueError("layer_types is left out: then every second block has linear attention")
    read_layer_types({**given, "sliding_window": None})
    return {"sliding_window": given.get("sliding_window"), "layer_types": (SLIDING,)}


def read_no_rope(given: dict[str, Any]) -> dict[str, Any]:
    """`read_windows` by the keys of SmolLM3, which say what blocks rotate: these may have a window."""
    every, windowed = given.get("no_rope_layer_interval", 4), given.get("use_sliding_window", False)
    require_bool("use_sliding_window", windowed)
    windowed = windowed and given.get("sliding_window") is not None
    require_positive("no_rope_layer_interval", every, int)
    require_positive("num_hidden_layers", given.get("num_hidden_layers"), int)
    blocks = min(given["num_hidden_layers"], MOST)
    turns = given.get("no_rope_layers", [int((n + 1) % every != 0) for n in range(blocks)])
    if not isinstance(turns, list) or len(turns) != blocks or set(turns) - {0, 1}:
        raise ValueError(f"no_rope_layers is {short(turns)}: it must hold 0 or 1 for each block")
    windows = read_windows(given, lambda n: not windowed or bool(turns[n]), window=None)
    kinds = zip(turns, windows["layer_types"], strict=True)
    return windows | {"layer_types": tuple(kind if turn else NOPE + kind for turn, kind in kinds)}


def read_qwen_windows(given: dict[str, Any]) -> dict[str, Any]:
    """`read_windows` by the keys of Qwen 2 and 3: blocks from `max_window_layers` on have a window."""
    asked, first = given.get("use_sliding_window", False), given.get("max_window_layers", 28)
    require_bool("use_sliding_window", asked)
    if type(first) is not int:
        raise ValueError(f"max_window_layers must be an integer, not {short(first)}")
    read_layer_types(given)
    if not asked:  # then transformers looks at nothing else
        given = {**given, "sliding_window": None, "layer_types": []}
    return read_windows(given, lambda n: not asked or n < first)


PATTERN = frozenset({"sliding_window_pattern", "_sliding_window_pattern"})


def read_pattern(given: dict[str, Any], every: int) -> Callable[[int], bool]:
    """Which blocks see all keys where every so many do: `every`, unless a key says how many."""
    step = renamed(given, dict.fromkeys(PATTERN, "every")).get("every", every)

    def full(n: int) -> bool:
        require_positive("sliding_window_pattern", step, int)
        return (n + 1) % step == 0

    return full


def read_kinds(given: dict[str, Any], theta: float, near: float) -> dict[str, Any]:
    """The rotation of blocks that see all keys, and that of blocks with a window.

    transformers 5 nests one under each kind. Older keys are about blocks that see all keys alone: `theta`
    is their default, and `near` the theta of blocks with a window.
    """
    ropes, scaling = given.get("rope_parameters") or {}, given.get("rope_scaling") or {}
    if not isinstance(ropes, dict) or (ropes and not ropes.keys() & KINDS):
        raise ValueError(
            f"rope_parameters is {short(ropes)}: it must hold {' and '.join(sorted(KINDS))}, with the RoPE "
            "of each"
        )
    own = {kind: _said(f"rope_parameters.{kind}", ropes.get(kind)) for kind in KINDS}
    far = (
        {"rope_theta": given.get("rope_theta", theta)} | own[FULL] | _said("rope_scaling", scaling)
    )
    if "type" in scaling:  # the older name of the key, which transformers does not take here
        far = {"rope_type": "default"} | far
    length = {key: given[key] for key in ("max_position_embeddings",) if key in given}
    return {
        **{"rope_parameters": far, "rope_scaling": {}, "rope_theta": far["rope_theta"]},
        "local_rope": read_rope(length | {"rope_parameters": {"rope_theta": near} | own[SLIDING]}),
    }


def _said(key: str, rope: Any) -> dict[str, Any]:
    if not isinstance(rope, dict | None):
        raise ValueError(f"{key} must be a JSON object, not {short(rope)}")
    return {key: value for key, value in (rope or {}).items() if value is not None}
