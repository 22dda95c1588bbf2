import ast
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graphopt.passes import Preserves
from graphopt.passes.base import Changes
from torch import Tensor, nn

import graphopt
from graphopt.capture import capture
from graphopt.graph import TrainingGraph
from graphopt.report.graph_dump import dump
from graphopt.report.provenance import block_name
from graphopt.report.python_text import broken, readable
from tests import zoo


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[graphopt.OptimizedModule, dict[str, str], dict[str, str]]:
    """An optimised model, and the texts of its dumps before and after a step."""
    model, inputs = zoo.make("bert", 4)
    opt = graphopt.optimize(model, inputs, budget=0.5, backend="aot_eager")
    folder = tmp_path_factory.mktemp("dump")
    before = {p.name: p.read_text("utf-8") for p in opt.dump(folder / "before")}
    zoo.call(opt, inputs).loss.backward()
    return opt, before, {p.name: p.read_text("utf-8") for p in opt.dump(folder / "after")}


Dumped = tuple[graphopt.OptimizedModule, dict[str, str], dict[str, str]]


def test_every_artifact_is_written_and_readable(dumped: Dumped) -> None:
    _, before, after = dumped
    passes = {f"{step}.{kind}" for step in ("1_dead_rows", "2_greentrainer") for kind in ("py", "diff")}
    reports = {"report.json", "report.txt", "report.html", "index.html", "provenance.txt", "blocks.svg"}
    assert set(before) == {"0_captured.py", *passes, *reports}
    assert {"3_forward.py", "3_backward.py"} <= set(after)
    assert "float32[4, 12, 32]" in after["0_captured.py"]
    assert "s26" not in after["0_captured.py"]
    diff = after["2_greentrainer.diff"]
    assert diff.startswith("--- before greentrainer")
    assert any(line.startswith("-") and "mm" in line for line in diff.splitlines())  # a gradient that is not computed
    report = json.loads(after["report.json"])
    assert report["trained"] + len(report["cut"]) == report["trainable"]
    assert report["step_flops"] <= 0.5 * report["full_step_flops"]
    assert after["blocks.svg"].lstrip().startswith("<?xml")


def test_every_stage_is_python_with_lines_of_code_and_names_of_parameters(dumped: Dumped) -> None:
    _, _, after = dumped
    stages = {name: text for name, text in after.items() if name.endswith(".py")}
    assert len(stages) == 5
    for name, text in stages.items():
        ast.parse(text)
        assert re.search(r"# File: .*modeling_bert.py:\d+ in forward, code: ", text), name
        assert not re.search(r"\bprimals_\d|\btangents_\d", text), name
        if name != "3_backward.py":  # which reads transposed weights that the forward hands over
            assert "bert_encoder_layer_1_attention_self_query_weight" in text, name
        assert max(map(len, text.splitlines())) <= 250, name


def test_a_decision_stands_beside_its_parameter_and_its_gradient(dumped: Dumped) -> None:
    opt, _, after = dumped
    cut, kept = opt.report.cut[0], opt.report.selected[0]
    why = {row.name: row.why for row in opt.report.tensors}
    text = after["0_captured.py"]
    assert f"# parameter {cut}; not trained: {why[cut]}" in text
    assert f"# gradient of parameter {cut}; not trained: {why[cut]}" in text
    assert f"# parameter {kept}; trained: {why[kept]}" in text


def test_provenance_leads_from_a_line_to_operators_and_decisions(dumped: Dumped) -> None:
    opt, _, after = dumped
    text = after["provenance.txt"]
    block = text[text.index("\nbert.encoder.layer.1\n") :].partition("\n\n")[0]
    (line,) = re.findall(r"^  transformers/models/bert/modeling_bert.py:\d+ in forward: query_layer = .*$", block, re.MULTILINE)
    entry = block[block.index(line) :].splitlines()[1:4]
    assert re.match("    forward .* -addmm_", entry[0])  # it runs for one row in the place of all
    assert entry[1].startswith("    backward ")
    row = next(r for r in opt.report.tensors if r.name == "bert.encoder.layer.1.attention.self.query.weight")
    assert f"    {row.name}: {'trained' if row.trained else 'not trained'}: {row.why}" in block
    removed = {node.name for node in opt.graph.graph.nodes} - {n.name for n in opt.plan.rewrite(opt.graph)[0].graph.nodes}
    listed = re.findall(r"^    (?:forward|backward) (.*)$", text, re.MULTILINE)
    assert set(re.findall(r"-(\w+)", " ".join(listed))) <= removed


def test_the_index_links_every_file(dumped: Dumped) -> None:
    _, before, after = dumped
    for files in (before, after):
        assert set(re.findall(r'href="([^"]+)"', files["index.html"])) == set(files) - {"index.html"}


class InParts(nn.Module):
    """Two graphs, and parameters that are called as operators are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.t, self.mm = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x) * self.t)
        torch._dynamo.graph_break()
        return self.second(hidden * self.mm).square().mean()


@pytest.mark.parametrize("budget", [None, 0.8])
def test_models_of_several_graphs_and_names_of_operators(budget: float | None, tmp_path: Path) -> None:
    opt = graphopt.optimize(InParts(), (torch.randn(6, 4),), budget=budget, backend="aot_eager")
    opt(torch.randn(6, 4)).backward()
    captured = {p.name: p.read_text("utf-8") for p in opt.dump(tmp_path / "dump")}["0_captured.py"]
    assert "# parameter t" in captured
    assert "# gradient of part " in captured
    ast.parse(captured)
    opt.report.to_html(tmp_path / "page.html")


@pytest.mark.parametrize("name", ["mlp", "cnn", "bert", "llama"])
def test_the_text_of_a_joint_graph_runs_and_computes_what_the_graph_does(name: str) -> None:
    assert_the_text_runs(zoo.captured(name))


class Hides(nn.Module):
    """A parameter with the name of a module that the text uses."""

    def __init__(self) -> None:
        super().__init__()
        self.operator = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x * self.operator, (4,)).square().mean()


def test_no_parameter_hides_what_the_text_uses() -> None:
    graph = capture(Hides(), (torch.randn(3, 4),), {})
    assert "operator.getitem" in readable(graph)
    assert_the_text_runs(graph)


def assert_the_text_runs(graph: TrainingGraph) -> None:
    """It computes what the graph does."""
    values = [random_like(node.meta["val"], graph) for node in graph.placeholders]
    names: dict[str, Any] = {}
    exec(compile(readable(graph, sources=True), "step", "exec"), names)
    for constant, value in vars(graph.module).items():
        setattr(names["step"], constant, value)
    for constant, value in graph.module.named_buffers():
        setattr(names["step"], constant, value)
    torch.manual_seed(0)
    expected = graph.module(*values)
    torch.manual_seed(0)
    found = names["step"](*values)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def random_like(value: Any, graph: TrainingGraph) -> Any:
    """A value of the same type for an input of a graph, at its captured batch size."""
    if not isinstance(value, Tensor):
        return graph.at(value, graph.batch_size)
    shape = [graph.at(size, graph.batch_size) for size in value.shape]
    return torch.randn(shape, dtype=value.dtype) if value.is_floating_point() else torch.ones(shape, dtype=value.dtype)


class ReadsNumber(nn.Module):
    """Reads a number off a tensor, of which nothing is known before a step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        read = {"float": x.mean(), "int": labels.sum(), "bool": (labels > 0).any()}[self.kind].item()
        return nn.functional.cross_entropy(self.last(self.first(x).relu() * read), labels)


@pytest.mark.parametrize("kind", ["float", "int", "bool"])
def test_a_number_that_is_read_off_a_tensor_has_a_name(kind: str, tmp_path: Path) -> None:
    example = (torch.randn(4, 5), torch.tensor([0, 1, 2, 1]))
    opt = graphopt.optimize(ReadsNumber(kind), example, budget=0.9, backend="aot_eager")
    opt.dump(tmp_path)
    text = (tmp_path / "0_captured.py").read_text("utf-8")
    assert f'"{kind}" = aten._local_scalar_dense' in text
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    graph = opt.graph
    values = [random_like(node.meta["val"], graph) for node in graph.placeholders]
    with torch.no_grad():
        namespace["step"](*values)


@dataclass(frozen=True)
class Nothing:
    """A pass that finds nothing, with a name that no file can have."""

    name: str = "mine/cut"
    preserves: Preserves = Preserves.EXACT
    serves: tuple[str, ...] = ()

    def applicable(self, graph: TrainingGraph) -> list[Any]:
        return []

    def apply(self, graph: TrainingGraph, decisions: Any) -> Changes:
        return Changes(())


class Formula(nn.Module):
    """A layer with a name that matplotlib took for mathematics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"$\\bad$": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["$\\bad$"](x).square().mean()


def test_any_names_and_numbers_can_be_written(tmp_path: Path) -> None:
    opt = graphopt.optimize(Formula(), (torch.randn(4, 8),), passes=[Nothing()], backend="aot_eager")
    files = {path.name: path for path in dump(tmp_path, replace(opt.report, sections={"mine/cut": {"x": math.inf}}), None)}
    assert {"1_mine_cut.py", "1_mine_cut.diff"} <= set(files)
    assert files["blocks.svg"].stat().st_size
    (page,) = re.findall(r'id="data">(.*?)</script>', files["report.html"].read_text("utf-8"), re.DOTALL)
    report = json.loads(files["report.json"].read_text("utf-8"), parse_constant=pytest.fail)
    assert report["sections"] == {"mine/cut": {"x": None}}
    assert json.loads(page, parse_constant=pytest.fail)["report"] == report


def test_a_long_call_is_broken_at_its_own_arguments() -> None:
    line = "    x = f(" + ", ".join(["[1, 2]", "'a, b'", "g(3, 4)"] * 12) + ")"
    assert broken(line)[:4] == ["    x = f(", "        [1, 2],", "        'a, b',", "        g(3, 4),"]
    assert ast.dump(ast.parse("".join(broken(line)).strip())) == ast.dump(ast.parse(line.strip()))
    assert broken("    y = 1") == ["    y = 1"]


def test_report_names_every_approximation() -> None:
    model, inputs = zoo.make("mlp", 4)
    cut = graphopt.optimize(model, inputs, budget=0.6, backend="aot_eager").report
    assert "not trained" in cut.approximations[0]
    assert "FLOPs per step" in str(cut)
    full = graphopt.optimize(model, inputs, backend="aot_eager").report
    assert full.approximations == []
    assert full.flops_ratio == 1.0


def test_blocks_are_named_by_the_first_index() -> None:
    assert block_name("encoder.layer.3.output.dense.weight") == "encoder.layer.3"
    assert block_name("pooler.dense.bias") == "pooler.dense"
    assert block_name("scale") == "scale"
