"""The engine of the benchmarks of single steps: variants train alike, and rows tell how they differ."""

from __future__ import annotations

import io
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer, Lsp
from graphopt.passes.lsp.optimizer import SubspaceOptimizer
from rich.console import Console

import graphopt
from graphopt.bench import exact, greentrainer, lsp, steps
from graphopt.bench.peak import held_bytes
from graphopt.bench.step_models import Made
from graphopt.bench.steps import COMPILED, Case, Variant, eager, fused_adamw, optimized, prepare
from graphopt.bench.timing import WARMUP
from tests import zoo

COMPRESSED = Variant(optimized(passes=[Lsp(subspace=4, nonzeros=1)], backend="aot_eager"))


def compiled(model: torch.nn.Module, *_: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def bert() -> Made:
    return zoo.make("bert", 4, layers=1)


def linears() -> Made:
    return lsp.Linears(32, 2), {"x": torch.randn(8, 32)}


def weights(ready: steps.Ready) -> list[torch.Tensor]:
    return [p.detach() for p in ready.model.parameters()]


def test_rows_compare_every_variant_with_the_reference() -> None:
    variants = {COMPILED: Variant(compiled), "half": Variant(optimized(budget=0.6, backend="aot_eager"))}

    def selected(kind: str, ready: Mapping[str, steps.Ready]) -> steps.Row:
        opt = ready[kind].opt
        return {"selected": None if opt is None else len(opt.selected)}

    case = Case(lambda: zoo.make("gpt2", 4, layers=1), variants, phases=True, more=selected)
    results = steps.run({"bert": case}, 3, Console(quiet=True), batch=4)
    theirs, half = results["rows"]
    assert (theirs["model"], theirs["variant"], half["variant"], results["batch"]) == ("bert", COMPILED, "half", 4)
    assert [theirs[ratio] for ratio in steps.RATIOS] == [1.0] * len(steps.RATIOS)
    assert theirs["time_per_flops_saved"] is None
    assert half["time_ratio"] == half["seconds"] / theirs["seconds"]
    assert half["flops_ratio"] <= 0.6
    assert half["time_per_flops_saved"] == (1 - half["time_ratio"]) / (1 - half["flops_ratio"])
    assert half["peak_ratio"] == half["peak"] / theirs["peak"] > 0
    assert half["selected"]
    for row in (theirs, half):
        parts = [row[f"{phase}_seconds"] for phase in ("forward", "backward", "optimizer")]
        assert 0 < max(parts) < row["forward_backward_seconds"] + row["optimizer_seconds"]


@pytest.mark.parametrize("optimizer", [fused_adamw, None])
def test_variants_make_the_same_steps_from_the_same_weights(optimizer: Any) -> None:
    ready = [
        prepare(Case(linears), Variant(call, optimizer), "cpu") for call in (eager, compiled, optimized(backend="aot_eager"))
    ]
    torch.manual_seed(0)
    start = [p.detach() for p in linears()[0].parameters()]
    for own in ready:
        for found, wanted, before in zip(weights(own), weights(ready[0]), start, strict=True):
            torch.testing.assert_close(found, wanted)
            assert torch.equal(found, before) == (optimizer is None)
        assert all(p.grad is None for p in own.model.parameters())


def test_steps_are_as_many_as_warm_up_and_one_whose_memory_is_measured() -> None:
    made: list[int] = []
    prepare(Case(linears), Variant(lambda model, *_: lambda x: (made.append(1), model(x))[1]), "cpu")
    assert len(made) == WARMUP + 1


@pytest.mark.parametrize("variant", [Variant(eager), COMPRESSED])
def test_whole_peaks_have_in_them_what_exists_for_the_whole_step(variant: Variant) -> None:
    apart, whole = (prepare(Case(linears, whole=whole), variant, "cpu") for whole in (False, True))
    assert whole.held == apart.held == held_bytes(whole.model, whole.inputs, whole.optimizer)
    assert whole.peak - apart.peak == whole.held


class Returning(torch.nn.Module):
    """Returns a large tensor beside its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1000, 1000, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(loss=self.layer(x).square().mean(), logits=torch.zeros(1_000_000))


@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_model_returns_beside_its_loss_lives_as_long_as_a_case_says(keeps: bool) -> None:
    """The weight's gradient is as large as the logits."""
    case = Case(lambda: (Returning(), {"x": torch.ones(1, 1000)}), keeps=keeps)
    peak = prepare(case, Variant(eager, None), "cpu").peak
    assert peak == pytest.approx(8e6 if keeps else 4e6, rel=0.02)


def test_held_bytes_are_those_of_weights_batch_and_states_once() -> None:
    model, inputs = linears()
    size = sum(p.nbytes for p in model.parameters())
    assert held_bytes(model, {"x": inputs["x"], "same": inputs["x"]}, None) == size + inputs["x"].nbytes
    compressed = prepare(Case(linears), COMPRESSED, "cpu")
    assert isinstance(compressed.optimizer, SubspaceOptimizer)
    moments = sum(m.first.nbytes + m.second.nbytes for m in compressed.optimizer.moments.values())
    assert compressed.held >= size + inputs["x"].nbytes + moments > size + inputs["x"].nbytes


@pytest.mark.parametrize("variant", [Variant(eager), COMPRESSED])
def test_every_adamw_is_fused(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class AdamW(torch.optim.AdamW):
        def __init__(self, *args: Any, **options: Any) -> None:
            asked.append(options.get("fused"))
            super().__init__(*args, **options)

    monkeypatch.setattr(torch.optim, "AdamW", AdamW)
    prepare(Case(linears), variant, "cpu")
    assert asked == [True] * len(asked) != []


def test_benchmarks_of_whole_steps_have_that_adamw_on_all_sides() -> None:
    variants = {**exact.VARIANTS, **greentrainer.VARIANTS, **lsp.VARIANTS}
    assert {kind for kind, variant in variants.items() if variant.optimizer is not fused_adamw} == {"GaLore, rank 16"}


def test_a_missing_gradient_is_an_error_of_exact_rewriting(monkeypatch: pytest.MonkeyPatch) -> None:
    real = graphopt.optimize

    def cut(model: torch.nn.Module, inputs: Any, backend: str) -> Any:
        return real(model, inputs, passes=[GreenTrainer(train=("classifier.bias",))], backend=backend)

    assert exact.gradient_error(*bert()) < 1e-12
    monkeypatch.setattr(graphopt, "optimize", cut)
    assert exact.gradient_error(*bert()) > 0.1


def test_a_table_has_no_empty_columns_and_says_what_was_refused() -> None:
    file = io.StringIO()
    rows = [{"model": "a", "variant": "b", "seconds": 0.25, "losses": 3}, {"model": "a", "variant": "c", "refused": "too small"}]
    results = {"torch": "2", "device": "cpu", "repeats": 5, "rows": rows}
    steps.show_rows(results, "nothing", {"losses": steps.number("losses", "d")}, Console(file=file, width=120))
    assert "250.0" in file.getvalue()
    assert "too small" in file.getvalue()
    assert "losses" in file.getvalue()
    assert "FLOPs" not in file.getvalue()
