"""Mistakes that people make, as a table: each ends soon, with a sentence that says what to do.

Those at the command line, before any rank starts, are made here. Those of running ranks have tests of their
own, which the table names: that they are there is checked.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from typer.testing import CliRunner

from espalier.cli import app

ROOT = Path(__file__).parent.parent

# what is typed after `espalier` (options: after `espalier train job.toml`), and what the answer says
TYPED = {
    "a typo in a table": ("--set train.stepz=4", "unknown key; did you mean train.steps?"),
    "a typo in a table's name": ("--set trane.steps=4", "unknown key; did you mean train?"),
    "a typo in the plan": ("--set plan.tensro=2", "did you mean tensor?"),
    "a typo in an optimizer": ("--set optimizer.name=AdmaW", "did you mean 'AdamW'?"),
    "an argument that it does not have": (
        "--set optimizer.betaz=1",
        "did you mean optimizer.betas?",
    ),
    "a typo in a kind of model": ("--set model.kind=gtp", "did you mean 'gpt'?"),
    "a typo in a tracker": ("--set train.track=tensorbord", "expected 'tensorboard'"),
    "sizes that don't divide": ("--set model.heads=5", "is not a multiple of heads = 5"),
    "a wrong number of ranks": (
        "-n 3 --set plan.tensor=2",
        "must be a multiple of 2, as 2 or 4",
    ),
    "too few rows": ("--set plan.accumulate=99", "has too few rows for plan.accumulate = 99"),
    "a sequence that is too long": (
        "--set train.sequence=64",
        "is longer than the model's 16 positions",
    ),
    "a rate below zero": ("--set optimizer.lr=-1", "optimizer.lr"),
    "--set without a value": ("--set plan.tensor", "expected section.key=value"),
    "a job that is not there": ("train jop.toml", "did you mean job.toml?"),
    "a job that is no TOML": ("train broken.toml", "is not valid TOML"),
    "restarts without checkpoints": ("--set elastic.restarts=1", "add [checkpoint]"),
    "a rollback without checkpoints": (
        '--set spikes.on_nan="rollback"',
        "add a table [checkpoint]",
    ),
    "--resume without checkpoints": ("--resume", "has no table [checkpoint]"),
    "offload to a disk that is not said": (
        '--set plan.offload.states="disk"',
        "directory = ...",
    ),
    "a budget for nothing": (
        "--set plan.offload.budget_gigabytes=1",
        "budget_gigabytes is for a ratio that is auto",
    ),
    "a text shorter than a row": (
        "--set data.kind=text --set data.source=short.txt --set model.vocab_size=300 --set plan.data=2",
        "needs a text of at least 9, but the part of it to train on has ",
    ),
    "too little text to validate on": (
        "--set data.kind=text --set data.source=text --set model.vocab_size=300 --set plan.data=2",
        "but the part of it kept for validation has ",
    ),
    "weights that are not there": ("--set model.weights=nowhere", "is not there: give a file"),
    "a folder that is no run": ("watch .", "is no folder of a run"),
    "a folder without checkpoints": ("checkpoint .", "There is no checkpoint in ."),
    "a rank that is none": ("dry job.toml --rank pipe", "expected an axis and a number"),
    "a schedule that is none": ("schedule --kind 1f2b", "1f1b"),
}

# of these, what takes longer to find out: a text is prepared, a tokenizer trained
PREPARED = {
    "a text shorter than a row",
    "too little text to validate on",
}

# what happens on ranks, and the test that shows how it ends
SHOWN = {
    "a port in use": "pure/launch::a_port_in_use_is_said_before_anything_starts",
    "a script that is not there": "pure/launch::requests_that_make_no_sense",
    "an exception on one rank": "pure/launch::a_rank_that_raises_is_named_and_quoted",
    "exit() on one rank": "pure/launch::a_rank_that_exits_is_told_from_those_that_wait_for_it",
    "a killed rank": "pure/launch::a_rank_that_is_killed_ends_the_others_soon",
    "a closed terminal, a killed launcher": "pure/launch::ranks_go_when_the_launcher_goes",
    "Ctrl-C on two ranks, a closed terminal while training": (
        "ranks/restarts::ctrl_c_and_a_closed_terminal_save_and_leave_no_process"
    ),
    "a closed terminal, under nohup": "pure/launch::a_signal_that_is_ignored_stays_so",
    "Ctrl-C in a run of one rank": "pure/cli::ctrl_c_saves_and_says_where",
    "a machine that asks": "ranks/restarts::a_run_that_is_asked_to_leave_saves_and_goes_on_with_fewer_ranks",
    "a loss that is no number": "pure/cli::a_loss_that_is_no_number_stops",
    "other rows on each rank": "ranks/loops::own_rows_taken_for_the_global_batch_are_told_of",
    "a loop that a plan cannot do": "ranks/loops::what_a_loop_cannot_say_is_refused_with_the_line_to_write",
    "step() without backward, and other wrong orders": "ranks/engine::wrong_uses_are_told",
    "one rank alone asks for a value": "ranks/sanitize::a_rank_that_does_not_come_is_named",
    "a collective on some ranks": "ranks/faults::collectives_that_differ_are_told_with_both_sides",
    "a step that one rank skips": "ranks/faults::one_that_skipped_a_step_is_named",
    "a rank that hangs": "ranks/faults::one_that_sleeps_is_told_from_those_that_wait_for_it",
    "another model's checkpoint": "ranks/checkpoint::another_model_is_told_all_that_differs",
    "a damaged checkpoint": "pure/checkpoint::every_flipped_bit_and_cut_is_seen",
    "a full disk while saving": "pure/checkpoint::a_disk_that_fills_up_and_one_that_is_read_only",
    "a full disk while offloading": "ranks/residency::a_full_disk_loses_nothing",
    "a mesh that does not fit the world": "ranks/mesh::wrong_meshes_are_told_at_once",
    "too few devices": "pure/devices::too_few_devices_are_said",
    "a function of a notebook's cell, a cell run twice": "pure/notebook::the_cells_of_a_notebook",
    ".numpy() and .tolist() of a part": "ranks/edges::values_are_global_and_repr_is_local",
    "a budget of memory that is too small": "ranks/residency::a_budget_is_filled",
}

JOB = """
[model]
kind = "gpt"
vocab_size = 64
layers = 1
hidden = 16
heads = 2
max_positions = 16

[data]
kind = "tokens"

[train]
steps = 1
batch_size = 4
sequence = 8
"""

FILES = {
    "job.toml": JOB,
    "broken.toml": "[model\n",
    "short.txt": "a b",
    "text/a.txt": "words to learn " * 20,
    "text/b.txt": "b",
}


@pytest.mark.parametrize("mistake", TYPED)
def test_before_ranks_start(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed, says = TYPED[mistake]
    typed = f"train job.toml {typed}" if typed.startswith("-") else typed
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr("espalier.train.run.launch", lambda *args, **given: pytest.fail("ranks were started"))
    result = CliRunner().invoke(app, typed.split(), env={"COLUMNS": "300"})
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert "Traceback" not in result.output and "not foreseen" not in result.output
    assert {path.name for path in tmp_path.iterdir()} - {".espalier"} == before  # that: prepared texts


@pytest.mark.parametrize("mistake", SHOWN)
def test_on_ranks(mistake: str) -> None:
    """The test that shows it is there."""
    file, _, name = SHOWN[mistake].partition("::")
    folder, _, file = file.partition("/")
    tree = ast.parse((ROOT / folder / f"test_{file}.py").read_text("utf-8"))
    assert f"test_{name}" in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
