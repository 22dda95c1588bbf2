"""What a report says of a selection: the rule, simple rules beside it, and which budget would buy more."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer

import graphopt
from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.api import worth
from graphopt.planner.costs import backward_costs
from graphopt.planner.flops_limit import default_limit
from graphopt.planner.guidance import Worth
from graphopt.planner.simple_rules import SIMPLE_RULES
from graphopt.report.selection import SelectionSummary, selection_lines
from graphopt.report.summary import Report
from tests import zoo

DEFAULT, BY_CAPACITY = GreenTrainer(), GreenTrainer(rule="capacity")
PUBLISHED = GreenTrainer(rule="greentrainer")


def report_of(name: str, flops: float | None, *passes: Any) -> Report:
    model, inputs = zoo.make(name)
    return graphopt.optimize(model, inputs, flops, passes or "auto", "aot_eager").report


def summary_of(name: str, flops: float, *passes: Any) -> SelectionSummary:
    summary = report_of(name, flops, *passes).selection
    assert summary is not None
    return summary


@pytest.mark.parametrize("flops", [0.45, 0.5, 0.6, 0.75, 0.9])
@pytest.mark.parametrize("rule", [DEFAULT, BY_CAPACITY, PUBLISHED])
def test_no_simple_rule_is_worth_more_than_the_selection(flops: float, rule: GreenTrainer) -> None:
    summary = summary_of("mlp", flops, rule)
    assert 0 < summary.value <= 1
    assert set(summary.alternatives) == set(SIMPLE_RULES)
    for name, value in summary.alternatives.items():
        assert 0 <= value <= summary.value + 1e-9, name


def test_a_transformers_selection_is_worth_more_than_simple_rules() -> None:
    report = report_of("bert", 0.5)
    assert report.selection is not None
    assert max(report.selection.alternatives.values()) <= report.selection.value < 1
    assert report.selection.rule == report.importance


def test_values_are_parts_of_everythings() -> None:
    model, inputs = zoo.make("mlp")
    opt = graphopt.optimize(model, inputs, 0.6, backend="aot_eager")
    profile = graphopt.analyze(model, inputs).flops
    assert isinstance(profile, FlopProfile)
    costs, shapes = backward_costs(profile), {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert opt.plan.importance is not None
    values = opt.plan.importance.values
    summary, total = opt.report.selection, sum(values.values())
    assert summary is not None
    assert summary.value == pytest.approx(sum(values[name] for name in opt.selected) / total)
    for name, rule in SIMPLE_RULES.items():
        chosen = [costs.names[k] for k in rule(costs, shapes, costs.affordable(0.6))]
        assert summary.alternatives[name] == pytest.approx(sum(values[n] for n in chosen) / total)


@pytest.mark.parametrize(("name", "flops"), [("mlp", 0.4), ("mlp", 0.5), ("bert", 0.5)])
def test_everything_includes_what_the_budget_cannot_reach(name: str, flops: float) -> None:
    model, inputs = zoo.make(name)
    there = next(w for w in worth(graphopt.analyze(model, inputs).graph) if math.isclose(w.flops, flops))
    assert summary_of(name, flops, "dead_rows", BY_CAPACITY).value == pytest.approx(there.value, rel=0.02)


def test_simple_rules_may_spend_what_exact_passes_save_as_the_selection_does() -> None:
    """BERT's pooler reads one row of each sequence: full training takes less than the graph as captured."""
    model, inputs = zoo.make("bert")
    opt = graphopt.optimize(model, inputs, 0.6, backend="aot_eager")
    assert "dead_rows" in opt.report.passes
    assert opt.report.selection is not None
    assert opt.plan.importance is not None
    values = opt.plan.importance.values
    graph = graphopt.analyze(model, inputs).graph
    limit = default_limit(graph, flop_profile(graph), 0.6)
    shapes = {p.name: tuple(p.shape) for p in graph.parameters}
    for name, rule in SIMPLE_RULES.items():
        chosen = [limit.costs.names[k] for k in rule(limit.costs, shapes, limit.most - limit.profile.forward)]
        value = sum(values[n] for n in chosen) / sum(values.values())
        assert opt.report.selection.alternatives[name] == pytest.approx(value), name
        trained = graphopt.optimize(model, inputs, passes=["dead_rows", GreenTrainer(train=chosen)], backend="aot_eager")
        assert 0.58 < trained.report.flops_ratio <= 0.6, name


def test_the_rule_is_named() -> None:
    assert "output layer" in summary_of("mlp", 0.6).rule
    assert "the model's own loss" in summary_of("mlp", 0.6, PUBLISHED).rule


def test_suggestions_are_above_the_budget_and_worth_more() -> None:
    found = {flops: summary_of("mlp", flops) for flops in (0.4, 0.45, 0.5, 0.55, 0.6)}
    for flops, summary in found.items():
        if summary.next_better is not None:
            assert summary.next_better.flops > flops
            assert summary.next_better.value > summary.value
    assert all(0 < c <= 1 for s in found.values() for c in s.cliffs)


def test_the_report_is_plain_values_and_comes_back_from_json() -> None:
    report = report_of("mlp", 0.5)
    summary = report.selection
    assert summary is not None
    read = json.loads(json.dumps(report.to_dict()))["selection"]
    assert read["rule"] == summary.rule
    assert read["value"] == summary.value
    assert read["alternatives"] == summary.alternatives
    assert tuple(read["cliffs"]) == summary.cliffs
    assert (None if read["next_better"] is None else Worth(**read["next_better"])) == summary.next_better


def test_the_lines_are_printed() -> None:
    report = report_of("mlp", 0.5)
    assert report.selection is not None
    lines, text = str(report).splitlines(), " ".join(str(report).split())
    assert all(" ".join(line.split()) in text for line in selection_lines(report.selection))
    (value,) = (line for line in lines if line.startswith("  value"))
    assert f"{100 * report.selection.value:.1f} % of everything's" in value
    assert all(f"{name} {100 * part:.1f} %" in text for name, part in report.selection.alternatives.items())
    assert not [line for line in lines if line.startswith("importance")]


def test_lines_about_cliffs_and_suggestions_are_there_only_if_there_are_any() -> None:
    summary = SelectionSummary("a rule", 0.5, {"topmost": 0.25, "random": 0.125}, (), None)
    assert selection_lines(summary) == [
        "selected by      a rule",
        "  value          50.0 % of everything's; topmost 25.0 %, random 12.5 %",
    ]
    full = SelectionSummary("a rule", 0.5, {}, (0.42, 0.615), Worth(0.42, 0.75, 3))
    assert selection_lines(full)[2:] == [
        "  cliffs         a large part no longer fits below flops=0.42, 0.61",
        "  next better    flops=0.42 would train 75.0 %",
    ]


@pytest.mark.parametrize(("flops", "passes"), [(None, ()), (1.0, ()), (None, (GreenTrainer(train=("third.bias",)),))])
def test_without_a_selection_there_is_nothing_to_say(flops: float | None, passes: tuple[Any, ...]) -> None:
    report = report_of("mlp", flops, *passes)
    assert report.selection is None
    assert json.loads(json.dumps(report.to_dict()))["selection"] is None
    assert "selected by" not in str(report)


def test_a_report_after_a_step_says_the_same() -> None:
    model, inputs = zoo.make("mlp")
    opt = graphopt.optimize(model, inputs, 0.5, backend="aot_eager")
    before = opt.report.selection
    opt(*inputs).backward()
    assert opt.report.selection == before
    larger = tuple(torch.cat([tensor, tensor]) for tensor in inputs)
    opt(*larger).backward()
    assert opt.report.selection == before
