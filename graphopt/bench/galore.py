"""GaLore's optimizer (Zhao et al., 2024), for comparison: Adam on P'G with P from a singular value decomposition of G."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class GaloreAdamW(torch.optim.Optimizer):
    """AdamW whose moments of matrices are (r x n): P (m x r) is the left singular vectors of G, found anew every `every` steps.

    Matrices that are taller than wide are projected from the right instead. Other parameters get ordinary AdamW. Defaults are
    those of galore-torch.
    """

    def __init__(self, params: Any, lr: float = 1e-3, rank: int = 16, every: int = 200, scale: float = 0.25) -> None:
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
        if matrix and (step - 1) % self.every == 0:
            left, _, right = torch.linalg.svd(gradient, full_matrices=False)
            state["projector"] = left[:, : self.rank].contiguous() if wide else right[: self.rank].contiguous()
        if matrix:
            gradient = state["projector"].t() @ gradient if wide else gradient @ state["projector"].t()
        if step == 1:
            state["first"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        betas = group["betas"]
        state["first"].lerp_(gradient, 1 - betas[0])
        state["second"].mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        direction = state["first"] / state["second"].sqrt().add_(group["eps"])
        rate = group["lr"] * math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)
        if matrix:
            direction = self.scale * (state["projector"] @ direction if wide else direction @ state["projector"])
        p.add_(direction, alpha=-rate)
