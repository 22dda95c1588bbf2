"""Where the values come from that passes have a step read beside the model's own, and where those go that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from graphopt.compat import InputDesc, OutputDesc
from graphopt.errors import PassError
from graphopt.passes.base import Supplying
from graphopt.passes.lsp.compressor import Part
from graphopt.planner.plan import Plan
from graphopt.runtime.uniforms import Uniforms

if TYPE_CHECKING:
    from graphopt.passes.lsp.subspaces import Subspaces


class Supply:
    """The `Supplier` of an optimised model's steps.

    Attributes:
        subspaces: of compressed gradients, where there are any.
        passes: of the plan in force; those of users may supply values of their own, see `Supplying`.
    """

    def __init__(self, plan: Plan, uniforms: Uniforms) -> None:
        self.uniforms = uniforms
        self.passes = plan.passes
        self.subspaces: Subspaces | None = None

    def supply(self, desc: InputDesc, size: Sequence[int], like: Tensor) -> Tensor:
        """See `Supplier`."""
        if desc.kind == "random":
            return self.uniforms.draw(desc.target, size[0], like.device)
        if self.subspaces is not None and isinstance(desc.target, Part):
            return self.subspaces.projector(desc, like.device)
        return self._owner(desc).supply(desc, size, like)

    def take(self, desc: InputDesc | OutputDesc, value: Tensor) -> None:
        """See `Supplier`."""
        if self.subspaces is not None and desc.kind == "compressed" and desc.target in self.subspaces.weights:
            self.subspaces.add_gradient(desc.target, value)
        else:
            self._owner(desc).take(desc, value)

    def finish(self) -> None:
        """See `Supplier`."""
        if self.subspaces is not None:
            self.subspaces.synchronize()

    def _owner(self, desc: InputDesc | OutputDesc) -> Supplying:
        found = next((p for p in self.passes if isinstance(p, Supplying)), None)
        if found is None:
            raise PassError(f"no pass says what the added input or result {desc.target!r} is: give the pass `supply` and `take`.")
        return found
