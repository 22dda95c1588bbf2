"""What the inputs and outputs of a joint graph are, in plain types, from AOTAutograd's descriptions of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch._functorch._aot_autograd import descriptors as d

from graphopt.errors import CaptureError


@dataclass(frozen=True)
class InputDesc:
    """What a placeholder of the joint graph is.

    Attributes:
        kind: "parameter" and "buffer" (target: qualified name), "input" (target: index among the flat tensor inputs),
            "tangent" (target: the `OutputDesc` it is the gradient of), "random" (numbers in [0, 1) that a pass draws from;
            target: the seed), "given" (a value that the caller of the graph passes; target: what it is) or "compressed" (the
            variable whose gradient stands for that of a parameter; target: the parameter's name).
        owner: the pass that added it, as `run_pass` notes; "": none, or not known.
    """

    kind: str
    target: Any
    owner: str = field(default="", compare=False, repr=False)


WRITES = ("mutation", "backward mutation")
"""Kinds of outputs that are written back to an input."""

FORWARD = ("mutation", "output", "base")
"""Kinds of outputs that the forward makes."""


@dataclass(frozen=True)
class OutputDesc:
    """What an output of the joint graph is.

    Attributes:
        kind: "output" (target: index among the model's flat outputs), "mutation" or "backward mutation", by the half of the step
            that writes it (target: the mutated `InputDesc`), "base" (target: index of the output that is a view of it),
            "gradient" (target: the `InputDesc`), "slot" (target: the name of a further result of the backward), "part" (target: a
            result of one of several graphs, as text) or "none".
        owner: see `InputDesc`.
    """

    kind: str
    target: Any
    owner: str = field(default="", compare=False, repr=False)


def drop_outputs(module: fx.GraphModule, unwanted: Callable[[Any], bool]) -> None:
    """Have a joint graph return nothing with such a description."""
    output = module.graph.output_node()
    returned: Any = output.args[0]
    kept = [(result, desc) for result, desc in zip(returned, output.meta["desc"], strict=True) if not unwanted(desc)]
    output.args = (tuple(result for result, _ in kept),)
    output.meta["desc"] = type(output.meta["desc"])(desc for _, desc in kept)


def take_meshes_out(module: fx.GraphModule) -> None:
    """Have a joint graph neither take nor return the meshes of DTensors, which are no tensors and which nothing reads."""
    drop_outputs(module, _is_mesh)
    for node in module.graph.find_nodes(op="placeholder"):
        if _is_mesh(node.meta["desc"]) and not node.users:
            module.graph.erase_node(node)
    module.recompile()


def describe_joint(joint: fx.GraphModule, num_forward: int) -> tuple[tuple[InputDesc, ...], tuple[OutputDesc, ...]]:
    """What the inputs and outputs are of a joint graph that AOTAutograd is about to split.

    Inputs that are Dynamo's have its position as target. What is none of a model's own, such as random states and the parts of a
    tensor subclass, keeps torch's description as target.

    Args:
        num_forward: how many outputs are the forward's.
    """
    inputs: list[InputDesc] = []
    for node in joint.graph.find_nodes(op="placeholder"):
        desc = node.meta.get("desc")
        try:
            inputs.append(describe_input(desc))
        except (CaptureError, AttributeError):
            of_result = "tangents" in node.name
            inputs.append(InputDesc("tangent", OutputDesc("none", str(desc))) if of_result else InputDesc("input", str(desc)))
    outputs: list[OutputDesc] = []
    for position, desc in enumerate(joint.graph.output_node().meta["desc"]):
        try:
            outputs.append(OutputDesc("none", None) if desc is None else describe_output(desc))
        except (CaptureError, AttributeError):
            outputs.append(OutputDesc("output" if position < num_forward else "slot", str(desc)))
    return tuple(inputs), tuple(outputs)


_LOCAL = "_local_tensor"
"""What of a DTensor is a tensor: this rank's part. AOTAutograd traces with it; beside it there is the mesh (torch 2.13)."""


def _is_mesh(desc: Any) -> bool:
    """Whether a description is that of what a DTensor has beside its tensor."""
    return isinstance(desc, (d.SubclassGetAttrAOTInput, d.SubclassGetAttrAOTOutput)) and desc.attr == "device_mesh"


def describe_input(desc: Any) -> InputDesc:
    """What an input is, by torch's description.

    Raises:
        CaptureError: it is none of a model's own, or part of a tensor subclass other than DTensor.
    """
    match desc:
        case d.SubclassGetAttrAOTInput(attr=attr) if attr == _LOCAL:
            return describe_input(desc.base)
        case d.ParamAOTInput():
            return InputDesc("parameter", desc.target)
        case d.BufferAOTInput():
            return InputDesc("buffer", desc.target)
        case d.PlainAOTInput():
            return InputDesc("input", desc.idx)
        case d.TangentAOTInput():
            return InputDesc("tangent", describe_output(desc.output))
    raise CaptureError(f"the model takes or makes a kind of tensor that graphopt does not support: {desc.expr()}")


def describe_output(desc: Any) -> OutputDesc:
    """See `describe_input`."""
    match desc:
        case d.SubclassGetAttrAOTOutput(attr=attr) if attr == _LOCAL:
            return describe_output(desc.base)
        case d.PlainAOTOutput():
            return OutputDesc("output", desc.idx)
        case d.InputMutationAOTOutput():
            return OutputDesc("mutation", describe_input(desc.mutated_input))
        case d.IntermediateBaseAOTOutput():
            return OutputDesc("base", describe_output(desc.base_of).target)
        case d.GradAOTOutput():
            return OutputDesc("gradient", describe_input(desc.grad_of))
    raise CaptureError(f"the model returns a kind of tensor that graphopt does not support: {desc.expr()}")
