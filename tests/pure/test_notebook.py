"""Ranks started from a notebook's cell."""

from __future__ import annotations

from pathlib import Path

import pytest

CELL = """
import torch
import espalier

SCALE = 3.0


def work(mesh, x):
    def inner(y):
        return y * SCALE

    return mesh.rank, inner(x).sum().item()


print(espalier.spawn(work, {"data": 2}, torch.ones(2)))
"""

TRAIN = """
from espalier.train.job import Job
from espalier.train.run import run

sizes = {"vocab_size": 40, "layers": 1, "hidden": 16, "heads": 2, "max_positions": 12}
train = {"steps": 2, "batch_size": 8, "sequence": 12, "log_every": 1}
job = {"model": {"kind": "gpt", **sizes}, "data": {"kind": "tokens"}, "plan": {"data": 2}, "train": train}
run("train", Job.from_dict(job))
"""

MODEL = """
model = torch.nn.Linear(4, 2)
"""

ENGINE = """
optimizer = torch.optim.SGD(model.parameters())
engine = espalier.initialize(model, optimizer, loss_fn=lambda y, x: y.square().sum())
print(engine.train_step(torch.ones(4, 4)).item() > 0)
"""


def test_the_cells_of_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function goes to ranks; a job's progress comes to the cell, line by line; a cell is run twice."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # a kernel does not show what its children print under pytest
    cells = [CELL, TRAIN, MODEL, ENGINE, ENGINE, MODEL, ENGINE]
    book = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    where = {"metadata": {"path": str(tmp_path)}}
    options = {"timeout": 120, "kernel_name": "python3", "resources": where, "allow_errors": True}
    nbclient.NotebookClient(book, **options).execute()
    spawned, trained, *_, first, again, _, anew = (
        "".join(out.get("text", out.get("evalue", "")) for out in cell["outputs"]) for cell in book.cells
    )
    assert spawned.strip() == "[(0, 6.0), (1, 6.0)]"
    assert [line.split("  ")[0] for line in trained.splitlines() if "step" in line][:2] == [
        "step 1/2",
        "step 2/2",
    ]
    assert "\x1b[1A" not in trained
    assert "is a DTensor already" in again and "run the one that builds the model before it" in again
    assert first.strip() == anew.strip() == "True"
