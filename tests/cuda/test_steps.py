"""Steps compiled by Inductor on a GPU compute what eager mode does there, in every family and under every kind of plan."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphopt.passes import DeadRows, GreenTrainer, LinearCrossEntropy, Lsp, Pass, RunLora, Vcas
from torch import Tensor, nn

import graphopt
from graphopt.ops.sparse import combine_rows
from graphopt.testing import check_pass
from tests import zoo
from tests.ops.test_sparse import DTYPES, dense, operands

GPU = torch.device("cuda")
STEPS = 6


def on_gpu(name: str, batch: int = 8) -> tuple[nn.Module, Any]:
    model, inputs = zoo.make(name, batch)
    return model.to(GPU), torch.utils._pytree.tree_map(lambda t: t.to(GPU), inputs)


def gradients(step: Callable[..., Any], model: nn.Module, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients by parameter, which are taken away."""
    loss = zoo.loss_of(zoo.call(step, inputs))
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), found


@pytest.mark.parametrize("name", sorted(zoo.FACTORIES))
@pytest.mark.parametrize("budget", [None, 0.75])
def test_gradients_are_those_of_eager_mode(name: str, budget: float | None) -> None:
    model, inputs = on_gpu(name)
    reference = copy.deepcopy(model)
    opt = graphopt.optimize(model, inputs, budget=budget)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    for batch in (8, 8, 5, 8, 5, 8):
        part = zoo.rows(inputs, batch)
        reference.load_state_dict(model.state_dict())
        loss, ours = gradients(opt, model, part)
        expected, theirs = gradients(reference, reference, part)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
        assert set(ours) == set(theirs) - set(opt.report.cut)
        largest = max(float(g.abs().max()) for g in theirs.values())
        for parameter, gradient in ours.items():
            assert float((gradient - theirs[parameter]).abs().max()) <= 1e-4 * largest, parameter
            model.get_parameter(parameter).grad = gradient
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", sorted(zoo.FACTORIES))
def test_under_autocast_gradients_are_as_near_to_float32_as_eager_modes(name: str) -> None:
    model, inputs = on_gpu(name)
    _, exact = gradients(model, model, inputs)
    with torch.autocast("cuda", torch.bfloat16):
        _, eager = gradients(model, model, inputs)
        opt = graphopt.optimize(model, inputs)
        for _ in range(STEPS):
            _, ours = gradients(opt, model, inputs)
    assert set(ours) == set(exact)
    error, of_eager = (sum(float((g[n] - exact[n]).square().sum()) for n in exact) ** 0.5 for g in (ours, eager))
    assert error <= 1.5 * of_eager


CONTRACTS = [
    (GreenTrainer(), "bert"),
    (RunLora(), "lora"),
    (DeadRows(), "bert"),
    (LinearCrossEntropy(), "llama"),  # its loss is in float32 whatever the model is in
    (Lsp(4, 2, criterion="flops"), "llama"),
    (Vcas(keep_rows=0.5), "gpt2"),
]


@pytest.mark.parametrize(("rewrite", "name"), CONTRACTS, ids=[rewrite.name for rewrite, _ in CONTRACTS])
def test_every_pass_keeps_its_contract(rewrite: Pass, name: str) -> None:
    model, inputs = on_gpu(name, batch=4)
    dtypes = (torch.float32,) if isinstance(rewrite, LinearCrossEntropy) else (torch.float64, torch.float32)
    assert len(check_pass(rewrite, model, inputs, dtypes=dtypes)) == len(dtypes)


@pytest.mark.parametrize("name", ["mlp", "bert", "llama", "vit", "t5-tied"])
def test_a_step_never_waits_for_the_gpu(name: str) -> None:
    model, inputs = on_gpu(name)
    opt = graphopt.optimize(model, inputs, budget=0.7)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    for step in range(STEPS):
        with no_waiting() if step >= STEPS - 2 else contextlib.nullcontext():
            zoo.loss_of(zoo.call(opt, inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def trained(schedule: str) -> dict[str, Tensor]:
    model, inputs = on_gpu("llama")
    rewrite = Lsp(4, 2, criterion="flops", schedule=schedule, check_every=3)
    opt = graphopt.optimize(model, inputs, passes=[rewrite])
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=1e-3)
    for _ in range(STEPS):
        zoo.loss_of(zoo.call(opt, inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in opt.state_dict().items()}


def test_schedules_that_overlap_copies_train_as_the_sequential_one() -> None:
    expected = trained("sequential")
    for name, value in trained("layerwise").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_the_triton_kernel_sums_the_rows() -> None:
    for dtype in DTYPES:
        for shape in ((8, 600, 5, 4), (3, 1, 2, 1), (4, 0, 3, 2)):
            table, indices, weights = (t.to(GPU) for t in operands(*shape, dtype))
            for layout in (table, table.t().contiguous().t()):
                found = combine_rows(layout, indices, weights)
                assert found.dtype == dtype
                torch.testing.assert_close(found.double(), dense(table, indices, weights), rtol=2e-2, atol=2e-2)
