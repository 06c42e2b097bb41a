"""nanochat (Karpathy 2025): norms without a gain, on the embedding too, and on q and k behind the rotation.

    x = norm(embed(tokens))
    x = x + attention(norm(x))      q = norm(rotate(q)), k = norm(rotate(k)), head by head
    x = x + ffn(norm(x))            norm(x) = x / rms(x)

Beside it: squared ReLU without a gate, heads that turn the other way, logits kept within a cap by tanh.
"""

from torch import Tensor, nn

from .attention import FamilyAttention
from .base import EmbedNorm, FamilyBlock, FamilyConfig
from .family import family
from .ffn import MLP
from .files import llama_names
from .norms import BareRMSNorm


class Attention(FamilyAttention):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.qk_norm = norm(config.head_dim, config.rms_norm_eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.qk_norm(super().rotate(x, cos, -sin))


class Block(FamilyBlock):
    attention_class, ffn_class = Attention, MLP


FAMILY = family(
    "nanochat",
    "NanoChatForCausalLM",
    EmbedNorm,
    BareRMSNorm,
    Block,
    keys={"attention_bias", "hidden_act", "final_logit_softcapping"},
    reads=set(),
    names=llama_names(
        {"ffn.up_proj": "mlp.fc1", "ffn.down_proj": "mlp.fc2", "ffn.gate_proj": None}
    ),
    nullable={"final_logit_softcapping"},
    hidden_act="relu2",
    final_logit_softcapping=15.0,
)
