"""OLMo 3 (2025): OLMo 2's norms, with a window of keys in three of four blocks.

x = x + norm(attention(x))      q = rotate(split(norm(q))), k = rotate(split(norm(k)))
x = x + norm(ffn(x))
"""

from typing import Any

import torch
from torch import Tensor

from . import olmo2
from .family import Family
from .keys import read, read_kinds, read_windows
from .parts import LateCastRMSNorm, WindowConfig, Windowed


class Olmo3(Windowed):
    def __init__(self, config: WindowConfig) -> None:
        super().__init__(config, LateCastRMSNorm, olmo2.Block)

    def kind_angles(
        self, kind: str, positions: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return super().kind_angles(kind, positions, torch.float32)


def _config(given: dict[str, Any]) -> WindowConfig:
    windows = read_windows(given, lambda n: n % 4 == 3)
    given, local_rope = read_kinds(given, "rope_theta", theta=500000.0)
    return read(
        WindowConfig,
        given,
        olmo2.READ,
        theta=500000.0,
        rms_norm_eps=1e-5,
        local_rope=local_rope,
        **windows,
    )


FAMILY = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    model=Olmo3,
    config=_config,
    keys=olmo2.READ | {"sliding_window", "layer_types"},
    reads=frozenset({"hidden_act"}),
    names=olmo2.FAMILY.names,
    nullable=frozenset({"sliding_window"}),
)
