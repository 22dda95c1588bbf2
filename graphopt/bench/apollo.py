"""APOLLO's optimizer (Zhu et al., arXiv 2412.05270), for comparison: learning rates per channel, from a random projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ApolloAdamW(torch.optim.Optimizer):
    """AdamW whose moments of matrices are (r x n): of R = PG, with P (r x m) random, drawn anew every `every` steps.

    G itself is applied, each channel j times s_j = |R~_j| / |R_j|, where R~ is Adam's direction for R (Algorithm 1). A step's
    norm may grow by 1 % over the step before. Other parameters get ordinary AdamW. Defaults are those of apollo-torch.
    """

    def __init__(self, params: Any, lr: float = 1e-3, rank: int = 16, every: int = 200, scale: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6})
        self.rank, self.every, self.scale = rank, every, scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, group)

    def _step(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        step = state["step"] = state.get("step", 0) + 1
        matrix = p.dim() == 2 and min(p.shape) > self.rank
        wide = matrix and p.shape[0] <= p.shape[1]
        projected = gradient
        if matrix:
            if (step - 1) % self.every == 0:
                size = min(p.shape)
                state["projector"] = torch.randn(self.rank, size, dtype=p.dtype, device=p.device) / self.rank**0.5
            projected = state["projector"] @ (gradient if wide else gradient.t())
        if step == 1:
            state["first"], state["second"] = torch.zeros_like(projected), torch.zeros_like(projected)
        betas = group["betas"]
        state["first"].lerp_(projected, 1 - betas[0])
        state["second"].mul_(betas[1]).addcmul_(projected, projected, value=1 - betas[1])
        first, second = state["first"] / (1 - betas[0] ** step), state["second"] / (1 - betas[1] ** step)
        direction = first / second.sqrt().add_(group["eps"])
        if matrix:
            factor = direction.norm(dim=0) / projected.norm(dim=0).add_(1e-8)
            direction = gradient * (factor if wide else factor[:, None]) * self.scale
            norm = float(direction.norm())
            most = 1.01 * state.get("norm", norm)
            state["norm"] = min(norm, most)
            direction.mul_(state["norm"] / max(norm, 1e-12))
        p.add_(direction, alpha=-group["lr"])
