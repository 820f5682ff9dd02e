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


def test_a_function_of_a_cell_runs_on_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3", resources=where).execute()
    (cell,) = book.cells
    told = "".join(out["text"] for out in cell["outputs"] if out.get("name") == "stdout")
    assert told.strip() == "[(0, 6.0), (1, 6.0)]"
