import copy
import random
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from graphopt.passes import Lsp, Vcas
from graphopt.passes.base import Changes, Preserves, Site
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt.graph import TrainingGraph
from graphopt.runtime.disabled import DisabledModule
from tests import zoo
from tests.long_forms import long
from tests.messages import warnings_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Wrong:
    """A pass that claims to be exact and scales what `what` returns, of the site named."""

    what: str = "gradient"
    site: str = "second.weight"
    factor: float = 1.01
    name = "wrong"
    preserves = Preserves.EXACT
    serves = ()

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        return [Site(self.site)]

    def apply(self, graph: TrainingGraph, decisions: Any) -> Changes:
        results = list(graph.results)
        for i, desc in enumerate(graph.outputs):
            named = getattr(desc.target, "target", desc.target)
            if desc.kind == self.what and named == (0 if self.what == "output" else self.site):
                node = results[i]
                assert node is not None
                with graph.graph.inserting_after(node):
                    scaled = graph.graph.call_function(aten.mul.Scalar, (node, self.factor))
                scaled.meta = {"val": node.meta["val"], "partitioner_tag": node.meta.get("partitioner_tag")}
                results[i] = scaled
        graph.graph.output_node().args = (tuple(results),)
        graph.module.recompile()
        return Changes((self.site,))


def optimized(model: nn.Module, inputs: Any, **options: Any) -> tuple[Any, list[str]]:
    with warnings_of() as texts:
        opt = graphopt.optimize(model, inputs, verify=True, **{"backend": "aot_eager", **options})
    return opt, texts


@pytest.mark.parametrize("name", ["mlp", "cnn", "bert", *long("t5-tied")])
def test_what_agrees_passes_silently(name: str) -> None:
    model, inputs = zoo.make(name, 4, **({"layers": 1} if name == "bert" else {}))
    opt, texts = optimized(model, inputs, budget=0.28 if name == "bert" else 0.7)
    assert opt.selected < {n for n, _ in model.named_parameters()}
    assert (texts, type(opt)) == ([], graphopt.OptimizedModule)
    zoo.call(opt, inputs)
    assert opt.counters.compilations == 1


@pytest.mark.parametrize(
    ("what", "site", "named"),
    [
        ("gradient", "second.weight", "the gradient of second.weight differs from eager's by"),
        ("output", "", "output differs from eager's by"),
    ],
)
def test_a_wrong_pass_is_named_and_the_model_trained_as_it_is(what: str, site: str, named: str) -> None:
    model, inputs = zoo.make("mlp", 4)
    reference = copy.deepcopy(model)
    opt, texts = optimized(model, inputs, passes=[Wrong(what, site)])
    assert len(texts) == 1
    assert named in texts[0]
    assert isinstance(opt, DisabledModule)
    assert named in opt.report.notes[0]
    zoo.call(opt, inputs).backward()
    zoo.call(reference, inputs).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_a_wrong_buffer_is_named() -> None:
    model, inputs = zoo.make("cnn", 4)
    opt, texts = optimized(model, inputs, passes=[Wrong("mutation", "features.1.running_var", 1.1)])
    assert "the buffer features.1.running_var differs" in texts[0]
    assert isinstance(opt, DisabledModule)


def test_a_wrong_gradient_in_a_tensor_whose_gradient_is_small() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.large(x) + 1e-3 * self.small(x)).square().sum()

    opt, texts = optimized(Small(), (torch.randn(6, 4),), passes=[Wrong(site="small.weight", factor=-1.0)])
    assert "the gradient of small.weight" in texts[0]


def test_it_leaves_no_trace() -> None:
    model, inputs = zoo.make("cnn", 4)
    model.features[1].eval()
    model.head.bias.grad = torch.full_like(model.head.bias, 3.0)
    calls: list[int] = []
    model.head.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    state, flags = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    batch, streams = copy.deepcopy(inputs), (torch.get_rng_state(), random.getstate(), str(numpy.random.get_state()))
    version = [p._version for p in model.parameters()]
    opt, texts = optimized(model, inputs)
    assert texts == []
    assert all(torch.equal(a, state[n]) for n, a in model.state_dict().items())
    assert [m.training for m in model.modules()] == flags
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["head.bias"]
    assert bool((model.head.bias.grad == 3.0).all())
    assert not calls
    assert [p._version for p in model.parameters()] == version
    assert all(torch.equal(a, b) for a, b in zip(batch, inputs, strict=True))
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert (random.getstate(), str(numpy.random.get_state())) == streams[1:]


def test_a_model_in_eval_mode_is_verified_as_it_will_be_trained_and_left_in_eval_mode() -> None:
    model, inputs = zoo.make("cnn", 4)
    _, texts = optimized(model.eval(), inputs, passes=[Wrong("mutation", "features.1.running_var", 1.1)])
    assert "running_var" in texts[0]
    assert not any(m.training for m in model.modules())


class Dropped(nn.Module):
    """Dropout as modules, functions, of whole channels, between recurrent layers and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.recurrent = nn.LSTM(8, 8, num_layers=2, batch_first=True, dropout=0.4, bidirectional=True)
        self.channels, self.alpha = nn.Dropout2d(0.3), nn.AlphaDropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        nn.functional.dropout(x, 0.5)  # nobody reads it: capture leaves it out, and with it a draw
        hidden = nn.functional.dropout(self.first(x), 0.3)
        hidden = nn.functional.scaled_dot_product_attention(hidden[:, None], hidden[:, None], hidden[:, None], dropout_p=0.2)
        return self.alpha(self.recurrent(self.channels(hidden)[:, 0])[0] + torch.rand_like(x[..., :1])).square().sum()


@pytest.mark.parametrize("backend", ["aot_eager", lambda module, inputs: module.forward])
def test_dropout_is_compared_with_the_same_masks(backend: Any) -> None:
    opt, texts = optimized(Dropped(), (torch.randn(4, 3, 8),), backend=backend)
    assert texts == []
    assert not isinstance(opt, DisabledModule)
    _, texts = optimized(Dropped(), (torch.randn(4, 3, 8),), backend=backend, passes=[Wrong(site="first.weight")])
    assert "first.weight" in texts[0]


def test_inductor_with_dropout() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3), nn.Dropout(0.2))
    opt, texts = optimized(model, (torch.randn(4, 8),), backend="inductor")
    assert texts == []
    torch.manual_seed(0)
    first, second = opt(torch.ones(4, 8)), opt(torch.ones(4, 8))
    assert not torch.equal(first, second)  # what trains draws anew every time


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3)).to(dtype)
    x = torch.randn(16, 8, dtype=dtype)
    assert optimized(model, (x,))[1] == []
    assert optimized(model, (x,), passes=[Wrong(site="0.weight", factor=1.5)])[1] != []


def test_autocast() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert optimized(model, (torch.randn(16, 8),))[1] == []


def test_inputs_that_require_a_gradient_are_compared_and_keep_theirs() -> None:
    model, (x, labels) = zoo.make("mlp", 4)
    x.requires_grad_()
    opt, texts = optimized(model, (x, labels))
    assert (texts, x.grad) == ([], None)


def test_tensors_that_the_loss_does_not_depend_on() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.other = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            hidden = self.body(x)
            return {"loss": self.head(hidden).square().mean(), "aside": self.other(hidden)}

    assert optimized(TwoHeads(), (torch.randn(6, 4),))[1] == []
    assert optimized(TwoHeads(), (torch.randn(6, 4),), loss=lambda out: out["aside"].sum())[1] == []


def test_a_sampler_is_compared_without_sampling() -> None:
    model, inputs = zoo.make("bert", 8, layers=1)
    for options in ({"passes": [Vcas(keep_rows=0.5, keep_tokens=0.5)]}, {"budget": graphopt.Budget(variance=0.5)}):
        opt, texts = optimized(model, inputs, **options)
        assert texts == []
        assert "vcas" in opt.report.passes


@pytest.mark.parametrize("schedule", ["sequential", "layerwise"])
def test_compressed_gradients_are_compared_with_the_image_of_eagers(schedule: str) -> None:
    model, inputs = zoo.make("mlp", 8)
    lsp = Lsp(subspace=4, nonzeros=2, criterion="flops", schedule=schedule)
    opt, texts = optimized(model, inputs, passes=[lsp])
    assert texts == []
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=0.1)
    before = model.second.weight.detach().clone()
    for _ in range(2):
        zoo.call(opt, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    assert not torch.equal(before, model.second.weight)


def test_a_wrong_compressed_gradient_is_named() -> None:
    model, inputs = zoo.make("mlp", 8)
    lsp = Lsp(subspace=4, nonzeros=2, criterion="flops")
    opt, texts = optimized(model, inputs, passes=[lsp, Wrong()])
    assert "second.weight" in texts[0]
    assert isinstance(opt.make_optimizer(torch.optim.AdamW, lr=0.1), torch.optim.AdamW)


def test_a_step_that_cannot_be_compiled_or_run_is_a_difference() -> None:
    def no_compiler(module: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    def no_memory(module: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            raise torch.OutOfMemoryError("no room")

        return run

    for backend, message in ((no_compiler, "no compiler here"), (no_memory, "no room")):
        model, inputs = zoo.make("mlp", 4)
        opt, texts = optimized(model, inputs, backend=backend)
        assert message in texts[0]
        zoo.call(opt, inputs).backward()
        assert all(p.grad is not None for p in model.parameters())


class Branches(nn.Module):
    """Dropout in a branch, and an operator that AOTAutograd keeps in order."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.cond(x.sum() > 0, lambda z: nn.functional.dropout(self.one(z), 0.5), lambda z: self.other(z).relu(), (x,))
        return torch.linalg.cholesky(self.head(z).t() @ self.head(z) + torch.eye(3)).sum()


def test_higher_order_operators() -> None:
    opt, texts = optimized(Branches(), (torch.rand(6, 8),), budget=0.75)
    assert (texts, type(opt)) == ([], graphopt.OptimizedModule)


class Checkpointed(nn.Module):
    """Dropout in regions that checkpointing computes again, with the random numbers of the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x).square().mean()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout_in_checkpointed_regions(backend: str) -> None:
    opt, texts = optimized(Checkpointed(), (torch.randn(6, 8),), backend=backend)
    assert (texts, type(opt)) == ([], graphopt.OptimizedModule)
    _, texts = optimized(Checkpointed(), (torch.randn(6, 8),), backend=backend, passes=[Wrong(site="layers.0.0.weight")])
    assert "layers.0.0.weight" in texts[0]


class Reentrant(nn.Module):
    """A region of the checkpointing that refuses `torch.autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.second, self.first(x).tanh(), use_reentrant=True)).square().mean()


def test_reentrant_checkpointing_is_compared() -> None:
    opt, texts = optimized(Reentrant(), (torch.randn(6, 8),))
    assert (texts, type(opt)) == ([], graphopt.OptimizedModule)
    _, texts = optimized(Reentrant(), (torch.randn(6, 8),), passes=[Wrong(site="head.weight")])
    assert "head.weight" in texts[0]


class Weighted(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor) -> Tensor:
        return self.scale * output.square().mean()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_copies_share_with_the_model_keeps_its_gradients(reentrant: bool) -> None:
    loss, steps = Weighted(), list[Tensor]()
    loss.scale.register_post_accumulate_grad_hook(steps.append)
    model: nn.Module = nn.Sequential(Reentrant(), nn.Identity()) if reentrant else nn.Linear(8, 4)
    _, texts = optimized(model, (torch.randn(6, 8),), loss=loss)
    assert (texts, loss.scale.grad) == ([], None)
    assert reentrant or not steps
