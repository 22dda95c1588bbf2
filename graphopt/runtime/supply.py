"""Where the values come from that passes have a step read beside the model's own, and where those go that it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from graphopt.compat import InputDesc, OutputDesc
from graphopt.errors import PassError
from graphopt.passes.state import State
from graphopt.runtime.uniforms import Uniforms


class Supply:
    """The `Supplier` of an optimised model's steps.

    Attributes:
        uniforms: of inputs of kind "random".
        states: of techniques, by their names; each knows its own inputs and results.
    """

    def __init__(self, uniforms: Uniforms, states: Mapping[str, State]) -> None:
        self.uniforms = uniforms
        self.states = states

    def supply(self, desc: InputDesc, size: Sequence[int], like: Tensor) -> Tensor:
        """See `Supplier`."""
        if desc.kind == "random":
            return self.uniforms.draw(desc.target, size[0], like.device)
        for state in self.states.values():
            value = state.supply(desc, size, like)
            if value is not None:
                return value
        raise _nobody(desc)

    def take(self, desc: InputDesc | OutputDesc, value: Tensor) -> None:
        """See `Supplier`."""
        if not any(state.take(desc, value) for state in self.states.values()):
            raise _nobody(desc)

    def finish(self) -> None:
        """See `Supplier`."""
        for state in self.states.values():
            state.synchronize()


def _nobody(desc: InputDesc | OutputDesc) -> PassError:
    return PassError(
        f"no pass says what the added input or result {desc.target!r} is: give the pass `supply` and `take`, or a state that has "
        "them."
    )
