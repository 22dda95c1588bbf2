"""The page of a report, seen by a browser: it draws itself without a network, and its sliders show what the solver planned."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from graphopt.passes import Vcas
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import graphopt
from graphopt.analysis.step_memory import step_memory
from graphopt.compat import new_fake_mode
from graphopt.errors import BudgetError, GraphoptError, InputError
from graphopt.report.html.model import model_page
from graphopt.report.progress import stages_told
from graphopt.report.units import in_bytes
from tests import zoo
from tests.report.browser import visit

LOOK = """
  const all = (selector) => [...document.querySelectorAll(selector)];
  const found = { budgets: [], sections: all("section").map((s) => s.id), outside: all("[src], link").length };
  const slider = document.getElementById("budget");
  for (let k = 0; slider && k <= Number(slider.max); k++) {
    slider.value = k;
    slider.dispatchEvent(new Event("input"));
    found.budgets.push(all(".cells .on").length);
  }
  found.batches = [];
  const batch = document.getElementById("batch");
  for (let k = 0; batch && k <= Number(batch.max); k++) {
    batch.value = k;
    batch.dispatchEvent(new Event("input"));
    found.batches.push(document.querySelector("#memory strong").textContent);
  }
  const chart = document.querySelector("#memory svg"), dot = chart.querySelector("circle").getBoundingClientRect();
  const over = { clientX: dot.left + dot.width / 2 + 0.5, clientY: dot.top + 40, bubbles: true };
  chart.dispatchEvent(new PointerEvent("pointermove", over));
  found.hover = document.getElementById("tip").textContent;
  chart.dispatchEvent(new PointerEvent("pointerleave", over));
  found.hidden = document.getElementById("tip").hidden;
  chart.parentElement.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  found.key = document.getElementById("tip").hidden;
  const overlaps = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  found.overlapping = all("svg").flatMap((picture) => {
    const texts = [...picture.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
    const over = (a, i) => texts.slice(i + 1).filter(([, b]) => overlaps(a, b));
    return texts.flatMap(([one, a], i) => over(a, i).map(([other]) => one + " / " + other));
  });
  found.wide = document.documentElement.scrollWidth > innerWidth;
  all("#tensors th button")[0].click();
  found.first = all("#tensors tbody tr").map((row) => row.cells[0].firstChild.textContent);
  found.rows = all("#tensors tbody tr").length;
  all("details.block").forEach((block) => { block.open = true; block.dispatchEvent(new Event("toggle")); });
  found.inside = all("details.block .inner").map((inner) => inner.querySelectorAll("tbody")[0].rows.length);
  found.lines = all("details.block .inner").filter((inner) => /\\.py:\\d+/.test(inner.textContent)).length;
  return found;
"""


def data_of(page: str) -> dict[str, Any]:
    """What a page draws."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    found: dict[str, Any] = json.loads(match[1])
    return found


@pytest.fixture(scope="module")
def optimised() -> tuple[graphopt.OptimizedModule, str]:
    model, inputs = zoo.make("bert", 4)
    opt = graphopt.optimize(model, inputs, 0.5, backend="aot_eager")
    return opt, opt.report.to_html(title="A <b>title</b>", device_memory="1MiB")


@pytest.fixture(scope="module")
def analysed() -> tuple[graphopt.Analysis, str]:
    model, inputs = zoo.make("mlp", 4)
    page = model_page(model, inputs, title="mlp", backend="aot_eager", front=True)
    return graphopt.analyze(model, inputs, backend="aot_eager"), page


def test_the_page_of_an_optimised_model(optimised: tuple[graphopt.OptimizedModule, str], tmp_path: Path) -> None:
    opt, page = optimised
    data, report = data_of(page), opt.report
    told = visit(page, LOOK, tmp_path)
    assert told["problems"] == []
    assert told["requests"] == []
    assert int(told["ready"]) < 3000
    found = told["found"]
    assert found["outside"] == 0
    assert found["sections"] == ["blocks", "memory", "budgets", "tensors", "techniques", "basis"]
    assert found["budgets"] == [len(plan["trained"]) for plan in data["plans"]]
    peak = step_memory(opt.plan.rewrite(opt.graph)[0], "aot_eager", "adamw")
    assert in_bytes(peak.peak_bytes) in found["hover"]
    assert f"in the {peak.peak_phase}, at {peak.rows[peak.peak_row].node}" in found["hover"]
    assert found["hidden"] is True
    assert found["key"] is False
    assert found["overlapping"] == []
    assert not found["wide"]
    assert found["rows"] == len(report.tensors) == sum(found["inside"])
    assert found["first"] == sorted(found["first"], key=str.lower)
    assert found["lines"] >= 5
    assert len(page) < 300_000


def test_predicting_the_memory_is_told_where_somebody_looks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, inputs = zoo.make("mlp", 4)
    opt = graphopt.optimize(model, inputs, backend="aot_eager")
    for seen in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda seen=seen: seen)
        opt.report.to_html()
        assert len(re.findall(r"memory +\d+\.\d s\n", capsys.readouterr().err)) == seen
    with stages_told(quiet=False):  # as a command does, around the same
        opt.report.to_html()
    assert len(re.findall(r"memory +\d+\.\d s\n", capsys.readouterr().err)) == 1


def test_the_page_of_a_model_has_other_batches_and_the_front(analysed: tuple[graphopt.Analysis, str], tmp_path: Path) -> None:
    analysis, page = analysed
    data = data_of(page)
    told = visit(page, LOOK, tmp_path)
    assert told["problems"] == told["requests"] == []
    found = told["found"]
    assert "pareto" in found["sections"]
    assert data["pareto"]
    assert max(point["importance"] for point in data["pareto"]) == 1.0
    batches = data["memory"]["batches"]
    assert len(batches) >= 5
    peaks = [analysis.memory.at(batch).peak_bytes for batch in batches]
    assert found["batches"] == [f"Peak {in_bytes(peak)} at batch {batch}" for peak, batch in zip(peaks, batches, strict=True)]
    assert found["overlapping"] == []


def test_what_is_shown_is_escaped_and_the_json_is_the_reports(optimised: tuple[graphopt.OptimizedModule, str]) -> None:
    opt, page = optimised
    assert "<h1>A &lt;b&gt;title&lt;/b&gt;</h1>" in page
    assert data_of(page)["report"] == json.loads(json.dumps(opt.report.to_dict()))
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)


def test_the_slider_holds_the_plan_in_force_and_ends_with_everything(optimised: tuple[graphopt.OptimizedModule, str]) -> None:
    opt, page = optimised
    plans, rows = data_of(page)["plans"], opt.report.tensors
    (now,) = (plan for plan in plans if plan["in_force"])
    assert now["flops"] == 0.5
    assert {rows[k].name for k in now["trained"]} == opt.selected
    assert len(plans[-1]["trained"]) == opt.report.trainable
    for plan in plans:
        assert plan["used"] <= plan["flops"] + 1e-9
    values = [plan["value"] for plan in plans]
    assert all(more >= less - 0.02 for less, more in itertools.pairwise(values))


def test_sums_of_a_thinned_timeline_are_those_of_the_profile(
    optimised: tuple[graphopt.OptimizedModule, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphopt.report.html import memory

    monkeypatch.setattr(memory, "MOST_ROWS", 20)
    graph = optimised[0].graph
    profile = step_memory(graph, "aot_eager", "adamw")
    (drawn,) = memory.memory_data(graph, [("all", profile)], graph.batch_size, None, "")["profiles"]
    assert len(drawn["steps"]) < 70
    sums = [
        sum(drawn["sizes"][size][0] for _, _, _, born, last, size, _, _ in drawn["blocks"] if born <= row <= last)
        for row in range(len(drawn["steps"]))
    ]
    assert max(sums) == profile.peak_bytes
    assert set(sums) <= {row.live for row in profile.timeline}


def test_sizes_on_the_slider_of_a_large_batch_go_on_beyond_it(optimised: tuple[graphopt.OptimizedModule, str]) -> None:
    """It ended with the batch itself."""
    from graphopt.report.html import memory

    profile = step_memory(zoo.captured("mlp"), "aot_eager", "adamw")

    def sizes(batch: int, capacity: int | None) -> list[int]:
        found: list[int] = memory.memory_data(zoo.captured("mlp"), [("all", profile)], batch, capacity, "")["batches"]
        return found

    assert max(sizes(8192, None)) == 16 * 8192
    limit = profile.at(5 * 8192).peak_bytes
    assert max(sizes(8192, limit)) == max(sizes(1000, limit)) == 8 * 8192
    for batch in (4, 1000, 8192):
        for capacity in (None, limit, 2**50):
            found = sizes(batch, capacity)
            assert batch in found
            assert len(found) <= memory.MOST_BATCHES + 1


def test_the_page_counts_the_optimizer_that_the_plan_keeps_its_limit_with() -> None:
    """It counted AdamW, and said that the plan does not fit."""
    model, inputs = zoo.make("mlp", 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    most = graphopt.analyze(model, inputs, optimizer=optimizer, backend="aot_eager").memory.peak_bytes
    report = graphopt.optimize(model, inputs, graphopt.Budget(memory=most), optimizer=optimizer, backend="aot_eager").report
    figures = {figure["label"]: figure["value"] for figure in data_of(report.to_html())["figures"]}
    assert report.plan is not None
    assert figures["Peak memory"] == in_bytes(report.plan.remaining["memory"]["used"])
    assert figures[f"Fits into {in_bytes(most)}"] == "yes"
    figures = {figure["label"]: figure["value"] for figure in data_of(report.to_html(optimizer="adamw"))["figures"]}
    assert figures[f"Fits into {in_bytes(most)}"] == "no"


class Squared(nn.Module):
    """Its rows can be sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU())))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def test_all_figures_are_of_the_batch_of_the_report() -> None:
    """Memory, blocks and techniques were of the example's, beside FLOPs of the last step's."""
    batch = torch.randn(2, 16, 8)
    opt = graphopt.optimize(Squared(), tuple(batch), passes=[Vcas(keep_rows=0.5)], backend="aot_eager")
    for rows in (16, 5):
        opt(*batch[:, :rows]).backward()
    report = opt.report
    data = data_of(report.to_html())
    assert report.batch_size == data["memory"]["batch"] == 5
    assert data["techniques"][-1]["flops"] == [report.full_step_flops, report.step_flops]
    assert sum(block["forward"] + block["after"] for block in data["blocks"]) == report.step_flops
    whole = step_memory(opt.graph, "aot_eager", "adamw").at(5).peak_bytes
    assert any(figure["note"].endswith(f"full training {in_bytes(whole)}") for figure in data["figures"])


def test_arguments_are_checked_before_the_work(
    optimised: tuple[graphopt.OptimizedModule, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A typo in an optimizer's name stood on the page, others were noticed after minutes."""
    monkeypatch.setattr("graphopt.report.summary.page", lambda *_: pytest.fail("the work has begun"))
    report, file = optimised[0].report, tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="unknown optimizer 'adamz'"):
        report.to_html(optimizer="adamz")
    with pytest.raises(BudgetError, match="24 Gig"):
        report.to_html(device_memory="24 Gig")
    with pytest.raises(InputError, match="cannot write"):
        report.to_html(file / "page.html")
    with pytest.raises(InputError, match="cannot write"):
        optimised[0].dump(file)


def test_a_notebook_shows_the_verdict_and_an_unpickled_report_says_what_it_cannot_draw(
    optimised: tuple[graphopt.OptimizedModule, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    report = optimised[0].report
    assert report.verdict in report._repr_html_()
    copy = pickle.loads(pickle.dumps(report))
    assert copy == report
    with pytest.raises(GraphoptError, match="no graph to draw"):
        copy.to_html()


@pytest.mark.long
def test_a_page_of_seven_billion_parameters_is_small_and_quick(tmp_path: Path) -> None:
    with new_fake_mode():
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, num_hidden_layers=32))
        inputs = {key: zoo.tokens(1, 512) for key in ("input_ids", "labels")}
    page = model_page(model, inputs, title="7B", backend="aot_eager", device_memory="80GiB")
    told = visit(page, "return document.querySelectorAll('#tensors tbody tr').length;", tmp_path)
    assert told["problems"] == told["requests"] == []
    assert told["found"] == 291
    assert len(page.encode()) < 1_000_000
    assert int(told["ready"]) < 3000
