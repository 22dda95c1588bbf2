"""What a random optimised step must fulfil: `check` holds one request on one model to its contract, against eager autograd.

Outputs and buffers are eager's. Gradients are by the passes' contracts: exact for selected tensors and None for others, in
expectation eager's where rows are sampled, P'GQ where they are compressed. FLOPs counted are those predicted, within the budget.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from graphopt.passes import DeadRows, GreenTrainer, LinearCrossEntropy, Lsp, RunLora, Vcas, run_pass
from graphopt.passes.vcas import ROWS
from graphopt.passes.vcas.technique import terms_alone
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt.analysis.flop_formulas import ADDED_FORMULAS
from graphopt.analysis.flops import flop_profile
from graphopt.analysis.step_memory import step_memory
from graphopt.budget import Budget
from graphopt.capture import capture_to_run
from graphopt.compat import pytree
from graphopt.errors import BudgetError, GraphoptError, PassError
from graphopt.graph import TrainingGraph
from graphopt.transforms.verify import verify
from tests.draws import expectation
from tests.measure import partitioned_flops
from tests.properties.random_models import Network

TOLERANCE = 1e-9
"""Relative to the largest entry of all gradients; everything is in float64."""

LEGITIMATE = {
    "lsp: no matrix to compress": r"no weight's gradient can be compressed",
    "lsp: no tensor that is trained": r"lsp cannot compress the gradient of .*: greentrainer does not train it",
    "vcas: not separable": r"cannot be sampled: .*(not separable by|not together|do not add up|_batch_norm|cannot be)",
    "vcas: a batch of 1 is not symbolic": r"the batch is not symbolic: a batch of 1\.",
    "vcas: no boundary": r"no gradient passes through one tensor whose rows are samples",
    "runlora: the order would not keep the result": r"cannot be computed as",
    "vcas: another output is differentiated": r"samples its backward for the loss alone",
    "no gradient": r"no output of the model requires a gradient|the model has no trainable parameters",
}
"""Refusals that a random model may meet, by what they are; every other error is a failure."""


@dataclass(frozen=True)
class Request:
    """What is asked of graphopt.

    Attributes:
        passes: which kinds.
        share: where the FLOPs budget lies between the smallest feasible and 1, or which part of the tensors is trained.
        keep_rows, keep_tokens: ratios of the sampler.
        subspace, order: of the compression, and of adapters' products.
        chunks: of tokens, in which a head is computed.
        backend: that compiles.
    """

    passes: tuple[str, ...]
    share: float
    keep_rows: float
    keep_tokens: float
    subspace: int
    order: str | None
    chunks: int
    backend: str = "aot_eager"


COMBINATIONS = [
    (), ("flops",), ("vcas",), ("lsp",), ("runlora",), ("train",), ("flops", "runlora"), ("flops", "vcas"), ("train", "vcas"),
    ("train", "lsp"), ("runlora", "lsp"), ("runlora", "vcas"), ("train", "runlora", "vcas", "lsp"), ("memory",),
    ("flops", "memory"), ("vcas", "lsp"), ("flops", "calibrated"), ("flops", "runlora", "calibrated"), ("rows", "heads"),
    ("heads",), ("flops", "rows", "heads"), ("train", "rows", "heads"), ("runlora", "heads"), ("rows", "heads", "lsp"),
    ("rows", "heads", "vcas"),
]  # fmt: skip


@st.composite
def requests(draw: Any, inductor_one_in: int = 0) -> Request:
    """A request that this version does not refuse for itself."""
    ratio = st.sampled_from([0.5, 0.34, 0.8, 1.0])
    compiled = bool(inductor_one_in) and draw(st.integers(1, inductor_one_in)) == inductor_one_in
    return Request(
        passes=draw(st.sampled_from(COMBINATIONS)),
        share=draw(st.floats(0, 1)),
        keep_rows=draw(ratio),
        keep_tokens=draw(ratio),
        subspace=draw(st.integers(1, 3)),
        order=draw(st.sampled_from([None, *(f"forward{f}+backward{b}" for f in (1, 2) for b in (1, 2, 5, 6, 8))])),
        chunks=draw(st.integers(2, 4)),
        backend="inductor" if compiled else "aot_eager",
    )


@dataclass
class Run:
    """Everything that eager mode or the optimised model leaves behind after one step."""

    outputs: Any
    buffers: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    flops: int
    inputs: tuple[Tensor, ...] = field(default=())


def step(model: Network, call: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """Forward and backward of `call`, whose tensors are `model`'s."""
    model.zero_grad()
    given = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in inputs)
    with FlopCounterMode(display=False, custom_mapping=ADDED_FORMULAS) as counter:
        outputs = call(*given)
        model.loss_of(outputs).backward()

    def copied(value: Any) -> Any:  # a parameter among the outputs is the user's own, whether it is trained or not
        own = isinstance(value, nn.Parameter)
        return value.detach().clone().requires_grad_(own or value.requires_grad) if isinstance(value, Tensor) else value

    values = pytree.tree_map(copied, outputs)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    return Run(values, buffers, {n: p.grad for n, p in model.named_parameters()}, counter.get_total_flops(), given)


def check(model: Network, wanted: Sequence[Request]) -> list[str]:
    """Hold every request to its contract.

    Returns:
        For each "held", or a key of `LEGITIMATE` where it was refused.
    Raises:
        AssertionError, or whatever else comes up: a fault of graphopt.
    """
    references = [eager(model, model.inputs(size, seed=i)) for i, size in enumerate(model.sizes)]
    with captured_once(), Warnings() as warnings:
        outcomes = [outcome(model, request, references) for request in wanted]
    fallen_back = [text for text in warnings.texts if "could not be compiled" in text or "calibration" in text]
    assert not fallen_back, fallen_back[0]
    return outcomes


@contextlib.contextmanager
def captured_once() -> Iterator[None]:
    """All requests on a model read the same captured graphs, which none may change: a capture takes longer than all else."""
    known: dict[Any, TrainingGraph] = {}

    def capture(model: nn.Module, args: tuple[Tensor, ...], *rest: Any) -> TrainingGraph:
        key = (*(t.shape for t in args), rest[-1])
        if key not in known:
            known[key] = capture_to_run(model, args, *rest)
        return known[key]

    with mock.patch("graphopt.runtime.captures.capture_to_run", capture):
        yield


def outcome(model: Network, request: Request, references: Sequence[Run]) -> str:
    """See `check`."""
    try:
        hold(copy.deepcopy(model), request, references)  # hooks of an earlier request's optimizer stay behind
    except GraphoptError as error:
        for what, pattern in LEGITIMATE.items():
            if re.search(pattern, str(error)):
                return what
        raise
    except Exception as error:
        if request.backend == "inductor" and str(error) == _error_of_torch_compile(model):
            return "torch.compile fails, too"
        raise
    return "held"


def _error_of_torch_compile(model: Network) -> str | None:
    """What torch.compile says of a step of this network; None if it trains it."""
    torch.compiler.reset()
    compiled = torch.compile(copy.deepcopy(model))
    try:
        for i, size in enumerate(model.sizes):
            model.loss_of(compiled(*model.inputs(size, seed=i))).backward()
    except Exception as error:
        return str(error)
    return None


class Warnings(logging.Handler):
    """Keeps what graphopt warns of; something else that runs in a step's place hides a fault."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Warnings:
        logging.getLogger("graphopt").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("graphopt").removeHandler(self)


def hold(model: Network, request: Request, references: Sequence[Run]) -> None:
    """See `check`; raises what graphopt refuses, too."""
    opt = optimized(model, request, references[0])
    assert step_memory(opt.graph, "aot_eager", "adamw").peak_bytes > 0
    if not any(getattr(m, "name", "") == "checkpointed" for m in model.modules()):  # there, eager mode repeats more
        assert references[0].flops == opt.flops.step, "eager's FLOPs are not those predicted"
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=0.0) if "lsp" in request.passes else None
    fresh = copy.deepcopy(model.state_dict())
    frozen = [eager(model, model.inputs(size, seed=i), opt.selected) for i, size in enumerate(model.sizes)]
    for i, (size, expected) in enumerate(zip(model.sizes, references, strict=True)):
        if i and 1 in model.sizes:
            opt(*model.inputs(size, seed=i))  # is captured anew, which a FLOP counter's hooks would not let pass
        # The first of compressed steps looks at full gradients; a step whose second loss is differentiated, too, runs again for
        # it, and the next for the first loss.
        repeats = 3 if model.output == "two losses" else 2 if optimizer is not None else 1
        for _ in range(repeats if i == 0 else 1):
            model.load_state_dict(fresh)
            opt.zero_grad()
            ours = step(model, opt, model.inputs(size, seed=i))
            compare(request, opt, ours, expected, size)
            assert requiring(ours) == requiring(frozen[i]), "an output requires a gradient in one of both modes"
        assert opt.last_step is not None, "the model itself ran in the step's place"
        verify(opt.last_step.graph)
        if request.backend == "aot_eager":
            assert ours.flops == flop_profile(opt.last_step.graph).step, "counted FLOPs are not those predicted"
        if i == 0 and (limit := opt.report.budget.get("flops")) is not None:
            compiled = partitioned_flops(opt.plan.rewrite(opt.graph)[0])
            if compiled > limit * opt.flops.step:  # kernels that Inductor fuses may repeat a product, in full training, too
                compiled -= partitioned_flops(opt.graph) - opt.flops.step
            assert max(ours.flops, compiled) <= limit * opt.flops.step, "over budget"
        if optimizer is not None:
            optimizer.step()
    assert str(opt.report)
    model.load_state_dict(fresh)
    if "vcas" in request.passes and model.output != "two losses":
        check_expectation(model, opt)
    if "calibrated" in request.passes and model.output != "two losses":
        check_calibrated(model, opt)


def eager(model: Network, inputs: tuple[Tensor, ...], selected: Collection[str] | None = None) -> Run:
    """What eager mode does on a copy of the model, in which only the selected tensors are trained."""
    reference = copy.deepcopy(model)
    for name, p in reference.named_parameters():
        p.requires_grad_(p.requires_grad and (selected is None or name in selected))
    return step(reference, reference, inputs)


def requiring(run: Run) -> list[bool]:
    """Which outputs and inputs require a gradient."""
    return [t.requires_grad for t in [*pytree.tree_leaves(run.outputs), *run.inputs] if isinstance(t, Tensor)]


def optimized(model: Network, request: Request, expected: Run) -> Any:
    """The optimised model; a budget that is too small becomes the smallest that the error calls feasible."""
    inputs = model.inputs(model.sizes[0], seed=0)
    passes: list[Any] = []
    if "rows" in request.passes:
        passes.append(DeadRows())
    if "heads" in request.passes:
        passes.append(LinearCrossEntropy(request.chunks))
    if "flops" in request.passes:
        passes.append(GreenTrainer())
    if "train" in request.passes:
        names = [name for name, gradient in expected.gradients.items() if gradient is not None]
        passes.append(GreenTrainer(train=tuple(names[:: 1 + int((1 - request.share) * len(names) / 2)])))
    if "runlora" in request.passes:
        passes.append(RunLora(order=request.order, criterion="flops"))
    if "vcas" in request.passes:
        passes.append(Vcas(keep_rows=request.keep_rows, keep_tokens=request.keep_tokens))
    if "calibrated" in request.passes:
        passes.append(Vcas(every=2))
    if "lsp" in request.passes:
        passes.append(Lsp(subspace=request.subspace, nonzeros=1, criterion="flops", iterations=3))
    budget = Budget(
        flops=max(request.share, 0.01) if "flops" in request.passes else None,
        memory=1 if "memory" in request.passes else None,
        variance=3.0 if "calibrated" in request.passes else None,
    )
    options = {"passes": "auto" if "memory" in request.passes else passes, "backend": request.backend}
    for _ in range(3):
        try:
            return graphopt.optimize(model, inputs, budget=budget, **options)
        except PassError as error:
            if "or keep_rows" not in str(error):
                raise
            without_rows = replace(next(p for p in passes if isinstance(p, Vcas)), keep_rows=None)
            options["passes"] = [without_rows if isinstance(p, Vcas) else p for p in passes]
        except BudgetError as error:
            smallest = re.search(r"Smallest feasible[^:]*: ([\d.,]*\d)", str(error))
            if smallest is None:
                raise
            limit = smallest[1].replace(",", "")
            memory = str(error).startswith("memory")
            budget = replace(budget, memory=int(limit)) if memory else replace(budget, flops=float(limit))
    return graphopt.optimize(model, inputs, budget=budget, **options)


def compare(request: Request, opt: Any, ours: Run, expected: Run, size: int) -> None:
    """One step of the optimised model on `size` samples against eager's."""
    exact = "vcas" not in request.passes or size == 1 or request.keep_rows == request.keep_tokens == 1.0
    flat, spec = pytree.tree_flatten(ours.outputs)
    wanted, wanted_spec = pytree.tree_flatten(expected.outputs)
    assert spec == wanted_spec, "another structure of outputs"
    for a, b in zip([*flat, *ours.inputs], [*wanted, *expected.inputs], strict=True):
        assert isinstance(a, Tensor) == isinstance(b, Tensor), "another kind of output"
        if isinstance(a, Tensor):
            close(a, b, "an output")
    for name, buffer in expected.buffers.items():
        close(ours.buffers[name], buffer, name)
    scale = max([float(g.abs().max()) for g in expected.gradients.values() if g is not None], default=1.0)
    for a, b in zip(ours.inputs, expected.inputs, strict=True):
        assert (a.grad is None) == (b.grad is None), "an input has a gradient in one of both modes"
        if a.grad is not None and b.grad is not None and exact:
            close(a.grad, b.grad, "an input's gradient", scale)
    compressed = opt.states["lsp"].weights if "lsp" in opt.states else {}
    for name, gradient in expected.gradients.items():
        found = ours.gradients[name]
        if name not in opt.selected or gradient is None:
            assert found is None, f"{name} has a gradient"
        elif name in compressed:
            assert found is None, f"{name} has a full gradient"
            image = compressed[name].variable.grad
            assert image is not None, f"no compressed gradient of {name}"
            if exact:
                close(image, compressed[name].subspace.compress(gradient), f"the image of {name}", 10 * scale)
        else:
            assert found is not None, f"no gradient of {name}"
            assert torch.isfinite(found).all(), f"gradient of {name} is not finite"
            if exact:
                close(found, gradient, f"the gradient of {name}", scale)


def close(ours: Tensor, exact: Tensor, what: str, scale: float | None = None) -> None:
    ours, exact = ours.detach(), exact.detach()
    assert ours.shape == exact.shape, f"{what} has shape {tuple(ours.shape)}, not {tuple(exact.shape)}"
    assert ours.dtype == exact.dtype, f"{what} is {ours.dtype}, not {exact.dtype}"
    if not ours.numel():
        return
    if not exact.is_floating_point():
        assert torch.equal(ours, exact), f"{what} differs"
        return
    scale = max(float(exact.abs().max()), 1e-6 if scale is None else scale) or 1.0  # no gradient is other than zero
    error = float((ours - exact).abs().max()) / scale
    assert error <= TOLERANCE, f"{what} is {error:.1e} of the largest entry off"


def check_calibrated(model: Network, opt: Any) -> None:
    """Whatever is chosen with ratios, a step has gradients of what is selected alone, and keeps to the FLOPs."""
    for k in range(5):
        inputs = model.inputs(model.sizes[0], seed=10 + k)
        ours, expected = step(model, opt, inputs), eager(model, inputs)
        full = opt.flops.at(model.sizes[0]).step
        taken, most = flop_profile(opt.last_step.graph).step, opt.budget.flops * full
        assert taken <= most, f"{taken} FLOPs of {most} after a calibration; {opt.last_step.sampled_part}, {opt.plan.key}"
        sampled = opt.last_step.sampled_part < 1
        for name, gradient in expected.gradients.items():
            found = ours.gradients[name]
            if name not in opt.selected or gradient is None:
                assert found is None, f"{name} has a gradient after a calibration"
            elif sampled or not opt.controller.ratios:
                assert found is not None, f"no gradient of {name} after a calibration"
                assert torch.isfinite(found).all(), f"gradient of {name} is not finite after a calibration"
        opt.controller.after_step(inputs)


def check_expectation(model: Network, opt: Any) -> None:
    """The mean over all draws, at two boundaries or for one weight, must be eager's gradient."""
    size = 4
    graph = opt.graph
    if not (graph.symbolic and graph.accepts(size)):
        return
    graph = replace(opt.plan.before_sampling().rewrite(graph)[0], batch_size=size)
    sites = terms_alone(graph) if opt.plan.not_separable else [site.name for site in Vcas().applicable(graph)]
    rows = [name for name in sites if name.startswith(ROWS)]
    tokens = [name for name in sites if not name.startswith(ROWS)]
    inputs = model.inputs(size, seed=3)
    run = eager(model, inputs)
    expected = {**run.gradients, **{i: t.grad for i, t in enumerate(run.inputs)}}
    scale = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for decisions in (dict(zip(rows[-2:], (0.75, 0.5), strict=False)), dict.fromkeys(tokens[len(tokens) // 2 :][:1], 0.4)):
        rewritten, report = run_pass(Vcas(), graph, decisions)
        if report.changes.changed:
            for name, mean in expectation(rewritten, model, inputs).items():
                gradient = expected[name]
                close(mean, torch.zeros_like(mean) if gradient is None else gradient, f"the mean gradient of {name}", scale)
