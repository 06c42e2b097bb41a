"""EXAONE 4.0 (LG 2025, arXiv:2507.11407): OLMo 2's norms behind the sublayers, QK-norm over each head.

    x = x + norm(attention(x))      q = rotate(norm(q)), k = rotate(norm(k)), head by head
    x = x + norm(ffn(x))

The norm rounds first and multiplies then, as Llama's does. Where a window is set, three of four blocks have
it, and the heads of those that see all keys do not turn.
"""

from typing import Any

from torch import Tensor, nn

from .. import model
from ..config import SIZES
from .family import Family
from .keys import FULL, PATTERN, SHARED, read, read_pattern, read_windows, still
from .olmo2 import FAMILY as OLMO2
from .parts import FamilyConfig, PartlyRotated, WindowConfig, Windowed


class Block(model.Block):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = PartlyRotated(config, norm)
        self.post_attention_norm, self.post_ffn_norm = self.pre_attention_norm, self.pre_ffn_norm
        del self.pre_attention_norm, self.pre_ffn_norm

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = x + self.post_attention_norm(self.attention(x, *how))
        return x + self.post_ffn_norm(self.ffn(x))


class Exaone4(Windowed):
    def __init__(self, config: WindowConfig) -> None:
        super().__init__(config, model.RMSNorm, Block)


REQUIRED = (*SIZES, "num_key_value_heads")


def _config(given: dict[str, Any]) -> WindowConfig:
    kinds = read_windows(given, read_pattern(given, every=4))
    if kinds["sliding_window"] is not None:
        kinds = still(kinds, FULL)
    return read(WindowConfig, given, required=REQUIRED, rms_norm_eps=1e-5, qk_norm=True, **kinds)


FAMILY = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    model=Exaone4,
    config=_config,
    keys=SHARED | PATTERN | {"sliding_window", "layer_types"},
    reads=frozenset({"hidden_act"}),
    names=OLMO2.names,
    nullable=frozenset({"sliding_window"}),
)
