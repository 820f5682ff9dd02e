"""What a run leaves to look at: its page (in a real browser), its server, two runs compared, trackers."""

from __future__ import annotations

import http.client
import json
import re
import sys
import threading
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import espalier
from espalier.cli import app
from espalier.parallel import Plan
from espalier.train.building import step_flops
from espalier.train.facts import published
from espalier.train.job import Job, JobError
from espalier.train.metrics import Record
from espalier.train.page import PAGE, compared, page, read_run, read_runs, to_toml, write_page
from espalier.train.run import run
from espalier.train.runlog import RunLog, append
from espalier.train.trackers import TRACKERS, Event, _name
from espalier.train.watch import Server
from tests.pure.browsing import all_of, opened, violations

HOSTILE = "</script><script>document.title='taken'</script>\u2028<!--"
JOB = '[plan]\ndata = 4\n\n[train]\nsteps = 40\n"a b" = [1, 2.5, true]\n'


def write_run(folder: Path, *, name: str = "mine", lr: float = 1e-3) -> Path:
    """A run of four ranks with a pipeline, which had a spike and a sample."""
    folder.mkdir(parents=True)
    memory, held = (
        (10**8, 2 * 10**8, 3 * 10**8, 4 * 10**8),
        {"parameters": (4000,) * 4, "states": (8000,) * 4},
    )
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 41):
            record = Record(
                step, 5.0 / step + lr, 1.0, lr, 1000.0 + step, step * 1.5, memory,
                {"data": 4000, "pipe": 900}, *((2 + 9 / step, held) if step % 10 == 0 else (None, {})),
            )  # fmt: skip
            file.write(json.dumps(record.__dict__) + "\n")
        file.write('{"step": 41, "loss"')  # not whole yet
    whole, half = [0.0, 1.0, 0.0, 1.0], [0.0, 0.5, 0.0, 1.0]
    part = {
        "bytes": 4096,
        "here": 2048,
        "parameter": "up.weight",
        "shape": [32, 32],
        "box": half,
        "states": whole,
    }
    row = [["F", 0, 0, 0.0, 0.01], ["B", 0, 0, 0.02, 0.04]]
    run = {
        "name": name, "status": "running", "steps": 80, "tokens": 512, "flops": 10**9, "entropy": 4.0,
        "model": "GPT", "parameters": 1234, "optimizer": "AdamW", "began": "2026-01-01T00:00:00+00:00",
        "plan": {"words": "pipe 2 × data 2", "axes": {"pipe": 2, "data": 2}, "ranks": 4},
        "mesh": {"names": ["pipe", "data"], "shape": [2, 2]}, "job": JOB.replace("40", f"40\nlr = {lr}"),
        "ranks": [
            {"coordinate": {"pipe": r // 2, "data": r % 2}, "host": "h", "device": "CPU"} for r in range(4)
        ],
        "holds": [[{**part, "name": f"blocks.{i}"} for i in range(3)]] * 4,
        "peak": {"rate": 1e12, "source": "a data sheet"}, "versions": {"python": "3.11"},
        "timeline": {"schedule": "1f1b", "bubble": 0.25, "measured": [row, row], "predicted": [row, row]},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    append(folder, Event("spike", "step 12 is left out: the loss leapt", 12, "2026-01-01T00:00:00+00:00"))
    (folder / "sample.txt").write_text(HOSTILE)
    return folder


# ---- in a browser


def test_the_page_in_a_browser(browser: Any, tmp_path: Path) -> None:
    """Curves, pictures and words are there, without an error; it can be used without a mouse."""
    folder = write_run(tmp_path / "mine")
    (folder / PAGE).write_text(page([read_run(folder)]))
    opened(browser, folder / PAGE)
    assert browser.title.startswith("mine"), "the sample's text is text"
    assert all_of(browser, "#samples pre")[0].get_attribute("textContent") == HOSTILE
    for name in ("training", "validation"):
        (curve,) = all_of(browser, f"#loss g[data-series={name}] path")
        assert curve.size["width"] > 300 and curve.size["height"] > 5
    assert len(all_of(browser, ".chart svg")) == 7
    assert len(all_of(browser, "#holds rect.here")) == 4, "three blocks that are alike stand once"
    assert len(all_of(browser, "#pipeline svg[role=img] rect[class^=span]")) == 8
    assert "left out" in all_of(browser, "#events")[0].text and len(all_of(browser, "#loss .mark")) == 1
    assert "step 40 of 80" in all_of(browser, ".status")[0].text
    chart = all_of(browser, "#loss .chart")[0]
    chart.send_keys("\ue011", "\ue014")  # Home, right arrow
    assert chart.get_attribute("aria-valuetext").startswith("step 2: training 2.501")
    log = next(button for button in all_of(browser, "button") if button.text == "log")
    log.click()
    assert log.get_attribute("aria-pressed") == "true" and all_of(
        browser, "#loss g[data-series=training] path"
    )
    all_of(browser, "#numbers summary")[0].click()
    browser.implicitly_wait(10)  # a page is told that a section was opened some time after the click
    assert browser.find_element("css selector", "#numbers tbody tr:nth-child(40)")
    browser.implicitly_wait(0)
    assert len(all_of(browser, "#numbers tbody tr")) == 40
    for theme in ("light", "dark"):
        browser.execute_script(f"document.documentElement.dataset.theme = '{theme}'")
        assert violations(browser) == [], theme
    assert browser.get_log("browser") == []


def test_a_run_shown_while_it_goes_and_two_compared(browser: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mine")
    with served(folder) as server:
        browser.get(server.url)
        assert browser.get_log("browser") == [] and "step 40 of 80" in all_of(browser, ".status")[0].text
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("\n" + json.dumps(Record(44, 0.1, 1.0, 1e-3, 900.0, 66.0, (1,)).__dict__) + "\n")
        browser.implicitly_wait(10)
        assert browser.find_element("css selector", "#loss .chart[aria-valuetext^='step 44']")
        browser.implicitly_wait(0)
    theirs = "theirs" + "-and-more" * 12
    other = write_run(tmp_path / "other", name=theirs, lr=2e-3)
    out = tmp_path / "both.html"
    result = CliRunner().invoke(app, ["compare-runs", str(folder), str(other), "--out", str(out)])
    assert result.exit_code == 0 and re.search(r"train\.lr +0\.001 +0\.002", result.stdout)
    opened(browser, out)
    assert {g.get_attribute("data-series") for g in all_of(browser, "#loss g[data-series]")} >= {
        "mine",
        theirs,
    }
    labels = "return [...document.querySelectorAll('#loss text.label')].map(x => x.lastChild.textContent)"
    assert max(map(len, browser.execute_script(labels))) < 40 < len(theirs), "it leaves room for curves"
    assert violations(browser) == []
    (run := json.loads((other / "run.json").read_text()))["status"] = "failed"
    (other / "run.json").write_text(json.dumps(run))
    said = "the loss is nan\nThe last it wrote to standard error:\n    last words"
    append(other, Event("failed", said, 4000, "2026-01-01T00:00:00+00:00"))
    opened(browser, write_page(other))
    header = all_of(browser, "header")[0].text
    assert "the loss is nan" in header and "failed, step 4,000 of" in header and "last words" not in header
    assert "last words" in all_of(browser, "#events")[0].text
    records = [Record(step, 2e16 / step, 1.0, 1e-3, 900.0, 1.5 * step, (1,)) for step in (1, 2)]
    (other / "metrics.jsonl").write_text("".join(json.dumps(x.__dict__) + "\n" for x in records))
    opened(browser, write_page(other))
    along = [x.text for x in all_of(browser, "#loss svg text[text-anchor=middle]")]
    assert along == ["1", "2"], "steps are whole"
    assert "nothing is sent" in all_of(browser, "#sent")[0].text
    up = [x.text for x in all_of(browser, "#loss svg text[text-anchor=end]")]
    assert "2.0e+16" in up, up


def test_runs_of_one_job_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("first", "second")]
    assert [run["name"] for run in read_runs(*folders)] == [f"mine, {folder}" for folder in folders]
    assert [run["name"] for run in read_runs(folders[0], write_run(tmp_path / "a", name="b"))] == [
        "mine",
        "b",
    ]


def test_runs_on_images_tell_images_a_second(browser: Any, tmp_path: Path) -> None:
    words, pictures = (read_run(write_run(tmp_path / name, name=name)) for name in ("words", "pictures"))
    pictures["unit"] = "images"
    assert "images a second" in [row[0] for row in compared(pictures, pictures)]
    assert "tokens a second" in [row[0] for row in compared(words, pictures)]
    (tmp_path / PAGE).write_text(page([pictures]))
    opened(browser, tmp_path / PAGE)
    shown = all_of(browser, "body")[0].text.lower()
    assert "images a second" in shown and "tokens a second" not in shown


# ---- the server


class served:
    """A server in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.server = Server(folder)

    def __enter__(self) -> Server:
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()
        return self.server

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def test_the_server_answers_this_machine_alone(tmp_path: Path) -> None:
    with served(write_run(tmp_path / "mine")) as server:
        assert server.server_address[0] == "127.0.0.1"

        def ask(path: str, **headers: str) -> http.client.HTTPResponse:
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
            connection.request("GET", path, headers={"Host": f"127.0.0.1:{server.server_port}", **headers})
            answer = connection.getresponse()
            answer.body = answer.read()  # type: ignore[attr-defined]
            connection.close()
            return answer

        answer = ask("/data.json")
        assert answer.status == 200 and len(json.loads(answer.body)["records"]) == 40  # type: ignore[attr-defined]
        assert answer.headers["Access-Control-Allow-Origin"] is None
        assert ask("/data.json", **{"If-None-Match": answer.headers["ETag"]}).status == 304
        assert ask("/", Host="evil.example").status == 403, "a name of the web that leads here"
        assert ask("/data.json", Origin="https://evil.example").status == 403
        assert ask("/../run.json").status == 404
        with pytest.raises(ValueError, match="port .* cannot be used"):
            Server(server.folder, server.server_port)
    with pytest.raises(ValueError, match=r"no folder of a run.*Its folders .*mine are such"):
        read_run(tmp_path)


# ---- what is written


class Heard:
    """A callback that remembers."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def begin(self, run: RunLog) -> None:
        self.words.append(f"begin {run.name}")

    def record(self, record: Record) -> None:
        self.words.append(f"record {record.step}")

    def event(self, event: Event) -> None:
        self.words.append(f"{event.kind} {event.text}")

    def end(self, status: str) -> None:
        self.words.append(f"end {status}")


def test_a_loop_of_ones_own_leaves_a_report(tmp_path: Path) -> None:
    """With the trackers told too that are installed; one that fails says so."""
    model, heard = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), Heard()
    engine = espalier.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), Plan(), loss_fn=nn.functional.mse_loss
    )
    track = []
    for word in TRACKERS:
        try:
            __import__(word)
            track.append(word)
        except ImportError:
            continue
    folder = tmp_path / "run"
    batch = torch.ones(8, 4), torch.ones(8, 1)
    log = RunLog(folder, engine, steps=9, tokens=8, every=3, track=track, callbacks=[heard])
    with pytest.raises(RuntimeError, match="stop here"), log:
        for _ in range(4):
            log.step(engine.train_step(batch))
        log.event("spike", "as if")
        raise RuntimeError("stop here")
    assert heard.words == ["begin run", "record 1", "record 3", "spike as if", "end failed"]
    run = read_run(folder)
    assert run["status"] == "failed" and [e["text"] for e in run["events"]] == ["as if", "stop here"]
    assert run["parameters"] == 25 and run["flops"] == 6 * 25 * 8 and run["peak"]["rate"] > 1e6
    assert [part["name"] for part in run["holds"][0]] == ["0", "2"]
    assert run["holds"][0][0]["states"] == [0.0, 1.0, 0.0, 1.0]
    assert run["records"][0]["held"]["states"][0] >= 2 * 25 * 4 and run["records"][0]["lr"] == 1e-2
    assert "stop here" in (folder / PAGE).read_text("utf-8")
    for word, pattern in {
        "tensorboard": "tensorboard/events*",
        "wandb": "wandb/offline-run-*/*.wandb",
        "mlflow": "mlflow.db",
    }.items():
        assert (word in track) == bool(list(folder.glob(pattern)))


def test_what_trackers_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job, too; a run that goes on does so in its run there; one that fails is left out of the rest."""
    begun: list[dict[str, Any]] = []

    class Started:
        id, summary = "abc", ()

        def log(self, values: Any, step: int) -> None:
            raise OSError("the disk is full")

    told = types.ModuleType("wandb")
    told.Settings = dict  # type: ignore[attr-defined]
    told.init = lambda **given: begun.append(given) or Started()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", told)
    engine = espalier.initialize(model := nn.Linear(4, 1), torch.optim.SGD(model.parameters(), 0.1), Plan())
    for after in (0, 1):
        log = RunLog(tmp_path, engine, every=1, track=["wandb"], after=after, job="[train]\nlr = 0.5\n")
        with pytest.warns(UserWarning, match="'wandb' is told nothing more.*OSError: the disk is full"), log:
            log.write(after + 1, 0.5, lr=0.1)
            log.event("note", "nobody hears it")
    assert [given["id"] for given in begun] == [None, "abc"]
    assert [given["resume"] for given in begun] == [None, "allow"]
    assert begun[0]["config"]["train"] == {"lr": 0.5} and begun[0]["config"]["plan"]["data"] == 1
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="'wandb' needs the package wandb"):  # no rank has begun
        run("train", Job.load("gpt", ["train.track=wandb"]))
    assert _name("sent_bytes/data,tensor") == "sent_bytes/data_tensor", "MLflow takes no commas"


def test_words_of_a_job(tmp_path: Path) -> None:
    """TOML there and back, the operations of a step, a tracker that isn't there, data sheets."""
    raw = tomllib.loads(JOB + '[model.config]\nrope = {kind = "a\\"b", n = -1}\n')
    assert tomllib.loads(to_toml(raw)) == raw
    job = Job.load("gpt")
    state = torch.get_rng_state()
    n, tokens = (
        sum(p.numel() for p in job.model.build().parameters()),
        job.train.batch_size * job.train.sequence,
    )
    torch.set_rng_state(state)
    found = step_flops(job)
    assert found is not None and 0.5 < found / (6 * n * tokens) < 2
    assert torch.get_rng_state().equal(state)
    with pytest.raises(JobError, match=r"train\.track\S* = 'tensorbord'"):
        Job.load("gpt", ["train.track=tensorbord"])
    assert published("NVIDIA H100 80GB HBM3", "bfloat16") == ("H100-SXM", 989e12)
    assert published("NVIDIA H100 PCIe", "bfloat16") == ("H100-PCIe", 756e12)
    assert published("a CPU", "float32") is None
