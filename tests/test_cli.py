import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import graphopt
from graphopt import cli
from graphopt.integrations import models
from tests import zoo


def mlp():  # type: ignore[no-untyped-def]
    return zoo.make("mlp", 4)


def wide():  # type: ignore[no-untyped-def]
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    return model, torch.randn(32, 64)


def stack():  # type: ignore[no-untyped-def]
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(4, 8)


def quits():  # type: ignore[no-untyped-def]
    raise SystemExit(3)


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
        "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 97,
    }))  # fmt: skip
    return path


def test_analyze_a_config_file(monkeypatch, capsys, config) -> None:  # type: ignore[no-untyped-def]
    for model in (config, config.parent):
        code, out, _ = run(monkeypatch, capsys, "analyze", str(model), "--batch", "2", "--length", "8", "--json")
        found = json.loads(out)
        assert code == 0
        assert found["step"] == found["forward"] + found["backward"]
        assert len(found["tensors"]) == 12
    code, out, _ = run(monkeypatch, capsys, "analyze", str(config), "--length", "8", "--top", "2", "--cost", "paper")
    assert code == 0
    assert "GFLOPs" in out


def test_analyze_and_optimize_a_factory(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert run(monkeypatch, capsys, "analyze", "tests.test_cli:mlp")[0] == 0
    arguments = ("optimize", "tests.test_cli:mlp", "--backend", "aot_eager", "--budget", "0.6", "--out", str(tmp_path / "o"))
    code, out, _ = run(monkeypatch, capsys, *arguments, "--json")
    assert code == 0
    assert json.loads(out)["flops_ratio"] <= 0.6
    assert {p.name for p in (tmp_path / "o").iterdir()} >= {
        "0_captured.py",
        "1_greentrainer.diff",
        "blocks.svg",
        "report.json",
    }


def test_report_writes_a_page_that_says_what_fits(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    page = tmp_path / "new" / "r.html"
    arguments = ("report", "tests.test_cli:mlp", "-o", str(page), "--device-memory", "1GiB", "--backend", "aot_eager", "--quiet")
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert (code, out, err) == (0, f"wrote {page}\n", "")
    text = page.read_text("utf-8")
    assert "it fits into 1.00 GiB, where batch" in text
    assert '"trained":6' in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "tests.test_cli:mlp", "--device-memory", "much"],
        ["report", "tests.test_cli:mlp", "--optimizer", "nonsense"],
        ["analyze", "nowhere"],
        ["analyze", "tests.test_cli:missing"],
        ["analyze", "no.such.module:x"],
        ["analyze", "tests.test_cli:fails"],
        ["analyze", "tests.test_cli:quits"],
        ["analyze", "../evil:fine"],
        ["analyze", ".:fine"],
        ["analyze", "..:fine"],
        ["analyze", ":"],
        ["analyze", "tests.test_cli:mlp", "--plot", "timeline.png"],
        ["plan", "tests.test_cli:mlp", "--device-memory", "lots"],
        ["optimize", "tests.test_cli:mlp", "--memory", "lots"],
        ["optimize", "tests.test_cli:mlp", "--memory", "100B"],
        ["optimize", "tests.test_cli:mlp", "--passes", "nonsense"],
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
        ["bench", "logits", "--memory", "0.5"],
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments) -> None:  # type: ignore[no-untyped-def]
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    lines = [line for line in err.strip().splitlines() if line.startswith("graphopt:")]
    assert len(lines) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["analyze", "tests.test_cli:mlp", "--cost", "guess"],
        ["analyze", "tests.test_cli:mlp", "--backend", "tpu"],
        ["plan", "tests.test_cli:mlp", "--optimizer", "nonsense"],
        ["pareto", "tests.test_cli:mlp", "--backend", "eager"],
        ["optimize", "tests.test_cli:mlp", "--optimizer", "nonsense"],
        ["optimize", "tests.test_cli:mlp", "--passes", "nonsense"],
        ["optimize", "tests.test_cli:mlp", "--variance", "-1"],
    ],
)
def test_options_are_checked_before_anything_is_loaded(monkeypatch, capsys, arguments) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert run(monkeypatch, capsys, *arguments)[0] == 2


def test_a_module_that_cannot_be_imported_is_explained(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "with_a_syntax_error.py").write_text("def made(:\n")
    (tmp_path / "that_divides.py").write_text("1 / 0\n")
    (tmp_path / "of_this_folder.py").write_text("from tests.test_cli import mlp as made\n")
    monkeypatch.chdir(tmp_path)
    for module, text in (("with_a_syntax_error", "SyntaxError"), ("that_divides", "ZeroDivisionError")):
        code, _, err = run(monkeypatch, capsys, "analyze", f"{module}:made")
        assert code == 2
        assert text in err
        assert "Traceback" not in err
    assert run(monkeypatch, capsys, "analyze", "of_this_folder:made")[0] == 0


def test_json_lists_as_many_tensors_as_the_table(monkeypatch, capsys, config) -> None:  # type: ignore[no-untyped-def]
    arguments = ("analyze", str(config), "--length", "8", "--json")
    found = {top: json.loads(run(monkeypatch, capsys, *arguments, "--top", top)[1])["tensors"] for top in ("2", "0")}
    assert (len(found["2"]), len(found["0"])) == (2, 12)
    costs = [row["weight_grad_flops"] + row["input_grad_flops"] for row in found["0"]]
    assert [row["weight_grad_flops"] + row["input_grad_flops"] for row in found["2"]] == sorted(costs)[:-3:-1]
    code, out, _ = run(monkeypatch, capsys, *arguments, "--memory", "--backend", "aot_eager", "--top", "2")
    assert code == 0
    assert len(json.loads(out)["top"]) == 2


def test_the_version_is_told(monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(monkeypatch, capsys, "--version")
    assert code == 0
    assert out.startswith(f"graphopt {graphopt.__version__}, torch ")


def test_help_does_without_torch() -> None:
    """It is what takes seconds to import."""
    for arguments in (["--help"], ["optimize", "--help"], ["bench", "--help"]):
        program = (
            f"import sys; sys.argv = ['graphopt', *{arguments}]\nfrom graphopt import cli\n"
            "try: cli.main()\n"
            "finally: print('loaded:', [m for m in ('torch', 'numpy', 'scipy', 'sympy', 'matplotlib') if m in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0
        assert "Usage" in done.stdout
        assert "loaded: []" in done.stdout


def test_commands_have_equal_defaults() -> None:
    seen: dict[str, set[object]] = {}
    for command in (cli.analyze, cli.fit, cli.plan, cli.pareto, cli.optimize):
        for name, parameter in inspect.signature(command).parameters.items():
            if name in ("batch", "length", "backend", "optimizer", "quiet", "as_json"):
                seen.setdefault(name, set()).add(parameter.default)
    assert {name: len(values) for name, values in seen.items()} == dict.fromkeys(
        ("batch", "length", "backend", "optimizer", "quiet", "as_json"), 1
    )


def test_weights_are_not_made_up_in_silence(monkeypatch, capsys, config, tmp_path) -> None:  # type: ignore[no-untyped-def]
    arguments = ("optimize", str(config), "--length", "8", "--backend", "aot_eager", "--out", str(tmp_path), "--json")
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "--random-weights" in err
    assert "GiB" in err
    code, out, _ = run(monkeypatch, capsys, *arguments, "--random-weights")
    assert code == 0
    assert json.loads(out)["flops_ratio"] <= 0.5


def test_optimize_takes_every_limit(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    arguments = ("optimize", "tests.test_cli:mlp", "--backend", "aot_eager", "--out", str(tmp_path), "--json")
    for more, limits, passes in (
        (["--memory", "1GiB", "--passes", "recompute", "--optimizer", "sgd"], {"memory": 2**30}, {"recompute"}),
        (["--variance", "0.5"], {"variance": 0.5}, {"vcas"}),
        (["--budget", "0.7", "--memory", "1GiB", "--optimizer", "none"], {"flops": 0.7, "memory": 2**30}, {"greentrainer"}),
        (["--passes", "greentrainer"], {"flops": 0.5}, {"greentrainer"}),
    ):
        code, out, err = run(monkeypatch, capsys, *arguments, *more)
        assert code == 0, err
        found = json.loads(out)
        assert found["budget"] == limits
        assert passes <= {*found["passes"], *found["plan"]["not_needed"]}


def test_no_optimizer_takes_no_memory(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The limit was kept with AdamW's states."""
    arguments = ("optimize", "tests.test_cli:wide", "--memory", "4MiB", "--backend", "aot_eager", "--out", str(tmp_path))
    found = [
        json.loads(run(monkeypatch, capsys, *arguments, "--optimizer", name, "--json")[1])["plan"]["remaining"]["memory"]["used"]
        for name in ("none", "sgd")
    ]
    assert found[0] == found[1]


def test_optimize_compresses_gradients(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """No limit is needed for that, and none on FLOPs is made up, which no pass would keep to."""
    arguments = ("optimize", "tests.test_cli:wide", "--passes", "lsp", "--backend", "aot_eager")
    code, out, err = run(monkeypatch, capsys, *arguments, "--out", str(tmp_path), "--json")
    assert code == 0, err
    assert json.loads(out)["passes"] == ["lsp"]
    assert json.loads(out)["budget"] == {}


def test_a_picture_of_plans_says_how_large_the_batch_is(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    titles: list[str] = []
    monkeypatch.setattr("graphopt.report.costs.plot_points", lambda points, path, title: titles.append(title))
    monkeypatch.setattr("graphopt.planner.pareto.STEPS", 2)
    arguments = ("pareto", "tests.test_cli:wide", "--backend", "aot_eager", "--plot", str(tmp_path / "p.png"), "--quiet")
    assert run(monkeypatch, capsys, *arguments)[0] == 0
    assert "batch 32" in titles[0]


def test_stages_are_told_with_their_time_unless_quiet(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    arguments = ("optimize", "tests.test_cli:mlp", "--backend", "aot_eager", "--out", str(tmp_path), "--json")
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 0
    told = dict(re.findall(r"^(\w+) +([\d.]+) s$", err, re.M))
    assert list(told) == ["capture", "importance", "plan", "compile", "memory"]
    json.loads(out)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, out, err = run(monkeypatch, capsys, *arguments, "--quiet")
    assert code == 0
    assert err == ""


def test_fit_has_an_exit_code_and_says_what_to_change(monkeypatch, capsys, config) -> None:  # type: ignore[no-untyped-def]
    arguments = ("fit", str(config), "--length", "8", "--backend", "aot_eager", "--quiet")
    code, out, err = run(monkeypatch, capsys, *arguments, "--gpu", "rtx4090")
    assert (code, err) == (0, "")
    assert out.startswith("It fits")
    adapted = ("--gpu", "400MiB", "--lora", "4", "--optimizer", "adamw8bit")
    code, out, _ = run(monkeypatch, capsys, *arguments, *adapted)
    assert code == 1
    assert out.startswith("It does not fit")
    code, out, _ = run(monkeypatch, capsys, *arguments, *adapted, "--json")
    assert code == 1
    assert {change["what"] for change in json.loads(out)["changes"]} >= {"weights in bfloat16"}
    assert run(monkeypatch, capsys, *arguments, "--gpu", "gtx")[0] == 2


def test_a_device_of_any_size_has_a_plan(monkeypatch, capsys, config) -> None:  # type: ignore[no-untyped-def]
    arguments = ("plan", str(config), "--length", "8", "--backend", "aot_eager", "--json")
    for size in ("9" * 300 + "GiB", "9" * 30 + "GiB"):
        code, _, err = run(monkeypatch, capsys, *arguments, "--device-memory", size)
        assert code == 2
        assert "must be a positive number of bytes" in err
    code, out, _ = run(monkeypatch, capsys, *arguments, "--device-memory", "1000000GiB")
    assert code == 0
    assert json.loads(out)["batch_size"] > 2**30
    _, out, _ = run(monkeypatch, capsys, *arguments, "--device-memory", "1MiB")
    assert "MiB of 973 KiB" in json.loads(out)["table"][0]["why"]


def test_a_broken_config_is_explained(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    five = '"hidden_size": 5, "num_attention_heads": 2'
    path = tmp_path / "config.json"
    for text, said in (
        ("not json", "not a Hugging Face config"),
        ("{}", "it names no model_type"),
        ('{"model_type": "no-such-type"}', "not a Hugging Face config"),
        ("[1]", "it names no model_type"),
        ('{"model_type": "llama", "architectures": ["NoSuchModel"]}', "has no NoSuchModel"),
        (f'{{"model_type": "llama", {five}}}', "The hidden size (5) is not a multiple"),
        (f'{{"model_type": "bert", {five}}}', "The hidden size (5) is not a multiple"),
    ):
        path.write_text(text)
        code, _, err = run(monkeypatch, capsys, "analyze", str(path), "--quiet")
        assert code == 2
        assert said in err
        assert err.count("\n") == 1
        assert len(err) < 500 + len(str(path))


def test_what_cannot_be_written_is_said_before_the_work(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("graphopt.integrations.models.load", lambda *_, **__: pytest.fail("it has begun"))
    (tmp_path / "file").write_text("")
    for arguments in (
        ("report", "-o", str(tmp_path)),
        ("optimize", "--out", str(tmp_path / "file" / "x")),
        ("pareto", "--plot", str(tmp_path / "front.txt")),
    ):
        code, _, err = run(monkeypatch, capsys, arguments[0], "tests.test_cli:mlp", *arguments[1:], "--quiet")
        assert code == 2
        assert err.startswith(f"graphopt: cannot write {tmp_path}")
        assert err.count("\n") == 1


@pytest.mark.parametrize("command", [("fit", "--gpu", "l4"), ("analyze", "--memory")])
def test_a_batch_whose_bytes_cannot_be_counted(command, monkeypatch, capsys, config) -> None:  # type: ignore[no-untyped-def]
    size = ("--length", "8", "--batch", str(10**16), "--quiet")
    code, _, err = run(monkeypatch, capsys, command[0], str(config), *command[1:], "--backend", "aot_eager", *size)
    assert code == 2
    assert "give a smaller batch" in err
    assert err.count("\n") == 1


def test_the_installed_command_answers() -> None:
    done = subprocess.run([sys.executable, "-m", "graphopt", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "analyze" in done.stdout


def test_optimize_verifies_on_request(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    seen = []
    differs = lambda *_: seen.append(1) or "the gradient of x differs"  # noqa: E731
    monkeypatch.setattr("graphopt.api.first_difference", differs)
    arguments = ("optimize", "tests.test_cli:mlp", "--backend", "aot_eager", "--budget", "0.6", "--out", str(tmp_path), "--json")
    for more, passes in (([], ["greentrainer", "runlora"]), (["--verify"], [])):
        code, out, _ = run(monkeypatch, capsys, *arguments, *more)
        assert code == 0
        assert set(json.loads(out)["passes"]) <= set(passes)
        assert len(seen) == len(more)


def test_more_tokens_than_a_model_has_positions_are_refused(monkeypatch, capsys, config) -> None:  # type: ignore[no-untyped-def]
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 16}))
    arguments = ("analyze", str(config), "--json", "--quiet")
    code, _, err = run(monkeypatch, capsys, *arguments, "--length", "17")
    assert code == 2
    assert "16 positions" in err
    assert run(monkeypatch, capsys, *arguments)[1] == run(monkeypatch, capsys, *arguments, "--length", "16")[1]


@pytest.mark.parametrize(
    "changes",
    [{"problem_type": "multi_label_classification"}, {"num_labels": 1}, {"problem_type": "regression", "num_labels": 2}, {}],
)
def test_labels_are_of_the_configs_kind(changes, tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 97, **changes,
    }))  # fmt: skip
    model, inputs = models.load(str(file), 3, 8, weights=True, random_weights=True)
    model(**inputs).loss.backward()


def test_a_factory_may_give_a_tensor(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    arguments = ("--budget", "0.9", "--backend", "aot_eager", "--out", str(tmp_path), "--quiet")
    assert run(monkeypatch, capsys, "optimize", "tests.test_cli:stack", *arguments)[0] == 0
