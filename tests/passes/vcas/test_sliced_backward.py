"""Attention that draws its dropout by a row's place, as fused kernels of GPUs do: its backward runs on all rows."""

import pytest
import torch
from graphopt.passes import Vcas, run_pass
from graphopt.passes.vcas import ROWS, sliced_backward
from torch import SymInt, fx

from graphopt.calls import as_call
from graphopt.capture import capture_to_run
from graphopt.graph import TrainingGraph
from tests.draws import made
from tests.passes.vcas.test_rewrite import assert_unbiased

aten = torch.ops.aten
FUSED = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention_backwards(graph: TrainingGraph) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.target is FUSED]


@pytest.mark.parametrize(
    ("target", "name", "value", "draws"),
    [
        (aten._scaled_dot_product_efficient_attention_backward.default, "dropout_p", 0.1, True),
        (aten._scaled_dot_product_flash_attention_backward.default, "dropout_p", 0.1, True),
        (aten._scaled_dot_product_cudnn_attention_backward.default, "dropout_p", 0.1, True),
        (aten._scaled_dot_product_flash_attention_backward.default, "dropout_p", 0.0, False),
        (aten._scaled_dot_product_flash_attention_backward.default, "max_q", 8, False),
        (aten._scaled_dot_product_flash_attention.default, "dropout_p", 0.1, False),
        (aten.native_dropout_backward.default, "scale", 0.1, False),
    ],
)
def test_attention_with_dropout_draws_by_place(target: torch._ops.OpOverload, name: str, value: float, draws: bool) -> None:
    names = [argument.name for argument in target._schema.arguments]
    args = tuple(value if argument == name else 0 for argument in names)
    assert sliced_backward.draws_by_place(fx.Graph().call_function(target, args)) is draws


@pytest.mark.parametrize("nested", [False, True])
def test_its_backward_runs_on_all_rows_and_what_is_below_on_the_kept_ones(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_backward, "draws_by_place", lambda node: node.target is FUSED)

    def pick(sites: list[str]) -> dict[str, float]:
        rows = [s for s in sites if s.startswith(ROWS)]
        return {rows[0]: 5 / 6, rows[1]: 0.5} if nested else {rows[0]: 0.5}

    model, inputs = made("bert", 6)
    graph = capture_to_run(model, *as_call(inputs))
    rewritten, report = run_pass(Vcas(), graph, pick([site.name for site in Vcas().applicable(graph)]))
    found = attention_backwards(rewritten)
    assert found
    assert all(isinstance(node.args[0].meta["val"].shape[0], SymInt) for node in found)  # type: ignore[union-attr]
    assert report.step_flops_after < report.step_flops_before
    assert_unbiased("bert", 6, pick)
