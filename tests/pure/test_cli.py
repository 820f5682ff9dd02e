"""The command line, on one rank: loops, results, messages, exit codes."""

import io
import json
import math
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import espalier
from espalier.cli import app, doctor, init
from espalier.cli.doctor import Finding, tell
from espalier.cli.main import init as init_command
from espalier.cli.tell import tell_schedule, tell_summary
from espalier.engine import Engine
from espalier.parallel import Plan
from espalier.parallel.pipeline import Costs, generate, simulate
from espalier.train.metrics import Display, Lines, Record, readable_bytes, readable_time
from espalier.train.trainer import Summary
from espalier.train.verify import compare

JOB = """
[model]
kind = "gpt2"
vocab_size = 300
layers = 1
hidden = 16
heads = 2
max_positions = 16
dropout = 0.1

[data]
source = "text"
cache = "cache"
val_fraction = 0.3

[optimizer]
lr = 1e-2

[train]
steps = 7
batch_size = 3
sequence = 8
clip = 1.0
eval_every = 4
eval_batches = 2
log_every = 3
sample_tokens = 5
prompt = "a"
"""


class OneRank(Engine):
    """The engine of one rank; ``error`` is added to one gradient."""

    error = 0.0

    def finish_gradients(self):
        super().finish_gradients()
        first = next(self.module.parameters())
        first.grad = first.grad + self.error


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr("espalier.engine.start.Engine", OneRank)
    monkeypatch.setattr("espalier.train.run.start", lambda device: SimpleNamespace(world_size=1))
    monkeypatch.setattr("espalier.train.run.finish", lambda: None)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for i in range(5):
        (tmp_path / "text" / f"{i}.py").write_text(f"print({i}, 'some text to learn')\n" * 20)
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def call(*args):
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_train(job, tmp_path):
    code, out, err = call("train", job)
    assert code == 0, err
    lines = (tmp_path / "runs/job/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["step"] for r in records] == [1, 3, 4, 6, 7]
    assert [r["step"] for r in records if r["val_loss"] is not None] == [4, 7]
    assert records[-1]["loss"] < records[0]["loss"]
    assert all(r["memory"][0] > 10**7 and r["grad_norm"] > 0 for r in records)
    assert "step 7/7" in out and "unigram entropy" in out and "final loss" in out
    assert (tmp_path / "runs/job/loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "runs/job/sample.txt").read_text().startswith("a")
    assert not list((tmp_path / "runs/job").glob(".*"))


def test_slow_products_of_an_accelerator_are_told_at_the_start(job, monkeypatch):
    monkeypatch.setattr("espalier.train.facts.is_accelerator", lambda device: True)
    monkeypatch.setattr("espalier.train.facts.names", lambda: ["a quick one"])
    monkeypatch.setattr("espalier.train.facts._measured_rate", lambda device, dtype: 1e12)
    _, out, _ = call("train", job, "--set", "train.steps=1")
    assert "float32 products are exact, and slow" in out and 'plan.precision = "bfloat16"' in out
    _, out, _ = call("train", job, "--set", "train.steps=1", "--set", "plan.precision=bfloat16")
    assert "float32 products" not in out


def test_the_saved_model_loads_into_the_plain_one(job, tmp_path):
    from safetensors.torch import load_file

    from espalier.models import build

    call("train", job, "--set", "train.steps=1")
    state = load_file(tmp_path / "runs/job/model.safetensors")
    model = build("gpt2", {"vocab_size": 300, "layers": 1, "hidden": 16, "heads": 2, "max_positions": 16})
    model.load_state_dict(state)


def test_training_begins_with_given_weights(job, tmp_path):
    from safetensors.torch import load_file

    call("train", job, "--set", "train.steps=2", "--set", "optimizer.lr=0.1")
    given = tmp_path / "runs/job/model.safetensors"
    more = ["--set", f"model.weights={given}", "--set", "train.steps=1", "--set", "optimizer.lr=1e-9"]
    assert call("train", job, *more, "--set", "train.out=more")[0] == 0
    first, then = load_file(given), load_file(tmp_path / "more/model.safetensors")
    assert all((x - then[name]).abs().max() < 1e-7 for name, x in first.items())
    assert call("verify", job, *more)[0] == 0
    code, _, err = call("train", job, *more, "--set", "model.hidden=32")
    assert code == 2 and "model.weights" in err and "embed.weight is [300, 32], there [300, 16]" in err


def test_evaluation_stops_and_keeps_the_best(job, tmp_path):
    more = ["--set", "optimizer.lr=1.0", "--set", "train.steps=40", "--set", "train.eval_every=1"]
    more += ["--set", "evaluation.patience=3", "--set", "evaluation.metrics=['accuracy', 'perplexity']"]
    code, out, err = call("train", job, *more, "--set", "checkpoint.every=5")
    assert code == 0, err
    lines = [json.loads(x) for x in (tmp_path / "runs/job/metrics.jsonl").read_text().splitlines()]
    losses = [x["val_loss"] for x in lines]
    best = min(range(len(losses)), key=losses.__getitem__)
    assert len(losses) == best + 4 < 40 and f"of step {best + 1} for 3 validations: that is enough" in out
    assert 0 <= lines[0]["metrics"]["accuracy"] <= 1
    assert lines[0]["metrics"]["perplexity"] == pytest.approx(math.exp(losses[0]))
    assert f"the weights are those of step {best + 1}" in out
    names = [p.name for p in (tmp_path / "runs/job/best").iterdir() if not p.name.startswith(".")]
    assert names == [f"step-{best + 1:08}"]
    # the last weights of the run are the best ones, and the run can be asked to write
    code, text, err = call("generate", tmp_path / "runs/job", "--prompt", "print", "--tokens", 4)
    assert code == 0 and text.startswith("print"), err
    with_checkpoint = call("generate", tmp_path / "runs/job/best", "--prompt", "print", "--tokens", 4)
    assert with_checkpoint[1] == text
    code, _, err = call("generate", tmp_path, "--prompt", "x")
    assert code == 2 and "says nothing of its model" in err
    (file,) = (tmp_path / "runs/job/best").glob("step-*/__0_0.distcp")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] + b"damaged!" + content[len(content) // 2 + 8 :])
    code, out, err = call("train", job, *more, "--resume", "--set", "checkpoint.every=5")
    assert code == 0, err  # it had enough already
    assert f"of step {best + 1}, cannot be loaded" in out and f"those of step {best + 4}, the last" in out


def test_init_writes_jobs_that_are_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"body": "a"}')
    assert call("init")[0] == 0
    assert call("init", "a.toml", "-n", 4)[0] == 0 and "data = 4" in (tmp_path / "a.toml").read_text()
    assert call("init", "b.toml", "--model", "vit")[0] == 0
    assert call("init", "c.toml", "--data", "data.jsonl", "--field", "body", "--zero", 3, "-n", 2)[0] == 0
    assert call("init", "d.toml", "--model", "my_model:make")[0] == 0
    for kind in ("cats", "dogs"):
        (tmp_path / "pets/train" / kind).mkdir(parents=True)
    text = init.written(init.Answers(model="vit", data="pets"))
    assert "classes = 2\n" in text and '"accuracy"' in text
    (tmp_path / "tokens.bin").touch()
    assert "4096     # above every token" in init.written(init.Answers(data="tokens.bin"))
    code, _, err = call("init")
    assert code == 2 and "job.toml exists" in err
    code, _, err = call("init", "e.toml", "--model", "gtp")
    assert code == 2 and "did you mean 'gpt'?" in err and not (tmp_path / "e.toml").exists()
    said, wrong = iter(["meo", "moe", "nowhere", "", "two", "0", "2", ""]), []
    answers = init.asked(init.Answers(), lambda question, now: next(said), wrong.append)
    assert answers == init.Answers(model="moe", ranks=2) and 'kind = "moe"' in init.written(answers)
    for text, part in zip(wrong, ("did you mean 'moe'?", "'nowhere'", "'two'", "'0'"), strict=True):
        assert part in text


def test_without_matplotlib_all_but_pictures_is_there(job, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["espalier.parallel.schedules.simulate"], "find_spec", lambda name: None)
    code, out, err = call("train", job, "--set", "train.steps=1")
    assert code == 0 and "loss.png" not in out, err
    assert {path.name for path in (tmp_path / "runs/job").iterdir()} >= {"report.html", "model.safetensors"}
    assert not (tmp_path / "runs/job/loss.png").exists()
    code, _, err = call("schedule", "--out", tmp_path / "timeline.svg")
    assert code == 2 and "pip install 'espalier[report]'" in err
    assert call("schedule", "--out", tmp_path / "timeline.csv")[0] == 0


def test_ctrl_c_at_a_question_of_init(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise typer.Abort

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(typer, "prompt", interrupted)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(typer.Exit) as ended:
        init_command(tmp_path / "job.toml")
    said = capsys.readouterr().err
    assert ended.value.exit_code == 130 and "interrupted" in said and "foreseen" not in said
    assert not list(tmp_path.iterdir())


OWN = """
from types import SimpleNamespace
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 300))

    def forward(self, input_ids, labels):
        scores = self.net(input_ids).flatten(0, 1)
        return SimpleNamespace(loss=nn.functional.cross_entropy(scores, labels.flatten()))
"""


def test_a_model_of_ones_own_that_cannot_write_is_trained_all_the_same(job, tmp_path):
    (tmp_path / "netted.py").write_text(OWN)
    model = "[model]\nkind = 'module'\nbuild = 'netted:Net'\nvocab_size = 300\n[data]"
    job.write_text(model + JOB.partition("[data]")[2].replace("eval_every = 4", "eval_every = 0"))
    code, out, err = call("train", job, "--set", "train.steps=1")
    assert code == 0, err
    assert "sample" in out and "none: it is called with input_ids alone" in out
    assert (tmp_path / "runs/job/model.safetensors").exists()


DICTS = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 300))

    def forward(self, input_ids, labels=None):
        logits = self.net(input_ids)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}
"""


def test_a_model_of_ones_own_may_give_dicts(job, tmp_path):
    (tmp_path / "dicts.py").write_text(DICTS)
    model = "[model]\nkind = 'module'\nbuild = 'dicts:Net'\nvocab_size = 300\n[data]"
    job.write_text(model + JOB.partition("[data]")[2].replace("eval_every = 4", "eval_every = 0"))
    few = ("--set", "train.steps=1", "--set", 'evaluation.metrics=["loss", "accuracy"]')
    code, out, err = call("train", job, *few, "--set", "checkpoint.every=0")
    assert code == 0 and "a sample of what it writes" in out and "none:" not in out, err
    assert (tmp_path / "runs/job/sample.txt").exists()
    code, out, err = call("generate", tmp_path / "runs/job", "--prompt", "def", "--tokens", 3)
    assert code == 0 and out.startswith("def"), err
    code, out, err = call("verify", job)
    assert code == 0 and "PASS" in out, err


def test_an_error_of_ones_own_model_is_told_with_its_place(job, tmp_path):
    (tmp_path / "broken.py").write_text(DICTS.replace("self.net(input_ids)", "self.net(input_ids).nothing"))
    model = "[model]\nkind = 'module'\nbuild = 'broken:Net'\nvocab_size = 300\n[data]"
    job.write_text(model + JOB.partition("[data]")[2])
    code, _, err = call("dry", job)
    assert code == 2 and "has no attribute 'nothing'" in err
    assert "broken.py, line 10, in forward: logits" in err


def test_the_same_seed_trains_the_same(job, tmp_path):
    losses = []
    for out in ("a", "b"):
        call("train", job, "--set", f"train.out={out}", "--set", "model.dropout=0.0")
        lines = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == losses[1]


def test_ctrl_c_saves_and_says_where(job, monkeypatch, request, tmp_path):
    """A plan of one rank trains in the command's own process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of pytest-xdist ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    honest, calls = OneRank.forward, []

    def interrupted(self, batch):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return honest(self, batch)

    monkeypatch.setattr(OneRank, "forward", interrupted)
    job.write_text(job.read_text() + "[checkpoint]\n")
    code, out, err = call("train", job)
    assert code == 130, err
    assert "interrupted after step 3; saved in runs/job/checkpoints/step-00000003: go on with --resume" in out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert json.loads((tmp_path / "runs/job/run.json").read_text())["status"] == "left"


def test_a_loss_that_is_no_number_stops(job, monkeypatch):
    honest = OneRank.forward
    calls = []

    def poisoned(self, batch):
        calls.append(1)
        return honest(self, batch) * (float("nan") if len(calls) > 3 else 1.0)

    monkeypatch.setattr(OneRank, "forward", poisoned)
    code, _, err = call("train", job)
    assert code == 2
    assert "the loss is nan at step 4 (it was" in err and "at step 3" in err
    assert "optimizer.lr" in err and "Traceback" not in err


def test_verify_passes(job):
    code, out, err = call("verify", job)
    assert code == 0, err
    assert "PASS: largest difference" in out
    assert "dropout set to 0 (model.dropout)" in out


def test_verify_finds_a_wrong_gradient(job, monkeypatch):
    monkeypatch.setattr(OneRank, "error", 1e-7)
    code, out, _ = call("verify", job)
    assert code == 1
    assert "FAIL" in out and "in embed.weight" in out
    assert call("verify", job, "--set", "verify.tolerance=1.0")[0] == 0


def test_compare():
    a = {"x": torch.ones(2), "y": torch.zeros(2), "z": None}
    assert compare(a, dict(a)).value == 0
    assert compare(a, {**a, "y": torch.tensor([0.0, -0.5])}).where == "y"
    assert compare(a, {**a, "z": torch.full((1,), 2.0)}).value == 2
    assert compare(a, {**a, "x": None}).value == 1
    for wrong in (torch.ones(3), torch.tensor([float("nan"), 1.0])):
        assert compare(a, {**a, "x": wrong}).value == float("inf")
    assert "w" in compare(a, {**a, "w": None}).where


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--set", "train.stepz=3"], "did you mean train.steps?"),
        (["--set", "data.source=nowhere"], "data.source = 'nowhere' is neither a file nor a folder"),
        (["--set", "model.vocab_size=100"], "at least 258 tokens"),
        (["--set", "plan.tensor=4", "-n", "6"], "a multiple of 4, as 4 or 8"),
        (["--set", "train.sequence=17"], "longer than the model's 16 positions"),
    ],
)
@pytest.mark.parametrize("command", ["train", "verify"])
def test_one_clear_message(job, command, args, expected):
    code, _, err = call(command, job, *args)
    assert code == 2
    assert expected in err and "Traceback" not in err


def test_debug_lets_the_error_through(job):
    with pytest.raises(ValueError, match="did you mean train.steps"):
        call("train", job, "--set", "train.stepz=3", "--debug")


def test_missing_job_file(job, tmp_path):
    code, _, err = call("train", tmp_path / "jop.toml")
    assert code == 2 and f"did you mean {job}?" in err


def test_the_data_axis_takes_the_remaining_ranks(job):
    from espalier.cli.jobs import load

    assert load(job, [], None).plan == Plan()
    assert load(job, [], 6).plan == Plan(data=6)
    assert load(job, ["plan.tensor=2"], 6).plan == Plan(tensor=2, data=3)
    # what hangs on the data axis is judged by the axis that there will be
    cut = load("moe", ["plan.expert=3"], 6)
    assert (cut.plan.data, cut.plan.expert) == (6, 3) and cut.raw["plan"]["data"] == 6
    with pytest.raises(ValueError, match="plan.expert = 4 .*expected a divisor of data = 6"):
        load("moe", ["plan.expert=4"], 6)


def test_run_passes_arguments_and_exit_code(job, tmp_path, monkeypatch):
    from espalier.mesh.launch import LaunchError

    seen = []

    def launch(argv, nproc, port=None, hosts=None, logs=None, *, grace, signals):
        seen.append((argv, nproc, port, hosts, logs))
        assert grace == 30 and set(signals) == {"SIGTERM", "SIGINT"}
        raise LaunchError("rank 1 of 2 failed: exit code 5", 1, 5)

    monkeypatch.setattr("espalier.mesh.launch.launch", launch)
    code, _, err = call("run", "-n", 2, "script.py", "--flag", "-n", "7", "x=1")
    assert seen == [(["script.py", "--flag", "-n", "7", "x=1"], 2, None, None, None)]
    assert code == 5 and "rank 1 of 2 failed" in err


def test_explain_prints_the_table_of_layouts(job):
    code, out, err = call("explain", job, "--set", "plan.tensor=2", "--set", "plan.accumulate=3")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert ["blocks.*.mlp.up_proj", "weight", "tensor:S(0)"] in [row[:3] for row in rows]
    assert ["blocks.*.mlp.down_proj", "weight", "tensor:S(1)"] in [row[:3] for row in rows]


def test_explain_tells_what_each_stage_of_a_pipeline_sends(job):
    pipe = ["plan.pipe=2", "plan.accumulate=2", "plan.tensor=2", "train.batch_size=4"]
    code, out, err = call("explain", job, *(word for pair in pipe for word in ("--set", pair)))
    assert code == 0, err
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines() if line}
    assert "(outside), rank 1 of the pipe" in rows
    # each on a rank of its own: the embedding forward, the head backward
    assert rows["embed"][3] != "0" != rows["head"][4]


@pytest.mark.filterwarnings("default:A global batch of")
def test_a_warning_is_a_note(job):
    code, _, err = call("explain", job, "--set", "plan.data=4", "--set", "train.batch_size=3")
    assert code == 0
    assert err.startswith("espalier: note: A global batch of 3 rows leaves 1 of the 4 ranks")
    assert err.count("\n") == 1


def test_what_needs_a_device_runs_dry(job):
    plain, fused = (call("dry", job, *more) for more in ([], ["--set", "optimizer.fused=true"]))
    assert plain[0] == fused[0] == 0 and plain[1] == fused[1]
    code, _, err = call("dry", job, "--rank", "pipe")
    assert code == 2 and "--rank pipe: expected an axis and a number from 0" in err
    code, _, err = call("dry", job, "--set", "optimizer.name=ASGD")
    assert code == 2 and "ASGD cannot be run dry: its step asks for values" in err
    assert call("dry", job, "--set", "optimizer.name=Muon")[0] == 0
    code, _, err = call("export", "x" * 300, "out")
    assert code == 2 and "File name too long. Give another path" in err


def test_help_names_every_command():
    code, out, _ = call("--help")
    assert code == 0
    assert all(name in out for name in ("train", "verify", "dry", "explain", "run", "doctor"))
    code, out, _ = call("migrate", "--help")
    (flag,) = [line for line in out.splitlines() if "--write" in line]
    assert flag.split("--write")[1].split()[:3] == ["Change", "the", "file."], "it takes no value"


def test_one_step_of_one_rank_is_said_so():
    console = Console(width=120, file=io.StringIO())
    tell_summary(console, Summary(1.0, 1.0, None, 10, 1, 1.0, 1, None, {}))
    assert ", 1 step, 0:01 on 1 rank\n" in console.file.getvalue()


def test_doctor_tells_the_remedy_beside_the_problem():
    console = Console(width=120, file=io.StringIO())
    tell(console, [Finding("torch", "2.9.0", "wrong", "pip install 'torch>=2.11'"), Finding("cores", "2")])
    text = console.file.getvalue()
    line = next(line for line in text.splitlines() if "torch" in line)
    assert "wrong" in line and "pip install" in line
    assert "1 problem to solve" in text


def record(**changes):
    values = {
        "step": 10,
        "loss": 2.5,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens_per_second": 12_345.6,
        "seconds": 20.0,
        "memory": (10**8, 2 * 10**8),
        "sent": {"data": 3_000_000, "tensor": 1500},
    }
    return Record(**{**values, **changes})


def test_a_line_of_the_log(capsys):
    Lines(100, Console(width=80), "images").show(record())
    assert "  images/s 12,346  " in capsys.readouterr().out
    Lines(100, Console(width=80)).show(record(val_loss=2.75))
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    for part in (
        "step  10/100",
        "loss 2.5000",
        "val 2.7500",
        "grad norm 0.500",
        "tokens/s 12,346",
        "memory 100 MB | 200 MB",
        "sent a step data 3 MB, tensor 1.5 KB",
        "ETA 3:00",
    ):
        assert part in line


def test_the_display_shows_the_same():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Display(100, console, "demo") as display:
        display.say("a message")
        display.show(record(memory=(1,) * 9))
    text = console.file.getvalue()
    assert "10 of 100, ETA 3:00" in text and "on 9 ranks" in text and "a message" in text


def test_units():
    counts = (0, 999, 1500, 2.5e9, 3e12)
    assert [readable_bytes(n) for n in counts] == ["0 B", "999 B", "1.5 KB", "2.5 GB", "3 TB"]
    assert [readable_time(s) for s in (5, 65, 3665)] == ["0:05", "1:05", "1:01:05"]


def test_schedule(tmp_path):
    """Drawn, its costs beside it; pictures and tables are written, and a table is read."""
    picture, table, toml = tmp_path / "zbv.svg", tmp_path / "zbv.csv", tmp_path / "zbv.toml"
    outs = [word for path in (picture, table, toml) for word in ("--out", path)]
    code, out, err = call("schedule", "--kind", "zbv", "--stages", 3, "--microbatches", 5, *outs)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "zbv: 6 stages on 3 ranks, 5 micro-batches"
    assert lines[1].startswith("rank 0 F0 F1 F2 F3 F4 F0 I0 W0 F1 ")
    assert lines[3].startswith("rank 2       F0 F0 F1 F1 F2 F2 I0 W0 F3 ")
    assert "2, as long as 0.333 micro-batches; 6.2% of all ranks' time" in out
    assert "3, 3, 3 on ranks 0 to 2" in out and "40: both ways, 4 crossings" in out
    assert b"<svg" in picture.read_bytes()
    for written in (table, toml):
        code, again, err = call("schedule", "--kind", written)
        assert code == 0, err
        assert again.splitlines()[1:] == lines[1 : len(again.splitlines())]


def test_help_does_not_wait_for_torch():
    code = "import sys, espalier.cli.main; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert set(espalier.__all__) <= set(dir(espalier)) and "initialize" in espalier.__all__
    with pytest.raises(AttributeError, match="'espalier' has no attribute 'initialise'"):
        _ = espalier.initialise


def test_schedule_in_colours():
    """Cells of the kind's colour, numbers alone; each rank's line ends where its last action does."""
    timeline = simulate(generate("1f1b", 2, 3), Costs(1, 1, 0.5))
    file = io.StringIO()
    tell_schedule(Console(file=file, force_terminal=True, color_system="standard", width=60), timeline)
    lines = file.getvalue().splitlines()
    assert lines[1].startswith("rank 0 \x1b[37;44m0 \x1b[0m\x1b[37;44m1 \x1b[0m   \x1b[37;42m0  \x1b[0m")
    assert "forward" in lines[3] and "backward" in lines[3]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--kind", "zigzag"), "'zigzag': expected one of naive, gpipe"),
        (("--out", "a.gif"), "a.gif: expected a name that ends in .svg, .png, .json, .csv or .toml"),
        (("--times", "1,2"), "times '1,2': expected three numbers above 0"),
        (("--virtual", "2"), "1f1b has one stage a rank"),
    ],
)
def test_schedule_says_what_is_wrong(arguments, told):
    code, _, err = call("schedule", *arguments)
    assert code == 2
    assert told in err


def test_doctor_tells_how_an_accelerator_multiplies(monkeypatch):
    monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: "highest")
    found = doctor._products("xpu")
    assert found.state == "note" and "bfloat16" in found.remedy
    monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: "high")
    assert doctor._products("xpu") == Finding("float32 products", "high: on XPU by units of lower precision")


def test_doctor_mends_what_it_can(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / ".espalier" / "data"
    gone, busy = cache / ".abc-999999999", cache / f".abc-{os.getpid()}"
    for folder in (gone, busy):
        folder.mkdir(parents=True)
    (left,) = doctor._leftovers()
    assert left.state == "note" and "1 in" in left.observed
    said = []

    def fails():
        raise OSError("no network")

    wrong = Finding("packages", "missing: x", "wrong", "pip install x", fails)
    assert doctor.mend([left, wrong, Finding("fine", "")], said.append) == 1
    assert not gone.exists() and busy.exists() and doctor._leftovers() == []
    assert any("it could not be done: no network" in line for line in said)
