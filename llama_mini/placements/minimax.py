"""MiniMax-Text-01 (2025, arXiv:2501.08313): a norm on the stream, in front of both its branches.

    x = norm(x)
    x = x * a + attention(x) * b
    x = norm(x)
    x = x * c + experts(x) * d

So what the stream carries on is the norm's output, and its scale never grows. Beside it: a mixture of
experts. Blocks of linear attention, which its checkpoint has too, are refused.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .. import model
from ..config import SIZES
from .family import Family
from .files import llama_names
from .keys import SHARED, SLIDING, read, read_layer_types
from .parts import Expert, WindowConfig, Windowed, mixture


@dataclass(frozen=True)
class MiniMaxConfig(WindowConfig):
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    full_attn_alpha_factor: float = 1.0
    full_attn_beta_factor: float = 1.0
    mlp_alpha_factor: float = 1.0
    mlp_beta_factor: float = 1.0


class Experts(nn.Module):
    """The weighted sum of each token's best few experts; the weights are a softmax over those few."""

    def __init__(self, config: MiniMaxConfig) -> None:
        super().__init__()
        self.top = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.num_local_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(self.top, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return mixture(self.experts, tokens, chosen, weights).view_as(x)


class Block(model.Block):
    def __init__(self, config: MiniMaxConfig, norm: type[nn.Module]) -> None:
        super().__init__(config, norm)
        self.ffn = Experts(config)
        self.a, self.b = config.full_attn_alpha_factor, config.full_attn_beta_factor
        self.c, self.d = config.mlp_alpha_factor, config.mlp_beta_factor

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        x = self.pre_attention_norm(x)
        x = x * self.a + self.attention(x, *how) * self.b
        x = self.pre_ffn_norm(x)
        return x * self.c + self.ffn(x) * self.d


class MiniMax(Windowed):
    def __init__(self, config: MiniMaxConfig) -> None:
        super().__init__(config, model.RMSNorm, Block)


FACTORS = "full_attn_alpha_factor full_attn_beta_factor mlp_alpha_factor mlp_beta_factor"
READ = SHARED | frozenset(f"num_local_experts num_experts_per_tok {FACTORS}".split())
LINEAR = frozenset("linear_attn_alpha_factor linear_attn_beta_factor block_size".split())


def _config(given: dict[str, Any]) -> MiniMaxConfig:
    if "layer_types" not in given:
        raise ValueError("layer_types is left out: then every second block has linear attention")
    read_layer_types({**given, "sliding_window": None})
    return read(
        MiniMaxConfig,
        given,
        READ,
        theta=1e6,
        required=(*SIZES, "num_key_value_heads"),
        rms_norm_eps=1e-5,
        sliding_window=given.get("sliding_window"),
        layer_types=(SLIDING,),
    )


EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
FAMILY = Family(
    model_type="minimax",
    architecture="MiniMaxForCausalLM",
    model=MiniMax,
    config=_config,
    keys=READ | LINEAR | {"layer_types", "sliding_window"},
    reads=frozenset(
        "hidden_act output_router_logits router_aux_loss_coef router_jitter_noise".split()
    ),
    names=llama_names(
        {
            "ffn.router": "block_sparse_moe.gate",
            **{
                f"ffn.experts.{n}.{ours}": f"block_sparse_moe.experts.{n}.{theirs}"
                for n in range(256)
                for ours, theirs in EXPERT.items()
            },
        }
    ),
)
