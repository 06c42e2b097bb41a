"""Feed-forward networks other than model.SwiGLU, made of a config; FamilyBlock gives them their biases."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import model
from ..config import LlamaConfig


def gelu_new(x: Tensor) -> Tensor:
    """GELU by tanh, operation by operation as in GPT-2: the fused form rounds otherwise."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3.0))))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": gelu_new,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


class MLP(nn.Module):
    """down(act(up(x))): a network without a gate, (b, t, m) -> (b, t, m)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.up_proj(x)))


class BloomMLP(MLP):
    """The same with GELU by tanh, in BLOOM's own order of operations."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.act = lambda x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class GLU(model.SwiGLU):
    """down(act(gate(x)) * up(x)): SwiGLU with another activation."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class FusedGLU(nn.Module):
    """SwiGLU with gate and up as one matrix, as the files have it.

    Two matrices would do, but the activation then meets whole rows: at some widths the last bit differs.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)
