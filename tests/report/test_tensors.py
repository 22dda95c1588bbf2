"""Every parameter has a row that says what its gradient costs, and why it is trained or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphopt.passes import GreenTrainer

import graphopt
from graphopt.analysis.flops import flop_profile
from graphopt.report.summary import Report
from graphopt.report.tensors import TensorRow, counted
from tests import zoo


def report_of(name: str, flops: float | None, *passes: object, **options: object) -> tuple[graphopt.OptimizedModule, Report]:
    model, inputs = zoo.make(name)
    opt = graphopt.optimize(model, inputs, flops, passes or "auto", "aot_eager", **options)  # type: ignore[arg-type]
    return opt, opt.report


def rows_of(report: Report) -> dict[str, TensorRow]:
    return {row.name: row for row in report.tensors}


@pytest.mark.parametrize(("name", "flops"), [("mlp", 0.6), ("bert", 0.5), ("bert", None), ("cnn", 0.8)])
def test_rows_are_the_models_parameters_with_their_costs(name: str, flops: float | None) -> None:
    opt, report = report_of(name, flops)
    rows = rows_of(report)
    assert set(rows) == {p.name for p in opt.graph.parameters}
    assert {n for n, row in rows.items() if row.trained} == opt.selected == set(report.selected)
    for tensor in opt.flops.tensors:
        row = rows[tensor.name]
        assert row.shape == tuple(tensor.shape)
        assert (row.weight_grad_flops, row.input_grad_flops) == (tensor.weight_grad_flops, tensor.input_grad_flops)
    before = opt.flops
    if {"dead_rows", "greentrainer"} <= set(report.passes):  # what dead rows save is saved whatever is selected
        before = flop_profile(replace(opt.plan, passes=opt.plan.passes[:1], train=None).rewrite(opt.graph)[0])
    for name, row in rows.items():
        with_it, without = before.cost(opt.selected | {name}), before.cost(opt.selected - {name})
        assert row.extra == pytest.approx((with_it - without) / opt.flops.step)
    assert sum(counted(report.tensors).values()) == len(rows)


def test_values_are_parts_of_everythings() -> None:
    _, report = report_of("mlp", 0.6)
    assert report.selection is not None
    assert sum(row.value or 0.0 for row in report.tensors) == pytest.approx(1.0)
    assert sum(row.value or 0.0 for row in report.tensors if row.trained) == pytest.approx(report.selection.value)
    assert max(row.importance or 0.0 for row in report.tensors) == 1.0


def test_a_tensor_that_no_budget_so_small_reaches_is_told_from_one_that_does_not_fit() -> None:
    opt, report = report_of("mlp", 0.45)
    left = 0.45 - report.flops_ratio
    seen = set()
    for row in report.tensors:
        seen.add(row.status)
        alone = (report.forward_flops + opt.flops.cost([row.name])) / report.full_step_flops
        if row.status == "out of reach":
            assert alone > 0.45
            assert f"{100 * alone:.1f} %" in row.why
        elif row.status == "does not fit":
            assert alone <= 0.45
            assert row.extra > left
        else:
            assert row.status in ("trained", "left out")
    assert {"trained", "out of reach"} <= seen


def test_frozen_unused_and_given_tensors_are_told_apart() -> None:
    model, inputs = zoo.make("mlp")
    model.first.weight.requires_grad = False
    opt = graphopt.optimize(model, inputs, passes=[GreenTrainer(train=("third.bias",))], backend="aot_eager")
    rows = rows_of(opt.report)
    assert rows["first.weight"].status == "frozen"
    assert rows["third.bias"].status == "trained"
    assert rows["third.bias"].why == "given to be trained"
    assert rows["second.weight"].status == "not given"


def test_what_the_optimizer_does_not_hold_is_worth_nothing() -> None:
    model, inputs = zoo.make("mlp")
    optimizer = torch.optim.SGD([model.third.weight, model.third.bias], lr=0.1)
    opt = graphopt.optimize(model, inputs, 0.6, backend="aot_eager", optimizer=optimizer)
    rows = rows_of(opt.report)
    assert rows["second.weight"].status == "worth nothing"
    assert rows["second.weight"].importance == 0.0


def test_rows_follow_the_batch_of_the_report() -> None:
    model, inputs = zoo.make("mlp", 4)
    opt = graphopt.optimize(model, inputs, 0.6, backend="aot_eager")
    before = rows_of(opt.report)
    larger = tuple(torch.cat([tensor, tensor]) for tensor in inputs)
    opt(*larger).backward()
    after = rows_of(opt.report)
    assert opt.report.batch_size in (4, 8)
    factor = opt.report.batch_size / 4
    assert all(after[n].weight_grad_flops == factor * row.weight_grad_flops for n, row in before.items())
    assert {n: row.status for n, row in after.items()} == {n: row.status for n, row in before.items()}
