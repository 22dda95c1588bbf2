"""The model matrix: every property of the foundation, on every family."""

from collections import defaultdict

import pytest
import torch
from graphopt.passes import GreenTrainer
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt.analysis.flop_formulas import ADDED_FORMULAS
from graphopt.analysis.flops import flop_profile
from graphopt.testing import check_pass
from tests import zoo
from tests.long_forms import long

REPEATED = ["bloom", "opt", "t5-untied", "llama"]  # of which "lora" is made
NAMES = [*sorted(set(zoo.FACTORIES) - {*REPEATED}), *long(*REPEATED)]
FEWER = ["mlp", "bert", "cnn", "lora", "lstm", "t5-tied"]
"""One of each kind; what they show of steps that are compiled, the others repeat."""

SIZES = {"mlp": (4, 3, 4), "cnn": (4, 3, 4), "bert": (4, 3, 4)}
"""Batches that come, the smaller one at the end of an epoch; those of other models differ from the example's at once."""

OPTIONS = defaultdict[str, dict[str, int]](dict, bert={"layers": 1})
BUDGETS = {"bert": 0.28, "vit": 0.45}
"""Where 0.7 of the FLOPs train everything: the loss reads few rows of a classifier's last block."""


@pytest.mark.parametrize("name", NAMES)
def test_counted_flops_are_those_of_eager_execution(name: str) -> None:
    flops = flop_profile(zoo.captured(name, **OPTIONS[name]))
    for batch in (4, 6):
        model, inputs = zoo.make(name, batch, **OPTIONS[name])
        # oneDNN would run a recurrent layer as one opaque operator
        with (
            torch.backends.mkldnn.flags(enabled=name != "lstm"),
            FlopCounterMode(display=False, custom_mapping=ADDED_FORMULAS) as counter,
        ):
            zoo.loss_of(zoo.call(model, inputs)).backward()
        assert flops.at(batch).step == counter.get_total_flops()
    assert 0 < sum(t.weight_grad_flops + t.input_grad_flops for t in flops.tensors) <= flops.backward


@pytest.mark.parametrize("name", NAMES)
def test_cut_keeps_selected_gradients_exact_in_both_precisions(name: str) -> None:
    model, inputs = zoo.make(name, batch=4, **OPTIONS[name])
    for check in check_pass(GreenTrainer(), model, inputs, captured=zoo.in_both_precisions(name, **OPTIONS[name])):
        assert check.report.changes.changed
        assert check.report.step_flops_after <= check.report.step_flops_before


@pytest.mark.parametrize("name", [*FEWER, *long(*sorted(set(zoo.FACTORIES) - {*FEWER}))])
def test_optimised_step_trains_only_the_selection_within_budget(name: str) -> None:
    model, inputs = zoo.make(name, batch=4, **OPTIONS[name])
    opt = graphopt.optimize(model, inputs, budget=BUDGETS.get(name, 0.7), backend="aot_eager")
    assert opt.selected < {n for n, _ in model.named_parameters()}
    reference, _ = zoo.make(name, batch=4, **OPTIONS[name])
    formulas = graphopt.analyze(model, inputs).flops
    for batch in SIZES.get(name, (3,)):
        part = zoo.rows(inputs, batch)
        zoo.call(opt, part)  # compiles; tracing on fake tensors would be counted too
        opt.zero_grad(set_to_none=True)
        reference.zero_grad(set_to_none=True)
        reference.load_state_dict(model.state_dict())
        with FlopCounterMode(display=False, custom_mapping=ADDED_FORMULAS) as counter:
            output = zoo.call(opt, part)
            zoo.loss_of(output).backward()
        expected = zoo.call(reference, part)
        zoo.loss_of(expected).backward()
        assert type(output) is type(expected)
        torch.testing.assert_close(zoo.loss_of(output), zoo.loss_of(expected), rtol=1e-5, atol=1e-6)
        gradients = {n: p.grad for n, p in model.named_parameters()}
        assert {n for n, g in gradients.items() if g is not None} == opt.selected
        for parameter_name, parameter in reference.named_parameters():
            if parameter_name in opt.selected:
                torch.testing.assert_close(gradients[parameter_name], parameter.grad, rtol=1e-4, atol=1e-5)
        flops = formulas.at(batch)
        assert opt.last_step is not None
        assert counter.get_total_flops() == flop_profile(opt.last_step.graph).step
        if not {"runlora", "dead_rows"}.intersection(opt.report.sections):
            assert counter.get_total_flops() == flops.forward + flops.cost(opt.selected)
        assert counter.get_total_flops() <= 0.7 * flops.step
