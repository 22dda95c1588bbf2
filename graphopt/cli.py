"""The `graphopt` command: analyze, optimize, demo, bench."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from graphopt.bench.commands import bench_app
from graphopt.cli_options import AsJson, make_folder_of
from graphopt.errors import GraphoptError

app = typer.Typer(
    name="graphopt",
    help="The same training, cheaper: a compiler for the joint forward and backward graph of PyTorch models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")

Model = Annotated[str, typer.Argument(help="A Hugging Face folder or config file (never downloaded), or package.module:factory.")]
Batch = Annotated[int, typer.Option(min=1, help="Samples in the example batch.")]
Length = Annotated[int, typer.Option(min=1, help="Tokens per sample, for text models.")]
Backend = Annotated[str, typer.Option(help="Whose memory: inductor, aot_eager, or eager for the uncompiled model.")]
Optimizer = Annotated[str, typer.Option(help="Whose states: sgd, momentum, adam, adamw, adamw8bit, ..., or none.")]


@app.command()
def analyze(
    model: Model,
    batch: Batch = 4,
    length: Length = 512,
    cost: Annotated[str, typer.Option(help="exact (operators of the graph) or paper (GreenTrainer's own rules).")] = "exact",
    top: Annotated[int, typer.Option(min=0, help="Tensors to list, the costliest first; 0 lists all in order.")] = 20,
    memory: Annotated[bool, typer.Option("--memory", help="Show the peak memory and what makes it, instead of FLOPs.")] = False,
    plot: Annotated[Path | None, typer.Option(help="With --memory: write the timeline as a PNG here.")] = None,
    backend: Backend = "inductor",
    optimizer: Optimizer = "adamw",
    as_json: AsJson = False,
) -> None:
    """Count the FLOPs of a training step per tensor, or its bytes; allocates no weights."""
    import graphopt
    from graphopt.integrations.models import load

    make_folder_of(plot)
    console = Console(stderr=True)
    with console.status("loading and tracing the model"):
        loaded, inputs = load(model, batch, length, weights=False)
        states = _named(optimizer)
        analysis = graphopt.analyze(loaded, inputs, cost=cost, backend=backend, optimizer=states)  # type: ignore[arg-type]
        flops = analysis.flops
        if memory:
            from graphopt.report.memory import memory_dict, plot_timeline, show_memory

            profile, title = analysis.memory, f"{model}, batch {batch}, {backend}, {optimizer}"
    if memory:
        if plot is not None:
            plot_timeline(profile, plot, title)
        if as_json:
            print(json.dumps({"model": model, **memory_dict(profile, top)}, indent=1))
        else:
            show_memory(profile, Console(), title, top)
        return
    rows = list(flops.tensors)
    if as_json:
        figures = {"forward": flops.forward, "backward": flops.backward, "step": flops.step}
        columns = ("name", "shape", "weight_grad_flops", "input_grad_flops")
        tensors = [{column: getattr(row, column) for column in columns} for row in rows]
        print(json.dumps({"model": model, "batch": batch, "cost": cost, **figures, "tensors": tensors}, indent=1))
        return
    table = Table(title=f"{model}, batch {batch}: GFLOPs of one step (2 per multiply-add), cost={cost}")
    for column in ("tensor", "shape", "own gradient (t_dw)", "passing it on (t_dy)"):
        table.add_column(column, justify="left" if column == "tensor" else "right")
    shown = sorted(rows, key=lambda r: -(r.weight_grad_flops + r.input_grad_flops))[:top] if top else rows
    for r in shown:
        shape = "x".join(map(str, r.shape))
        table.add_row(r.name, shape, f"{r.weight_grad_flops / 1e9:,.3f}", f"{r.input_grad_flops / 1e9:,.3f}")
    console = Console()
    console.print(table)
    if len(shown) < len(rows):
        console.print(f"{len(rows) - len(shown)} more tensors; --top 0 lists all")
    console.print(
        f"forward {flops.forward / 1e9:,.3f}  backward {flops.backward / 1e9:,.3f}  step {flops.step / 1e9:,.3f} GFLOPs"
    )


@app.command()
def plan(
    model: Model,
    devices: Annotated[int, typer.Option(help="Number of equal devices.")] = 1,
    device_memory: Annotated[str, typer.Option(help="Memory of one device, such as 24GiB.")] = "24GiB",
    tensor_parallel: Annotated[int | None, typer.Option(help="Degree for DP+TP; else every divisor is tried.")] = None,
    margin: Annotated[float, typer.Option(help="Share of each device that stays free.")] = 0.05,
    allow_within_margin: Annotated[bool, typer.Option("--allow-within-margin", help="Use that share too.")] = False,
    batch: Batch = 4,
    length: Length = 512,
    backend: Backend = "inductor",
    optimizer: Optimizer = "adamw",
    plot: Annotated[Path | None, typer.Option(help="Write the memory timeline of one device as a PNG here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how to train a model on given devices: strategy, batch and why; allocates no weights."""
    import graphopt
    from graphopt.integrations.models import load
    from graphopt.planner.parallel import check_devices, plan_devices
    from graphopt.report.memory import plan_dict, plot_timeline, show_plan

    check_devices(devices, device_memory, tensor_parallel, margin)
    make_folder_of(plot)
    console = Console(stderr=True)
    with console.status("loading and tracing the model"):
        loaded, inputs = load(model, batch, length, weights=False)
        profile = graphopt.analyze(loaded, inputs, backend=backend, optimizer=_named(optimizer)).memory  # type: ignore[arg-type]
    found = plan_devices(
        profile,
        devices,
        device_memory,
        tensor_parallel=tensor_parallel,
        margin=margin,
        allow_within_margin=allow_within_margin,
    )
    if plot is not None:
        largest = profile.at(max(1, found.batch_size))
        plot_timeline(largest, plot, f"{model}, batch {largest.batch_size}, one device")
    if as_json:
        print(json.dumps({"model": model, **plan_dict(found)}, indent=1))
    else:
        show_plan(found, Console())


def _named(optimizer: str) -> str | None:
    return None if optimizer == "none" else optimizer


@app.command()
def pareto(
    model: Model,
    batch: Batch = 4,
    length: Length = 32,
    backend: Annotated[str, typer.Option(help="Whose memory: inductor or aot_eager.")] = "aot_eager",
    optimizer: Optimizer = "adamw",
    plot: Annotated[Path | None, typer.Option(help="Also draw the plans as a PNG.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a training step can cost: the best plans over FLOPs, memory and the importance that they keep."""
    from dataclasses import asdict

    from rich.progress import Progress

    from graphopt.api import pareto as find, worth
    from graphopt.integrations.models import load
    from graphopt.planner.guidance import cliffs
    from graphopt.planner.pareto import STEPS
    from graphopt.report.pareto import plot_points, show_points, show_worth

    make_folder_of(plot)
    with Progress(console=Console(stderr=True)) as bar:
        loaded, inputs = load(model, batch, length, weights=False)
        task = bar.add_task("planning", total=STEPS**2)
        points = find(loaded, inputs, backend=backend, optimizer=_named(optimizer), advance=lambda: bar.advance(task))
        curve = worth(loaded, inputs)
    if plot is not None:
        plot_points(points, plot)
    if as_json:
        found = {"plans": list(map(asdict, points)), "flops": list(map(asdict, curve)), "cliffs": cliffs(curve)}
        print(json.dumps(found, indent=1))
    else:
        show_points(points, Console())
        show_worth(curve, Console())


@app.command()
def optimize(
    model: Model,
    budget: Annotated[float, typer.Option(help="FLOPs of a step as a fraction of full training's, in (0, 1].")] = 0.5,
    out: Annotated[Path, typer.Option(help="Folder for the graphs, the diff per pass, the picture and report.json.")] = Path(
        "out"
    ),
    batch: Batch = 4,
    length: Length = 32,
    backend: Annotated[str, typer.Option(help="inductor or aot_eager.")] = "aot_eager",
    verify: Annotated[bool, typer.Option("--verify", help="Compare the step with eager autograd on the example batch.")] = False,
    as_json: AsJson = False,
) -> None:
    """Optimise a model for a budget, run one step on random inputs, and dump the graphs."""
    import graphopt
    from graphopt.integrations.models import load

    console = Console(stderr=True)
    with console.status("optimising"):
        loaded, inputs = load(model, batch, length, weights=True)
        opt = graphopt.optimize(loaded.train(), inputs, budget=budget, backend=backend, verify=verify)
        _run_once(opt, inputs)
        files = opt.dump(out)
    if as_json:
        print(json.dumps(opt.report.to_dict(), indent=1))
        return
    console = Console()
    console.print(str(opt.report), highlight=False)
    console.print(f"wrote {len(files)} files to {out}")


def _run_once(opt: Any, inputs: Any) -> None:
    if isinstance(inputs, dict):
        opt(**inputs)
    else:
        opt(*inputs)


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
    print(f"graphopt: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
