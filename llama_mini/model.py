"""The whole Llama decoder, to be read from top to bottom.

Axes, in shapes and in einops patterns:

    b  batch            h  query heads                m  model width (hidden_size)
    t  query position   g  key/value heads            d  head size (head_dim)
    s  key position     r  query heads per key/value head, h = g * r

Where the norms go: two in every block, and one before the head.

    tokens --> embed
                 |
                 x  the residual stream (b, t, m): blocks only ever add to it
                 |
      block      +--> pre_attention_norm --> attention --+
      0 .. N-1   +<--------------------------------------+   x = x + attention(pre_attention_norm(x))
                 |
                 +--> pre_ffn_norm --> ffn --+
                 +<--------------------------+               x = x + ffn(pre_ffn_norm(x))
                 |
             final_norm --> lm_head --> logits (b, t, vocab)

A block's norms stand on its branches, in front of the sublayer that reads them, and never on the stream
itself (pre-norm, Xiong et al. 2020, arXiv:2002.04745). So the stream after N blocks is the embedding plus
2 N deltas (what sublayers return), and a gradient has a path to the embedding through sums alone. Nothing
rescales the stream, and in trained models its magnitude grows with depth. `final_norm` divides it by its
own RMS: the head reads the stream's direction, at one scale, however many blocks have added to it.
"""

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from .cache import BlockCache, KVCache, causal_mask, require_inputs
from .config import LlamaConfig
from .rope import cos_sin, rotate


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467).

    LayerNorm without centring: no mean, no bias, one reduction. Multiply x by a positive number, and the
    output stays the same (up to eps): a sublayer reads the stream's direction, whatever its magnitude. Add
    a constant to x, and the output changes; LayerNorm would subtract it. Llama trains without centring and
    without the bias, and its linear layers have no biases either.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()  # in float16 the square of 256 overflows
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        # Llama's order: round to the input's dtype, then multiply by the weight. nn.RMSNorm multiplies
        # first, which rounds differently in bfloat16. The last cast is for float32 weights on a bfloat16 x.
        return (self.weight * normed.to(x.dtype)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class Attend(nn.Module):
    """softmax(q k^T / sqrt d) v: q (b, h, t, d), k and v (b, g, s, d) -> (b, h, t, d).

    The first r query heads read key/value head 0, the next r head 1, and so on (grouped queries, Ainslie
    et al. 2023, arXiv:2305.13245). `mask` is true where a query may see a key: (1 or b, 1, t, s). None is
    causal order, for t = s, or for one query, which sees all keys; a `ValueError` for None and any other t
    and s. A module of its own, without parameters, so that a hook can see q, k and v.
    """

    scale: float | None = None  # of the scores; None is 1 / sqrt d

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        g, r = k.shape[1], q.shape[1] // k.shape[1]
        causal = mask is None and q.shape[2] > 1
        if causal and q.shape[2] != k.shape[2]:
            raise ValueError(
                f"{q.shape[2]} queries over {k.shape[2]} keys need a mask (b, 1, t, s)"
            )
        # Key/value heads join the batch axis, and their r queries read them without a copy. Every kernel
        # takes that in memory linear in s, while torch's enable_gqa can fall back to a quadratic one.
        q = rearrange(q, "b (g r) t d -> (b g) r t d", r=r)
        k = rearrange(k, "b g s d -> (b g) 1 s d").expand(-1, r, -1, -1)
        v = rearrange(v, "b g s d -> (b g) 1 s d").expand(-1, r, -1, -1)
        if mask is not None and mask.shape[0] > 1:
            mask = repeat(mask, "b 1 t s -> (b g) 1 t s", g=g)
        heads = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale
        )
        return rearrange(heads, "(b g) r t d -> b (g r) t d", g=g)


class Attention(nn.Module):
    """Causal self-attention with rotary positions: (b, t, m) -> (b, t, m), a delta for the stream.

    Qwen3 has two more norms here, over d, on every query and key before rotation (QK-norm): then the scores
    do not grow with the magnitude of q and k either.
    """

    def __init__(self, config: LlamaConfig, norm: type[nn.Module]) -> None:
        super().__init__()
        m, d = config.hidden_size, config.head_dim
        self.head_dim = d
        self.q_proj = nn.Linear(m, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(m, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(m, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, m, bias=False)
        self.q_norm = norm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = norm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.attend = Attend()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: BlockCache | None
    ) -> Tensor:
        # Only d is fixed; h and g follow from the tensors: a rank with some of the heads can run this.
        q = rearrange(self.q_proj(x), "b t (h d) -> b h t d", d=self.head_dim)
        k = rearrange(self.k_proj(x), "b t (g d) -> b g t d", d=self.head_dim)
        v = rearrange(self.v_proj(x), "b t (g d) -> b g t d", d=self.head_dim)
        q = self.rotate(self.q_norm(q), cos, sin)
        k = self.rotate(self.k_norm(k), cos, sin)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.o_proj(rearrange(self.attend(q, k, v, mask), "b h t d -> b t (h d)"))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(x, cos, sin)


class SwiGLU(nn.Module):
    """Gated feed-forward network, (b, t, m) -> (b, t, m) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Each sublayer reads the stream x (b, t, m) through its own norm, and the block adds its delta."""

    def __init__(self, config: LlamaConfig, norm: type[nn.Module]) -> None:
        super().__init__()
        self.pre_attention_norm = norm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, norm)
        self.pre_ffn_norm = norm(config.hidden_size, config.rms_norm_eps)
        self.ffn: nn.Module = SwiGLU(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: BlockCache | None
    ) -> Tensor:
        x = x + self.attention(self.pre_attention_norm(x), cos, sin, mask, cache)
        x = x + self.ffn(self.pre_ffn_norm(x))
        return x


class Llama(nn.Module):
    """Tokens (b, t) int64 -> logits (b, t, vocab), in the dtype of the weights.

    `norm` is the class of every norm, made as norm(dim, eps): RMSNorm, or nn.LayerNorm for comparison.
    `block` is the class of every block, made as block(config, norm): placements/ has other families'.
    """

    def __init__(
        self, config: LlamaConfig, norm: type[nn.Module] = RMSNorm, block: type[nn.Module] = Block
    ) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(block(config, norm) for _ in range(config.num_hidden_layers))
        self.final_norm = norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed.weight

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits of the token after each position (b, t, vocab), or with `last_only` (b, 1, vocab).

        `cache` holds the positions before `tokens`, which are appended; a `ValueError` when they do not
        fit. `positions` (t,) or (b, t) and `mask` (t, s), (b, t, s) or (b, 1, t, s), true where a query may
        see a key, take the place of counting on from the cache in causal order: a left-padded batch needs
        both.
        """
        require_inputs(tokens, positions, mask)
        t = tokens.shape[1]
        past = 0 if cache is None else cache.require(len(tokens), t, self.embed.weight.dtype)
        self.config.require_in_window(past + t)
        if positions is None:
            positions = torch.arange(past, past + t, dtype=torch.long, device=tokens.device)
        if mask is None:
            mask = causal_mask(t, past, tokens.device)
        elif mask.dim() < 4:
            mask = mask.unsqueeze(-3)
        x = self.through_blocks(tokens, positions, mask, cache)
        if cache is not None:
            cache.length += t
        return self.lm_head(self.final_norm(x[:, -1:] if last_only else x))

    def through_blocks(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        """The residual stream behind the last block (b, t, m): all that the final norm reads.

        Other families override this, `embedding`, `angles` or `Attention.rotate`.
        """
        x = self.embedding(tokens, positions)
        cos, sin = self.angles(positions, x.dtype)
        for n, block in enumerate(self.blocks):
            x = block(x, cos, sin, mask, None if cache is None else cache[n])
        return x

    def embedding(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embed(tokens)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return cos_sin(self.config.rope, self.config.head_dim, positions, dtype)
