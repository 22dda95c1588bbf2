"""What to tell of parts of a model that run in eager mode."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from graphopt.graph import TrainingGraph

UNCOMPILED = (
    "a step ran uncompiled: torch.compile compiles nothing here, or has compiled this model too often for what changes from step "
    "to step. TORCH_LOGS=recompiles says what"
)


def left_to_eager_mode(model: nn.Module, graph: TrainingGraph) -> str:
    """What to tell of parameters in no part that torch.compile traces; "" if there are none."""
    known = {p.name for p in graph.parameters}
    others = [name for name, p in model.named_parameters() if p.requires_grad and name not in known]
    if not others:
        return ""
    return (
        f"torch.compile traces no use of {len(others)} parameters for the example batch (the first is {others[0]}). Those that "
        "are used all the same, in eager mode or on a branch that other batches take, are trained, and not planned or counted"
    )


def no_longer_traced(names: Collection[str]) -> str:
    """What to tell of parameters that are in the plan's one graph, and in none of those of a step whose graph breaks."""
    return (
        f"torch.compile breaks the graph of a step, and traces no use of {len(names)} parameters there (the first is "
        f"{min(names)}). Those that are used in eager mode, as where modules have backward hooks, take all FLOPs of their "
        "gradients, whatever the budget. TORCH_LOGS=graph_breaks says where"
    )
