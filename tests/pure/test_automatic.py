"""Layouts that trials find, against those written by hand; what a job's table tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.models import build

TEXT = {"vocab_size": 4096, "hidden": 256, "heads": 4, "layers": 2, "max_positions": 128}
IMAGES = {"hidden": 256, "heads": 4, "layers": 2}


class Unknown(nn.Module):
    """A model that nobody described."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **batch: Any) -> Any:
        return self.net(**batch)


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        if kind == "vit":
            return {"pixel_values": torch.zeros(8, 3, 32, 32), "labels": torch.zeros(8, dtype=torch.int64)}
        tokens = torch.zeros(8, 64, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}


def dry(kind: str, known: bool, sequence: Any) -> espalier.DryReport:
    with torch.device("meta"):
        net = build(kind, IMAGES if kind == "vit" else TEXT)
        net = net if known else Unknown(net)
    optimizer = torch.optim.AdamW(net.parameters())
    return espalier.dry_run(
        net, {"tensor": 4, "sequence_parallel": sequence}, batch_of(kind), optimizer=optimizer
    )


@pytest.mark.parametrize("kind", ["gpt", "gpt2", "bert", "vit"])
@pytest.mark.parametrize("sequence", [False, True])
def test_trials_find_the_tables_or_better(kind: str, sequence: bool) -> None:
    found, table = dry(kind, False, sequence), dry(kind, True, sequence)
    assert 0 < sum(found.ledger.by_axis().values()) <= sum(table.ledger.by_axis().values())
    assert found.parameter_bytes <= table.parameter_bytes
    assert found.peak_bytes <= table.peak_bytes


def test_the_sequence_is_cut_where_that_is_cheaper() -> None:
    for known in (False, True):
        asked, auto, whole = (dry("gpt2", known, sequence) for sequence in (True, "auto", False))
        assert auto.ledger == asked.ledger != whole.ledger
        assert auto.peak_bytes < whole.peak_bytes


class Bottleneck(nn.Module):
    """Far more activations than weights: cutting sends more than it frees."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, inner), nn.Linear(inner, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.parametrize(("inner", "pays"), [(8, False), (256, True)])
def test_what_costs_more_than_it_frees_stays_whole(inner: int, pays: bool) -> None:
    with torch.device("meta"):
        net = nn.Sequential(*(Bottleneck(inner) for _ in range(2)))
        x = torch.zeros(256, 64)
    mesh = espalier.Mesh.dry({"data": 1, "tensor": 2})
    engine = espalier.initialize(
        net, None, {"tensor": 2}, mesh=mesh, example=x, loss_fn=lambda out, _: out.square().mean()
    )
    cut = espalier.layout_of(net[0].up.weight).placements[1] == espalier.Shard(0)
    assert cut is pays
    with espalier.ledger(mesh) as book:
        engine.backward(engine(x))
    assert bool(book.by_axis()) is pays


def test_a_table_tells_what_each_module_sends_and_why() -> None:
    with torch.device("meta"):
        net = Unknown(build("gpt2", TEXT))
    table = espalier.explain_layouts(net, {"tensor": 4, "sequence_parallel": True}, batch_of("gpt2"))
    rows = {(row.module, row.parameter): row for row in table.rows}
    # float32, by ring algorithms: [8, 64, 256] gathered or scattered among four
    piece = 3 * 4 * 8 * 64 * 256 // 4
    up = rows["net.blocks.0.mlp.up_proj", "weight"]
    assert up.layout == "tensor:S(0)" and "frees" in up.why
    # backward: gathered again, and its gradient scattered
    assert (up.forward, up.backward) == (piece, 2 * piece)
    down = rows["net.blocks.1.mlp.down_proj", "weight"]
    assert (down.layout, down.forward, down.backward) == ("tensor:S(1)", piece, piece)
    norm = rows["net.norm", "weight"]
    # gradients of what meets shards are summed in one message, after the backward pass
    assert norm.layout == "whole" and norm.forward == norm.backward == 0 < rows["(outside)", ""].forward
    # all that is sent, and nothing twice
    with torch.device("meta"):
        twin = Unknown(build("gpt2", TEXT))
    report = espalier.dry_run(twin, {"tensor": 4, "sequence_parallel": True}, batch_of("gpt2"))
    assert sum(row.forward + row.backward for row in table.rows) == sum(
        e.bytes for e in report.ledger.entries
    )
    assert rows["net.head", "weight"].why == "tied to net.embed.weight"
    printed = str(table)
    assert "net.blocks.*.mlp.up_proj × 2" in printed and "net.blocks.1" not in printed
