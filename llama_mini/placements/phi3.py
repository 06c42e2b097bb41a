"""Phi-3 and Phi-4 (Microsoft 2024, arXiv:2404.14219): Llama, whose files fuse q, k, v and gate, up.

    x = x + attention(norm(x))
    x = x + ffn(norm(x))

Optionally a window of keys, and heads that rotate in part.
"""

from typing import Any

from torch import Tensor, nn

from .. import model
from ..config import LlamaConfig
from .family import Family
from .files import chunks, llama_names
from .keys import SHARED, SLIDING, read
from .parts import FamilyConfig, FusedGLU, PartlyRotated, WindowConfig, Windowed


class Block(model.Block):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = PartlyRotated(config, norm)
        self.ffn = FusedGLU(config)


class Phi3(Windowed):
    def __init__(self, config: WindowConfig) -> None:
        super().__init__(config, model.RMSNorm, Block)


READ = SHARED | {"partial_rotary_factor"}


def _config(given: dict[str, Any]) -> WindowConfig:
    return read(
        WindowConfig,
        given,
        READ,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        sliding_window=given.get("sliding_window"),
        layer_types=(SLIDING,),
    )


def split(name: str, tensor: Tensor, config: LlamaConfig) -> dict[str, Tensor]:
    d, h, g = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    return chunks(name, tensor, "qkv_proj", ("q_proj", "k_proj", "v_proj"), (h * d, g * d, g * d))


FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    model=Phi3,
    config=_config,
    keys=READ | {"sliding_window"},
    reads=frozenset({"embd_pdrop", "hidden_act", "resid_pdrop"}),
    names=llama_names(
        {
            "attention.qkv_proj": "self_attn.qkv_proj",
            "ffn.gate_up_proj": "mlp.gate_up_proj",
        }
    ),
    split=split,
)
