"""engine.loader: each rank loads its rows, and a checkpoint knows where they stand."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import espalier

F64 = torch.float64
ROWS = 22


class Counted(Dataset[Any]):
    """Rows of which it remembers who asked for them."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.rows = torch.randn(ROWS, 3, dtype=F64, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        self.asked.append(i)
        return {"x": self.rows[i], "number": torch.tensor(i)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 4, dtype=F64)

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return (self.inner(x).square().sum(1) * (1 + number)).mean()


def engine_of(plan: dict[str, int]) -> Any:
    net = Model()
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters(), lr=0.01), plan)
    engine.lay_out({"x": torch.zeros(4, 3, dtype=F64), "number": torch.zeros(4, dtype=torch.int64)})
    return engine


def numbers(batch: Any) -> list[int]:
    return [int(i) for i in espalier.full_tensor(batch["number"])]


def trained(
    rank: int, world: int, folder: str, plan: dict[str, int], part: str
) -> list[tuple[list[int], float]]:
    """Rows and losses: of three epochs in one go, or up to a save in the second, or from there on."""
    engine = engine_of(plan)
    dataset = Counted()
    loader = engine.loader(dataset, batch_size=4, shuffle=True, seed=3)
    assert len(loader) == 6
    if part == "rest":
        torch.manual_seed(1 + rank)
        engine.load(folder)
    seen = []
    while loader.epoch < 3:
        for batch in loader:
            seen.append((numbers(batch), float(engine.train_step(batch))))
            if part == "first" and len(seen) == 9:
                engine.save(folder)
                return seen
    asked = len(dataset.asked)
    if part == "whole" and plan.get("data", 1) > 1:
        assert asked < 3 * ROWS, "each rank loads its own rows alone"
    return seen


def other_ways(rank: int, world: int, folder: str) -> None:
    engine = engine_of({"data": world})
    dataset = Counted()
    plain = engine.loader(dataset, 4, drop_last=True)
    assert [numbers(b) for b in plain] == [
        list(range(i, i + 4)) for i in range(0, 20, 4)
    ] and plain.epoch == 1
    # one that is left is not gone on with; workers, and rows put together by hand
    mine = engine.loader(
        dataset, 5, True, collate_fn=lambda rows: {"number": torch.stack([r["number"] for r in rows])}
    )
    first = numbers(next(iter(mine)))
    whole = [numbers(b) for b in mine]
    assert mine.epoch == 2 and sorted(itertools.chain(*whole)) == list(range(ROWS)) and whole[0] != first
    assert [len(b) for b in whole] == [5, 5, 5, 5, 2]
    # as programs start theirs; a spawned rank would have them spawned, which import torch anew
    forked: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    by_workers = engine.loader(TensorDataset(torch.arange(ROWS)), 6, True, seed=1, **forked)
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, from Python 3.12 on
        got = [espalier.full_tensor(b[0]).tolist() for b in by_workers]
    assert sorted(itertools.chain(*got)) == list(range(ROWS)) and torch.equal(torch.get_rng_state(), state)
    again = engine.loader(TensorDataset(torch.arange(ROWS)), 6, True, seed=1)
    assert [espalier.full_tensor(b[0]).tolist() for b in again] == got
    with pytest.raises(ValueError, match="known length"):
        engine.loader(Stream(), 4)
    with pytest.raises(ValueError, match=r"engine.loader\(loader.dataset, batch_size\)"):
        engine.loader(DataLoader(dataset, batch_size=4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave out sampler"):
        engine.loader(dataset, 4, sampler=range(3))
    engine.train_step({"x": dataset.rows[:4], "number": torch.arange(4)})
    engine.save(folder)
    # another order would not be the one that was left
    other = engine_of({"data": world})
    other.loader(dataset, 4, True)
    before = other.full_state_dict()
    with pytest.raises(ValueError, match="shuffle = False, this one True"):
        other.load(folder)
    assert all(torch.equal(x, before[name]) for name, x in other.full_state_dict().items())
    # torch's own cannot be gone on with: that is told where it draws at random
    other = engine_of({"data": world})
    still = DataLoader(dataset)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load(folder)
    drawing = DataLoader(dataset, shuffle=True)
    with pytest.warns(UserWarning, match=r"engine\.loader"):
        other.load(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load(folder, model_only=True)
    assert still is not drawing


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


PLANS = [(1, {"data": 1}), (2, {"data": 2}), (2, {"data": 2, "zero": 3})]


def test_training_goes_on_where_it_was(ranks: Any, tmp_path: Path) -> None:
    whole = ranks(2, trained, "", {"data": 2}, "whole")[0]
    assert [sorted(itertools.chain(*(b for b, _ in whole[i : i + 6]))) for i in (0, 6, 12)] == [
        list(range(ROWS))
    ] * 3
    assert whole[0][0] != whole[6][0], "each epoch has an order of its own"
    for i, (n, plan) in enumerate(PLANS):
        folder = str(tmp_path / str(i))
        first = ranks(n, trained, folder, plan, "first")[0]
        m, other = PLANS[(i + 1) % len(PLANS)]
        rest = ranks(m, trained, folder, other, "rest")[0]
        for (rows, loss), (same, right) in zip(first + rest, whole, strict=True):
            assert rows == same and loss == pytest.approx(right, rel=1e-10)


@pytest.mark.world(3)
def test_batches_of_other_kinds(ranks: Any, tmp_path: Path) -> None:
    ranks(3, other_ways, str(tmp_path))
