"""The Muon optimizer for the matrices of a decoder."""

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal: it moves all directions of a matrix equally far.

    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; the factor 0.2 sqrt(max(n, m))
    gives it the RMS of an AdamW update, Liu et al. 2025, arXiv:2502.16982.) torch.optim.Muon always
    orthogonalises in bfloat16; this one does it in the dtype `products`.
    """

    def __init__(
        self, params: list[nn.Parameter], lr: float, weight_decay: float, products: torch.dtype
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})
        self.products = products

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(average, group["momentum"]), self.products)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


def orthogonalise(matrix: Tensor, products: torch.dtype) -> Tensor:
    """About U V^T of the singular value decomposition U S V^T: singular values from 0.7 to 1.2.

    Five steps of Newton-Schulz; the coefficients are Jordan's, chosen for speed and not precision.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = (x / (x.norm() + 1e-7)).to(products)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)
