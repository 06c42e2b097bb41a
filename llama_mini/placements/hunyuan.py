"""HunYuan dense (Tencent 2025): Llama with QK-norm behind the rotation, where others have it in front.

    x = x + attention(norm(x))      q = norm(rotate(q)), k = norm(rotate(k)), head by head
    x = x + ffn(norm(x))

Both ways the scores depend on directions only; behind, the weight of the norm scales numbers that already
turned, and so does not turn with them.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..config import LlamaConfig, require_positive
from .attention import FamilyAttention
from .base import FamilyBlock
from .family import family
from .files import HUNYUAN


class Attention(FamilyAttention):
    def place(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(self.rotate(q, cos, sin)), self.k_norm(self.rotate(k, cos, sin))


class Block(FamilyBlock):
    attention_class = Attention


PLAIN = family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    block=Block,
    keys={"attention_bias"},
    reads={"eod_token_id", "hidden_act"},
    names=HUNYUAN,
    rms_norm_eps=1e-5,
    qk_norm=True,
)


def grown(given: dict[str, Any]) -> LlamaConfig:
    """The config, where `dynamic` scaling has an alpha: theta grows by it once, for texts of any length."""
    ropes = [given.get(key) for key in ("rope_parameters", "rope_scaling")]
    alphas = [rope["alpha"] for rope in ropes if isinstance(rope, dict) and rope.get("alpha")]
    if not alphas:
        return PLAIN.config(given)
    require_positive("alpha", alphas[0], int, float)
    theta = next((rope["rope_theta"] for rope in ropes if rope and "rope_theta" in rope), 10000.0)
    plain = {key: value for key, value in given.items() if not key.startswith("rope_")}
    config = PLAIN.config(plain | {"rope_theta": given.get("rope_theta", theta)})
    d, rope = config.head_dim, config.rope
    more = alphas[0] ** (d / (d - 2))
    return replace(config, rope=replace(rope, rope_theta=rope.rope_theta * more))


FAMILY = replace(PLAIN, config=grown)
