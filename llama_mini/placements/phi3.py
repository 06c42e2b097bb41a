"""Phi-3 and Phi-4 (Microsoft 2024, arXiv:2404.14219): Llama, whose files fuse q, k, v and gate, up.

    x = x + attention(norm(x))
    x = x + ffn(norm(x))

Optionally a window of keys, and heads that rotate in part.
"""

from typing import Any

from einops import rearrange
from torch import Tensor, nn

from .attention import FamilyAttention
from .base import FamilyBlock, FamilyConfig, WindowConfig, Windowed
from .family import family
from .ffn import FusedGLU
from .files import llama_names
from .keys import SLIDING


class Attention(FamilyAttention):
    """q, k and v come of one matrix, as in the files: a narrow k alone takes another kernel."""

    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        h, g, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.sizes = (h * d, g * d, g * d)
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        del self.q_proj, self.k_proj, self.v_proj

    def project(self, x: Tensor) -> list[Tensor]:
        parts = self.qkv_proj(x).split(self.sizes, dim=-1)
        return [rearrange(part, "b t (h d) -> b h t d", d=self.head_dim) for part in parts]


class Block(FamilyBlock):
    attention_class, ffn_class = Attention, FusedGLU


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
