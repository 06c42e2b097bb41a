"""Mixtures of experts: each token goes through the few networks that a router chooses for it."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import model

# Keys for training, and of the blocks with linear attention that are refused (MiniMax).
UNUSED = frozenset(
    {"router_aux_loss_coef", "router_jitter_noise", "output_router_logits", "block_size"}
)


class Expert(model.SwiGLU):
    """SwiGLU as one of many. transformers joins the files' gate and up: apart, some take another kernel."""

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat((self.gate_proj.weight, self.up_proj.weight))
        gate, up = F.linear(x, joined).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


def mixture(experts: nn.ModuleList, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of what each token's experts make of it, in the weights' dtype: tokens (n, m), and
    for each the numbers and weights of its k experts (n, k) -> (n, m).
    """
    deltas = weights.new_zeros(*chosen.shape, tokens.shape[-1])
    for n, expert in enumerate(experts):
        token, place = torch.where(chosen == n)
        deltas[token, place] = expert(tokens[token]) * weights[token, place, None]
    return deltas.sum(1).to(tokens.dtype)


class TopExperts(nn.Module):
    """The weighted sum of each token's best few experts; the weights are a softmax over those few."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.num_local_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(self.top, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return mixture(self.experts, tokens, chosen, weights).view_as(x)


class GroupedExperts(nn.Module):
    """The same of experts in groups, of which the best few are open, and one expert that sees all tokens
    (DeepSeek V3). The router works in float32.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        experts, groups, opened = config.n_routed_experts, config.n_group, config.topk_group
        each, chosen = experts // groups, config.num_experts_per_tok
        # A group counts by the sum of its best two.
        if experts % groups or each < 2 or opened > groups or chosen > opened * each:
            raise ValueError(
                f"n_routed_experts {experts} in n_group {groups}, topk_group {opened} of them open, give "
                f"no num_experts_per_tok {chosen}"
            )
        self.router = nn.Linear(config.hidden_size, config.n_routed_experts)
        wide = config.n_shared_experts * config.moe_intermediate_size
        one = replace(config, intermediate_size=config.moe_intermediate_size)
        self.experts = nn.ModuleList(Expert(one) for _ in range(config.n_routed_experts))
        self.shared = model.SwiGLU(replace(config, intermediate_size=wide))

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
