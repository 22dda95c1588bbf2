"""When the gradients of a model have been cleared by its own `zero_grad`, which knows of no compressed gradient."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from graphopt.frontend.step import RegionStep


class Cleared:
    """Looks at the gradients of a model's other tensors: those that the step before computes."""

    def __init__(self) -> None:
        self._computed: frozenset[str] | None = None

    def follow(self, step: RegionStep | None) -> None:
        """Note which gradients the step that has just run computes, where all of it was compiled."""
        if step is not None and not step.broken:
            outputs = (desc for graph in step.graphs for desc in graph.outputs)
            self._computed = frozenset(desc.target.target for desc in outputs if desc.kind == "gradient")

    def are(self, others: Mapping[str, Tensor], stepped: bool) -> bool:
        """Whether compressed gradients are to be cleared, too.

        Args:
            others: trained tensors whose gradients are not compressed.
            stepped: the gradients have been used. It is all that there is to go by where every gradient is compressed.
        """
        known = [p for name, p in others.items() if self._computed is None or name in self._computed]
        if not known:
            return stepped
        gradients = sorted((p.grad for p in known if p.grad is not None), key=Tensor.numel)
        return not any(bool(gradient.any()) for gradient in gradients)  # mostly the first one says so
