"""What the planner keeps on disk: found again by the same program, never by another."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from espalier import Plan, dry_run
from espalier.models import GPT, GPTConfig
from espalier.planner import Recorder, Totals, cells, composed, kept
from espalier.planner.cells import Cell
from espalier.planner.kept import Kept, identity


def model(**sizes: Any) -> nn.Module:
    with torch.device("meta"):
        base = {"vocab_size": 64, "max_positions": 8, "layers": 5, "hidden": 32, "heads": 4}
        return GPT(GPTConfig(**(base | sizes)))


def batch(rows: int = 4) -> dict[str, torch.Tensor]:
    tokens = torch.empty(rows, 8, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def recorder(folder: Path | None, net: nn.Module, rows: int = 4, **options: Any) -> Recorder:
    return Recorder(net, torch.optim.AdamW(net.parameters()), batch(rows), options, folder)


class Scaled(nn.Module):
    """What it is told shows neither in its repr nor in its parameters."""

    def __init__(self, factor: Any) -> None:
        super().__init__()
        self.factor = factor
        self.inner = nn.Linear(2, 2)


def test_one_key_a_program() -> None:
    net = Scaled(2.0)
    again = Scaled(2.0)
    again.load_state_dict(net.state_dict())
    assert identity(net) == identity(net) == identity(again) is not None
    others = [
        Scaled(3.0),
        Scaled(2),
        Scaled("2.0"),
        Scaled({"a": [2.0]}),
        Scaled({"a": (2.0,)}),
        Scaled(None),
    ]
    others += [Scaled(partial(max, k)) for k in (1, 2)] + [Scaled(lambda x, k=k: x + k) for k in (1, 2)]
    others += [
        Scaled(torch.float32),
        Scaled({1, 2}),
        Scaled({1, 3}),
        Scaled(GPTConfig()),
        Scaled(Plan(data=2)),
    ]

    def closed(k: int) -> Callable[[int], int]:
        return lambda x: x + k

    others += [Scaled(closed(k)) for k in (1, 2)]
    for other in others:
        other.load_state_dict(net.state_dict())
    keys = [identity(x) for x in (net, *others)]
    assert None not in keys and len(set(keys)) == len(keys)
    with torch.no_grad():
        again.inner.weight += 1
    assert identity(again) != identity(net), "values that are there may be asked for"
    assert identity(Scaled(object)) is not None
    assert identity(Scaled(iter([1]))) is None, "nothing tells where it is"
    assert Kept(Path("anywhere"), Scaled(iter([1]))).path("x") is None


def test_a_key_has_the_code_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    key = identity(net)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99")
        assert identity(net) != key
    with monkeypatch.context() as patch:
        digest = kept._digest
        patch.setattr(
            kept, "_digest", lambda path: digest(path) + ("!" if path.name == "dispatch.py" else "")
        )
        assert identity(net) != key, "a file of this package is another"
    torch.set_default_dtype(torch.float64)
    try:
        assert identity(net) != key
    finally:
        torch.set_default_dtype(torch.float32)
    assert identity(net) == key
    # a module of the user's own, and what it imports
    monkeypatch.syspath_prepend(str(tmp_path))
    helper, own = tmp_path / "kept_helper.py", tmp_path / "kept_model.py"
    helper.write_text("factor = 2\n")
    own.write_text("import torch, kept_helper\nclass Net(torch.nn.Linear): pass\n")
    net = importlib.import_module("kept_model").Net(2, 2)
    try:
        key = identity(net)
        helper.write_text("factor = 3\n")
        assert key is not None and identity(net) != key
        own.unlink()
        assert identity(net) is None, "nothing tells what its class does"
    finally:
        for name in ("kept_model", "kept_helper"):
            sys.modules.pop(name)


def test_keys_are_the_same_in_another_process() -> None:
    program = (
        "import torch; from espalier.models import GPT2, GPT2Config\n"
        "from espalier.planner.kept import identity\n"
        "with torch.device('meta'): net = GPT2(GPT2Config(layers=2))\n"
        "print(identity(net, torch.optim.AdamW(net.parameters()), {'max_grad_norm': 1.0}))\n"
        "from espalier.mesh.launch import leave; leave()"
    )
    keys = set()
    for seed in "12":
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        keys.add(done.stdout)
    assert len(keys) == 1 and "None" not in keys.pop()


def test_another_model_batch_or_option_finds_nothing(tmp_path: Path) -> None:
    recorder(tmp_path, model()).costs(Cell())
    same = recorder(tmp_path, model())
    same.costs(Cell())
    assert same.recorded == 0
    same = recorder(tmp_path, model(), rows=8)
    same.costs(Cell())
    assert same.recorded == 0, "rows are cut"
    for other in (
        recorder(tmp_path, model(heads=2)),
        recorder(tmp_path, model(), max_grad_norm=1.0),
        recorder(tmp_path, model(), layouts={"*.up": "column"}),
    ):
        other.costs(Cell())
        assert other.recorded == 2


def test_totals_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [Plan(data=2, zero=3), Plan(tensor=2), Plan(pipe=2, cuts=("blocks.2",), accumulate=4)]
    found: dict[Any, Totals] = {}
    first = recorder(tmp_path, model())
    cuts = tuple(first.names[2:3])
    plans[2] = Plan(pipe=2, cuts=cuts, accumulate=4)
    asked: list[Any] = [(plans[0], {}), (plans[1], {}), (plans[2], {"pipe": 0}), (plans[2], {"pipe": 1})]
    first.totals_ahead(asked)
    for plan, place in asked:
        found[str(plan), str(place)] = first.totals(plan, place)
        net = model()
        given = {"optimizer": torch.optim.AdamW(net.parameters()), "coordinate": place}
        assert first.totals(plan, place) == composed(net, plan, batch(), **given)
    monkeypatch.setattr(cells, "composed", None)
    again = recorder(tmp_path, model())
    for plan, place in asked:
        assert again.totals(plan, place) == found[str(plan), str(place)]
    for other, plan in (
        (recorder(tmp_path, model(), rows=8), plans[0]),
        (recorder(tmp_path, model(hidden=64)), plans[0]),
        (again, Plan(data=2, zero=3, chunk_megabytes=7)),
        (again, Plan(data=2, zero=2)),
    ):
        with pytest.raises(TypeError):
            other.totals(plan, {})
    monkeypatch.undo()
    for path in tmp_path.iterdir():
        path.write_text(path.read_text()[:-20])
    damaged = recorder(tmp_path, model())
    assert damaged.totals(*asked[0]) == found[str(asked[0][0]), "{}"], "it is made again"


class Named(nn.Module):
    """Blocks under names that no table knows, and an embedding that is small beside all of them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.look = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.look(x)
        for layer in self.layers:
            y = y + layer(y)
        return y.square().mean()


def test_what_is_a_large_share_is_one_of_the_whole_model() -> None:
    with torch.device("meta"):
        net, tokens = Named(40), torch.empty(8, 2, dtype=torch.int64)
    given = {"optimizer": torch.optim.AdamW(net.parameters())}
    plan = Plan(tensor=2, accumulate=1)
    totals, whole = composed(net, plan, tokens, **given), Totals.of(dry_run(net, plan, tokens, **given))
    assert totals.runs > 1 and totals.differs(whole) == []
    assert whole.parameter_bytes > 4 * 50 * 64, "the embedding is whole"
