"""Keys and values of the positions already seen, so that a new token costs one position and not all
of them.
"""

from typing import NamedTuple

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
    numbers = batch * config.num_key_value_heads * capacity * config.head_dim
    return 2 * config.num_hidden_layers * numbers * dtype.itemsize


class KVCache:
    """Room for `capacity` positions of keys and values in every block, of which the first `length`
    are filled.

    Takes 2 * blocks * batch * g * capacity * d numbers of `dtype` (`cache_bytes`). `Llama.forward`
    advances `length`, once.
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
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        blocks = range(config.num_hidden_layers)
        self.keys = [torch.empty(shape, device=device, dtype=dtype) for _ in blocks]
        self.values = [torch.empty(shape, device=device, dtype=dtype) for _ in blocks]
        self.batch, self.capacity, self.dtype = batch, capacity, dtype
        self.length = 0

    def require(self, batch: int, t: int, dtype: torch.dtype) -> None:
        """Raise a `ValueError` unless `t` more positions of `batch` sequences in `dtype` fit."""
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

    def __getitem__(self, block: int) -> BlockCache:
        return BlockCache(self.keys[block], self.values[block], self.length)
