"""Where the values come from that passes have a step read beside the model's own, and where those go that it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from graphopt.compat import InputDesc, OutputDesc
from graphopt.errors import PassError
from graphopt.passes.state import State
from graphopt.runtime.uniforms import Uniforms


@dataclass(eq=False)
class Supply:
    """Where the values of a model's steps come from, and go to.

    Attributes:
        uniforms: of inputs of kind "random".
        states: of techniques, by their names; each knows its own inputs and results.
    """

    uniforms: Uniforms
    states: Mapping[str, State]

    def supply(self, desc: InputDesc, size: Sequence[int], like: Tensor) -> Tensor:
        """The value of an added input, on the device of `like`."""
        if desc.kind == "random":
            return self.uniforms.draw(desc.target, size[0], like.device)
        for state in self.states.values():
            value = state.supply(desc, size, like)
            if value is not None:
                return value
        raise _nobody(desc)

    def take(self, desc: InputDesc | OutputDesc, value: Tensor) -> None:
        """The gradient of an added input, or a slot's value; the tensor is the taker's own."""
        if not any(state.take(desc, value) for state in self.states.values()):
            raise _nobody(desc)

    def finish(self) -> None:
        """A graph is about to run whose weights are read without a gate: do what is still to be done to them."""
        for state in self.states.values():
            state.synchronize()


def _nobody(desc: InputDesc | OutputDesc) -> PassError:
    return PassError(
        f"no pass says what the added input or result {desc.target!r} is: give the pass `supply` and `take`, or a state that has "
        "them."
    )
