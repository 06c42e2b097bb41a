"""Gemma 2 (2024, arXiv:2408.00118): Gemma 3's norms, with capped scores in place of QK-norm.

    x = x + norm2(attention(norm1(x)))
    x = x + norm4(ffn(norm3(x)))          norm(x) = x / rms(x) * (1 + weight)

Beside it: scores and logits kept within a cap by tanh, every second block with a window of keys.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from . import gemma, gemma3
from .family import family
from .files import SANDWICH
from .keys import read_windows
from .norms import OnePlusRMSNorm
from .scores import EagerAttend, softcap


@dataclass(frozen=True)
class Gemma2Config(gemma3.Gemma3Config):
    attn_logit_softcapping: float | None = 50.0


class Attend(EagerAttend):
    def __init__(self, config: Gemma2Config) -> None:
        super().__init__()
        self.factor = config.query_pre_attn_scalar**-0.5
        self.cap = config.attn_logit_softcapping

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return softcap(q @ k.transpose(-1, -2) * self.factor, self.cap)


class Block(gemma3.Block):
    def __init__(self, config: Gemma2Config, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention.attend = Attend(config)


FAMILY = family(
    "gemma2",
    "Gemma2ForCausalLM",
    gemma.Gemma,
    OnePlusRMSNorm,
    Block,
    Gemma2Config,
    keys=gemma3.KEYS | {"attn_logit_softcapping"},
    renames={"hidden_activation": "hidden_act"},
    fields=lambda given: read_windows(given, lambda n: n % 2 == 1),
    reads={"use_bidirectional_attention"},
    names=SANDWICH,
    nullable={"attn_logit_softcapping", "final_logit_softcapping", "sliding_window"},
    final_logit_softcapping=30.0,
    **gemma.DEFAULTS,
)
