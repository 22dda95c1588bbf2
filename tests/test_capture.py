import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

import graphopt
from graphopt import CaptureError, InputError
from graphopt.calls import as_call
from graphopt.capture import capture, capture_to_run
from graphopt.compat.inductor import fresh_compiler_cache
from tests import zoo
from tests.long_forms import long
from tests.messages import warnings_of


def test_batch_is_a_symbol_and_formulas_are_linear_in_it() -> None:
    model, inputs = zoo.make("bert", 4, layers=1)
    graph = capture(model, *as_call(inputs))
    assert graph.symbolic
    assert graph.accepts(2)
    assert graph.accepts(1000)
    assert not graph.accepts(1)


def test_batch_equal_to_other_sizes_stays_symbolic() -> None:
    for batch in (8, 5, 3):  # width, features and classes of the MLP
        model, inputs = zoo.make("mlp", batch)
        assert capture(model, inputs).symbolic


def test_an_example_of_one_sample_still_gives_formulas_and_can_run() -> None:
    model, inputs = zoo.make("mlp", 1)
    graph = capture(model, inputs)
    assert graph.symbolic
    assert graph.batch_size == 1
    assert capture_to_run(model, inputs, {}).accepts(1)
    many, batch = zoo.make("mlp", 7)
    assert graphopt.analyze(model, inputs).flops.at(7).step == graphopt.analyze(many, batch).flops.step


class FixesBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 6:
            return self.linear(x).sum()
        return self.linear(x).mean() * 2


def test_a_model_that_computes_otherwise_for_one_batch_size_does_so() -> None:
    model = FixesBatch()
    opt = graphopt.optimize(model, (torch.randn(6, 3),), backend="aot_eager")
    assert not capture(model, (torch.randn(6, 3),)).accepts(6)
    for batch in (6, 4, 1, 6):
        x = torch.randn(batch, 3)
        torch.testing.assert_close(opt(x), model(x))


def test_tied_weights_are_one_parameter_with_the_whole_gradient() -> None:
    model, inputs = zoo.make("gpt2", 3)
    graph = capture(model, *as_call(inputs))
    (tied,) = [p for p in graph.parameters if p.aliases]
    assert (tied.name, tied.aliases) == ("transformer.wte.weight", ("lm_head.weight",))
    assert [p.name for p in graph.parameters] == [n for n, _ in model.named_parameters()]


def test_capture_changes_nothing_of_the_callers() -> None:
    for name in ("cnn", "bert"):
        model, inputs = zoo.make(name, 4, dropout=True)
        model = zoo.in_one_block(model)
        state = copy.deepcopy(model.state_dict())
        flags = [m.training for m in model.modules()]
        model.apply(lambda m: setattr(m, "training", False))
        rng = torch.get_rng_state()
        graphopt.analyze(model, inputs)
        assert torch.equal(rng, torch.get_rng_state())
        assert not any(m.training for m in model.modules())
        assert all(flags)
        for key, value in model.state_dict().items():
            assert torch.equal(value, state[key])
        assert all(p.grad is None for p in model.parameters())


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.linear(x).sum().item() > 0:  # the line that the error must name
            return self.linear(x).sum()
        return self.linear(x).mean()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(lambda y, layer=layer: torch.relu(layer(y)), x, use_reentrant=False)
        return x.square().mean()


class Wide(nn.Module):
    """A block that keeps four times its input for the backward unless it is computed again."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.checkpointing = nn.Linear(32, 128), nn.Linear(128, 32), False
        self.dropout = nn.Dropout(dropout)

    def gradient_checkpointing_enable(self) -> None:
        self.checkpointing = True

    def block(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(nn.functional.gelu(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False) if self.checkpointing else self.block(x)
        return wide.square().mean()


def checkpointable(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return zoo.make("llama", 8) if name == "llama" else (Wide(), (torch.randn(512, 32),))


@pytest.mark.parametrize(("name", "backend"), [("wide", "aot_eager"), *long(("wide", "inductor"), ("llama", "aot_eager"))])
def test_checkpointed_regions_are_recomputed(name: str, backend: str) -> None:
    saved = []
    for checkpointing in (False, True):
        model, inputs = checkpointable(name)
        if checkpointing:
            model.gradient_checkpointing_enable()
        opt = graphopt.optimize(model, inputs, backend=backend)
        with fresh_compiler_cache():  # what comes from torch's cache on disk was split in another process
            zoo.loss_of(zoo.call(opt, inputs)).backward()
        reference, _ = checkpointable(name)
        zoo.loss_of(zoo.call(reference, inputs)).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        assert opt.last_step is not None
        ((_, backward),) = opt.last_step.halves
        values = [n.meta["val"] for n in backward.graph.nodes if n.op == "placeholder"]
        saved.append(sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor)))
    assert saved[1] < 0.6 * saved[0]


def test_checkpointing_a_model_with_frozen_embeddings() -> None:
    """PEFT and Trainer let the embeddings' result require a gradient, so that reentrant checkpointing has one to pass on."""
    model, inputs = zoo.make("lora", 4)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    opt = graphopt.optimize(model, inputs, backend="aot_eager")
    zoo.loss_of(zoo.call(opt, inputs)).backward()
    reference, _ = zoo.make("lora", 4)
    zoo.loss_of(zoo.call(reference, inputs)).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout_in_a_checkpointed_region_is_the_same_in_forward_and_backward(backend: str) -> None:
    """The gradient agrees with finite differences of the loss under the same seed."""
    if backend == "inductor":
        model, inputs = Wide(dropout=0.3).double(), (torch.randn(5, 32, dtype=torch.float64),)
    else:  # attention has dropout of its own
        model, inputs = zoo.make("bert", 4, torch.float64, dropout=True)
    zoo.in_one_block(model).gradient_checkpointing_enable()
    opt = graphopt.optimize(model, inputs, backend=backend)

    def loss() -> torch.Tensor:
        torch.manual_seed(5)
        return zoo.loss_of(zoo.call(opt, inputs))

    loss().backward()
    directions = [torch.randn_like(p) for p in model.parameters()]
    slope = sum((d * p.grad).sum() for d, p in zip(directions, model.parameters(), strict=True) if p.grad is not None)
    values = []
    for scale in (1e-6, -1e-6):
        with torch.no_grad():
            for d, p in zip(directions, model.parameters(), strict=True):
                p.add_(d, alpha=scale)
        values.append(loss().item())
        with torch.no_grad():
            for d, p in zip(directions, model.parameters(), strict=True):
                p.sub_(d, alpha=scale)
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope.item(), rel=1e-3)


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_a_graph_break_runs_and_the_report_names_the_line() -> None:
    model = Breaks()
    opt = graphopt.optimize(model, (torch.randn(2, 3),), backend="aot_eager")
    for x in (torch.ones(2, 3), -torch.ones(2, 3), torch.randn(4, 3)):
        torch.testing.assert_close(gradients_of(model, opt(x)), gradients_of(twin := copy.deepcopy(model), twin(x)))
    assert (opt.model_runs, opt.report.notes) == (0, [])
    assert "item()" in opt.report.batch
    assert "test_capture.py" in opt.report.batch


def test_a_model_that_has_to_be_one_graph_is_refused_with_the_line_and_the_remedy() -> None:
    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+.*\n?.*item\(\).*Remedy"):
        graphopt.optimize(Breaks(), (torch.randn(2, 3),), fullgraph=True)


def test_a_line_of_a_library_is_not_to_be_moved_by_the_user() -> None:
    """transformers makes its hooks under a lock, in the first forward that is asked for hidden states."""
    model, inputs = zoo.make("llama")
    inputs = {**inputs, "output_hidden_states": True}
    with pytest.raises(CaptureError, match=r"output_capturing.py.*Remedy: that line is a library's.*run the model once"):
        graphopt.optimize(model, inputs, backend="aot_eager", fullgraph=True)
    model(**inputs)
    opt = graphopt.optimize(model, inputs, backend="aot_eager", fullgraph=True)
    assert len(opt(**inputs).hidden_states) == 2


def test_a_line_of_a_library_that_breaks_the_graph_is_left_alone() -> None:
    model, inputs = zoo.make("llama")
    inputs = {**inputs, "output_hidden_states": True}
    opt = graphopt.optimize(model, inputs, 0.7, backend="aot_eager")
    reference, _ = zoo.make("llama")
    for _ in range(2):
        output = opt(**inputs)
        assert len(output.hidden_states) == 2
        ours = gradients_of(model, output.loss)
        theirs = gradients_of(reference, reference(**inputs).loss)
        assert {n for n, gradient in ours.items() if gradient is not None} == opt.selected
        torch.testing.assert_close({n: ours[n] for n in opt.selected}, {n: theirs[n] for n in opt.selected})
    assert opt.model_runs == 0


def test_sizes_that_depend_on_the_data_are_refused_in_one_graph_and_analysed_as_parts() -> None:
    class Selecting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y[y > 0].mean()

    inputs = (torch.randn(4, 6),)
    with pytest.raises(CaptureError, match=r"depends on the data \(aten.index.Tensor\).*torch.where"):
        graphopt.optimize(Selecting(6, 4), inputs, fullgraph=True)
    assert (
        graphopt.analyze(Selecting(6, 4), inputs).flops.at(4).step == graphopt.analyze(nn.Linear(6, 4), inputs).flops.at(4).step
    )


@pytest.mark.parametrize(
    ("inputs", "error", "match"),
    [
        ((torch.randn(4, 5), torch.zeros(3, dtype=torch.long)), InputError, "disagree"),
        ((torch.randn(0, 5), torch.zeros(0, dtype=torch.long)), InputError, "empty"),
        (3.5, InputError, "example_inputs must be"),
        ((torch.randn(4, 6), torch.zeros(4, dtype=torch.long)), CaptureError, "model itself fails.*shapes cannot be multiplied"),
    ],
)
def test_inputs_that_do_not_fit(inputs: object, error: type[Exception], match: str) -> None:
    """The last was said to be a line that cannot be captured, below torch's own traces of the trials."""
    model, _ = zoo.make("mlp")
    with pytest.raises(error, match=match), warnings_of("torch._subclasses.fake_tensor") as told:
        graphopt.optimize(model, inputs)
    assert not told


def test_nothing_to_train_and_nothing_to_differentiate() -> None:
    model, inputs = zoo.make("mlp")
    with pytest.raises(CaptureError, match="no trainable parameters"):
        graphopt.optimize(copy.deepcopy(model).requires_grad_(False), inputs)

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.inner(x, labels).detach()

    with pytest.raises(CaptureError, match="requires a gradient"):
        graphopt.optimize(Detached(), inputs)


def test_a_model_that_spreads_batches_over_devices_is_refused() -> None:
    model, inputs = zoo.make("mlp")
    with pytest.raises(InputError, match=r"DataParallel.*model\.module"):
        graphopt.optimize(nn.DataParallel(model), inputs, budget=0.6)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(InputError, match=r"DistributedDataParallel.*model\.module"):
            graphopt.optimize(nn.parallel.DistributedDataParallel(model), inputs, budget=0.6)
    finally:
        dist.destroy_process_group()


@dataclasses.dataclass
class Plain:
    loss: Tensor


class ReturnsPlain(nn.Linear):
    def forward(self, x: Tensor) -> Plain:  # type: ignore[override]
        return Plain(super().forward(x).square().mean())


def test_a_class_that_torch_cannot_look_into() -> None:
    with pytest.raises(CaptureError, match=r"returns a (tests\.test_capture\.)?Plain.*torch\.export\.register_dataclass"):
        graphopt.optimize(ReturnsPlain(3, 3), (torch.randn(2, 3),), fullgraph=True)
    model, x = ReturnsPlain(3, 3), torch.randn(2, 3)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    output = opt(x)
    assert type(output) is Plain
    torch.testing.assert_close(gradients_of(model, output.loss), gradients_of(model, model(x).loss))
    assert opt.model_runs == 0


@dataclasses.dataclass
class Registered:
    loss: Tensor


class ReturnsRegistered(nn.Linear):
    def forward(self, x: Tensor) -> Registered:  # type: ignore[override]
        return Registered(super().forward(x).square().mean())


def test_the_remedy_for_such_a_class_helps() -> None:
    torch.export.register_dataclass(Registered)
    model, x = ReturnsRegistered(3, 3), torch.randn(2, 3)
    opt = graphopt.optimize(model, (x,), backend="aot_eager", fullgraph=True)
    output = opt(x)
    assert isinstance(output, Registered)
    torch.testing.assert_close(output.loss, model(x).loss)
    output.loss.backward()
    assert model.weight.grad is not None


class Mixed(nn.Module):
    """Keyword, non-tensor and unbatched inputs; batch in the second dimension; nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, table: Tensor, scale: float, mode: str = "a", extra: dict | None = None) -> dict:
        y = self.linear(x) * scale + table
        if mode == "b":
            y = y * 2
        if extra is not None:
            y = y + extra["shift"]
        return {"loss": y.square().mean(), "parts": (y, [y.sum(0)]), "nothing": None}


def test_keyword_constant_and_unbatched_inputs() -> None:
    model = Mixed()
    inputs = {
        "x": torch.randn(3, 6, 4),
        "table": torch.randn(4),
        "scale": 0.5,
        "mode": "b",
        "extra": {"shift": torch.randn(1, 6, 4)},
    }
    dims = {"x": 1, "table": None, "extra.shift": 1}
    opt = graphopt.optimize(model, inputs, batch_dim=dims, backend="aot_eager")
    assert capture(model, (), inputs, dims).symbolic
    for batch in (6, 2):
        call = {**inputs, "x": inputs["x"][:, :batch], "extra": {"shift": inputs["extra"]["shift"][:, :batch]}}
        ours, theirs = opt(**call), model(**call)
        assert ours["nothing"] is None
        torch.testing.assert_close(ours["parts"][1][0], theirs["parts"][1][0])
    torch.testing.assert_close(opt(**{**inputs, "mode": "a"})["loss"], model(**{**inputs, "mode": "a"})["loss"])
    with pytest.raises(InputError, match="batch_dim="):
        graphopt.optimize(model, inputs, fullgraph=True)
    undeclared = graphopt.optimize(model, inputs, backend="aot_eager")
    torch.testing.assert_close(undeclared(**inputs)["loss"], model(**inputs)["loss"])
    assert "batch_dim=" in undeclared.report.batch


def test_analysis_of_weights_that_exist_nowhere() -> None:
    real, inputs = zoo.make("llama", 4)
    expected = graphopt.analyze(real, inputs).flops.step
    with torch.device("meta"):
        meta, _ = zoo.FACTORIES["llama"](4)
    assert graphopt.analyze(meta, inputs).flops.step == expected
    assert all(p.is_meta for p in meta.parameters())
    with pytest.raises(InputError, match="exist nowhere"):
        graphopt.optimize(meta, inputs)


def test_a_submodule_with_two_names_keeps_its_tensors() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.first, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
            self.second, self.again = self.first, self.norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(self.second(self.norm(self.first(self.below(x))))).square().sum()

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(4, 6)
    twin = copy.deepcopy(model)
    held = dict(model.named_parameters())
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    assert all(held[name] is parameter for name, parameter in model.named_parameters())
    opt(x).backward()
    twin(x).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_lstm_whose_input_needs_no_gradient_is_traced_as_its_products() -> None:
    """torch would trace oneDNN's layer, whose backward then fails."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0].square().mean()

    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 2, 4)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    opt(x).backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad)
