"""Phi-3 and Phi-4 (Microsoft 2024, arXiv:2404.14219): Llama, whose files fuse q, k, v and gate, up.

    x = x + attention(norm(x))
    x = x + ffn(norm(x))

Optionally a window of keys, and heads that rotate in part.
"""

from typing import Any

from einops import rearrange
from torch import Tensor, nn

from .. import model
from ..cache import BlockCache
from .family import Family
from .files import llama_names
from .keys import SHARED, SLIDING, read
from .parts import FamilyConfig, FusedGLU, PartlyRotated, WindowConfig, Windowed


class Attention(PartlyRotated):
    """q, k and v come of one matrix, as in the files: a narrow k alone takes another kernel."""

    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        h, g, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.sizes = (h * d, g * d, g * d)
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        del self.q_proj, self.k_proj, self.v_proj

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: BlockCache | None
    ) -> Tensor:
        parts = self.qkv_proj(x).split(self.sizes, dim=-1)
        q, k, v = (rearrange(part, "b t (h d) -> b h t d", d=self.head_dim) for part in parts)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.o_proj(rearrange(self.attend(q, k, v, mask), "b h t d -> b t (h d)"))


class Block(model.Block):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = Attention(config, norm)
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
)
