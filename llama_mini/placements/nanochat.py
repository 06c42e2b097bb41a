"""nanochat (Karpathy 2025): norms without a gain, on the embedding too, and on q and k behind the rotation.

    x = norm(embed(tokens))
    x = x + attention(norm(x))      q = norm(rotate(q)), k = norm(rotate(k)), head by head
    x = x + ffn(norm(x))            norm(x) = x / rms(x)

Beside it: squared ReLU without a gate, heads that turn the other way, logits kept within a cap by tanh.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .. import model
from .family import Family
from .files import llama_names
from .keys import SHARED, read
from .parts import ACTIVATIONS, MLP, BareRMSNorm, Decoder, FamilyConfig, softcap


@dataclass(frozen=True)
class NanoChatConfig(FamilyConfig):
    final_logit_softcapping: float | None = 15.0


class Attention(model.Attention):
    def __init__(self, config: NanoChatConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.qk_norm = norm(config.head_dim, config.rms_norm_eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.qk_norm(super().rotate(x, cos, -sin))


class Block(model.Block):
    def __init__(self, config: NanoChatConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = Attention(config, norm)
        self.ffn = MLP(config, ACTIVATIONS[config.hidden_act], bias=False)


class NanoChat(Decoder):
    config: NanoChatConfig

    def __init__(self, config: NanoChatConfig) -> None:
        super().__init__(config, BareRMSNorm, Block)
        self.embed_norm = BareRMSNorm(config.hidden_size, config.rms_norm_eps)

    def embedding(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embed_norm(self.embed(tokens))

    def forward(self, *inputs: Any, **how: Any) -> Tensor:
        return softcap(super().forward(*inputs, **how), self.config.final_logit_softcapping)


READ = SHARED | frozenset({"attention_bias", "hidden_act", "final_logit_softcapping"})


def _config(given: dict[str, Any]) -> NanoChatConfig:
    return read(NanoChatConfig, given, READ, hidden_act="relu2")


FAMILY = Family(
    model_type="nanochat",
    architecture="NanoChatForCausalLM",
    model=NanoChat,
    config=_config,
    keys=READ,
    reads=frozenset(),
    names=llama_names(
        {"ffn.up_proj": "mlp.fc1", "ffn.down_proj": "mlp.fc2", "ffn.gate_proj": None}
    ),
    nullable=frozenset({"final_logit_softcapping"}),
)
