"""The commands of `graphopt bench`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from graphopt.cli_options import AsJson, CompiledBackend, plain_console
from graphopt.errors import InputError
from graphopt.report.files import json_text, make_folder_of

bench_app = typer.Typer(help="Side-by-side measurements within one run.", no_args_is_help=True)

Repeats = Annotated[int, typer.Option(min=5, help="Timed steps per variant; the median is reported.")]
Models = Annotated[str, typer.Option(help="Names or patterns, with commas; all by default.")]
Cases = Annotated[str, typer.Option(help="Names or patterns such as operator/linalg.*, with commas; all by default.")]
Jobs = Annotated[int, typer.Option(min=1, help="Processes at a time, of one thread each.")]
Timeout = Annotated[float, typer.Option(min=1.0, help="Seconds of a case.")]
Out = Annotated[Path | None, typer.Option(help="Also write the JSON here.")]
Folder = Annotated[Path, typer.Option(help="Folder of the results, which are kept between calls.")]


@bench_app.command("greentrainer")
def bench_greentrainer(repeats: Repeats = 9, models: Models = "", out: Out = None, as_json: AsJson = False) -> None:
    """Full fine-tuning of minilm and gpt2, eager and torch.compile, against flops=0.7, 0.5 and 0.4."""
    _measure("greentrainer", as_json, out, models=_listed(models), repeats=repeats)


@bench_app.command("exact")
def bench_exact(repeats: Repeats = 15, models: Models = "", out: Out = None, as_json: AsJson = False) -> None:
    """What exact rewrites save without a budget, against torch.compile: minilm, bert, vit, llama with labels of answers alone."""
    _measure("exact", as_json, out, models=_listed(models), repeats=repeats)


@bench_app.command("logits")
def bench_logits(
    layers: Annotated[int, typer.Option(min=1, help="Of SmolLM2-135M's 30.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Of a batch.")] = 2048,
    samples: Annotated[int, typer.Option(min=1, help="Sequences of a batch.")] = 4,
    chunks: Annotated[int | None, typer.Option(min=1, help="As many as are chosen by default.")] = None,
    labelled: Annotated[float, typer.Option(min=0.0, max=1.0, help="Part of the tokens, the last, that have a label.")] = 1.0,
    lora: Annotated[bool, typer.Option("--lora", help="Train adapters of rank 8 alone: the head is frozen.")] = False,
    trainer: Annotated[
        bool, typer.Option("--trainer", help="SmolLM2-135M with its weights on real text, in the Trainer (make llm).")
    ] = False,
    memory: Annotated[
        float | None, typer.Option(min=0.01, max=1.0, help="With --trainer: limit a step to this part of torch.compile's bytes.")
    ] = None,
    repeats: Repeats = 5,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """A language model's logits in chunks of tokens, against eager and torch.compile: bytes that a step allocates, and time."""
    if memory is not None and not trainer:
        raise typer.BadParameter("it limits the Trainer's step, so it needs --trainer.", param_hint="'--memory'")
    shared: dict[str, Any] = {"tokens": tokens, "samples": samples, "labelled": labelled, "lora": lora, "repeats": repeats}
    if trainer:
        _measure("logits_trainer", as_json, out, memory=memory, **shared)
    else:
        _measure("logits", as_json, out, layers=layers, chunks=chunks, **shared)


@bench_app.command("batches")
def bench_batches(
    models: Models = "",
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sample.")] = 4096,
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer than the models have, to try it.")] = None,
    backend: CompiledBackend = "inductor",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """The largest batch of language models on 16 and 24 GiB, predicted, with and without what is done without a budget."""
    _measure("batches", as_json, out, models=_listed(models), length=length, backend=backend, layers=layers)


@bench_app.command("memory")
def bench_memory(models: Models = "", out: Out = None, as_json: AsJson = False) -> None:
    """Predicted against measured peak memory of mlp, cnn, bert, gpt2, opt, llama, t5 and vit, run and optimised in many ways."""
    _measure("memory", as_json, out, models=_listed(models))


@bench_app.command("runlora")
def bench_runlora(
    repeats: Repeats = 7,
    cases: Cases = "",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """LoRA with PEFT, eager and torch.compile, against reordered products."""
    _measure("runlora", as_json, out, cases=_listed(cases), repeats=repeats, dtype=dtype)


@bench_app.command("vcas")
def bench_vcas(repeats: Repeats = 7, models: Models = "", out: Out = None, as_json: AsJson = False) -> None:
    """Sampled backwards that save 20, 35 and 50 % of the FLOPs, against exact training with torch.compile."""
    _measure("vcas", as_json, out, models=_listed(models), repeats=repeats)


@bench_app.command("lsp")
def bench_lsp(
    repeats: Repeats = 9,
    cases: Cases = "",
    chart: Annotated[Path | None, typer.Option(help="Also draw the simulated schedules here (PNG).")] = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compressed gradients against AdamW and GaLore."""
    _measure("lsp", as_json, out, cases=_listed(cases), repeats=repeats, chart=chart)


@bench_app.command("gpu")
def bench_gpu(repeats: Repeats = 15, models: Models = "", out: Folder = Path("out/bench_gpu"), as_json: AsJson = False) -> None:
    """Steps of llama, lora, bert and vit on a GPU under every kind of plan, against torch.compile: time and peak memory."""
    _measure("gpu", as_json, keeps=out, models=_listed(models), repeats=repeats)


@bench_app.command("distributed")
def bench_distributed(
    models: Models = "",
    ranks: Annotated[int, typer.Option(min=2, help="That train together.")] = 8,
    gloo: Annotated[bool, typer.Option("--gloo", help="Measure all-reduces between two processes here, too.")] = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """What a rank sends per step and holds: exact, selected, compressed, DDP, FSDP, tensor parallel; modelled times."""
    _measure("distributed", as_json, out, models=_listed(models), ranks=ranks, gloo=gloo)


@bench_app.command("suite")
def bench_suite(
    tasks: Annotated[
        str, typer.Option(help="Of glosses, parts_of_speech, digits, digits_resnet, definitions, smollm2, with commas.")
    ] = "",
    ways: Annotated[str, typer.Option(help="Ways to train, with commas; all by default, and exact training.")] = "",
    steps: Annotated[int, typer.Option(min=0, help="Steps of exact training; 0: the task's own number.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Of each way at its best learning rate.")] = 3,
    time: Annotated[float, typer.Option(min=0.01, help="Part of exact training's time that every other way gets.")] = 1.0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    backend: Annotated[str, typer.Option(help="inductor, or aot_eager to compile nothing.")] = "inductor",
    keep_compiled: Annotated[bool, typer.Option("--keep-compiled", help="Use what earlier runs compiled.")] = False,
    out: Folder = Path("out/bench_suite"),
    as_json: AsJson = False,
) -> None:
    """What each way to fine-tune is worth at equal time: exact training, techniques, and what people use instead."""
    from graphopt.bench import suite
    from graphopt.bench.selection_tasks import SMALL
    from graphopt.lower import check_backend

    check_backend(backend)
    settings = suite.Settings(
        tuple(_listed(tasks) or SMALL), tuple(_listed(ways) or ()), steps, seeds, time, threads, backend, keep_compiled
    )
    _measure("suite", as_json, keeps=out, settings=settings)


@bench_app.command("selection")
def bench_selection(
    tasks: Annotated[
        str, typer.Option(help="Of glosses, parts_of_speech, digits, digits_resnet, definitions, with commas.")
    ] = "",
    flops: Annotated[str, typer.Option(help="Fractions of full training's FLOPs, with commas.")] = "0.4,0.5,0.6,0.7",
    rules: Annotated[str, typer.Option(help="Rules, with commas; all by default, and full training.")] = "",
    steps: Annotated[int, typer.Option(min=0, help="Steps of a run; 0: the task's own number.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Of the rules near the best.")] = 3,
    jobs: Jobs = 2,
    out: Folder = Path("out/bench_selection"),
    as_json: AsJson = False,
) -> None:
    """Which rule selects the tensors that train best at equal FLOPs: ours against simple ones, each at its best rate."""
    from graphopt.bench import selection
    from graphopt.bench.selection_run import RULES
    from graphopt.bench.selection_tasks import SMALL

    settings = selection.Settings(
        tuple(_listed(tasks) or SMALL),
        _numbers(flops),
        tuple(_listed(rules) or (*RULES, "full")),
        steps,
        seeds,
    )
    _measure("selection", as_json, keeps=out, settings=settings, jobs=jobs)


@bench_app.command("trials")
def bench_trials(
    task: Annotated[str, typer.Option(help="One of those of `graphopt bench selection`.")] = "digits",
    flops: Annotated[float, typer.Option(help="Fraction of full training's FLOPs.")] = 0.5,
    rate: Annotated[float, typer.Option(min=0.0, help="Learning rate of the trials.")] = 0.004,
    folder: Annotated[Path, typer.Option(help="Where `graphopt bench selection` keeps its runs.")] = Path("out/bench_selection"),
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Whether a few steps tell which of the sets that `graphopt bench selection` has trained is the best."""
    _measure("trials", as_json, out, task=task, flops=flops, rate=rate, folder=folder)


@bench_app.command("breadth")
def bench_breadth(
    cases: Cases = "", jobs: Jobs = 1, timeout: Timeout = 300, out: Folder = Path("out/bench_breadth"), as_json: AsJson = False
) -> None:
    """Many tiny models: whether each trains as it does in eager mode and by torch.compile, within 0.7 of the FLOPs."""
    _measure("breadth", as_json, keeps=out, cases=_listed(cases), jobs=jobs, timeout=timeout)


@bench_app.command("operators")
def bench_operators(
    cases: Cases = "",
    samples: Annotated[int, typer.Option(min=1, help="Inputs per operator and per module, at most.")] = 2,
    jobs: Jobs = 1,
    timeout: Timeout = 480,
    out: Folder = Path("out/bench_operators"),
    as_json: AsJson = False,
) -> None:
    """torch's own operators and modules: whether each trains as it does in eager mode and by torch.compile."""
    _measure("operators", as_json, keeps=out, cases=_listed(cases), samples=samples, jobs=jobs, timeout=timeout)


@bench_app.command("loops")
def bench_loops(
    cases: Cases = "", jobs: Jobs = 1, timeout: Timeout = 300, out: Folder = Path("out/bench_loops"), as_json: AsJson = False
) -> None:
    """Training loops of other libraries: whether each trains as without graphopt, within 0.7 of the FLOPs."""
    _measure("loops", as_json, keeps=out, cases=_listed(cases), jobs=jobs, timeout=timeout)


@bench_app.command("overhead")
def bench_overhead(
    models: Models = "",
    repeats: Annotated[int, typer.Option(min=1, help="Of every start, each in two processes; the median is reported.")] = 3,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """What a step, the start, new sizes and a second process of mlp and llama cost beside torch.compile."""
    _measure("overhead", as_json, out, models=_listed(models), repeats=repeats)


def _listed(text: str) -> list[str] | None:
    return [name.strip() for name in text.split(",") if name.strip()] or None


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, _listed(text) or ()))
    except ValueError as error:
        raise InputError(f"{text!r} must be numbers with commas, such as 0.5,0.7.") from error


def _measure(name: str, as_json: bool, out: Path | None = None, keeps: Path | None = None, **options: Any) -> None:
    """Run a benchmark, write its results to `out` as JSON, if asked, and print them as JSON or as a table.

    Args:
        name: of a module here, which has `run` and `show`; what only it needs is not imported before.
        keeps: folder in which the benchmark keeps results.
        options: for `run`.
    Raises:
        InputError: nothing can be written to `out` or `keeps`; nothing was run.
    """
    make_folder_of(out)
    if keeps is not None:
        make_folder_of(keeps / "results")
        options["folder"] = keeps
    benchmark = importlib.import_module(f"graphopt.bench.{name}")
    results = benchmark.run(console=plain_console(stderr=True), **options)
    text = json_text(results)
    if as_json:
        print(text)
    else:
        benchmark.show(results, plain_console())
    if out is not None:
        out.write_text(text + "\n")
