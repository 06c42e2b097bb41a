"""BLOOM (2022, arXiv:2211.05100): pre-norm, and a norm on the embedding, so that training stays stable.

    x = norm(embed(tokens))
    x = x + attention(norm(x))
    x = x + ffn(norm(x))

Beside it: LayerNorm, biases; positions as a bias on the scores that grows with distance (ALiBi,
arXiv:2108.12409); no gate; q, k and v as one matrix, head by head. With
`apply_residual_connection_post_layernorm` the stream is the norm's output: n = norm(x), x = n + f(n).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import model
from . import gpt2, neox
from .family import Family
from .files import names
from .keys import SHARED, read, renamed
from .parts import MLP, Decoder, FamilyConfig, causal


@dataclass(frozen=True)
class BloomConfig(FamilyConfig):
    apply_residual_connection_post_layernorm: bool = False


def slopes(heads: int, device: torch.device) -> Tensor:
    """How fast the scores of each head fall with distance: powers of 2, and odd ones for what is left."""

    def powers(count: int, exponents: Tensor) -> Tensor:
        base = 2 ** -(2 ** -(math.log2(count) - 3))
        return torch.tensor(base, dtype=torch.float32, device=device).pow(exponents)

    near = 2 ** math.floor(math.log2(heads))
    some = powers(near, torch.arange(1, 1 + near, device=device, dtype=torch.int32))
    odd = torch.arange(1, 1 + 2 * (heads - near), 2, device=device, dtype=torch.int32)
    return torch.cat((some, powers(2 * near, odd)))


class Attend(model.Attend):
    """Attention with ALiBi, in the order and dtypes of transformers', which is eager."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        (b, h, t, d), s = q.shape, k.shape[2]
        distance = torch.arange(s, dtype=torch.long, device=q.device)
        alibi = slopes(h, q.device)[:, None, None] * distance
        alibi = alibi.repeat(b, 1, 1).to(q.dtype)
        q, k, v = q.reshape(b * h, t, d), k.reshape(b * h, s, d), v.reshape(b * h, s, d)
        scores = alibi.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=1.0 / math.sqrt(d))
        seen = causal(q[None], k[None]) if mask is None else mask
        low = torch.where(seen, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
        scores = scores.view(b, h, t, s) + low
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.bmm(weights.view(b * h, t, s), v).view(b, h, t, d)


def gelu(x: Tensor) -> Tensor:
    """GELU by tanh, in BLOOM's own order of operations."""
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class Block(model.Block):
    def __init__(self, config: BloomConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = gpt2.Attention(config, norm)
        self.attention.attend = Attend()
        self.ffn = MLP(config, gelu, bias=True)


class PostBlock(Block):
    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = self.pre_attention_norm(x)
        x = x + self.attention(x, *how)
        x = self.pre_ffn_norm(x)
        return x + self.ffn(x)


class Bloom(Decoder):
    def __init__(self, config: BloomConfig) -> None:
        after = config.apply_residual_connection_post_layernorm
        super().__init__(config, nn.LayerNorm, PostBlock if after else Block)
        self.embed_norm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)

    def embedding(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embed_norm(self.embed(tokens))


KEYS = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "layer_norm_epsilon": "rms_norm_eps",
}
READ = (SHARED - {"num_key_value_heads", "head_dim", "intermediate_size"}) | {
    "apply_residual_connection_post_layernorm"
}


def _config(given: dict[str, Any]) -> BloomConfig:
    given = renamed(given, KEYS)
    return read(
        BloomConfig,
        {**given, "intermediate_size": gpt2.four_times_hidden_size(given)},
        READ | {"intermediate_size"},
        rms_norm_eps=1e-5,
        attention_bias=True,
        tie_word_embeddings=True,
    )


FAMILY = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    model=Bloom,
    config=_config,
    keys=READ | KEYS.keys(),
    reads=frozenset({"hidden_dropout", "slow_but_exact"}),
    names=names(
        "transformer.h.N",
        {
            "pre_attention_norm": "input_layernorm",
            "attention.qkv_proj": "self_attention.query_key_value",
            "attention.o_proj": "self_attention.dense",
            "pre_ffn_norm": "post_attention_layernorm",
            "ffn.up_proj": "mlp.dense_h_to_4h",
            "ffn.down_proj": "mlp.dense_4h_to_h",
        },
        embed="transformer.word_embeddings",
        embed_norm="transformer.word_embeddings_layernorm",
        final_norm="transformer.ln_f",
        lm_head="lm_head",
    ),
    split=neox.split,
)
