"""DeepSeek V3 (2024, arXiv:2412.19437): Youtu's latent norms, and a mixture of experts as FFN.

    x = x + attention(norm(x))
    x = x + experts(norm(x))      q = up(norm(down(x))), k and v = up(norm(latent)): see youtu.py

Every token goes to its best few experts, chosen group by group, and to one that sees all. The first blocks
have a plain FFN. The router stays in float32 whatever the dtype of the model.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import model
from . import youtu
from .family import Family
from .keys import read
from .parts import Expert, mixture


@dataclass(frozen=True)
class DeepseekV3Config(youtu.LatentConfig):
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    first_k_dense_replace: int = 3

    def expert(self, count: int = 1) -> "DeepseekV3Config":
        """The config of an FFN as wide as `count` experts."""
        return dataclasses.replace(self, intermediate_size=count * self.moe_intermediate_size)


class Experts(nn.Module):
    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.hidden_size, config.n_routed_experts)
        experts = (Expert(config.expert()) for _ in range(config.n_routed_experts))
        self.experts = nn.ModuleList(experts)
        self.shared = model.SwiGLU(config.expert(config.n_shared_experts))

    def forward(self, x: Tensor) -> Tensor:
        config, tokens = self.config, x.flatten(0, 1)
        scores = F.linear(tokens.float(), self.router.weight.float()).sigmoid()
        # The bias only chooses: it balances the load, and the weights of the sum go without it.
        groups = (scores + self.router.bias).unflatten(1, (config.n_group, -1))
        best = groups.topk(2, dim=-1).values.sum(-1)
        open_groups = best.topk(config.topk_group, dim=-1, sorted=False).indices
        shut = torch.ones_like(best, dtype=torch.bool).scatter(1, open_groups, False)
        candidates = groups.masked_fill(shut[..., None], float("-inf")).flatten(1)
        chosen = candidates.topk(config.num_experts_per_tok, dim=-1, sorted=False).indices
        weights = scores.gather(1, chosen)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * config.routed_scaling_factor
        return mixture(self.experts, tokens, chosen, weights).view_as(x) + self.shared(x)


class DeepseekV3(youtu.Youtu):
    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config)
        for block in self.blocks[config.first_k_dense_replace :]:
            block.ffn = Experts(config)


MIXTURE = {field.name for field in dataclasses.fields(DeepseekV3Config)} - {
    field.name for field in dataclasses.fields(youtu.LatentConfig)
}
READ = youtu.READ | MIXTURE


def _config(given: dict[str, Any]) -> DeepseekV3Config:
    return read(DeepseekV3Config, given, READ, max_position_embeddings=4096)


EXPERTS = {
    f"blocks.N.ffn.experts.{n}.{name}": f"model.layers.N.mlp.experts.{n}.{name}"
    for n in range(512)
    for name in ("gate_proj", "up_proj", "down_proj")
}
SHARED_EXPERT = {
    f"blocks.N.ffn.shared.{name}": f"model.layers.N.mlp.shared_experts.{name}"
    for name in ("gate_proj", "up_proj", "down_proj")
}
FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    model=DeepseekV3,
    config=_config,
    keys=READ | {"head_dim"},
    reads=frozenset("hidden_act num_nextn_predict_layers output_router_logits qk_head_dim".split()),
    names={
        **youtu.NAMES,
        **EXPERTS,
        **SHARED_EXPERT,
        "blocks.N.ffn.router": "model.layers.N.mlp.gate",
        "blocks.N.ffn.router.bias": "model.layers.N.mlp.gate.e_score_correction_bias",
    },
    nullable=frozenset({"q_lora_rank"}),
    float32=frozenset({"blocks.N.ffn.router.weight", "blocks.N.ffn.router.bias"}),
)
