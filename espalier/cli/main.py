"""The commands. They read their arguments, call `espalier.train`, and tell what came of it."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from espalier.cli.jobs import load
from espalier.cli.tell import (
    complain,
    one_clear_message,
    say,
    tell_checkpoints,
    tell_preempted,
    tell_schedule,
    tell_summary,
    tell_verification,
)
from espalier.texts import names_of_tables

_flag = partial(typer.Option, metavar="")  # it takes no value: none is shown


app = typer.Typer(
    help="Train single-device PyTorch models on a mesh of ranks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JobFile = Annotated[
    Path,
    typer.Argument(metavar="JOB.toml", help="The job file, or a shipped job's name."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the job, as in --set plan.tensor=2."),
]
Ranks = Annotated[
    int | None,
    typer.Option("-n", "--ranks", min=1, help="Ranks in all: the data axis takes what the other axes leave."),
]
Port = Annotated[int | None, typer.Option(help="Where the ranks meet; a free port if not given.")]
Nodes = Annotated[int | None, typer.Option("--nodes", min=1, help="Machines that take part.")]
NodeRank = Annotated[int | None, typer.Option("--node-rank", min=0, help="Which of them this is.")]
Rendezvous = Annotated[
    str | None,
    typer.Option("--rdzv", metavar="HOST:PORT", help="Where the first of them is."),
]
Debug = Annotated[bool, _flag("--debug", help="Show tracebacks.")]
_CLUSTERS = names_of_tables(Path(__file__).parent.parent / "planner" / "shipped")  # which imports no torch
From = Annotated[Path, typer.Argument(metavar="FROM", help="A checkpoint, or weights.")]
To = Annotated[Path, typer.Argument(metavar="TO", help="What to write.")]
Dtype = Annotated[str | None, typer.Option(help="Of the weights, as bfloat16; their own if not given.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it as JSON.")]
Page = Annotated[Path | None, typer.Option(metavar="FILE", help="Write it as a page.")]
Like = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Whose config.json tells Megatron's names, and goes along."),
]
Tree = Annotated[str | None, typer.Option(help="The nested dict that holds the weights.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"espalier {version('espalier')}")
        raise typer.Exit()


@app.callback()
def _options(
    show: Annotated[
        bool, _flag("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train single-device PyTorch models on a mesh of ranks."""


def _check_outputs(*paths: Path | None) -> None:
    """See before what takes long that there is a place for what it writes."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise ValueError(f"{path} cannot be written: {why}. Give another path.")


def _write_json(path: Path | None, table: Any) -> None:
    """Write what JSON takes, where that is asked for."""
    if path is not None:
        path.write_text(json.dumps(table, indent=1) + "\n", "utf-8")


@app.command()
def train(
    job: JobFile,
    set_: Set = None,
    ranks: Ranks = None,
    port: Port = None,
    debug: Debug = False,
    resume: Annotated[bool, _flag("--resume", help="Go on from the newest checkpoint.")] = False,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    rdzv: Rendezvous = None,
) -> None:
    """Train the job's model, with live progress."""
    with one_clear_message(debug):
        console = Console()
        _quieten_torch(nodes)
        loaded = load(job, set_ or [], ranks, resume=resume)
        from espalier.train.run import PREEMPTED  # takes seconds: what is wrong with the job is told before
        from espalier.train.trainer import Preempted

        hosts = _hosts(nodes, node_rank, rdzv, console)
        options = {"port": port, "debug": debug, "resume": resume, "hosts": hosts}
        summary = _on_ranks("train", loaded, console, **options)
        if isinstance(summary, Preempted):
            tell_preempted(console, summary)
            raise typer.Exit(130 if summary.interrupted else PREEMPTED)
        if summary is not None:
            tell_summary(console, summary)


@app.command()
def demo(set_: Set = None, ranks: Ranks = None, port: Port = None, debug: Debug = False) -> None:
    """Train a small GPT on the source of Python's standard library, on four ranks: runs/demo."""
    from importlib.resources import as_file, files

    with as_file(files("espalier.train") / "shipped" / "demo.toml") as job:
        train(job, set_, ranks, port, debug)


@app.command()
def verify(
    job: JobFile, set_: Set = None, ranks: Ranks = None, port: Port = None, debug: Debug = False
) -> None:
    """Prove in float64 that the plan computes what one process computes.

    Exit code 1 when a difference in loss, gradients or parameters is above the tolerance.
    """
    with one_clear_message(debug):
        console = Console()
        verification = _on_ranks("verify", load(job, set_ or [], ranks), console, port=port, debug=debug)
        if verification is not None:
            tell_verification(console, verification)
            if not verification.passed:
                raise typer.Exit(1)


_SEVERAL = ("SLURM_STEP_NUM_NODES", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PET_NNODES")  # tell of machines


def _quieten_torch(nodes: int | None) -> None:
    """Import torch so that this process, which starts ranks, logs no vain look for the first machine.

    Who is waited for, and why, is told in words. Torch asks for the level as it is imported.
    """
    level = "TORCH_CPP_LOG_LEVEL"
    if level in os.environ or (nodes is None and not any(name in os.environ for name in _SEVERAL)):
        return
    os.environ[level] = "FATAL"
    try:
        import torch  # noqa: F401
    finally:
        del os.environ[level]  # ranks log as ever


def _hosts(nodes: int | None, node_rank: int | None, rdzv: str | None, console: Console) -> Any:
    """The machines that take part."""
    from espalier.mesh.hosts import Hosts, find_hosts

    hosts = find_hosts(nodes, node_rank, rdzv)
    if isinstance(hosts, Hosts):
        say(console, str(hosts))
    return hosts


def _on_ranks(
    action: Literal["train", "verify", "compare"], job: Any, console: Console, **options: Any
) -> Any:
    from espalier.mesh.process import outlive_terminal
    from espalier.train.run import run

    outlive_terminal()
    report = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    return run(action, job, report=report, **options)


@app.command()
def dry(
    job: JobFile,
    set_: Set = None,
    ranks: Ranks = None,
    rank: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS=NUMBER", help="Which rank to play, as --rank pipe=3. May stand several times."
        ),
    ] = None,
    json_: Json = None,
    debug: Debug = False,
) -> None:
    """Predict one step on any number of ranks, without starting one: bytes per axis, peak memory."""
    with one_clear_message(debug):
        place = dict(map(_numbered, rank or []))
        _check_outputs(json_)
        loaded = load(job, set_ or [], ranks)
        from espalier.train.building import dry_step

        report = dry_step(loaded, place or None)
        Console().print(str(report), highlight=False, markup=False)
        _write_json(json_, report.to_dict())


@app.command()
def plan(
    job: JobFile,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"One that is shipped ({', '.join(_CLUSTERS)}), a file, or here: this machine, as calibrate "
            "measured it.",
        ),
    ] = None,
    set_: Set = None,
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--ranks", min=1, help="How many of the cluster's."),
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="What is not searched, as --fix tensor=8."),
    ] = None,
    memory: Annotated[float, typer.Option(help="The share of a device's memory that may be taken.")] = 0.92,
    quick: Annotated[bool, _flag("--quick", help="Leave the best ones' dry runs out.")] = False,
    json_: Json = None,
    html: Page = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write its step as a trace, for Perfetto."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Find the best mix of parallelism for a job on a cluster, without a device, and say why.

    Exit code 1 when nothing fits.
    """
    with one_clear_message(debug):
        if cluster is None:
            names = ", ".join(_CLUSTERS)
            raise ValueError(f"--cluster is missing: one that is shipped ({names}), a file, or here.")
        _check_outputs(json_, html, trace)
        from espalier.train.foresight import foresee
        from espalier.train.job import Job

        foreseen = foresee(Job.load(job, set_ or []), cluster, ranks, fix or [], memory, quick=quick)
        say(Console(), foreseen.text)
        _write_json(json_, foreseen.table)
        if html is not None and foreseen.fits:
            html.write_text(foreseen.page(), "utf-8")
        if trace is not None and foreseen.fits:
            trace.write_text(json.dumps(foreseen.trace()), "utf-8")
        if not foreseen.fits:
            raise typer.Exit(1)


@app.command()
def calibrate(
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--ranks", min=1, help="One a device, or core, by default."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="cpu, or the accelerator's, if there is one."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="The cluster; --cluster here by default."),
    ] = None,
    anyway: Annotated[bool, _flag("--anyway", help="Measure a busy machine, too.")] = False,
    disk: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="On the disk for what plans keep off the device; one in the cache by default.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure what this machine's devices compute and send, and write it as a cluster for plan."""
    with one_clear_message(debug):
        from espalier.files import write_file
        from espalier.planner.calibrate import calibrate as measured
        from espalier.planner.calibrate import show
        from espalier.planner.cluster import here

        if out is not None and out.is_dir():
            _check_outputs(out)
        path = out or here()
        path.parent.mkdir(parents=True, exist_ok=True)
        cluster = measured(ranks, show, anyway=anyway, disk=disk, device_type=device)
        write_file(path, cluster.to_toml().encode())
        for line in cluster.told():
            say(Console(), line)
        say(Console(), f"written: {path}{'' if out else ' (--cluster here)'}")


@app.command()
def compare(
    job: JobFile,
    set_: Set = None,
    ranks: Ranks = None,
    cluster: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="What the prediction is of: this machine, or another.")
    ] = "here",
    steps: Annotated[int, typer.Option(min=1, help="How many are timed.")] = 20,
    json_: Json = None,
    html: Page = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write both steps of its pipeline, for Perfetto."),
    ] = None,
    port: Port = None,
    debug: Debug = False,
) -> None:
    """Lay what plan says of a job's own plan beside real steps of it on this machine, term by term."""
    with one_clear_message(debug):
        _check_outputs(json_, html, trace)
        loaded, console = load(job, set_ or [], ranks), Console()
        from espalier.parallel.schedules.simulate import draw
        from espalier.planner.cluster import Cluster
        from espalier.planner.compare import Comparison
        from espalier.train.foresight import predicted
        from espalier.train.plan_page import compare_page

        checked, timeline = predicted(loaded, cluster)
        # what is said of a CPU is to be laid beside a CPU
        more = {"steps": steps, "device_type": "cpu" if Cluster.load(cluster).device.waits else None}
        measured = _on_ranks("compare", loaded, console, port=port, debug=debug, **more)
        if measured is None:  # of torchrun's ranks the first tells it
            return
        comparison = Comparison(checked.prediction, measured, checked.bytes)
        for line in comparison.lines():
            say(console, line)
        _write_json(json_, comparison.to_dict())
        if html is not None:
            html.write_text(compare_page(loaded.name, comparison, timeline), "utf-8")
        if trace is not None and timeline is not None and measured.timeline is not None:
            draw(trace, {"predicted": timeline, "measured": measured.timeline})
        elif trace is not None:
            say(Console(stderr=True), f"{trace} is not written: the plan has no pipeline.")


def _numbered(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not number.isdigit():
        raise ValueError(f"--rank {text}: expected an axis and a number from 0, as --rank pipe=3")
    return name, int(number)


@app.command()
def explain(job: JobFile, set_: Set = None, ranks: Ranks = None, debug: Debug = False) -> None:
    """Tell how each parameter of the job's model is laid out, what its module sends, and why."""
    with one_clear_message(debug):
        loaded = load(job, set_ or [], ranks)
        from espalier.train.building import layout_table

        table = layout_table(loaded)
        say(Console(), str(table))


@app.command()
def schedule(
    kind: Annotated[
        str, typer.Option(help="naive, gpipe, 1f1b, interleaved, zb-h1, zbv, or the file of a table.")
    ] = "1f1b",
    stages: Annotated[
        int | None,
        typer.Option(min=1, help="Pipe ranks (4 if not given), each with --virtual stages."),
    ] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Micro-batches (8 if not given).")] = None,
    virtual: Annotated[
        int | None,
        typer.Option(min=1, help="Stages a rank: 2 for interleaved and zbv, else 1."),
    ] = None,
    times: Annotated[
        str, typer.Option(metavar="F,I,W", help="How long forward and both parts of backward take.")
    ] = "1,1,1",
    out: Annotated[
        list[Path] | None,
        typer.Option(
            help="Write a picture (.svg, .png), a trace for Perfetto (.json) or a table (.csv, .toml). "
            "May be given several times."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Draw a pipeline's schedule, check it, and say what it costs: bubble, live micro-batches, messages."""
    with one_clear_message(debug):
        from espalier.parallel.pipeline import TABLES, find_schedule, read_times, simulate, write_table
        from espalier.parallel.schedules.simulate import PICTURES, draw

        _check_outputs(*out or [])
        costs = read_times(times)
        built = find_schedule(kind, stages, microbatches, virtual)
        timeline = simulate(built, costs)
        console = Console()
        for path in out or []:
            if path.suffix not in (*TABLES, *PICTURES):
                raise ValueError(f"{path}: expected a name that ends in .svg, .png, .json, .csv or .toml")
        tell_schedule(console, timeline)
        for path in out or []:
            if path.suffix in TABLES:
                write_table(path, built)
            else:
                draw(path, {str(built).partition(":")[0]: timeline})
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
    script: Annotated[str, typer.Argument(metavar="SCRIPT.py", help="A script, or -m MODULE.")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="How many ranks to start.")] = 1,
    port: Port = None,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    rdzv: Rendezvous = None,
    logs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where prints of ranks 1, 2, ... are kept."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Run your own script on several ranks, torchrun beneath: espalier run -n 4 SCRIPT.py ARGUMENTS.

    With --nodes, -n ranks on each of several machines, on each of which this is called.

    Exit code: that of the rank which failed first.
    """
    with one_clear_message(debug):
        _quieten_torch(nodes)
        hosts = _hosts(nodes, node_rank, rdzv, Console(stderr=True))
        from espalier.mesh.hosts import Task
        from espalier.mesh.launch import LaunchError, launch, of_ranks

        if isinstance(hosts, Task):  # this process is a rank already
            os.environ.update({**of_ranks(), **hosts.environment})
            os.execv(sys.executable, [sys.executable, script, *context.args])
        try:
            # a script may catch Ctrl-C, and save before it ends
            heard: dict[str, Any] = {"grace": 30, "signals": ("SIGTERM", "SIGINT")}
            launch([script, *context.args], ranks, port=port, hosts=hosts, logs=logs, **heard)
        except LaunchError as error:
            code = error.exit_code
            if code is None or debug:
                raise
            complain(str(error))
            raise typer.Exit(code if code > 0 else 128 - code) from None


Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]


@app.command()
def watch(
    run: Run,
    port: Annotated[int | None, typer.Option(help="Of this machine; a free one if not given.")] = None,
    show: Annotated[bool, _flag("--open", help="Open a browser on it.")] = False,
    debug: Debug = False,
) -> None:
    """Show a run's report while it trains, on a page that this machine alone can reach."""
    with one_clear_message(debug):
        from espalier.train.watch import Server

        with Server(run, port or 0) as server:
            say(Console(), f"{run} is shown at {server.url} (Ctrl-C ends it)")
            if show:
                import webbrowser

                webbrowser.open(server.url)
            with suppress(KeyboardInterrupt):
                server.serve_forever()


@app.command("compare-runs")
def compare_runs(
    a: Run,
    b: Run,
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="Where the page is written.")] = Path(
        "compared.html"
    ),
    debug: Debug = False,
) -> None:
    """Tell two runs apart: what their jobs say, how they ended; as a page, too."""
    with one_clear_message(debug):
        _check_outputs(out)
        from espalier.files import write_file
        from espalier.texts import in_columns
        from espalier.train.page import compared, page, read_runs

        runs = read_runs(a, b)
        for line in in_columns(compared(*runs), "<>"):
            say(Console(), line)
        write_file(out, page(runs).encode())
        say(Console(), f"written: {out}")


@app.command()
def init(
    path: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The file to write.")] = Path("job.toml"),
    model: Annotated[
        str | None,
        typer.Option(help="gpt, gpt2, bert, vit, moe, a folder with config.json, or module:function."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="stdlib, or a file or folder of text, records, tokens or images."),
    ] = None,
    field: Annotated[str, typer.Option(help="Column that holds the text.")] = "",
    chat: Annotated[str, typer.Option(help="Column that holds conversations.")] = "",
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Ranks of the data axis.")] = 1,
    zero: Annotated[int, typer.Option(min=0, max=3, help="Stage of ZeRO.")] = 0,
    lora: Annotated[int, typer.Option(min=0, help="Rank of adapters; 0 trains all weights.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="To train.")] = 200,
    force: Annotated[bool, _flag("--force", help="Write over a file that is there.")] = False,
    debug: Debug = False,
) -> None:
    """Write a job file, by flags, or by a few questions where none are given on a terminal."""
    with one_clear_message(debug):
        from espalier.cli.init import Answers, asked, written

        if path.exists() and not force:
            raise ValueError(f"{path} exists: name another file, or write over it with --force")
        answers = Answers(model or "gpt", data or "stdlib", field, chat, ranks, zero, lora, steps)
        if model is None and data is None and sys.stdin.isatty():
            answers = asked(answers, lambda question, now: str(typer.prompt(question, default=now)), complain)
        text = written(answers)
        path.write_text(text, "utf-8")
        load(path, [], None)
        typer.echo(f"{path} is written: espalier train {path}")


@app.command()
def generate(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A run's folder, a checkpoint, or a folder with config.json and weights.",
        ),
    ],
    prompt: Annotated[str, typer.Option(help="What to go on with.")],
    tokens: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=1, help="Draw among so many.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    chat: Annotated[bool, _flag("--chat", help="Ask by the tokenizer's chat template.")] = False,
    tokenizer: Annotated[Path | None, typer.Option(help="Its tokenizer.json, or the folder.")] = None,
    debug: Debug = False,
) -> None:
    """Let a trained model write."""
    with one_clear_message(debug):
        from espalier.train.writing import write

        options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "seed": seed, "chat": chat}
        reply = write(path, prompt, tokens, tokenizer=tokenizer, **options)
        typer.echo(reply.text if chat else reply.whole)


@app.command()
def migrate(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.py", help="A program.")],
    write: Annotated[bool, _flag("--write", help="Change the file.")] = False,
    debug: Debug = False,
) -> None:
    """Say how a program for DeepSpeed, Colossal-AI, torch's wrappers, transformers or accelerate runs here.

    Prints a diff, and what it does not show. Exit code 1 when something has no equivalent.
    """
    with one_clear_message(debug):
        from espalier.compat.migrate import migrate as migrated

        try:
            source = script.read_text("utf-8")
            migration = migrated(source, script.parent)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise ValueError(f"{script} is no Python program: {error}.") from None
        typer.echo(migration.diff(script.name), nl=False)
        for note in migration.notes:
            typer.echo(f"{script.name}:{note.line}: {note.text}", err=True)
        if not migration.systems:
            typer.echo(f"{script.name}: nothing of another system was found", err=True)
        if write and migration.after != migration.before:
            script.write_text(migration.after, "utf-8")
        if any(note.is_missing for note in migration.notes):
            raise typer.Exit(1)


@app.command()
def checkpoint(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, or a folder of them.")],
    verify: Annotated[bool, _flag("--verify", help="Read all and compare with the checksums.")] = False,
    debug: Debug = False,
) -> None:
    """Tell what checkpoints there are: step, plan, size, and whether they are whole.

    Exit code 1 when one is not.
    """
    with one_clear_message(debug):
        from espalier.train.trainer import rows

        table = list(rows(directory, verify=verify))
        tell_checkpoints(Console(), table)
        if any(row.problem for row in table):
            raise typer.Exit(1)


@app.command()
def doctor(
    fix: Annotated[bool, _flag("--fix", help="Do what can be done, and look again.")] = False,
    debug: Debug = False,
) -> None:
    """Say what this machine has, what will be used, and what is wrong, with a remedy for each.

    Exit code 1 when something stands in the way of a run.
    """
    with one_clear_message(debug):
        from espalier.cli.doctor import examine, mend, tell

        findings = examine()
        if fix and mend(findings, lambda line: say(Console(), line)):
            findings = examine()
        tell(Console(), findings)
        if any(finding.state == "wrong" for finding in findings):
            raise typer.Exit(1)


@app.command()
def export(
    source: From,
    out: To,
    form: Annotated[
        str, typer.Option("--format", help="safetensors, torch, dcp, megatron or universal.")
    ] = "safetensors",
    dtype: Dtype = None,
    shard_gigabytes: Annotated[float, typer.Option(help="Largest file of safetensors, in 10^9 bytes.")] = 5.0,
    tree: Tree = None,
    like: Like = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint's weights for others: safetensors, torch.save, torch's distributed checkpoint,
    Megatron's, or DeepSpeed's universal one.
    """
    options: dict[str, Any] = {"shard_gigabytes": shard_gigabytes, "companions": like}
    _convert(source, out, form, dtype, tree, debug, **options)


@app.command("import")
def import_(
    source: From,
    out: To,
    dtype: Dtype = None,
    tree: Tree = None,
    like: Like = None,
    optimizer: Annotated[
        bool, _flag("--optimizer", help="The optimizer's states and options too, for engine.load.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Make a folder of Espalier's checkpoints of others' weights, for engine.load(..., model_only=True); with
    --optimizer for all of it.
    """
    _convert(source, out, "espalier", dtype, tree, debug, companions=like, optimizer=optimizer)


def _convert(
    source: Path, out: Path, form: str, dtype: str | None, tree: str | None, debug: bool, **more: Any
) -> None:
    with one_clear_message(debug):
        import torch

        from espalier.checkpoint.sinks import export

        kind = None if dtype is None else getattr(torch, dtype, None)
        if dtype is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
            raise ValueError(f"--dtype {dtype}: expected a dtype of floats, as float32, bfloat16 or float16.")
        count = export(source, out, form, dtype=kind, tree=tree, **more)
        say(Console(), f"{count} tensors written to {out}")


def main() -> None:
    """Entry point of ``espalier``."""
    # A block of code drawn with box characters must not fail on a terminal that cannot encode it.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="espalier")
    except SystemExit as end:
        if "torch" not in sys.modules or not isinstance(end.code, int):
            raise
        from espalier.mesh.launch import leave

        leave(end.code)
