"""Several passes on one graph: every combination keeps the weakest of their contracts, and costs what was predicted."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from graphopt.passes import (
    BY_NAME,
    DeadRows,
    GreenTrainer,
    LinearCrossEntropy,
    Lsp,
    Pass,
    Preserves,
    Recompute,
    RunLora,
    Vcas,
    in_order,
    run_pass,
)  # fmt: skip
from graphopt.passes.runlora.orders import named_order
from torch import Tensor, nn

from graphopt import PassError
from graphopt.analysis.flops import flop_profile
from graphopt.analysis.step_memory import step_memory
from graphopt.budget import Budget
from graphopt.calls import as_call
from graphopt.capture import capture_to_run
from graphopt.graph import TrainingGraph
from graphopt.planner.plan import resolve_passes
from graphopt.report.python_text import readable
from graphopt.testing import PassCheck, check_passes
from tests import zoo
from tests.long_forms import long
from tests.measure import peak_and_rest

LARGER = ["llama", "bert", "t5-tied", "lora"]
EXACT, UNBIASED, PROJECTED = Preserves.EXACT, Preserves.UNBIASED, Preserves.PROJECTED

MATRIX = {
    ("greentrainer",): {EXACT},
    ("runlora",): {EXACT},
    ("vcas",): {UNBIASED},
    ("lsp",): {PROJECTED},
    ("greentrainer", "runlora"): {EXACT},
    ("greentrainer", "vcas"): {UNBIASED},
    ("greentrainer", "lsp"): {PROJECTED},
    ("runlora", "vcas"): {UNBIASED},
    ("runlora", "lsp"): {PROJECTED},
    ("vcas", "lsp"): {UNBIASED, PROJECTED},
    ("greentrainer", "runlora", "vcas"): {UNBIASED},
    ("greentrainer", "runlora", "lsp"): {PROJECTED},
    ("greentrainer", "vcas", "lsp"): {UNBIASED, PROJECTED},
    ("runlora", "vcas", "lsp"): {UNBIASED, PROJECTED},
    ("greentrainer", "runlora", "vcas", "lsp"): {UNBIASED, PROJECTED},
}
"""What every combination preserves of autograd's gradients, of those that it still computes."""

OF_CLASSIFIERS = {
    ("dead_rows",): {EXACT},
    ("dead_rows", "greentrainer"): {EXACT},
    ("dead_rows", "vcas"): {UNBIASED},
    ("dead_rows", "lsp"): {PROJECTED},
    ("dead_rows", "greentrainer", "vcas", "lsp"): {UNBIASED, PROJECTED},
}
"""With what finds something in models whose head reads one row."""

OF_LANGUAGE_MODELS = {
    ("linear_cross_entropy",): {EXACT},
    ("greentrainer", "linear_cross_entropy"): {EXACT},
    ("linear_cross_entropy", "lsp"): {PROJECTED},
    ("greentrainer", "linear_cross_entropy", "lsp"): {PROJECTED},
    ("linear_cross_entropy", "vcas"): {UNBIASED},
    ("greentrainer", "linear_cross_entropy", "vcas", "lsp"): {UNBIASED, PROJECTED},
}
"""With what finds something in models that return a loss of logits."""

DRAWS = 100
"""A bias of 0.6 of a gradient's standard deviation is found; see `test_a_bias_under_compression_is_found`."""

SAMPLER = Vcas(keep_rows=0.5, keep_tokens=0.6)
COMPRESSION = Lsp(subspace=3, nonzeros=2, criterion="flops")
ORDERS = (named_order("forward2", "backward5"), named_order("forward1", "backward2"))


def upper_part(graph: TrainingGraph) -> set[str]:
    """Two thirds of the parameters: the cut is in the middle of a block."""
    sites = GreenTrainer().applicable(graph)
    return {site.name for site in sites[len(sites) // 3 :]}


def merged_and_not(graph: TrainingGraph) -> dict[str, Any]:
    """Every other layer computed as X(W + cAB)."""
    return {site.name: ORDERS[i % 2] for i, site in enumerate(RunLora().applicable(graph))}


def all_sites(rewrite: Pass) -> Callable[[TrainingGraph], set[str]]:
    return lambda graph: {site.name for site in rewrite.applicable(graph)}


PASSES: dict[str, tuple[Pass, Any]] = {
    "greentrainer": (GreenTrainer(), upper_part),
    "dead_rows": (DeadRows(), all_sites(DeadRows())),
    "linear_cross_entropy": (LinearCrossEntropy(chunks=3), all_sites(LinearCrossEntropy())),
    "runlora": (RunLora(), merged_and_not),
    "vcas": (SAMPLER, SAMPLER.ratios),
    "lsp": (COMPRESSION, all_sites(COMPRESSION)),
}


WIDTH = 64
"""Wide enough for 1 % of the peak to be more than what operators of samplers and compression allocate inside."""


class Words(nn.Module):
    """Layers on embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.relu(self.first(self.embed(tokens)))
        return torch.relu(self.second(hidden + hidden.mean(1, keepdim=True)))


class Tied(Words):
    """A language model whose head is its embedding."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = nn.functional.linear(super().forward(tokens), self.embed.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Classifier(Words):
    """Reads the first row alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(super().forward(tokens)[:, 0]), tokens[:, 0] % 3)


def adapted() -> nn.Module:
    """An MLP with adapters of two of its layers."""
    layers = peft.LoraConfig(r=4, target_modules=["first", "second"], init_lora_weights=False)
    return peft.get_peft_model(zoo.MLP(width=WIDTH), layers)


def made(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """A model of the zoo, of one block, or a smaller one with what passes look for."""
    torch.manual_seed(0)
    if name == "mlp":
        return zoo.MLP(width=WIDTH).to(dtype), zoo.make("mlp", 6, dtype)[1]
    if name == "adapted":
        return adapted().to(dtype), zoo.make("mlp", 96, dtype)[1]
    if name in ("tied", "classifier"):
        return {"tied": Tied, "classifier": Classifier}[name]().to(dtype), (zoo.tokens(6),)
    return zoo.make(name, 6, dtype, **({"layers": 1} if name == "bert" else {}))


@functools.cache
def captured(name: str, dtype: torch.dtype, symbolic: bool = True) -> TrainingGraph:
    model, inputs = made(name, dtype)
    return capture_to_run(model, *as_call(inputs), symbolic=symbolic)


def checked(name: str, combination: tuple[str, ...]) -> list[PassCheck]:
    model, inputs = made(name)
    dtypes = [torch.float64] if "vcas" in combination else [torch.float64, torch.float32]
    if name == "llama" and "linear_cross_entropy" in combination:
        dtypes = [torch.float32]  # in which its loss is computed whatever its weights are
    symbolic = "vcas" in combination or "linear_cross_entropy" not in combination
    graphs = {d: captured(name, d, symbolic and (d is torch.float64 or "vcas" in combination)) for d in dtypes}
    return check_passes([PASSES[n] for n in combination], model, inputs, dtypes=dtypes, captured=graphs, draws=DRAWS)


def assert_peak_is_predicted(check: PassCheck) -> None:
    """Within 1 % of what the allocator says."""
    check.step()  # .grad is None from here on
    memory = step_memory(check.graph, "aot_eager", None)
    assert memory.peak_bytes - memory.static_bytes == pytest.approx(peak_and_rest(check.step)[0], rel=0.01)


def test_the_matrix_is_complete() -> None:
    apart = {"recompute"}.union(*OF_CLASSIFIERS, *OF_LANGUAGE_MODELS).difference(*MATRIX)  # recompute: see the last test
    names = [name for name in BY_NAME if name not in apart]
    assert set(MATRIX) == {c for size in range(1, 5) for c in itertools.combinations(names, size)}


WITH_ADAPTERS = [combination for combination in MATRIX if "runlora" in combination]


@pytest.mark.parametrize(
    ("name", "combination"),
    [
        *(("mlp", combination) for combination in MATRIX),
        *(("adapted", combination) for combination in WITH_ADAPTERS),
        ("tied", ("greentrainer", "vcas", "lsp")),
        *long(*itertools.product(LARGER, MATRIX)),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_every_combination_keeps_its_contract(name: str, combination: tuple[str, ...]) -> None:
    if "runlora" in combination and name not in ("adapted", "lora"):
        assert_nothing_to_reorder(name, combination)
        return
    assert_contract(name, combination, MATRIX[combination])


@pytest.mark.parametrize(
    ("name", "combination", "preserves"),
    [
        *(("classifier", combination, preserves) for combination, preserves in OF_CLASSIFIERS.items()),
        *(("tied", combination, preserves) for combination, preserves in OF_LANGUAGE_MODELS.items()),
        ("bert", *list(OF_CLASSIFIERS.items())[-1]),
        ("llama", *list(OF_LANGUAGE_MODELS.items())[-1]),
        *long(*(("bert", *case) for case in list(OF_CLASSIFIERS.items())[:-1])),
        *long(*(("llama", *case) for case in list(OF_LANGUAGE_MODELS.items())[:-1])),
        *long(*(("t5-tied", *case) for case in OF_LANGUAGE_MODELS.items())),
    ],
)
def test_rows_and_logits_with_everything_else(name: str, combination: tuple[str, ...], preserves: set[Preserves]) -> None:
    assert_contract(name, combination, preserves)


def assert_contract(name: str, combination: tuple[str, ...], preserves: set[Preserves]) -> None:
    for check in checked(name, combination):
        assert check.preserves == preserves
        assert [report.name for report in check.reports] == list(combination)
        assert all(report.changes.changed for report in check.reports)
        assert check.counted_flops == check.report.step_flops_after == flop_profile(check.graph).step
    assert_peak_is_predicted(check)


def assert_nothing_to_reorder(name: str, combination: tuple[str, ...]) -> None:
    """Without adapters, runlora hands the very same graph on: the row is that without it, which is checked in its own place."""
    graph = captured(name, torch.float64)
    if "greentrainer" in combination:
        graph, _ = run_pass(GreenTrainer(), graph, upper_part(graph))
    rewritten, report = run_pass(RunLora(), graph, merged_and_not(graph))
    assert report.changes.changed == ()
    assert readable(rewritten) == readable(graph)
    rest = tuple(n for n in combination if n != "runlora")
    assert MATRIX[combination] == (MATRIX[rest] if rest else {EXACT})


def test_the_order_of_the_pipeline_is_fixed() -> None:
    class Own(GreenTrainer):
        name = "own"

    class Noisy(Vcas):
        name = "noisy"

    class Image(Lsp):
        name = "image"

    known = [GreenTrainer(), RunLora(), Vcas(keep_rows=0.5), Lsp()]
    for listed in itertools.permutations(known):
        assert list(in_order(listed)) == known
        assert list(resolve_passes(listed, Budget())) == known
    listed = [Image(), Lsp(), Vcas(keep_rows=0.5), Noisy(keep_rows=0.5), Own(), RunLora(), GreenTrainer()]
    names = [rewrite.name for rewrite in in_order(listed)]
    assert names == ["greentrainer", "runlora", "own", "noisy", "vcas", "lsp", "image"]


class Skewed(Lsp):
    """Compresses to a little too much."""

    def apply(self, graph: TrainingGraph, decisions: Any) -> Any:
        changes = super().apply(graph, decisions)
        for desc, node in zip(graph.outputs, graph.results, strict=True):
            if desc.kind == "gradient" and desc.target.kind == "compressed" and node is not None:
                with graph.graph.inserting_after(node):
                    scaled = graph.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.5))
                scaled.meta = dict(node.meta)
                node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)
        return changes


def test_a_bias_under_compression_is_found() -> None:
    model, inputs = zoo.make("mlp", 6)
    skewed = Skewed(subspace=3, nonzeros=2)
    passes: list[tuple[Pass, Any]] = [PASSES["vcas"], (skewed, all_sites(skewed))]
    with pytest.raises(PassError, match=r"vcas \+ lsp: the mean of the compressed gradient.* standard errors"):
        check_passes(passes, model, inputs, dtypes=[torch.float64], draws=4 * DRAWS)
    with pytest.raises(PassError, match=r"greentrainer \+ lsp: the compressed gradient of .* differs"):
        check_passes([PASSES["greentrainer"], (skewed, all_sites(skewed))], model, inputs, dtypes=[torch.float64])


class Forgetful(Vcas):
    """Loses a gradient."""

    def apply(self, graph: TrainingGraph, decisions: Any) -> Any:
        changes = super().apply(graph, decisions)
        graph.drop_gradient(graph.trainable[0].name)
        return changes


def test_only_an_exact_pass_may_drop_a_gradient() -> None:
    model, inputs = zoo.make("mlp", 6)
    with pytest.raises(PassError, match=r"vcas is UNBIASED, but the gradient of first\.weight is gone"):
        check_passes([(Forgetful(keep_rows=0.5), None)], model, inputs, dtypes=[torch.float64])


def test_two_projections_are_refused() -> None:
    model, inputs = zoo.make("mlp", 6)
    with pytest.raises(PassError, match="one at a time"):
        check_passes([PASSES["lsp"], PASSES["lsp"]], model, inputs)


@pytest.mark.parametrize("order", ["activations", "left", "right", "formed"])
def test_every_order_of_compression_sums_over_the_rows_that_are_left(order: str) -> None:
    model, inputs = zoo.make("mlp", 6)
    rewrite = Lsp(subspace=3, nonzeros=2, order=order)
    passes: list[tuple[Pass, Any]] = [PASSES["vcas"], (rewrite, all_sites(rewrite))]
    check_passes(passes, model, inputs, dtypes=[torch.float64], draws=DRAWS)


@pytest.mark.parametrize("name", ["classifier", "adapted", *long("bert", "lora")])
def test_all_passes_keep_their_contracts_on_a_forward_that_is_computed_again(name: str) -> None:
    # a loss in chunks is for a batch that is no symbol
    only = {"runlora": ["adapted", "lora"], "dead_rows": ["classifier", "bert"], "linear_cross_entropy": []}
    others = [n for n in BY_NAME if n in PASSES and name in only.get(n, [name])]
    model, inputs = made(name)
    sequence = [(Recompute(), all_sites(Recompute())), *(PASSES[n] for n in others)]
    (check,) = check_passes(
        sequence, model, inputs, dtypes=[torch.float64], captured={torch.float64: captured(name, torch.float64)}, draws=DRAWS
    )
    assert check.preserves == {UNBIASED, PROJECTED}
    assert all(report.changes.changed for report in check.reports)
    assert check.reports[0].saved_bytes_after < check.reports[0].saved_bytes_before
    assert check.counted_flops == check.report.step_flops_after == flop_profile(check.graph).step
