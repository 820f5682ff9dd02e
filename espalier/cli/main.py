"""The commands. They read their arguments, call `espalier.train`, and tell what came of it."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

app = typer.Typer(
    help="Train single-device PyTorch models on a mesh of ranks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a value of the job, as in --set plan.tensor=2.",
        show_default=False,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--ranks",
        min=1,
        help="Ranks in all: the data axis takes what the other axes leave.",
        show_default=False,
    ),
]
Port = Annotated[
    int | None, typer.Option(help="Where the ranks meet; a free port if not given.", show_default=False)
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"espalier {version('espalier')}")
        raise typer.Exit()


@app.callback()
def _options(
    show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train single-device PyTorch models on a mesh of ranks."""


@app.command()
def train(
    job: JobFile,
    set_: Set = None,
    ranks: Ranks = None,
    port: Port = None,
    debug: Debug = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
) -> None:
    """Train the job's model, with live progress."""
    with one_clear_message(debug):
        from espalier.cli.tell import tell_preempted, tell_summary
        from espalier.train.trainer import Preempted
        from espalier.train.worker import PREEMPTED

        console = Console()
        loaded = load(job, set_ or [], ranks)
        summary = _on_ranks("train", loaded, console, port=port, debug=debug, resume=resume)
        if isinstance(summary, Preempted):
            tell_preempted(console, summary)
            raise typer.Exit(PREEMPTED)
        if summary is not None:
            tell_summary(console, summary)


@app.command()
def verify(
    job: JobFile, set_: Set = None, ranks: Ranks = None, port: Port = None, debug: Debug = False
) -> None:
    """Prove in float64 that the plan computes what one process computes.

    Exit code 1 when a difference in loss, gradients or parameters is above the tolerance.
    """
    with one_clear_message(debug):
        from espalier.cli.tell import tell_verification

        console = Console()
        found = _on_ranks("verify", load(job, set_ or [], ranks), console, port=port, debug=debug)
        if found is not None:
            tell_verification(console, found)
            if not found.passed:
                raise typer.Exit(1)


def _on_ranks(action: Literal["train", "verify"], job: Any, console: Console, **options: Any) -> Any:
    from espalier.train.run import run

    report = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    return run(action, job, report=report, **options)


@app.command()
def dry(job: JobFile, set_: Set = None, ranks: Ranks = None, debug: Debug = False) -> None:
    """Predict one step on any number of ranks, without starting one: bytes per axis, peak memory."""
    with one_clear_message(debug):
        from espalier.train.dry import dry_step

        Console().print(str(dry_step(load(job, set_ or [], ranks))), highlight=False, markup=False)


@app.command()
def explain(job: JobFile, set_: Set = None, ranks: Ranks = None, debug: Debug = False) -> None:
    """Tell how each parameter of the job's model is laid out, what its module sends, and why."""
    with one_clear_message(debug):
        from espalier.train.dry import layout_table

        table = layout_table(load(job, set_ or [], ranks))
        Console().print(str(table), highlight=False, markup=False, soft_wrap=True)


@app.command()
def schedule(
    kind: Annotated[
        str, typer.Option(help="naive, gpipe, 1f1b, interleaved, zb-h1, zbv, or the file of a table.")
    ] = "1f1b",
    stages: Annotated[
        int | None,
        typer.Option(
            min=1, help="Pipe ranks (4 if not given), each with --virtual stages.", show_default=False
        ),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches (8 if not given).", show_default=False)
    ] = None,
    virtual: Annotated[
        int | None,
        typer.Option(min=1, help="Stages a rank: 2 for interleaved and zbv, else 1.", show_default=False),
    ] = None,
    times: Annotated[
        str, typer.Option(metavar="F,I,W", help="How long forward and both parts of backward take.")
    ] = "1,1,1",
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Write a picture (.svg, .png) or a table (.csv, .toml). May stand several times."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Draw a pipeline's schedule, check it, and say what it costs: bubble, live micro-batches, messages."""
    with one_clear_message(debug):
        from espalier.cli.tell import tell_schedule
        from espalier.parallel.pipeline import TABLES, find_schedule, read_times, simulate, write_table
        from espalier.parallel.pipeline.draw import PICTURES, draw

        costs = read_times(times)
        found = find_schedule(kind, stages, microbatches, virtual)
        timeline = simulate(found, costs)
        console = Console()
        for path in out or []:
            if path.suffix not in (*TABLES, *PICTURES):
                raise ValueError(f"{path}: expected a name that ends in .svg or .png, .csv or .toml")
        tell_schedule(console, timeline)
        for path in out or []:
            if path.suffix in TABLES:
                write_table(path, found)
            else:
                draw(path, {str(found).partition(":")[0]: timeline})
            console.print(f"written: {path}", highlight=False, markup=False)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
def run(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT.py", help="A script, or -m MODULE.", show_default=False)
    ],
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="How many ranks to start.")] = 1,
    port: Port = None,
    debug: Debug = False,
) -> None:
    """Run your own script on several ranks, torchrun beneath: espalier run -n 4 SCRIPT.py ARGUMENTS.

    Exit code: that of the rank which failed first.
    """
    with one_clear_message(debug):
        from espalier.mesh.launch import LaunchError, launch

        try:
            launch([script, *context.args], ranks, port=port)
        except LaunchError as error:
            code = error.exit_code
            if code is None or debug:
                raise
            _complain(str(error))
            raise typer.Exit(code if code > 0 else 128 - code) from None


@app.command()
def checkpoint(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint, or a folder of them.", show_default=False)
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all and compare with the checksums.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Tell what checkpoints there are: step, plan, size, and whether they are whole.

    Exit code 1 when one is not.
    """
    with one_clear_message(debug):
        from espalier.cli.tell import tell_checkpoints
        from espalier.train.inspect import rows

        found = list(rows(directory, verify=verify))
        tell_checkpoints(Console(), found)
        if any(row.problem for row in found):
            raise typer.Exit(1)


@app.command()
def doctor(debug: Debug = False) -> None:
    """Say what this machine has, what will be used, and what is wrong, with a remedy for each.

    Exit code 1 when something stands in the way of a run.
    """
    with one_clear_message(debug):
        from espalier.cli.doctor import examine, tell

        findings = examine()
        tell(Console(), findings)
        if any(finding.state == "wrong" for finding in findings):
            raise typer.Exit(1)


def load(path: Path, overrides: list[str], ranks: int | None) -> Any:
    """Load a job, its data axis sized so that the plan has ``ranks`` ranks, where a number is given.

    Raises:
        ValueError: when the job has mistakes or its other axes do not divide ``ranks``.
    """
    import espalier
    from espalier.train.job import Job

    job = Job.load(path, overrides)
    plan = espalier.Plan.from_dict(dict(job.plan))
    if ranks is None or ranks == plan.world_size:
        return job
    others = plan.world_size // plan.data
    if ranks % others:
        rest = " × ".join(
            f"{name} {size}"
            for name, size in plan.axes.items()
            if name not in ("data", "expert") and size > 1
        )
        below = ranks - ranks % others
        near = [str(n) for n in (below, below + others) if n]
        raise ValueError(
            f"-n {ranks} does not fit the plan of {path}: its other axes ({rest}) multiply to {others}, so "
            f"it must be a multiple of {others}, as {' or '.join(near)}; or change the plan, "
            "--set plan.<axis>=<size>"
        )
    return Job.load(path, [*overrides, f"plan.data={ranks // others}"])


@contextmanager
def one_clear_message(debug: bool) -> Iterator[None]:
    """Turn every error into a message and exit code 2; with ``debug``, let it through."""
    told: set[str] = set()

    def tell(message: Warning | str, *_: Any) -> None:
        if str(message) not in told:
            told.add(str(message))
            _complain(f"note: {message}")

    try:
        with warnings.catch_warnings():
            warnings.showwarning = tell  # type: ignore[assignment]
            yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _complain("interrupted; all ranks have been stopped")
        raise typer.Exit(130) from None
    except Exception as error:
        if debug:
            raise
        _complain(_message(error))
        raise typer.Exit(2) from None


def _message(error: Exception) -> str:
    from espalier.mesh.launch import LaunchError
    from espalier.train.run import RunError
    from espalier.train.trainer import TrainingError

    if isinstance(error, ValueError | LaunchError | RunError | TrainingError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}. Give another path, or see to this one."
    return f"{type(error).__name__}: {error}\nThis was not foreseen; --debug shows where it comes from."


def _complain(message: str) -> None:
    Console(stderr=True).print(f"espalier: {message}", highlight=False, markup=False, soft_wrap=True)


def main() -> None:
    """Entry point of ``espalier``."""
    # A block of code drawn with box characters must not fail on a terminal that cannot encode it.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app(prog_name="espalier")
