import json
import subprocess
import sys
from pathlib import Path

import pytest

from graphopt import cli
from tests import zoo


def mlp():  # type: ignore[no-untyped-def]
    return zoo.make("mlp", 4)


def fails():  # type: ignore[no-untyped-def]
    raise KeyError("weights")


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["graphopt", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out, out.err


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97,
    }))  # fmt: skip
    return path


def test_analyze_a_config_file(monkeypatch, capsys, config) -> None:  # type: ignore[no-untyped-def]
    for model in (config, config.parent):
        code, out, _ = run(monkeypatch, capsys, "analyze", str(model), "--batch", "2", "--length", "8", "--json")
        found = json.loads(out)
        assert code == 0
        assert found["step"] == found["forward"] + found["backward"]
        assert len(found["tensors"]) == 21
    code, out, _ = run(monkeypatch, capsys, "analyze", str(config), "--length", "8", "--top", "2", "--cost", "paper")
    assert code == 0
    assert "GFLOPs" in out


def test_analyze_and_optimize_a_factory(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert run(monkeypatch, capsys, "analyze", "tests.test_cli:mlp")[0] == 0
    code, out, _ = run(
        monkeypatch, capsys, "optimize", "tests.test_cli:mlp", "--budget", "0.6", "--out", str(tmp_path / "o"), "--json"
    )
    assert code == 0
    assert json.loads(out)["flops_ratio"] <= 0.6
    assert {p.name for p in (tmp_path / "o").iterdir()} >= {
        "0_captured.py",
        "1_greentrainer.diff",
        "blocks.svg",
        "report.json",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["analyze", "nowhere"],
        ["analyze", "tests.test_cli:missing"],
        ["analyze", "no.such.module:x"],
        ["analyze", "tests.test_cli:mlp", "--cost", "guess"],
        ["analyze", "tests.test_cli:fails"],
        ["analyze", "tests.test_cli:mlp", "--memory", "--plot", f"{__file__}/below/a/file.png"],
        ["pareto", "tests.test_cli:mlp", "--plot", f"{__file__}/below/a/file.png"],
        ["optimize", "tests.test_cli:mlp", "--out", f"{__file__}/below/a/file"],
        ["analyze", "tests.test_cli:mlp", "--batch", "0"],
        ["optimize", "tests.test_cli:mlp", "--budget", "1.5"],
        ["optimize", "tests.test_cli:mlp", "--budget", "0.01"],
        ["optimize", "tests.test_cli:mlp", "--backend", "tpu"],
        ["analyze"],
        ["nonsense"],
        ["bench", "greentrainer", "--models", "nonsense"],
        ["bench", "budget", "--variants", "nonsense"],
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments) -> None:  # type: ignore[no-untyped-def]
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    lines = [line for line in err.strip().splitlines() if line.startswith("graphopt:")]
    assert len(lines) == 1
    assert "Traceback" not in err


def test_a_broken_config_is_explained(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for text in ("not json", "{}", '{"model_type": "no-such-type"}', "[1]"):
        path = tmp_path / "config.json"
        path.write_text(text)
        code, _, err = run(monkeypatch, capsys, "analyze", str(path))
        assert code == 2
        assert "not a Hugging Face config" in err


def test_the_installed_command_answers() -> None:
    done = subprocess.run([sys.executable, "-m", "graphopt", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "analyze" in done.stdout


def test_optimize_verifies_on_request(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    seen = []
    differs = lambda *_: seen.append(1) or "the gradient of x differs"  # noqa: E731
    monkeypatch.setattr("graphopt.runtime.module.OptimizedModule.first_difference", differs)
    arguments = ("optimize", "tests.test_cli:mlp", "--budget", "0.6", "--out", str(tmp_path), "--json")
    for more, passes in (([], ["greentrainer", "runlora"]), (["--verify"], [])):
        code, out, _ = run(monkeypatch, capsys, *arguments, *more)
        assert code == 0
        assert set(json.loads(out)["passes"]) <= set(passes)
        assert len(seen) == len(more)
