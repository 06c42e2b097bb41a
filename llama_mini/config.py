"""The shape of a decoder, in Hugging Face's field names: plain dataclasses that check their values."""

from dataclasses import dataclass
from typing import Any

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
ROPE_TYPES = ("default", "linear", "llama3")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def short(value: Any) -> str:
    """The value as it goes into a message of one line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def shown(name: str) -> str:
    """A name that a file gives, as it goes into a message of one line: quoted and cut where it is odd."""
    return name if name.isprintable() and len(name) <= 200 else short(name)


def require_bool(key: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, not {short(value)}")


def require_positive(key: str, value: Any, *kinds: type) -> None:
    """Raise a `ValueError` unless the value is a positive number in float32's range, or a positive
    integer that can be the size of a tensor.
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
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type is {short(self.rope_type)}: this RoPE scaling is not supported; supported: "
                f"{', '.join(ROPE_TYPES)}"
            )
        for key in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor"):
            require_positive(key, getattr(self, key), int, float)
            # A float, since torch takes ints of 64 bits only.
            object.__setattr__(self, key, float(getattr(self, key)))
        require_positive(
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
            require_positive(key, getattr(self, key), int)
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
            require_positive(key, getattr(self, key), int)
        require_positive("rms_norm_eps", self.rms_norm_eps, int, float)
        object.__setattr__(self, "rms_norm_eps", float(self.rms_norm_eps))
        if self.sliding_window is not None:
            require_positive("sliding_window", self.sliding_window, int)
        for key in ("tie_word_embeddings", "qk_norm"):
            require_bool(key, getattr(self, key))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.turned() == self.head_dim and self.head_dim % 2:
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

    def turned(self) -> int:
        """How many numbers of each head RoPE turns."""
        return self.head_dim

    def cached(self) -> tuple[int, int, int]:
        """What a cache keeps of a position: how many heads, and the size of a key and of a value."""
        return self.num_key_value_heads, self.head_dim, self.head_dim

    def context(self) -> int:
        """How many positions a sequence can have."""
        return min(
            self.max_position_embeddings, self.sliding_window or self.max_position_embeddings
        )

    def require_in_window(self, length: int) -> None:
        """Raise a `ValueError` when `length` positions reach beyond the sliding window of a
        `params.json`: attention here is full. (A `config.json` with a window becomes a model of
        placements/ that has one.)
        """
        if self.sliding_window is not None and length > self.sliding_window:
            raise ValueError(
                f"{length} positions reach beyond this checkpoint's sliding_window of "
                f"{self.sliding_window}, which is supported only with a config.json (Hugging Face): "
                "take that layout, a shorter prompt, or fewer new tokens"
            )
