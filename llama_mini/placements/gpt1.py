"""GPT (Radford et al. 2018): the original Transformer's post-norm (Vaswani et al. 2017, arXiv:1706.03762).

    x = norm(x + attention(x))
    x = norm(x + ffn(x))          and no norm at the end

The norms stand on the stream itself: every one divides all that came before it. Beside it, as in GPT-2:
LayerNorm, biases, learned positions, no gate. Scores that may not be seen get -10,000, and the softmax is
in the model's own dtype.
"""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .. import model
from . import gpt2
from .family import Family
from .files import names
from .keys import SHARED, read, renamed
from .parts import ACTIVATIONS, MLP, LearnedConfig, LearnedPositions, causal


class Attend(model.Attend):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        seen = (causal(q, k) if mask is None else mask).to(q.dtype)
        scores = q @ k.transpose(-1, -2) / math.sqrt(v.shape[-1])
        return F.softmax(scores * seen - 1e4 * (1 - seen), dim=-1) @ v


class Block(model.Block):
    def __init__(self, config: LearnedConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.attention = gpt2.Attention(config, norm)
        self.attention.attend = Attend()
        self.post_attention_norm, self.post_ffn_norm = self.pre_attention_norm, self.pre_ffn_norm
        self.ffn = MLP(config, ACTIVATIONS[config.hidden_act], bias=True)
        del self.pre_attention_norm, self.pre_ffn_norm

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = self.post_attention_norm(x + self.attention(x, *how))
        return self.post_ffn_norm(x + self.ffn(x))


class GPT(LearnedPositions):
    def __init__(self, config: LearnedConfig) -> None:
        super().__init__(config, Block)
        self.final_norm = nn.Identity()


KEYS = {ours: theirs for ours, theirs in gpt2.KEYS.items() if theirs != "intermediate_size"}
KEYS["afn"] = "hidden_act"
ACTS = {"gelu": "gelu_new", "swish": "silu"}  # what the names of 2018 mean


def _config(given: dict[str, Any]) -> LearnedConfig:
    given = renamed(given, KEYS)
    act = given.get("hidden_act", "gelu")
    return read(
        LearnedConfig,
        {**given, "intermediate_size": gpt2.four_times_hidden_size(given)},
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        hidden_act=ACTS.get(str(act), act),
        tie_word_embeddings=True,
        attention_bias=True,
    )


FAMILY = Family(
    model_type="openai-gpt",
    architecture="OpenAIGPTLMHeadModel",
    model=GPT,
    config=_config,
    keys=(SHARED - {"intermediate_size"}) | KEYS.keys(),
    reads=gpt2.UNUSED,
    names=names(
        "transformer.h.N",
        {
            "attention.qkv_proj": "attn.c_attn",
            "attention.o_proj": "attn.c_proj",
            "post_attention_norm": "ln_1",
            "ffn.up_proj": "mlp.c_fc",
            "ffn.down_proj": "mlp.c_proj",
            "post_ffn_norm": "ln_2",
        },
        embed="transformer.tokens_embed",
        positions="transformer.positions_embed",
        lm_head="lm_head",
    ),
    split=gpt2.split,
    constant=gpt2.FAMILY.constant,
)
