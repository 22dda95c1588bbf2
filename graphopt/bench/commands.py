"""The commands of `graphopt bench`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from graphopt.cli_options import AsJson, CompiledBackend, json_text, make_folder_of, plain_console
from graphopt.errors import InputError

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
    from graphopt.bench import greentrainer

    _measure(lambda console: greentrainer.run(_listed(models), repeats, console), greentrainer.show, out, as_json)


@bench_app.command("exact")
def bench_exact(repeats: Repeats = 15, models: Models = "", out: Out = None, as_json: AsJson = False) -> None:
    """What exact rewrites save without a budget, against torch.compile: minilm, bert, vit, llama with labels of answers alone."""
    from graphopt.bench import exact

    _measure(lambda console: exact.run(_listed(models), repeats, console), exact.show, out, as_json)


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
    from graphopt.bench import logits, logits_trainer

    if memory is not None and not trainer:
        raise typer.BadParameter("it limits the Trainer's step, so it needs --trainer.", param_hint="'--memory'")
    if trainer:
        chosen = (tokens, samples, labelled, lora, memory, repeats)
        _measure(lambda console: logits_trainer.run(*chosen, console), logits_trainer.show, out, as_json)
        return
    settings = (layers, tokens, samples, chunks, labelled, lora, repeats)
    _measure(lambda console: logits.run(*settings, console), logits.show, out, as_json)


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
    from graphopt.bench import batches

    _measure(lambda console: batches.run(_listed(models), length, backend, layers, console), batches.show, out, as_json)


@bench_app.command("memory")
def bench_memory(models: Models = "", out: Out = None, as_json: AsJson = False) -> None:
    """Predicted against measured peak memory of mlp, cnn, bert, gpt2, opt, llama, t5 and vit, run and optimised in many ways."""
    from graphopt.bench import memory

    _measure(lambda console: memory.run(_listed(models), console), memory.show, out, as_json)


@bench_app.command("runlora")
def bench_runlora(
    repeats: Repeats = 7,
    cases: Cases = "",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """LoRA with PEFT, eager and torch.compile, against reordered products."""
    from graphopt.bench import runlora

    _measure(lambda console: runlora.run(_listed(cases), repeats, dtype, console), runlora.show, out, as_json)


@bench_app.command("vcas")
def bench_vcas(repeats: Repeats = 7, models: Models = "", out: Out = None, as_json: AsJson = False) -> None:
    """Sampled backwards that save 20, 35 and 50 % of the FLOPs, against exact training with torch.compile."""
    from graphopt.bench import vcas

    _measure(lambda console: vcas.run(_listed(models), repeats, console), vcas.show, out, as_json)


@bench_app.command("lsp")
def bench_lsp(
    repeats: Repeats = 9,
    cases: Cases = "",
    chart: Annotated[Path | None, typer.Option(help="Also draw the simulated schedules here (PNG).")] = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compressed gradients against AdamW, ZeRO-Offload's schedule and GaLore."""
    from graphopt.bench import lsp

    _measure(lambda console: lsp.run(_listed(cases), repeats, console, chart), lsp.show, out, as_json)


@bench_app.command("gpu")
def bench_gpu(repeats: Repeats = 15, models: Models = "", out: Folder = Path("out/bench_gpu"), as_json: AsJson = False) -> None:
    """Steps of llama, lora, bert and vit on a GPU under every kind of plan, against torch.compile: time and peak memory."""
    from graphopt.bench import gpu

    _measure(lambda console: gpu.run(_listed(models), repeats, out, console), gpu.show, None, as_json, out)


@bench_app.command("distributed")
def bench_distributed(
    models: Models = "",
    ranks: Annotated[int, typer.Option(min=2, help="That train together.")] = 8,
    gloo: Annotated[bool, typer.Option("--gloo", help="Measure all-reduces between two processes here, too.")] = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """What a rank sends per step and holds: exact, selected, compressed, DDP, FSDP, tensor parallel; modelled times."""
    from graphopt.bench import distributed

    _measure(lambda console: distributed.run(_listed(models), ranks, console, gloo), distributed.show, out, as_json)


@bench_app.command("suite")
def bench_suite(
    tasks: Annotated[str, typer.Option(help="Of glosses, parts_of_speech, digits, definitions, smollm2, with commas.")] = "",
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
    _measure(lambda console: suite.run(settings, out, console), suite.show, None, as_json, out)


@bench_app.command("selection")
def bench_selection(
    tasks: Annotated[str, typer.Option(help="Of glosses, parts_of_speech, digits, definitions, with commas.")] = "",
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
    _measure(lambda console: selection.run(settings, out, jobs, console), selection.show, None, as_json, out)


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
    from graphopt.bench import trials

    _measure(lambda console: trials.run(task, flops, rate, folder, console), trials.show, out, as_json)


@bench_app.command("breadth")
def bench_breadth(
    cases: Cases = "", jobs: Jobs = 1, timeout: Timeout = 300, out: Folder = Path("out/bench_breadth"), as_json: AsJson = False
) -> None:
    """Many tiny models: whether each trains as it does in eager mode and by torch.compile, within 0.7 of the FLOPs."""
    from graphopt.bench import breadth

    _measure(lambda console: breadth.run(_listed(cases), out, jobs, console, timeout), breadth.show, None, as_json, out)


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
    from graphopt.bench import operators

    _measure(
        lambda console: operators.run(_listed(cases), samples, out, jobs, console, timeout), operators.show, None, as_json, out
    )


@bench_app.command("loops")
def bench_loops(
    cases: Cases = "", jobs: Jobs = 1, timeout: Timeout = 300, out: Folder = Path("out/bench_loops"), as_json: AsJson = False
) -> None:
    """Training loops of other libraries: whether each trains as without graphopt, within 0.7 of the FLOPs."""
    from graphopt.bench import loops

    _measure(lambda console: loops.run(_listed(cases), out, jobs, console, timeout), loops.show, None, as_json, out)


@bench_app.command("overhead")
def bench_overhead(
    models: Models = "",
    repeats: Annotated[int, typer.Option(min=1, help="Of every start, each in two processes; the median is reported.")] = 3,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """What a step, the start, new sizes and a second process of mlp and llama cost beside torch.compile."""
    from graphopt.bench import overhead

    _measure(lambda console: overhead.run(_listed(models), repeats, console), overhead.show, out, as_json)


def _listed(text: str) -> list[str] | None:
    return [name.strip() for name in text.split(",") if name.strip()] or None


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, _listed(text) or ()))
    except ValueError as error:
        raise InputError(f"{text!r} must be numbers with commas, such as 0.5,0.7.") from error


def _measure(
    run: Callable[[Console], Any],
    show: Callable[[Any, Console], None],
    out: Path | None,
    as_json: bool,
    folder: Path | None = None,
) -> None:
    """Run a benchmark, write its results to `out` as JSON, if asked, and print them as JSON or as a table.

    Args:
        folder: in which the benchmark keeps results.
    Raises:
        InputError: nothing can be written to `out` or `folder`; nothing was run.
    """
    make_folder_of(out)
    make_folder_of(None if folder is None else folder / "results")
    results = run(plain_console(stderr=True))
    text = json_text(results)
    if as_json:
        print(text)
    else:
        show(results, plain_console())
    if out is not None:
        out.write_text(text + "\n")
