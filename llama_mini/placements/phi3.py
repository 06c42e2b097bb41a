"""Phi-3 and Phi-4 (Microsoft 2024, arXiv:2404.14219): Llama, whose files fuse q, k, v and gate, up.

    x = x + attention(norm(x))
    x = x + ffn(norm(x))

Optionally a window of keys, and heads that rotate in part.
"""

from typing import Any

from .attention import FusedAttention
from .base import FamilyBlock, WindowConfig, Windowed
from .family import family
from .ffn import FusedGLU
from .files import llama_names
from .keys import SLIDING


class Block(FamilyBlock):
    attention_class, ffn_class = FusedAttention, FusedGLU


def window(given: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": given.get("sliding_window"), "layer_types": (SLIDING,)}


NAMES = {"attention.qkv_proj": "self_attn.qkv_proj", "ffn.gate_up_proj": "mlp.gate_up_proj"}
FAMILY = family(
    "phi3",
    "Phi3ForCausalLM",
    Windowed,
    block=Block,
    config=WindowConfig,
    keys={"partial_rotary_factor", "sliding_window"},
    fields=window,
    reads={"embd_pdrop", "hidden_act", "resid_pdrop"},
    names=llama_names({**NAMES}),
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)
