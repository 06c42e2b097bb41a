"""Norms other than model.RMSNorm, made as it is: norm(dim, eps). nn.LayerNorm is one more.

The order of casts is transformers', so that every bit agrees.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .. import model


class LateCastRMSNorm(model.RMSNorm):
    """RMSNorm that multiplies by the weight in float32, then rounds; Llama rounds first (OLMo 2)."""

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed).to(x.dtype)


class OnePlusRMSNorm(model.RMSNorm):
    """RMSNorm with a gain of 1 + weight, in float32, rounded last (Gemma): weight decay pulls it to 1."""

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype)


class BareRMSNorm(nn.Module):
    """RMSNorm without a gain (nanochat)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class AllHeads(LateCastRMSNorm):
    """A norm over all heads at once, of heads already split: (b, h, t, d)."""

    def forward(self, x: Tensor) -> Tensor:
        normed = super().forward(rearrange(x, "b h t d -> b t (h d)"))
        return rearrange(normed, "b t (h d) -> b h t d", d=x.shape[-1])


class BareLayerNorm(nn.Module):
    """LayerNorm without weight and bias, in float32. The eps is no key of the config."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.shape = (dim,)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.shape, eps=1e-5).to(x.dtype)


class GainLayerNorm(nn.Module):
    """LayerNorm with a weight and no bias, operation by operation in float32; `dim` may be (heads, d)."""

    def __init__(self, dim: int | tuple[int, ...], eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 - x32.mean(-1, keepdim=True)
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        gain = self.weight if self.weight.dim() == 1 else self.weight[:, None]  # (h, 1, d)
        return (gain.float() * normed).to(x.dtype)
