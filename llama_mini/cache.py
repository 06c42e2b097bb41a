"""Keys and values of the positions already seen, so that a new token costs one position and not all
of them; and the order in which positions see each other.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import LlamaConfig


class BlockCache(NamedTuple):
    """One block's part of the cache, as its attention sees it: two tensors (b, g, capacity, d) and
    where to write.
    """

    keys: Tensor
    values: Tensor
    start: int

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write `k`, `v` (b, g, t, d) behind the positions held; return all keys and values so far
        (b, g, s, d).
        """
        end = self.start + k.shape[2]
        self.keys[:, :, self.start : end] = k
        self.values[:, :, self.start : end] = v
        return self.keys[:, :, :end], self.values[:, :, :end]


def cache_bytes(config: LlamaConfig, batch: int, capacity: int, dtype: torch.dtype) -> int:
    """What a `KVCache` made of these takes."""
    heads, key, value = config.cached()
    return config.num_hidden_layers * batch * heads * capacity * (key + value) * dtype.itemsize


class KVCache:
    """Room for `capacity` positions of keys and values in every block, of which the first `length`
    are filled.

    Takes 2 * blocks * batch * g * capacity * d numbers of `dtype` (`cache_bytes`), unless the config says
    otherwise (`LlamaConfig.cached`). `Llama.forward` advances `length`, once.
    """

    def __init__(
        self,
        config: LlamaConfig,
        batch: int = 1,
        capacity: int = 512,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if batch < 1 or capacity < 1:
            raise ValueError(f"batch {batch} and capacity {capacity} must be 1 or more")
        heads, key, value = config.cached()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        blocks = range(config.num_hidden_layers)
        self.keys = [torch.empty(batch, heads, capacity, key, **place) for _ in blocks]
        self.values = [torch.empty(batch, heads, capacity, value, **place) for _ in blocks]
        self.batch, self.capacity, self.dtype = batch, capacity, dtype
        self.length = 0

    @classmethod
    def for_model(cls, model: Any, batch: int = 1, capacity: int = 512) -> "KVCache":
        """A cache of the sizes of `model`, a `Llama`, on its device and in its dtype."""
        weight = model.embed.weight
        return cls(model.config, batch, capacity, weight.device, weight.dtype)

    @torch.inference_mode(False)  # or it could not be written to outside of that mode
    @torch.no_grad()
    def grow(self, capacity: int) -> None:
        """Make room for `capacity` positions in all; what is held stays."""
        for tensors in (self.keys, self.values):
            for n, old in enumerate(tensors):
                shape = (*old.shape[:2], capacity, old.shape[3])
                tensors[n] = torch.empty(shape, device=old.device, dtype=old.dtype)
                tensors[n][:, :, : self.length] = old[:, :, : self.length]
        self.capacity = capacity

    def require(self, batch: int, t: int, dtype: torch.dtype) -> int:
        """How many positions are filled; a `ValueError` unless `t` more of `batch` rows in `dtype` fit."""
        if self.length < 0:
            raise ValueError(f"the cache's length is {self.length}: it must be 0 or more")
        if self.length + t > self.capacity:
            raise ValueError(
                f"the cache has room for {self.capacity} positions and holds {self.length}, so {t} more do "
                f"not fit: make it with capacity={self.length + t} or more"
            )
        if (batch, dtype) != (self.batch, self.dtype):
            raise ValueError(
                f"the cache was made for batch {self.batch} in {self.dtype}, and the model was called with "
                f"batch {batch} in {dtype}"
            )
        return self.length

    def __getitem__(self, block: int) -> BlockCache:
        return BlockCache(self.keys[block], self.values[block], self.length)


def causal_mask(t: int, past: int, device: torch.device) -> Tensor | None:
    """Who sees whom when t queries follow `past` keys: (1, 1, t, s), or None where `Attend` needs none."""
    # On MPS, is_causal in half precision lets queries see up to three later keys in torch before 2.13
    # (pytorch issue 195910): an explicit mask there.
    if t == 1 or (past == 0 and device.type != "mps"):
        return None
    return torch.ones(1, 1, t, past + t, dtype=torch.bool, device=device).tril(past)


def require_inputs(tokens: Tensor, positions: Tensor | None, mask: Tensor | None) -> None:
    """Raise a `ValueError` that names what is not of the form that `Llama.forward` takes."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
        given = tuple(tokens.shape) if isinstance(tokens, Tensor) else repr(tokens)[:60]
        raise ValueError(f"tokens must be a tensor of token ids (b, t), not {given}")
    if not tokens.shape[1]:
        raise ValueError(f"tokens {tuple(tokens.shape)} hold no position: give at least one")
    if positions is not None and positions.shape[-1] != tokens.shape[1]:
        raise ValueError(f"{positions.shape[-1]} positions do not fit {tokens.shape[1]} tokens")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype}: it must be bool, true where a query may see a key")
