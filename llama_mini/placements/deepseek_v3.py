"""DeepSeek V3 (2024, arXiv:2412.19437): Youtu's latent norms, and a mixture of experts as FFN.

    x = x + attention(norm(x))
    x = x + experts(norm(x))      q = up(norm(down(x))), k and v = up(norm(latent)): see latent.py

Every token goes to its best few experts, chosen group by group, and to one that sees all. The first blocks
have a plain FFN. The router stays in float32 whatever the dtype of the model.
"""

from dataclasses import dataclass

from torch import nn

from .base import Decoder
from .experts import GroupedExperts
from .family import family
from .files import DEEPSEEK
from .keys import declared
from .latent import NULLABLE, LatentBlock, LatentConfig


@dataclass(frozen=True)
class DeepseekV3Config(LatentConfig):
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    first_k_dense_replace: int = 3
    may_be_zero = ("first_k_dense_replace",)


class DeepseekV3(Decoder):
    def __init__(
        self, config: DeepseekV3Config, norm: type[nn.Module], block: type[nn.Module]
    ) -> None:
        super().__init__(config, norm, block)
        for layer in self.blocks[config.first_k_dense_replace :]:
            layer.ffn = GroupedExperts(config)


FAMILY = family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    DeepseekV3,
    block=LatentBlock,
    config=DeepseekV3Config,
    keys={"attention_bias"} | declared(LatentConfig) | declared(DeepseekV3Config),
    reads={"hidden_act", "num_nextn_predict_layers", "output_router_logits", "qk_head_dim"},
    names=DEEPSEEK,
    nullable=NULLABLE | {"norm_topk_prob"},
    float32={"blocks.N.ffn.router.weight", "blocks.N.ffn.router.bias"},
    max_position_embeddings=4096,
)
