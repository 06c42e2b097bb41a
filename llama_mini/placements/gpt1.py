"""GPT (Radford et al. 2018): the original Transformer's post-norm (Vaswani et al. 2017, arXiv:1706.03762).

    x = norm(x + attention(x))
    x = norm(x + ffn(x))          and no norm at the end

The norms stand on the stream itself: every one divides all that came before it. Beside it, as in GPT-2:
LayerNorm, biases, learned positions, no gate. Scores that may not be seen get -10,000, and the softmax is
in the model's own dtype.
"""

from typing import Any

from torch import Tensor, nn

from .base import FamilyBlock, LearnedConfig, LearnedPositions
from .family import family
from .ffn import MLP
from .files import GPT1, transposed
from .gpt import GPT_KEYS, GPT_MASK, GPT_UNUSED, TIED, UNTURNED, gpt1_fields
from .scores import SumAttention


class Block(FamilyBlock):
    norms = ("post_attention_norm", "post_ffn_norm")
    attention_class, ffn_class = SumAttention, MLP

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = self.post_attention_norm(x + self.attention(x, *how))
        return self.post_ffn_norm(x + self.ffn(x))


class GPT(LearnedPositions):
    def __init__(
        self, config: LearnedConfig, norm: type[nn.Module], block: type[nn.Module]
    ) -> None:
        super().__init__(config, norm, block)
        self.final_norm = nn.Identity()


FAMILY = family(
    "openai-gpt",
    "OpenAIGPTLMHeadModel",
    GPT,
    nn.LayerNorm,
    Block,
    LearnedConfig,
    unshared={"intermediate_size"} | UNTURNED,
    renames=GPT_KEYS | {"afn": "hidden_act"},
    fields=gpt1_fields,
    reads=GPT_UNUSED,
    names=GPT1,
    split=transposed,
    constant=GPT_MASK,
    max_position_embeddings=512,
    **TIED,
)
