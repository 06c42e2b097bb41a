"""What families are built on: configs, a block and decoders, which say in attributes what a family has."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import model
from ..cache import KVCache
from ..config import LlamaConfig, RopeConfig, require_bool, require_positive, short
from ..rope import cos_sin
from .attention import FamilyAttention, add_biases
from .ffn import ACTIVATIONS
from .keys import FULL, NOPE, SLIDING
from .scores import softcap


@dataclass(frozen=True)
class FamilyConfig(LlamaConfig):
    """A `LlamaConfig` and what more a family's config.json says, under the same names."""

    attention_bias: bool = False
    o_proj_bias: bool = True  # whether o_proj has a bias where q, k and v have
    mlp_bias: bool = False
    hidden_act: str = "silu"
    partial_rotary_factor: float = 1.0
    final_logit_softcapping: float | None = None
    float32_angles: bool = False  # whether heads turn in float32
    may_be_zero: ClassVar[tuple[str, ...]] = ()  # fields

    def __post_init__(self) -> None:
        base = {field.name for field in dataclasses.fields(LlamaConfig)}
        for field in dataclasses.fields(self):
            text = field.type.__name__ if isinstance(field.type, type) else str(field.type)
            value, kind = getattr(self, field.name), text.removesuffix(" | None")
            if field.name in base or (value is None and kind != text):
                continue
            if kind == "bool":
                require_bool(field.name, value)
            if value == 0 and field.name in self.may_be_zero:
                continue
            if kind in ("int", "float"):
                require_positive(field.name, value, *((int, float) if kind == "float" else (int,)))
                if kind == "float":  # torch takes no integer of more than 64 bits
                    object.__setattr__(self, field.name, float(value))
        if self.partial_rotary_factor > 1:
            raise ValueError(f"partial_rotary_factor is {self.partial_rotary_factor}: above 1")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act is {short(self.hidden_act)}: it must be one of {', '.join(ACTIVATIONS)}"
            )
        super().__post_init__()

    def turned(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)


class FamilyBlock(model.Block):
    """model.Block with other norms, another attention or another FFN, named by attributes."""

    norms: tuple[str, ...] = ("pre_attention_norm", "pre_ffn_norm")
    attention_class: type[FamilyAttention] = FamilyAttention
    ffn_class: type[nn.Module] = model.SwiGLU
    post_attention_norm: nn.Module
    post_ffn_norm: nn.Module

    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention, self.ffn = self.attention_class(config, norm), self.ffn_class(config)
        for name in {"pre_attention_norm", "pre_ffn_norm"} - {*self.norms}:
            delattr(self, name)
        for name in self.norms:  # those that are there keep their place
            setattr(self, name, norm(config.hidden_size, config.rms_norm_eps))
        if config.attention_bias:
            outer = ("o_proj",) if config.o_proj_bias else ()
            add_biases(self.attention, *self.attention_class.inner, *outer)
        if config.mlp_bias:
            add_biases(self.ffn, *(name for name, _ in self.ffn.named_children()))

    def at_depth(self, n: int, config: Any) -> None:
        """Take what the forward pass needs of the config; n blocks are below this one."""


class Decoder(model.Llama):
    """`Llama` whose heads may turn in part, in float32, or by another base; its logits may be capped."""

    config: FamilyConfig

    def __init__(self, config: FamilyConfig, norm: type[nn.Module], block: type[nn.Module]) -> None:
        super().__init__(config, norm, block)
        for n, layer in enumerate(self.blocks):
            if isinstance(layer, FamilyBlock):
                layer.at_depth(n, config)

    def forward(self, *inputs: Any, **how: Any) -> Tensor:
        return softcap(super().forward(*inputs, **how), self.config.final_logit_softcapping)

    def angles(
        self, positions: Tensor, dtype: torch.dtype, rope: RopeConfig | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self.config.turned():
            return (none := positions.new_empty(0, dtype=dtype)), none
        dtype = torch.float32 if self.config.float32_angles else dtype
        return cos_sin(rope or self.config.rope, self.config.turned(), positions, dtype)


class EmbedNorm(Decoder):
    """A decoder with a norm on the embedding."""

    def __init__(self, config: FamilyConfig, norm: type[nn.Module], block: type[nn.Module]) -> None:
        super().__init__(config, norm, block)
        self.embed_norm = norm(config.hidden_size, config.rms_norm_eps)

    def embedding(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embed_norm(self.embed(tokens))


@dataclass(frozen=True)
class UnturnedConfig(FamilyConfig):
    """A config without RoPE."""

    def turned(self) -> int:
        return 0


@dataclass(frozen=True)
class LearnedConfig(UnturnedConfig):
    """A config whose positions are rows of a table, and end with it."""

    def require_in_window(self, length: int) -> None:
        if length > self.max_position_embeddings:
            raise ValueError(
                f"{length} positions: this checkpoint has learned max_position_embeddings = "
                f"{self.max_position_embeddings}; use a shorter prompt or fewer new tokens"
            )


class LearnedPositions(Decoder):
    """A decoder that adds a learned vector for each position to the embedding, and rotates nothing."""

    def __init__(self, config: FamilyConfig, norm: type[nn.Module], block: type[nn.Module]) -> None:
        super().__init__(config, norm, block)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def embedding(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embed(tokens) + self.positions(positions)


@dataclass(frozen=True)
class WindowConfig(FamilyConfig):
    """A config with a kind for each block, by turns: those of `SLIDING` see the last `sliding_window` keys
    only, and rotate by `local_rope` where there is one; those whose kind begins with `NOPE` do not rotate.
    """

    layer_types: tuple[str, ...] = (FULL,)
    local_rope: RopeConfig | None = None

    def context(self) -> int:
        return self.max_position_embeddings

    def require_in_window(self, length: int) -> None:
        """Nothing to require: what is beyond the window is hidden."""


class Windowed(Decoder):
    """A decoder whose blocks are of several kinds, with a mask and angles for each kind."""

    config: WindowConfig

    def through_blocks(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        x, kinds = self.embedding(tokens, positions), self.config.layer_types
        keys = tokens.shape[1] + (0 if cache is None else cache.length)
        local = within(self.config.sliding_window, mask, tokens.shape[1], keys, x.device)
        seen = {
            kind: (
                *self.kind_angles(kind, positions, x.dtype),
                local if kind.endswith(SLIDING) else mask,
            )
            for kind in set(kinds)
        }
        for n, block in enumerate(self.blocks):
            x = block(x, *seen[kinds[n % len(kinds)]], None if cache is None else cache[n])
        return x

    def kind_angles(
        self, kind: str, positions: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine for the blocks of a kind: of no pair at all where they do not rotate."""
        cos, sin = self.angles(
            positions, dtype, self.config.local_rope if kind == SLIDING else None
        )
        return (cos[..., :0], sin[..., :0]) if kind.startswith(NOPE) else (cos, sin)


def within(
    window: int | None, mask: Tensor | None, t: int, s: int, device: torch.device
) -> Tensor | None:
    """The mask for t queries over s keys with all keys hidden but the last `window` of each query."""
    if window is None or s <= window:
        return mask
    ones = torch.ones(1, 1, t, s, dtype=torch.bool, device=device)
    return (ones.tril(s - t) if mask is None else mask) & ones.triu(s - t - window + 1)
