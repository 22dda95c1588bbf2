"""Cases of `graphopt bench operators`: one operator or module, trained three times on the same inputs, and what differs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.bench.breadth_run import BUDGET, Case, Trained, compare, judged, reference, seed_everything, train
from graphopt.bench.cases import attempt, begin
from graphopt.bench.testing_databases import Call, databases
from graphopt.compat import pytree

STEPS: Mapping[str, Mapping[str, Any]] = {"exact": {"passes": []}, "budget": {"budget": BUDGET}}
"""What `optimize` is asked for, by name."""

VERDICTS = ("ok", "wrong", "error", "ours", "torch's", "eager's")
"""As eager autograd; another loss or gradient; an error that is not meant for users; graphopt refuses what torch.compile trains;
torch.compile itself fails; eager autograd fails or does not repeat itself, which does not count."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative differences of losses and gradients that count as none."""

LEFT_OUT: Mapping[str, str] = {
    "operator/view_as_real": "complex numbers alone",
    "operator/istft": "complex numbers alone",
    "operator/imag": "complex numbers alone",
    "operator/torch.ops.aten._flash_attention_forward": "CUDA alone",
    "operator/torch.ops.aten._efficient_attention_forward": "CUDA alone",
    "operator/nn.functional.batch_norm.without_cudnn": "CUDA alone",
    "operator/nn.functional.one_hot": "no backward",
}
"""Cases that are not tried, with the reason. Randomised operators are tried: each run draws from the same seed."""

WIDTH = 128
"""Of the layers that a budget chooses among; they take most FLOPs of a case, so that each budget can be met."""


class Trainable(nn.Module):
    """A case as a model: the results of its call, as a number, and the loss of two layers.

    Tensors of the call that require a gradient are parameters, others are buffers.
    """

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.function = call.function
        self.finish = call.finish
        self.first = nn.Linear(WIDTH, WIDTH, dtype=call.dtype)
        self.second = nn.Linear(WIDTH, WIDTH, dtype=call.dtype)
        self.leaves, self.spec = pytree.tree_flatten((call.args, call.kwargs))
        self.places: list[str | None] = []
        known: dict[int, str] = {}
        for number, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Tensor):
                self.places.append(None)
                continue
            name = known.setdefault(id(leaf), f"tensor{number}")
            self.places.append(name)
            if hasattr(self, name):
                continue
            if leaf.requires_grad:
                self.register_parameter(name, nn.Parameter(leaf.detach().clone()))
            else:
                self.register_buffer(name, leaf.detach().clone())
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        hidden = torch.tanh(self.first(x))
        leaves = list(self.leaves)
        for position, name in enumerate(self.places):
            if name is not None:
                tensor = getattr(self, name)
                leaves[position] = tensor * 1 if tensor.requires_grad else tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        results = self.function(*args, **kwargs)
        if self.finish is not None:
            results = self.finish(results)
        loss = self.second(hidden).square().mean()
        for result in pytree.tree_leaves(results):
            if isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex()):
                loss = loss + result.abs().sum()
        return loss


def first_cases() -> list[str]:
    """The first case of every module and operator, modules first: "module/NAME/0", "operator/NAME/0"."""
    stems = [f"{kind}/{name}" for kind, database in databases().items() for name in database.names()]
    return [f"{stem}/0" for stem in stems if stem not in LEFT_OUT]


def case_names(samples: int, patterns: Sequence[str] | None) -> list[str]:
    """The cases that may fit some patterns, in the order of `first_cases`; to count the inputs of all takes minutes.

    Args:
        samples: inputs per operator and per module, at most.
        patterns: such as "operator/linalg.*"; None: every case.
    """
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some samples are made with what torch has deprecated
        for first in first_cases():
            kind, name, _ = first.split("/")
            possible = [f"{kind}/{name}/{i}" for i in range(samples)]
            if any(fnmatchcase(case, pattern) for case in possible for pattern in patterns or ["*"]):
                found += possible[: databases()[kind].count(name, samples)]
    return found


def case_of(name: str) -> tuple[Case, torch.dtype]:
    """A case, and the type of its numbers."""
    kind, named, number = name.split("/")
    make = partial(databases()[kind].made, named, int(number))
    seed_everything(0)
    dtype = make().dtype

    def made() -> tuple[nn.Module, dict[str, Any]]:
        model = Trainable(make())
        return model, {"x": torch.randn(8, WIDTH, dtype=dtype)}

    return Case(made, kind, left_behind, BUDGET), dtype


def left_behind(model: nn.Module) -> float:
    """The buffers as a number: running statistics are to be the same, too."""
    return float(sum(b.to_dense().to(torch.complex128).nan_to_num().abs().sum().real for b in model.buffers()))


def made(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    """Equal models and batches, however often this is called."""
    seed_everything(0)
    return case.make()


def measure(case: Case, tolerance: float, optimize: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Train a case in eager mode, by torch.compile and by graphopt, and give a verdict.

    Args:
        tolerance: relative difference that counts as none.
        optimize: in place of `graphopt.optimize`.
    """
    import graphopt

    optimize = optimize or graphopt.optimize
    begin({"verdict": "eager's"})
    first = attempt(lambda: {"run": reference(partial(made, case), partial(train, case), tolerance)})
    if "error" in first:
        return {"verdict": "eager's", "error": first["error"]}
    eager = first["run"]
    begin({"verdict": "torch's"})
    plain = attempt(partial(_plainly_trained, case, eager))
    row: dict[str, Any] = {"torch_compile": plain}
    for step, options in STEPS.items():
        begin({**row, "verdict": "error"})
        row[step] = attempt(partial(_trained_by, optimize, case, eager, options))
        row[step]["verdict"] = verdict(plain, row[step], tolerance)
    found = [row[step]["verdict"] for step in STEPS]
    row["verdict"] = next((v for v in ("wrong", "error", "ours", "torch's") if v in found), "ok")
    return row


def measure_named(name: str) -> dict[str, Any]:
    """`measure` of a case of `case_names`."""
    case, dtype = case_of(name)
    return measure(case, TOLERANCES[dtype])


def _plainly_trained(case: Case, eager: Trained) -> dict[str, Any]:
    model, batch = made(case)
    return compare(train(case, model, torch.compile(model, backend="aot_eager"), batch), eager)


def _trained_by(optimize: Callable[..., Any], case: Case, eager: Trained, options: Mapping[str, Any]) -> dict[str, Any]:
    model, batch = made(case)
    seed_everything(1)
    opt = optimize(model, batch, backend="aot_eager", **options)
    return judged(opt, train(case, model, opt, batch), eager)


def verdict(plain: Mapping[str, Any], ours: Mapping[str, Any], tolerance: float) -> str:
    """One of `VERDICTS`, for one step."""
    torch_fails = "error" in plain or differs(plain, tolerance)
    if "error" not in ours:
        wrong = differs(ours, tolerance) or bool(ours["unselected_gradients"])
        return "ok" if not wrong else "torch's" if "error" not in plain and torch_fails else "wrong"
    if ours["refused"]:
        return "torch's" if torch_fails else "ours"
    return "torch's" if "error" in plain else "error"


def differs(found: Mapping[str, Any], tolerance: float) -> bool:
    """Whether a run gives other losses, gradients or buffers than eager autograd."""
    return not max(found["loss"], found["gradient"]) <= tolerance or bool(found["effects"])
