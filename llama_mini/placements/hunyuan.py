"""HunYuan dense (Tencent 2025): Llama with QK-norm behind the rotation, where others have it in front.

    x = x + attention(norm(x))      q = norm(rotate(q)), k = norm(rotate(k)), head by head
    x = x + ffn(norm(x))

Both ways the scores depend on directions only; behind, the weight of the norm scales numbers that already
turned, and so does not turn with them.
"""

from dataclasses import replace
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from .. import model
from ..cache import BlockCache
from ..config import require_positive
from .family import Family
from .files import llama_names
from .keys import SHARED, read
from .parts import Decoder, FamilyConfig


class Attention(model.Attention):
    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: BlockCache | None
    ) -> Tensor:
        q = rearrange(self.q_proj(x), "b t (h d) -> b h t d", d=self.head_dim)
        k = rearrange(self.k_proj(x), "b t (g d) -> b g t d", d=self.head_dim)
        v = rearrange(self.v_proj(x), "b t (g d) -> b g t d", d=self.head_dim)
        q = self.q_norm(self.rotate(q, cos, sin))
        k = self.k_norm(self.rotate(k, cos, sin))
        if cache is not None:
            k, v = cache.append(k, v)
        return self.o_proj(rearrange(self.attend(q, k, v, mask), "b h t d -> b t (h d)"))


class Block(model.Block):
    def __init__(self, config: FamilyConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = Attention(config, norm)


class HunYuan(Decoder):
    def __init__(self, config: FamilyConfig) -> None:
        super().__init__(config, model.RMSNorm, Block)


READ = SHARED | {"attention_bias"}


def _config(given: dict[str, Any]) -> FamilyConfig:
    ropes = [given.get(key) for key in ("rope_parameters", "rope_scaling")]
    alphas = [rope["alpha"] for rope in ropes if isinstance(rope, dict) and rope.get("alpha")]
    if not alphas:
        return read(FamilyConfig, given, READ, rms_norm_eps=1e-5, qk_norm=True)
    # `dynamic` with an alpha: theta grows by it once, however long the text is.
    require_positive("alpha", alphas[0], int, float)
    theta = next((rope["rope_theta"] for rope in ropes if rope and "rope_theta" in rope), 10000.0)
    plain = {key: value for key, value in given.items() if not key.startswith("rope_")}
    plain["rope_theta"] = given.get("rope_theta", theta)
    config = read(FamilyConfig, plain, READ, rms_norm_eps=1e-5, qk_norm=True)
    d, rope = config.head_dim, config.rope
    grown = rope.rope_theta * alphas[0] ** (d / (d - 2))
    return replace(config, rope=replace(rope, rope_theta=grown))


FAMILY = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    model=HunYuan,
    config=_config,
    keys=READ,
    reads=frozenset({"eod_token_id", "hidden_act"}),
    names=llama_names(
        {
            "attention.q_norm": "self_attn.query_layernorm",
            "attention.k_norm": "self_attn.key_layernorm",
        }
    ),
)
