"""Checkpoints: what any plan saved, every other loads, exactly."""

from __future__ import annotations

import copy
import errno
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import espalier
from espalier.checkpoint import Checkpoint, CheckpointError, Saver, checkpoints, newest
from espalier.checkpoint.saver import Staging
from espalier.engine import checkpointing as state
from espalier.engine.states import whole_states
from espalier.tensor.live_memory import LiveMemory
from tests.asked import ASKED
from tests.ranks.test_branches import TABLE, Parallel
from tests.ranks.test_engine import batch, model
from tests.ranks.test_experts import model as experts

ROWS = 8
# of more checkpoints than this, each plan loads its own, that of one process, and a seventh of the others
MANY = 99 if ASKED else 8
Plan = dict[str, Any]


def gpt() -> nn.Module:
    return model("gpt", tied=True)


def plain_gpt() -> nn.Module:
    return model("gpt", tied=True).float()


def parallel() -> nn.Module:
    torch.manual_seed(2)
    return Parallel().double()


def data(net: nn.Module, step: int) -> Any:
    return batch(ROWS, step)["input_ids"] if isinstance(net, Parallel) else batch(ROWS, step)


def engine_of(
    build: Callable[[], nn.Module], plan: Plan, folder: Path, *, early: bool = False, **given: Any
) -> espalier.Engine:
    """One that knows how its parameters lie; ``early``: not, if that hangs on the first batch."""
    net = build()
    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "lr": 1e-2}, {"params": vectors, "lr": 3e-3}])
    if plan.get("offload", {}).get("states") == "disk":
        plan = {**plan, "offload": {**plan["offload"], "directory": str(folder / "offload")}}
    if isinstance(net, Parallel) and plan.get("branch", 1) > 1:
        given["branches"] = TABLE
    engine = espalier.initialize(net, optimizer, {"chunk_megabytes": 0.02, **plan}, **given)
    if not early:
        engine.lay_out(engine.cut(data(net, 0))[0])
    return engine


def trained(engine: espalier.Engine, steps: range) -> list[float]:
    return [engine.train_step(data(engine.module, step)).item() for step in steps]


class Slow(Staging):
    """Copies so late that whoever does not wait is ahead of it."""

    def fill(self, later: Any) -> Any:
        time.sleep(0.1)
        return super().fill(later)


def save_all(rank: int, world: int, build: Any, plans: list[Plan], folder: Path) -> None:
    for i, plan in enumerate(plans):
        engine = engine_of(build, plan, folder)
        trained(engine, range(2))
        here = folder / f"{world}-{i}"
        before = {name: x.clone() for name, x in engine.full_state_dict().items()}
        engine._saver = Saver(engine.mesh)
        engine._saver._staging = Slow(engine.mesh)
        saved = engine.save(here, asynchronous=True, note=("a", {"b": 1.5}))
        losses = trained(engine, range(2, 4))
        engine.wait_saved()
        assert newest(here) == saved
        if rank == 0:
            read = Checkpoint(saved)
            assert all(torch.equal(x, read.read(f"model.{name}")) for name, x in before.items())
            assert len(read.index.tensors) > 3 * len(list(engine.module.parameters()))
            torch.save(losses, here / "losses.pt")


def load_all(rank: int, world: int, build: Any, plans: list[Plan], folder: Path, tolerance: float) -> None:
    for i, plan in enumerate(plans):
        engine = engine_of(build, plan, folder)
        saved = sorted(folder.glob("?-*"))
        for k, here in enumerate(saved):
            wanted, own = torch.load(here / "losses.pt"), here.name == f"{world}-{i}"
            if len(saved) > MANY and not own and here.name != "1-0" and (i + k) % 7:
                continue
            if here.name == "1-0":  # before the first batch
                engine = engine_of(build, plan, folder, early=True)
            assert engine.load(here) == {"note": ("a", {"b": 1.5})} and engine.steps == 2
            engine.lay_out(engine.cut(data(engine.module, 0))[0])
            again = engine.save(folder / "again" / f"{world}-{i}-{k}")
            if rank == 0:
                compare(Checkpoint(newest(here) or here), Checkpoint(again), (plan, here.name))
            if own or here.name == "1-0":
                losses = trained(engine, range(2, 4))
                apart = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
                assert apart <= (0.0 if own else tolerance), (plan, here.name, apart)


def compare(a: Checkpoint, b: Checkpoint, where: Any) -> None:
    """Two checkpoints hold the same, whoever wrote it."""
    assert a.entries.keys() == b.entries.keys(), where
    for name in a.entries:
        assert torch.equal(a.read(name), b.read(name)), (where, name)
    for key in ("optimizer", "steps", "model"):
        assert a.values[key] == b.values[key], (where, key)


ZERO = [{"data": 2, "zero": zero} for zero in (0, 1, 2, 3)]
AWAY = {"parameters": "disk", "gradients": "disk", "states": "disk"}
# (model, tolerance of losses after a step under another plan, plans by world)
FAMILIES: dict[str, tuple[Callable[[], nn.Module], float, dict[int, list[Plan]]]] = {
    "axes": (
        gpt,
        1e-9,
        {
            1: [{}, {"offload": {"states": "host"}}],
            2: [*ZERO, {"data": 2, "zero": 3, "offload": AWAY}, {"context": 2, "zero": 1}],
            4: [
                {"data": 2, "tensor": 2, "zero": 3},
                {"replicate": 2, "data": 2, "zero": 3},
                {"tensor": 4, "tensor_mode": "2d"},
                {"data": 2, "context": 2, "zero": 2, "offload": {"states": "host"}},
                {"tensor": 2, "sequence_parallel": True, "data": 2, "zero": 1},
                {"data": 4, "zero": 2, "accumulate": 2},
            ],
        },
    ),
    "pipelines": (
        gpt,
        1e-9,
        {
            1: [{}],
            2: [
                {"pipe": 2, "accumulate": 4},
                {"pipe": 2, "accumulate": 2, "stages_per_rank": 2, "schedule": "zbv"},
            ],
            4: [
                {"pipe": 2, "data": 2, "zero": 3, "accumulate": 2},
                {"pipe": 2, "tensor": 2, "accumulate": 2},
            ],
        },
    ),
    "grids": (
        gpt,
        1e-9,
        {
            1: [{}],
            8: [{"tensor": 8, "tensor_mode": "3d"}, {"tensor": 8, "tensor_mode": "2.5d", "depth": 2}],
        },
    ),
    "experts": (
        experts,
        1e-9,
        {
            1: [{}],
            2: [{"data": 2, "expert": 2, "zero": 3}],
            4: [{"data": 2, "expert": 2, "tensor": 2}, {"tensor": 4, "tensor_mode": "2d"}],
        },
    ),
    "branches": (parallel, 1e-9, {1: [{}], 2: [{"branch": 2}], 4: [{"branch": 2, "data": 2, "zero": 2}]}),
    "masters": (
        plain_gpt,
        1e-2,
        {
            1: [{}, {"precision": "bfloat16"}],
            2: [
                {"data": 2, "zero": 1, "precision": "bfloat16"},
                {"data": 2, "zero": 3, "precision": "float16"},
                {"tensor": 2, "precision": "bfloat16", "offload": {"states": "disk"}},
            ],
        },
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_plan_loads_what_others_saved(ranks: Any, tmp_path: Path, family: str) -> None:
    build, tolerance, plans = FAMILIES[family]
    for world, of in plans.items():
        ranks(world, save_all, build, of, tmp_path)
    for world, of in plans.items():
        ranks(world, load_all, build, of, tmp_path, tolerance)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    **{name: {} for name in "Adadelta Adagrad Adamax ASGD NAdam RAdam RMSprop Rprop Adafactor Muon".split()},
}


def any_optimizer(rank: int, world: int, folder: Path) -> None:
    for name, given in OPTIMIZERS.items():
        if not hasattr(torch.optim, name):
            continue
        losses, lying = [], []
        for plan in ({"data": 2, "zero": 1}, {"data": 2, "zero": 1}, {"tensor": 2}):
            net = model("gpt", tied=True, layers=1)
            held = [p for p in net.parameters() if p.ndim == 2] if name == "Muon" else net.parameters()
            optimizer = getattr(torch.optim, name)(held, lr=1e-3, **given)
            engine = espalier.initialize(net, optimizer, plan)
            if not losses:
                trained(engine, range(2))
                saved = engine.save(folder / name)
            else:
                engine.load(saved)
            engine.lay_out(data(net, 0))  # of tensor after the load
            states = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
            lying.append(
                [{k: x.placements for k, x in s.items() if hasattr(x, "placements")} for s in states]
            )
            losses.append(trained(engine, range(2, 5)))
        assert losses[1] == losses[0] and lying[1] == lying[0], name
        apart = max(abs(a - b) for a, b in zip(losses[2], losses[0], strict=True))
        assert apart < 1e-9, (name, apart)
        for p, of in optimizer.state.items() if rank else ():
            optimizer.state[p] = dict(reversed(of.items()))  # of what all have, each writes a part
        engine.save(folder / "again" / name)


@pytest.mark.filterwarnings("ignore")
def test_any_optimizer(ranks: Any, tmp_path: Path) -> None:
    ranks(2, any_optimizer, tmp_path)


class Told(nn.Dropout):
    """It has more to save than parameters and buffers."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.told: Any = {"scales": torch.zeros(2), "calls": 0}

    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state


def untold() -> nn.Module:
    """Nothing says how it lies but a batch."""
    torch.manual_seed(4)
    net = nn.Sequential(
        nn.Linear(12, 16), nn.LayerNorm(16), nn.ReLU(), Told(0.3), nn.Linear(16, 12), nn.Linear(12, 6)
    )
    net[2].register_buffer("seen", torch.zeros(3))
    net[5].bias.requires_grad_(False)
    return net


def loads_early(rank: int, world: int, folder: Path) -> None:
    """What is loaded before the first batch, by any way, is there after it: as if it were laid out before."""
    batches = [(torch.randn(ROWS, 12), torch.randint(6, (ROWS,))) for _ in range(5)]
    plans: list[Plan] = [
        {"tensor": 2},
        {"tensor": 2, "precision": "bfloat16", "offload": {"states": "disk"}},
        {"pipe": 2, "cuts": ["4"], "accumulate": 2},
    ]
    for i, plan in enumerate(plans):
        if "offload" in plan:
            plan["offload"]["directory"] = str(folder / "offload")

        def begun(**given: Any) -> espalier.Engine:
            net = untold()
            optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
            return espalier.initialize(net, optimizer, plan, loss_fn=nn.functional.cross_entropy, **given)  # noqa: B023

        engine = begun()
        assert engine._data is None
        for drawn in batches[:2]:
            engine.train_step(drawn)
        engine.module[2].seen += 7.0
        told = engine.module[3].told = {"scales": torch.ones(2), "calls": 3 + i}
        saved = engine.save(folder / str(i))
        weights, states = engine.state_dict(), whole_states(engine.optimizer.state_dict())
        files = folder / f"{i}-{rank}.pt"
        torch.save({"model": weights, "optimizer": states}, files)

        def by_load(engine: espalier.Engine) -> None:
            engine.load(saved)  # noqa: B023

        def by_weights(engine: espalier.Engine) -> None:
            engine.load_weights(files, optimizer=True)  # noqa: B023

        def by_dicts(engine: espalier.Engine) -> None:
            engine.load_state_dict(weights)  # noqa: B023
            engine.optimizer.load_state_dict(copy.deepcopy(states))  # noqa: B023

        for take in (by_load, by_weights, by_dicts):
            losses = []
            for given in ({"example": batches[0]}, {}):
                engine = begun(**given)
                take(engine)
                held = engine.state_dict()
                taken = held.pop("3._extra_state")
                assert taken["calls"] == told["calls"] and torch.equal(taken["scales"], told["scales"])
                assert all(torch.equal(x, weights[name]) for name, x in held.items()), (plan, take)
                torch.manual_seed(1)  # of dropout
                losses.append([engine.train_step(drawn).item() for drawn in batches[2:]])
                if take is by_load:
                    assert engine.steps == 5
            assert losses[0] == losses[1], (plan, take)
        for name in ("3._extra_state", "0.weight"):
            with pytest.raises(ValueError, match=name):
                engine.load_state_dict({key: x for key, x in weights.items() if key != name})
        with pytest.raises(ValueError, match=r"4\._extra_state is not in the model"):
            engine.load_state_dict({**weights, "4._extra_state": 1})


def test_what_is_loaded_before_the_first_batch(ranks: Any, tmp_path: Path) -> None:
    ranks(2, loads_early, tmp_path)


def whole_files(rank: int, world: int, folder: Path) -> None:
    """What others write of a whole state dict is as large as on one process: no tensor brings its chunk."""
    for plan in ({"data": 2}, {"data": 2, "zero": 3}, {"tensor": 2}, {"pipe": 2, "accumulate": 2}):
        engine = engine_of(gpt, plan, folder)
        trained(engine, range(1))
        whole, states = engine.state_dict(), whole_states(engine.optimizer.state_dict())["state"]
        of_states = {f"{k} {name}": x for k, own in states.items() for name, x in own.items()}
        for name, x in {**whole, **of_states}.items():
            if x.ndim:
                assert x.untyped_storage().nbytes() == x.numel() * x.element_size(), (plan, name)
        ties = state.aliases_of(engine.module.state_dict(keep_vars=True))
        held = {f"model.{name}": x.data_ptr() for name, x in whole.items()}
        assert ties and all(held.pop(tie) in held.values() for tie in ties), plan
        assert len(set(held.values())) == len(held), plan
        save_file({name: whole[name.removeprefix("model.")] for name in held}, folder / f"{rank}.safetensors")


def test_files_of_whole_state_dicts(ranks: Any, tmp_path: Path) -> None:
    ranks(2, whole_files, tmp_path)


def several_folders(rank: int, world: int, folder: Path) -> None:
    net = model("gpt")
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), {"data": world})
    engine.train_step(batch(ROWS))
    with pytest.raises(CheckpointError, match="several folders"):
        engine.save(folder / str(rank))
    engine.save(folder / "one")


def test_ranks_that_save_to_several_folders_do_not_wait(ranks: Any, tmp_path: Path) -> None:
    ranks(2, several_folders, tmp_path)


def beside_the_model(rank: int, world: int, folder: Path) -> None:
    """What a program keeps itself comes back as it was, whatever its names."""
    net, x = nn.Linear(4, 4), torch.ones(3)
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), {"data": world, "zero": 3})
    draws = np.random.RandomState(rank // world)
    given = {
        "tensors": {1: x, "1": 2 * x, "a.b": 3 * x, "a": {"b": 4 * x}},
        "window": deque([1.0, 2.0], maxlen=2),
        "numpy": draws.get_state(),
    }
    expected = draws.rand(3).tolist()
    engine.save(folder, **given)
    found = engine.load(folder)
    tensors = found["tensors"]
    assert [y[0].item() for y in (tensors[1], tensors["1"], tensors["a.b"], tensors["a"]["b"])] == [
        1,
        2,
        3,
        4,
    ]
    found["window"].append(3.0)
    assert list(found["window"]) == [2.0, 3.0]
    draws.set_state(found["numpy"])
    assert draws.rand(3).tolist() == expected
    assert repr(found["tensors"].keys()) == repr(given["tensors"].keys())


def test_what_is_saved_beside_the_model(ranks: Any, tmp_path: Path) -> None:
    ranks(2, beside_the_model, tmp_path)


def asks_for_what_cannot_be(rank: int, world: int, folder: Path) -> None:
    """All ranks are told, though the first alone looks, or one alone says otherwise."""
    net = nn.Linear(4, 4)
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), {"data": world})
    saved = engine.save(folder, keep=1)
    for keep in (0, -1):
        with pytest.raises(ValueError, match=rf"keep = {keep}: .*None, which keeps all"):
            engine.save(folder, keep=keep if rank == 0 else 1)
    assert newest(folder) == saved
    for path in (folder / ("x" * 300), folder / ("x" * 300) / "y"):
        with pytest.raises(CheckpointError, match="too long|no checkpoint"):
            engine.load(path)
        with pytest.raises(ValueError, match="too long|does not exist"):
            engine.load_weights(path)
    asks_alone_for_what_cannot_be(rank, engine, folder)


def says_otherwise(rank: int, world: int, folder: Path) -> None:
    net = nn.Linear(4, 4)
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), {"data": world})
    draws = torch.Generator().manual_seed(rank)
    for own in ({"seen": {"rows": 4 + rank}}, {"draws": draws.get_state()}):
        with pytest.warns(UserWarning, match="ranks give (seen.rows|draws) different values"):
            engine.save(folder, **own, alike=(1, "x"))
    engine.save(folder, alike=torch.ones(3), seen={f"rank{rank}": 4 + rank})
    assert engine.load(folder)["seen"] == {"rank0": 4, "rank1": 5}
    with pytest.raises(ValueError, match="some ranks alone give the tensor 'draws'"):
        engine.save(folder, **({"draws": draws.get_state()} if rank else {}))


def test_what_ranks_say_differently_is_told(ranks: Any, tmp_path: Path) -> None:
    """The first rank's was written, without a word."""
    ranks(2, says_otherwise, tmp_path)


def save_to_one_folder(rank: int, world: int, folder: Path) -> None:
    """What one engine has saved stays, also beside another that saves the same step at the same time."""
    nets = [nn.Linear(4, 4) for _ in range(3)]
    of_each = [
        espalier.initialize(net, torch.optim.SGD(net.parameters(), 0.1), {"data": world}) for net in nets
    ]
    first, second, third = of_each
    values = [engine.full_state_dict()["weight"] for engine in of_each]

    def saved(engine: espalier.Engine, told: bool, **given: Any) -> None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            engine.save(folder, **given)
            engine.wait_saved()
        words = [str(one.message) for one in seen]
        assert len(words) == (told and rank == 0), words
        assert all(f"process {os.getpid()} on" in one and "engine.load" in one for one in words)
        torch.distributed.barrier()

    def is_value(of: int, path: Path) -> None:
        assert torch.equal(Checkpoint(path).read("model.weight"), values[of])

    final = folder / "step-00000000"
    saved(first, False)
    saved(first, False)
    assert os.listdir(folder) == [final.name]
    torch.distributed.barrier()
    saved(second, True)
    (aside,) = folder.glob("of-*/step-00000000")
    is_value(0, aside)
    is_value(1, final)
    third.load(aside)  # goes on from the first, and is not the second's either
    saved(third, True)
    saved(third, False, keep=1)
    third.load(aside.parent)
    third.save(aside.parent)
    third.wait_saved()
    torch.distributed.barrier()
    assert checkpoints(aside.parent) == [aside]
    assert checkpoints(folder) == [final]
    first.save(folder / "both", asynchronous=True)
    second.save(folder / "both", asynchronous=True, keep=1)
    with warnings.catch_warnings():  # of whichever comes later
        warnings.simplefilter("ignore")
        first.wait_saved()
        second.wait_saved()
    torch.distributed.barrier()
    assert len([*folder.glob("both/**/step-00000000")]) == 2
    first.save(folder / "kept")
    for second.steps in (1, 2):
        second.save(folder / "kept", keep=1)
        second.wait_saved()
    torch.distributed.barrier()
    assert [path.name for path in checkpoints(folder / "kept")] == ["step-00000002", "step-00000000"]


def test_engines_that_save_to_one_folder_lose_nothing(ranks: Any, tmp_path: Path) -> None:
    """The second took the place of the first's without a word."""
    ranks(2, save_to_one_folder, tmp_path)


class Fails:
    """Beside a model; has a state on the first rank alone."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if self.rank:
            raise KeyError("no state")
        return {}


def asks_alone_for_what_cannot_be(rank: int, engine: espalier.Engine, folder: Path) -> None:
    """A program that goes on after an error does so on all ranks."""
    saved = newest(folder)
    for asynchronous in (False, True):
        with pytest.raises(KeyError, match="no state"):
            engine.save(folder, asynchronous=asynchronous, tracker=Fails(rank))
    engine.save(folder / "own")
    with pytest.raises(ValueError, match="it has no 'tracker'"):
        engine.load(folder / "own", **({"tracker": Fails(rank)} if rank else {}))
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(
                Staging, "begin", lambda self, boxes: (_ for _ in ()).throw(MemoryError("too little"))
            )
        engine.save(folder, asynchronous=True)
        with pytest.raises(CheckpointError, match="too little"):
            engine.wait_saved()
    assert newest(folder) == saved
    engine.save(folder)


def test_what_cannot_be_is_told_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks(2, asks_for_what_cannot_be, tmp_path)


def holds_little(rank: int, world: int, folder: Path) -> None:
    """A load takes the memory of what stays, and of two boxes, however large the model is."""
    net = model("gpt", layers=12)
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), {"data": world, "zero": 3})
    own = sum(2 * 8 * math.prod(espalier.layout_of(p).local_shape) for p in net.parameters())
    if world == 1:
        engine.train_step(batch(ROWS))
        engine.save(folder)
        return
    largest = max(p.numel() for p in net.parameters()) * 8
    with LiveMemory(engine.resized) as live:
        engine.load(folder)
    most = own + own // 2 + 2 * largest + 20_000  # states, parameters, two boxes
    assert own < live.peak < most < 0.7 * world * 1.5 * own, (own, live.peak, largest)


def test_a_load_holds_its_own_part_and_a_box(ranks: Any, tmp_path: Path) -> None:
    ranks(1, holds_little, tmp_path)
    ranks(2, holds_little, tmp_path)


def refuses(rank: int, world: int, folder: Path) -> None:
    engine = engine_of(gpt, {"data": 2}, folder)
    saved = engine.save(folder)
    other = model("gpt", tied=True, hidden=32)
    other.extra = nn.Linear(2, 3)
    found = espalier.initialize(other, torch.optim.SGD(other.parameters(), lr=0.1), {"data": 2})
    before = {name: x.clone() for name, x in found.full_state_dict().items()}
    with pytest.raises(ValueError, match="nothing was changed") as caught:
        found.load(saved)
    told = str(caught.value)
    for words in ("missing from it: extra.weight [3, 2]", "[37, 24] in it, [37, 32]", "AdamW, not SGD"):
        assert words in told, told
    assert all(torch.equal(x, before[name]) for name, x in found.full_state_dict().items())


def test_another_model_is_told_all_that_differs(ranks: Any, tmp_path: Path) -> None:
    ranks(2, refuses, tmp_path)


def fails_late(rank: int, world: int, folder: Path) -> None:
    """A disk that fails when the checkpoint of a save is there already."""
    engine = engine_of(gpt, {"data": 2, "zero": 2}, folder)
    trained(engine, range(1))
    before, real = engine.save(folder / "c", keep=1), os.fsync
    engine.wait_saved()

    def fails(file: int) -> None:
        time.sleep(0.1)
        if rank == 1:
            raise OSError(errno.EIO, "Input/output error")
        real(file)

    trained(engine, range(1))
    os.fsync = fails
    try:
        after = engine.save(folder / "c", keep=1)
        assert newest(folder / "c") == after and set(checkpoints(folder / "c")) == {before, after}
        torch.distributed.barrier()
        with pytest.raises(CheckpointError, match="Input/output error"):
            engine.wait_saved()
    finally:
        os.fsync = real
    torch.distributed.barrier()
    assert os.listdir(folder / "c") == [before.name]
    torch.distributed.barrier()
    after = engine.save(folder / "c", keep=1, durable=True)
    assert checkpoints(folder / "c") == [after]


def test_the_one_before_stays_until_the_newest_is_on_the_disk(ranks: Any, tmp_path: Path) -> None:
    ranks(2, fails_late, tmp_path)


def has_streams(rank: int, world: int, folder: Path) -> None:
    """Each rank has a stream of its device's, as far as there are so many."""
    of_device = torch.Generator().manual_seed(rank)
    real, state.device_stream = (
        state.device_stream,
        lambda mesh: state.GeneratorState(of_device.get_state, of_device.set_state),
    )
    try:
        engine = engine_of(gpt, {"data": world}, folder)
        if world == 2:
            torch.rand(3, generator=of_device)
            engine.save(folder / "c", durable=True)
            torch.save(torch.rand(5, generator=of_device), folder / f"{rank}.pt")
        engine.load(folder / "c")
        assert torch.equal(torch.rand(5, generator=of_device), torch.load(folder / f"{rank % 2}.pt"))
    finally:
        state.device_stream = real


def test_streams_of_devices_go_on(ranks: Any, tmp_path: Path) -> None:
    ranks(2, has_streams, tmp_path)
    ranks(1, has_streams, tmp_path)


def loads_frozen(rank: int, world: int, folder: Path) -> None:
    """The first stage trains nothing, so no optimizer has anything there."""

    def started() -> espalier.Engine:
        net = model("gpt2", layers=2)
        for name, p in net.named_parameters():
            p.requires_grad_("blocks.0" not in name and "embed" not in name and "position" not in name)
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        plan = {"pipe": 2, "accumulate": 2, "cuts": ("blocks.1",)}
        engine = espalier.initialize(net, optimizer, plan)
        engine.lay_out(engine.cut(batch(ROWS))[0])
        return engine

    first, second = started(), started()
    trained(first, range(2))
    first.save(folder / "saved")
    second.load(folder / "saved")
    assert trained(first, range(2, 4)) == trained(second, range(2, 4))


def test_a_stage_that_is_frozen_as_a_whole_is_loaded(ranks: Any, tmp_path: Path) -> None:
    ranks(2, loads_frozen, tmp_path)
