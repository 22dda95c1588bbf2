"""Trade-offs: no plan is worse than another in everything, and each is what its rewritten graph says."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch

from graphopt.analysis.flops import flop_profile
from graphopt.api import pareto
from graphopt.capture import capture
from graphopt.planner import solver
from graphopt.planner.costs import backward_costs, smallest_ratio
from graphopt.report.costs import plot_points
from tests.planner.tower import Tower


def test_points_trade_flops_memory_and_importance(tmp_path: Path) -> None:
    torch.manual_seed(0)
    steps: list[int] = []
    with mock.patch("graphopt.planner.pareto.solve", wraps=solver.solve) as solve:
        points = pareto(Tower(3, 48, 4), (torch.randn(256, 48),), advance=lambda: steps.append(1))
    assert len(steps) == 36
    costs = backward_costs(flop_profile(capture(Tower(3, 48, 4), (torch.randn(256, 48),))))
    asked = [call.args[1] for call in solve.call_args_list if len(call.args) > 1]
    assert min(asked) == int(smallest_ratio(costs) * costs.step_flops) + 1  # the cheapest plan is among those looked for
    assert len(points) >= 5
    assert max(p.importance for p in points) == 1.0
    for p in points:
        assert p.trained >= 1
        assert not any(
            q.flops_ratio <= p.flops_ratio and q.peak_bytes <= p.peak_bytes and q.importance >= p.importance and q != p
            for q in points
        )
    exact = [p for p in points if p.importance == 1.0]
    assert any(p.recomputed and p.flops_ratio > 1 for p in exact)
    assert min(p.peak_bytes for p in points) < 0.7 * min(p.peak_bytes for p in exact)
    plot_points(points, tmp_path / "points.png")
    assert (tmp_path / "points.png").stat().st_size > 1000
