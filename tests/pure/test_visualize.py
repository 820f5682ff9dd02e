"""The picture of who holds what."""

from __future__ import annotations

import re

import pytest
import torch

import espalier
from espalier import Layout, Mesh, Partial, Replicate, Shard

R, P = Replicate(), Partial()
S = Shard
MESH = Mesh.dry({"data": 2, "tensor": 4}, coordinate=(1, 2))


def printed(capsys: pytest.CaptureFixture[str], layout: Layout, **options: object) -> list[str]:
    espalier.visualize_sharding(layout, **options)  # type: ignore[arg-type]
    return capsys.readouterr().out.splitlines()


def test_uneven_pieces_empty_ranks_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, Layout(MESH, [S(0), S(1)], (7, 6)), header="weights") == [
        "weights",
        "[7, 6] on data 2 × tensor 4",
        "",
        "            dim 1: 0-1  dim 1: 2-3  dim 1: 4-5",
        "dim 0: 0-3  meta:0      meta:1      meta:2",
        "dim 0: 4-6  meta:4      meta:5      meta:6",
        "",
        "data: Shard(0)",
        "tensor: Shard(1)",
        "nothing is held by meta:3,7",
    ]


def test_replicas_and_addends(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, Layout(MESH, [S(0), R], (5,)))[2:4] == [
        "dim 0: 0-2  meta:0-3",
        "dim 0: 3-4  meta:4-7",
    ]
    lines = printed(capsys, Layout(MESH, [P, R], ()))
    assert lines[2].strip() == "meta:0+4,1+5,2+6,3+7"
    assert "data: Partial(sum), 2 ranks hold one addend each" in lines
    assert "tensor: Replicate (deferred)" in printed(
        capsys, Layout(MESH, [S(0), R], (5,), deferred=["tensor"])
    )


def test_two_axes_on_one_dim_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, Layout(MESH, [S(0), S(0)], (8,), order=["tensor", "data"]))
    assert [line.split()[-1] for line in lines[2:10]] == [f"meta:{n}" for n in (0, 4, 1, 5, 2, 6, 3, 7)]
    assert "cut tensor, then data" in lines


def test_more_dims_are_folded_into_several_tables(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, Layout(MESH, [S(1), S(3)], (2, 4, 3, 8)))
    assert lines[2:6] == [
        "dim 0: 0-1, dim 2: 0-2",
        "            dim 3: 0-1  dim 3: 2-3  dim 3: 4-5  dim 3: 6-7",
        "dim 1: 0-1  meta:0      meta:1      meta:2      meta:3",
        "dim 1: 2-3  meta:4      meta:5      meta:6      meta:7",
    ]
    cube = Mesh.dry({"a": 2, "b": 2, "c": 2})
    lines = printed(capsys, Layout(cube, [S(0), S(1), S(2)], (4, 4, 4)))
    assert [line for line in lines if line.startswith("dim 2")] == ["dim 2: 0-1", "dim 2: 2-3"]
    assert re.findall(r"meta:(\d)", "\n".join(lines)) == list("02461357")


def test_nothing_to_show_and_colour(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, Layout(MESH, [S(0), R], (0, 3)))[0].endswith("no elements")
    x = espalier.zeros(4, 6, device_mesh=MESH, placements=[S(0), S(1)])
    with espalier.ledger(MESH) as book:
        espalier.visualize_sharding(x, use_rich=True)
        text = capsys.readouterr().out
    assert not book.entries and isinstance(x, torch.Tensor)
    assert "dim 1: 2-3" in text and "meta:6" in text and "data: Shard(0)" in text
