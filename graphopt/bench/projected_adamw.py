"""Optimizers whose states of matrices are those of projected gradients, for comparison: GaLore and APOLLO."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor


class ProjectedAdamW(torch.optim.Optimizer):
    """AdamW whose moments of matrices are (r x n): of R = PG, P (r x m) found anew every `every` steps.

    Matrices that are taller than wide are projected from the right instead. Other parameters get ordinary AdamW. With u Adam's
    direction for R, a matrix moves along

        GaLore (Zhao et al., 2024): scale x P'u, with P the left singular vectors of G
        APOLLO (Zhu et al., arXiv 2412.05270, Algorithm 1): scale x G, channel j times |u_j| / |R_j|, with P random; the norm
            may grow by 1 % over the step before

    Defaults are those of galore-torch and apollo-torch.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, rank: int = 16, every: int = 200, scale: float = 0.25, channels: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6})
        self.rank, self.every, self.scale, self.channels = rank, every, scale, channels

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    matrix = p.dim() == 2 and min(p.shape) > self.rank
                    wide = p.dim() != 2 or p.shape[0] <= p.shape[1]
                    direction = self._direction(p, p.grad if wide else p.grad.t(), matrix, group)
                    p.add_(direction if wide else direction.t(), alpha=-group["lr"])

    def _direction(self, p: Tensor, gradient: Tensor, matrix: bool, group: dict[str, Any]) -> Tensor:
        """Of a gradient that is no taller than wide."""
        state = self.state[p]
        step = state["step"] = state.get("step", 0) + 1
        if matrix and (step - 1) % self.every == 0:
            if self.channels:
                random = torch.randn(self.rank, gradient.shape[0], dtype=p.dtype, device=p.device)
                state["projector"] = random / self.rank**0.5
            else:
                state["projector"] = torch.linalg.svd(gradient, full_matrices=False)[0][:, : self.rank].t().contiguous()
        projected = state["projector"] @ gradient if matrix else gradient
        if step == 1:
            state["first"], state["second"] = torch.zeros_like(projected), torch.zeros_like(projected)
        betas = group["betas"]
        state["first"].lerp_(projected, 1 - betas[0])
        state["second"].mul_(betas[1]).addcmul_(projected, projected, value=1 - betas[1])
        root = (state["second"] / (1 - betas[1] ** step)).sqrt_().add_(group["eps"])
        direction = state["first"] / (1 - betas[0] ** step) / root
        if not matrix:
            return direction
        if not self.channels:
            return self.scale * (state["projector"].t() @ direction)
        scaled = self.scale * gradient * (direction.norm(dim=0) / projected.norm(dim=0).add_(1e-8))
        norm = float(scaled.norm())
        before = state.get("norm", norm)
        state["norm"] = min(norm, 1.01 * before)
        return scaled.mul_(state["norm"] / max(norm, 1e-12))


GaloreAdamW = partial(ProjectedAdamW, scale=0.25)
ApolloAdamW = partial(ProjectedAdamW, scale=1.0, channels=True)
