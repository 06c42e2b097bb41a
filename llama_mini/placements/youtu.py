"""Youtu-LLM (Tencent 2025): norms on the latents of latent attention (MLA, DeepSeek V2, arXiv:2405.04434).

    q = up(norm(down(x)))
    k, v = up(norm(latent))     latent, key = down(x): one key for all heads is rotated and joins every k

Blocks are Llama's: x = x + attention(norm(x)), x = x + ffn(norm(x)). The cache keeps the normed latent and
the rotated key in place of all heads' k and v. Beside it: values of another size than keys, pairs that
stand side by side.

transformers 5.24 sets the embedding of `pad_token_id` to zero as it loads a checkpoint. Here it is the
file's.
"""

from .family import family
from .files import LATENT
from .keys import declared
from .latent import NULLABLE, LatentBlock, LatentConfig

FAMILY = family(
    "youtu",
    "YoutuForCausalLM",
    block=LatentBlock,
    config=LatentConfig,
    keys=declared(LatentConfig) | {"attention_bias"},
    reads={"embedding_initializer_range", "hidden_act", "qk_head_dim"},
    names=LATENT,
    nullable=NULLABLE,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
)
