"""The `graphopt` command. torch is imported by what a command does, so that help is there at once."""

from __future__ import annotations

import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer

from graphopt.bench.commands import bench_app
from graphopt.cli_options import (
    AsJson,
    Backend,
    Batch,
    CompiledBackend,
    Length,
    Model,
    Optimizer,
    Quiet,
    at_work,
    check_picture,
    checked_optimizer,
    default_flops,
    plain_console,
)
from graphopt.errors import GraphoptError, InputError
from graphopt.report.files import json_text, make_folder_of

app = typer.Typer(
    name="graphopt",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")


def _version(asked: bool) -> None:
    if asked:
        print(f"graphopt {metadata.version('graphopt')}, torch {metadata.version('torch')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print versions.")] = False,
) -> None:
    """The same training, cheaper: a compiler for the joint forward and backward graph of PyTorch models."""


@app.command()
def analyze(
    model: Model,
    batch: Batch = 4,
    length: Length = None,
    cost: Annotated[
        Literal["exact", "paper"], typer.Option(help="Counted by the operators of the graph, or by GreenTrainer's own rules.")
    ] = "exact",
    top: Annotated[
        int | None, typer.Option(min=0, help="Tensors to list, the costliest first; 0: all in order. By default 20, in JSON all.")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Show the peak memory and what makes it, instead of FLOPs.")] = False,
    plot: Annotated[Path | None, typer.Option(help="With --memory: write the timeline as a PNG here.")] = None,
    backend: Backend = "inductor",
    optimizer: Optimizer = "adamw",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Count the FLOPs of a training step per tensor, or its bytes; allocates no weights."""
    if plot is not None and not memory:
        raise InputError("--plot draws the timeline of the memory: add --memory.")
    check_picture(plot)
    import graphopt
    from graphopt.integrations.models import load

    states = checked_optimizer(optimizer)
    with at_work(quiet):
        loaded, inputs = load(model, batch, length, weights=False)
        analysis = graphopt.analyze(loaded, inputs, cost=cost, backend=backend, optimizer=states)
        flops = analysis.flops
        if memory:
            from graphopt.report.costs import memory_dict, plot_timeline, show_memory

            profile = analysis.memory
            title = f"{model}, batch {profile.batch_size}, {backend}, {optimizer}"
    if memory:
        top = 20 if top is None and not as_json else top or len(profile.blocks)
        if plot is not None:
            plot_timeline(profile, plot, title)
        if as_json:
            print(json_text({"model": model, **memory_dict(profile, top)}))
        else:
            show_memory(profile, plain_console(), title, top)
        return
    from graphopt.report.costs import show_flops

    rows = list(flops.tensors)
    most = (None if as_json else 20) if top is None else top
    shown = sorted(rows, key=lambda r: -(r.weight_grad_flops + r.input_grad_flops))[:most] if most else rows
    if as_json:
        figures = {"forward": flops.forward, "backward": flops.backward, "step": flops.step}
        columns = ("name", "shape", "weight_grad_flops", "input_grad_flops")
        tensors = [{column: getattr(row, column) for column in columns} for row in shown]
        print(json_text({"model": model, "batch": flops.batch_size, "cost": cost, **figures, "tensors": tensors}))
        return
    title = f"{model}, batch {flops.batch_size}: GFLOPs of one step (2 per multiply-add), cost={cost}"
    show_flops(flops, shown, plain_console(), title)


@app.command()
def plan(
    model: Model,
    devices: Annotated[int, typer.Option(help="Number of equal devices.")] = 1,
    device_memory: Annotated[str, typer.Option(help="Memory of one device, such as 24GiB.")] = "24GiB",
    tensor_parallel: Annotated[int | None, typer.Option(help="Degree for DP+TP; else every divisor is tried.")] = None,
    margin: Annotated[float, typer.Option(help="Share of each device that stays free.")] = 0.05,
    allow_within_margin: Annotated[bool, typer.Option("--allow-within-margin", help="Use that share too.")] = False,
    batch: Batch = 4,
    length: Length = None,
    backend: Backend = "inductor",
    optimizer: Optimizer = "adamw",
    plot: Annotated[Path | None, typer.Option(help="Write the memory timeline of one device as a PNG here.")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Say how to train a model on given devices: strategy, batch and why; allocates no weights."""
    import graphopt
    from graphopt.integrations.models import load
    from graphopt.planner.parallel import check_devices, plan_devices
    from graphopt.report.costs import plot_timeline, show_plan

    check_devices(devices, device_memory, tensor_parallel, margin)
    check_picture(plot)
    states = checked_optimizer(optimizer)
    with at_work(quiet):
        loaded, inputs = load(model, batch, length, weights=False)
        analysis = graphopt.analyze(loaded, inputs, backend=backend, optimizer=states)
        profile, averaging = analysis.memory, analysis.memory_on(devices)
    found = plan_devices(
        profile,
        devices,
        device_memory,
        averaging=averaging,
        tensor_parallel=tensor_parallel,
        margin=margin,
        allow_within_margin=allow_within_margin,
    )
    if plot is not None:
        largest = profile.at(max(1, found.batch_size))
        plot_timeline(largest, plot, f"{model}, batch {largest.batch_size}, one device", found.capacity_bytes)
    if as_json:
        print(json_text({"model": model, **asdict(found)}))
    else:
        show_plan(found, plain_console())


@app.command()
def fit(
    model: Model,
    gpu: Annotated[str, typer.Option(help="A name such as h100, a100-40g or rtx4090, or an amount such as 16GiB.")],
    lora: Annotated[
        int | None, typer.Option(min=1, help="Train adapters of this rank (PEFT) in the place of all weights.")
    ] = None,
    batch: Batch = 4,
    length: Length = None,
    backend: CompiledBackend = "inductor",
    optimizer: Optimizer = "adamw",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Will a training step fit? Exit code 0 if it does, else 1, with what to change first; allocates no weights."""
    from graphopt.integrations.fit import fit as find, gpu_bytes
    from graphopt.integrations.models import load

    gpu_bytes(gpu)
    states = checked_optimizer(optimizer)
    with at_work(quiet):
        loaded, inputs = load(model, batch, length, weights=False)
        found = find(loaded, inputs, gpu, optimizer=states, backend=backend, lora=lora)
    if as_json:
        print(json_text({"model": model, **asdict(found)}))
    else:
        print(found)
    raise typer.Exit(0 if found.fits else 1)


@app.command()
def pareto(
    model: Model,
    batch: Batch = 4,
    length: Length = None,
    backend: CompiledBackend = "inductor",
    optimizer: Optimizer = "adamw",
    plot: Annotated[Path | None, typer.Option(help="Also draw the plans as a PNG.")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """What a training step can cost: the best plans over FLOPs, memory and the importance that they keep."""
    from rich.progress import Progress

    from graphopt.api import analyze as count, worth
    from graphopt.integrations.models import load
    from graphopt.planner.guidance import cliffs
    from graphopt.planner.pareto import STEPS, trade_offs
    from graphopt.report.costs import plot_points, show_points, show_worth

    check_picture(plot)
    states = checked_optimizer(optimizer)
    with Progress(console=plain_console(stderr=True), disable=quiet) as bar:
        loaded, inputs = load(model, batch, length, weights=False)
        task = bar.add_task("planning", total=STEPS**2)
        graph = count(loaded, inputs, optimizer=states).graph
        points = trade_offs(graph, backend, states, lambda: bar.advance(task))
        curve = worth(graph)
    if plot is not None:
        samples = graph.batch_size  # a factory does not ask for --batch
        plot_points(points, plot, f"{model}, batch {samples}: plans of which none is worse in everything")
    if as_json:
        found = {"plans": list(map(asdict, points)), "flops": list(map(asdict, curve)), "cliffs": cliffs(curve)}
        print(json_text(found))
    else:
        show_points(points, plain_console())
        show_worth(curve, plain_console())


@app.command()
def optimize(
    model: Model,
    budget: Annotated[
        float | None, typer.Option(help="FLOPs of a step as a part of full training's; 0.5 where no limit is given.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Peak of a step, such as 6GiB.")] = None,
    variance: Annotated[float | None, typer.Option(help="Variance added, as a part of the batch's own.")] = None,
    passes: Annotated[str, typer.Option(help="Names with commas, or auto.")] = "auto",
    optimizer: Optimizer = "adamw",
    out: Annotated[Path, typer.Option(help="Folder for the graphs, the diff per pass, the picture and report.json.")] = Path(
        "out"
    ),
    batch: Batch = 4,
    length: Length = None,
    backend: CompiledBackend = "inductor",
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Make weights up where there is a config and no weights.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the step with eager autograd on the example batch.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Optimise a model for a budget, run one step on random inputs, and dump the graphs."""
    import torch

    import graphopt
    from graphopt.analysis.optimizers import named_optimizer
    from graphopt.calls import as_call
    from graphopt.integrations.asked import own_optimizer
    from graphopt.integrations.models import load
    from graphopt.planner.plan import resolve_passes

    named = passes if passes == "auto" else [name.strip() for name in passes.split(",")]
    flops = default_flops(named) if budget is memory is variance is None else budget
    limits = graphopt.Budget(flops=flops, memory=memory, variance=variance)
    compresses = any(p.name == "lsp" for p in resolve_passes(named, limits))
    states = checked_optimizer(optimizer, compresses=compresses)
    make_folder_of(out / "report.json")
    with at_work(quiet):
        loaded, inputs = load(model, batch, length, weights=True, random_weights=random_weights)
        without = states is None and memory is None  # else "sgd", which holds no states either
        trained = [] if compresses or without else [p for p in loaded.parameters() if p.requires_grad]
        steps_with = named_optimizer(states or "sgd", trained[0].device)(trained) if trained else None
        opt = graphopt.optimize(
            loaded.train(), inputs, budget=limits, passes=named, backend=backend, optimizer=steps_with, verify=verify
        )
        args, kwargs = as_call(inputs)
        stepping = [opt.make_optimizer(torch.optim.Adam if states == "adam" else torch.optim.AdamW)] if own_optimizer(opt) else []
        opt(*args, **kwargs)
        del stepping  # without which compressed gradients have nowhere to go
        files = opt.dump(out)
    if as_json:
        print(json_text(opt.report.to_dict()))
        return
    plain_console().print(f"{opt.report}\nwrote {len(files)} files to {out}", highlight=False)


@app.command()
def report(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    device_memory: Annotated[str | None, typer.Option(help="Memory of the device, such as 24GiB.")] = None,
    front: Annotated[bool, typer.Option("--front", help="Find the best plans over FLOPs and memory, too (minutes).")] = False,
    batch: Batch = 4,
    length: Length = None,
    backend: CompiledBackend = "inductor",
    optimizer: Optimizer = "adamw",
    quiet: Quiet = False,
) -> None:
    """Draw a training step as one page of HTML: memory, blocks, tensors, what every budget trains; allocates no weights."""
    from graphopt.budget import parse_bytes
    from graphopt.integrations.models import load
    from graphopt.report.html.model import model_page

    capacity, states = None if device_memory is None else parse_bytes(device_memory), checked_optimizer(optimizer)
    make_folder_of(out)
    with at_work(quiet):
        loaded, inputs = load(model, batch, length, weights=False)
        page = model_page(loaded, inputs, title=model, backend=backend, optimizer=states, device_memory=capacity, front=front)
    out.write_text(page, encoding="utf-8")
    print(f"wrote {out}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def demo(context: typer.Context) -> None:
    """Fine-tune MiniLM on WordNet glosses: full training against a budget at equal time; --help lists its options."""
    from graphopt.bench import demo

    demo.main(context.args or ["--seconds", "60", "--validation-rows", "1000"])


def main() -> None:
    """Entry point: graphopt's own errors, wrong usage and files that cannot be opened end with one line and exit code 2."""
    try:
        result = app(standalone_mode=False)
    except GraphoptError as error:
        _fail(str(error))
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except OSError as error:
        _fail(f"{type(error).__name__}: {error}")
    except Exception as error:
        if not hasattr(error, "format_message"):  # wrong usage, as typer and click report it
            raise
        _fail(error.format_message())
    sys.exit(result if isinstance(result, int) else 0)


def _fail(message: str) -> None:
    if message:  # there is none where a group of commands without one has printed its help
        print(f"graphopt: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
