import json
from pathlib import Path

import graphopt
from graphopt.report.picture import block_name
from tests import zoo


def test_every_artifact_is_written_and_readable(tmp_path: Path) -> None:
    model, inputs = zoo.make("bert", 4)
    opt = graphopt.optimize(model, inputs, budget=0.5, backend="aot_eager")
    names = {p.name for p in opt.dump(tmp_path / "before")}
    passes = {f"{step}.{kind}" for step in ("1_dead_rows", "2_greentrainer") for kind in ("py", "diff")}
    assert names == {"0_captured.py", *passes, "blocks.svg", "report.json"}
    zoo.call(opt, inputs).loss.backward()
    names = {p.name for p in opt.dump(tmp_path / "after")}
    assert {"3_forward.py", "3_backward.py"} <= names
    captured = (tmp_path / "after" / "0_captured.py").read_text()
    assert "float32[4, 12, 32]" in captured
    assert "s26" not in captured
    diff = (tmp_path / "after" / "2_greentrainer.diff").read_text()
    assert diff.startswith("--- before greentrainer")
    assert any(line.startswith("-") and "mm" in line for line in diff.splitlines())  # a gradient that is not computed
    report = json.loads((tmp_path / "after" / "report.json").read_text())
    assert report["trained"] + len(report["cut"]) == report["trainable"]
    assert report["step_flops"] <= 0.5 * report["full_step_flops"]
    assert (tmp_path / "after" / "blocks.svg").read_text().lstrip().startswith("<?xml")


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
