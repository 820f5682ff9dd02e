"""Checkpoints of one process: the format, what breaks, who may read it."""

from __future__ import annotations

import atexit
import errno
import io
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import espalier
from espalier.checkpoint import Checkpoint, CheckpointError, Lying, checkpoints, newest, open_any
from espalier.checkpoint.folder import Seal
from espalier.checkpoint.index import decode, encode
from espalier.checkpoint.saver import Staging, boxes_to_write
from espalier.checkpoint.tensor_file import ALIGN, frame_of
from espalier.cli.main import app
from espalier.compat.deepspeed.checkpoints import whole_tag
from espalier.engine import Engine
from espalier.layout import Layout, Replicate, Shard
from espalier.mesh import Mesh

DTYPES = "float32 float64 bfloat16 float16 bool uint8 int64 int32 complex64 uint16 float8_e4m3fn".split()


def engine(seed: int = 0, width: int = 8) -> Engine:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 4))
    optimizer, mesh = torch.optim.AdamW(net.parameters(), lr=1e-2), Mesh.single(("data", "tensor"))
    return espalier.initialize(net, optimizer, {}, mesh=mesh, loss_fn=nn.functional.mse_loss)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    given = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, generator=given), torch.randn(6, 4, generator=given)


def trained(steps: int = 2) -> Engine:
    found = engine()
    for step in range(steps):
        found.train_step(batch(step))
    return found


def state(of: Engine) -> dict[str, torch.Tensor]:
    assert of.optimizer is not None
    found = {name: x.clone() for name, x in of.full_state_dict().items()}
    for i, p in enumerate(of.module.parameters()):
        found.update({f"{i} {k}": espalier.full_tensor(x).clone() for k, x in of.optimizer.state[p].items()})
    return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


# ---- the format


@pytest.mark.parametrize("name", DTYPES)
def test_frames_are_what_torch_saves(name: str) -> None:
    dtype = getattr(torch, name)
    for shape in ((), (0,), (3,), (5, 7), (2, 3, 4), (0, 3)):
        x = (torch.rand(shape) * 10).to(dtype)
        data = x.reshape(-1).view(torch.uint8).numpy().tobytes()
        frame = frame_of(dtype, shape)
        head, tail = frame.around(zlib.crc32(data))
        assert frame.start % ALIGN == 0
        loaded = torch.load(io.BytesIO(head + data + tail), weights_only=True)
        assert loaded.dtype is dtype and loaded.shape == x.shape
        assert torch.equal(loaded.reshape(-1).view(torch.uint8), x.reshape(-1).view(torch.uint8))
        assert zipfile.ZipFile(io.BytesIO(head + data + tail)).testzip() is None


def test_values_come_back_as_they_were() -> None:
    tensors: dict[str, torch.Tensor] = {}

    def take(at: str, x: torch.Tensor) -> str:
        tensors[at] = x
        return at

    given = {
        "a": [1, 2.5, None, True, "x", float("inf"), -0.0, 1e-300],
        "b": (1, (2, [3])),
        3: {"$odd": 1, ("t", 1): 2},
        "c": OrderedDict(z=1, a=2),
        "d": Counter({5: 2}),
        "e": b"\0\xff",
        "f": 1 + 2j,
        "g": torch.bfloat16,
        "h": deque([1]),
        "j": deque([1, 2], maxlen=2),
        "k": np.random.RandomState(3).get_state(),
        "i": {"x": torch.arange(3)},
    }
    said = json.loads(json.dumps(encode(given, "values", take)))
    found = decode(said, tensors.__getitem__)
    assert torch.equal(found["i"].pop("x"), given["i"].pop("x"))  # type: ignore[attr-defined]
    assert repr(found) == repr(given)
    with pytest.raises(ValueError, match=r"extra\.0 is a _thread\.lock, which cannot be saved"):
        encode([threading.Lock()], "extra", take)
    with pytest.raises(ValueError, match=r"extra is a numpy\.ndarray, which cannot be saved"):
        encode(np.array(["a", "b"]), "extra", take)


@pytest.mark.parametrize("axes", [{"data": 4}, {"a": 2, "b": 3}])
def test_each_element_is_written_once_and_all_ranks_write_alike(axes: dict[str, int]) -> None:
    shapes = [(700, 512), (3, 5), (), (0, 4), (513,), (1 << 20,), (9, 1 << 17)]
    places: list[list[Any]] = [[Replicate()] * len(axes), [Shard(0)] + [Replicate()] * (len(axes) - 1)]
    written = {}
    bytes_of: Counter[int] = Counter()
    wholes = {}
    for rank in range(Mesh.dry(axes).size()):
        mesh = Mesh.dry(axes, world_rank=rank)
        tree = {}
        for i, shape in enumerate(shapes):
            for place in places:
                if shape or place is places[0]:
                    layout = Layout(mesh, place, shape)
                    name = f"{i} {place}"
                    local = torch.empty((), dtype=torch.float32).expand(layout.local_shape)
                    tree[name], wholes[name] = Lying(local, layout), shape
        for piece in boxes_to_write(tree):
            assert piece.values.shape == piece.box.sizes
            if "Shard" not in piece.name:
                bytes_of[rank] += piece.values.numel() * 4
            count = written.setdefault(piece.name, torch.zeros(wholes[piece.name], dtype=torch.int8))
            count[piece.box.slices] += 1
    assert written.keys() == wholes.keys()
    assert all((count == 1).all() for count in written.values())
    assert max(bytes_of.values()) < 1.05 * min(bytes_of.values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_it(tmp_path: Path) -> None:
    saved = trained()
    path = saved.save(tmp_path)
    converted = tmp_path / "converted.pt"
    dcp_to_torch_save(path, converted)
    loaded = torch.load(converted, weights_only=True)
    model = saved.full_state_dict()
    assert loaded["model"].keys() == model.keys()
    assert all(torch.equal(x, model[name]) for name, x in loaded["model"].items())
    into = {"model.0.weight": torch.zeros(8, 4), "optimizer.state.0.weight.exp_avg": torch.zeros(8, 4)}
    dcp.load(into, checkpoint_id=path, no_dist=True)
    assert torch.equal(into["model.0.weight"], model["0.weight"])
    assert into["optimizer.state.0.weight.exp_avg"].abs().sum() > 0


# ---- saving and loading


def test_all_is_restored_and_goes_on_alike(tmp_path: Path) -> None:
    first = engine()
    schedule = torch.optim.lr_scheduler.MultiStepLR(first.optimizer, [1, 3])
    for step in range(2):
        first.train_step(batch(step))
    schedule.step()
    first.save(tmp_path, schedule=schedule, note={"at": (1, 2)}, table=torch.arange(4))
    wanted = [(first.train_step(batch(s)).item(), schedule.step()) for s in range(2, 5)], state(first)
    second = engine(seed=1)
    other = torch.optim.lr_scheduler.MultiStepLR(second.optimizer, [7])
    found = second.load(tmp_path, schedule=other)
    assert found["note"] == {"at": (1, 2)} and torch.equal(found["table"], torch.arange(4))
    assert second.steps == 2 and other.last_epoch == 1
    again = [(second.train_step(batch(s)).item(), other.step()) for s in range(2, 5)], state(second)
    assert again[0] == wanted[0] and equal(again[1], wanted[1])


def test_the_model_alone(tmp_path: Path) -> None:
    first, second = trained(), engine(seed=1)
    first.save(tmp_path)
    second.load(tmp_path, model_only=True)
    assert equal(second.full_state_dict(), first.full_state_dict())
    assert second.steps == 0 and not second.optimizer.state  # type: ignore[union-attr]


def test_saved_as_it_was_while_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, real = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: (hold.wait(30), real(*given))[1])
    first = trained()
    wanted, buffers = state(first), None
    for _ in range(3):
        hold.clear()
        path = first.save(tmp_path, asynchronous=True)
        first.train_step(batch(9))
        assert newest(tmp_path) != path
        hold.set()
        first.wait_saved()
        assert newest(tmp_path) == path
        second = engine(seed=1)
        second.load(path)
        assert equal(state(second), wanted)
        wanted = state(first)
        assert first._saver is not None and first._saver._staging is not None
        now = {key: x.data_ptr() for key, x in first._saver._staging._buffers.items()}
        assert buffers in (None, now)
        buffers = now


def test_what_is_written_by_hand_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, real = threading.Event(), Staging.fill
    monkeypatch.setattr(Staging, "fill", lambda *given: (hold.wait(30), real(*given))[1])
    first = trained()
    before = first.save(tmp_path)

    def by_hand() -> None:
        with torch.no_grad():
            first.module[0].weight.clamp_(-0.1, 0.1)  # type: ignore[union-attr, operator]

    def step() -> None:
        assert first.optimizer is not None
        first.backward(first(batch(3)))
        first.finish_gradients()
        type(first.optimizer).step(first.optimizer)  # not the engine's
        first.zero_grad()

    for change in (by_hand, step):
        hold.clear()
        first.save(tmp_path, asynchronous=True)
        change()
        hold.set()
        with pytest.raises(CheckpointError, match=r"0\.weight.* was written to.*engine\.wait_staged\(\)"):
            first.wait_saved()
        assert checkpoints(tmp_path) == [before]
    wanted = state(first)
    first.save(tmp_path, asynchronous=True)
    first.wait_staged()
    by_hand()
    first.wait_saved()
    second = engine(seed=1)
    second.load(tmp_path)
    assert equal(state(second), wanted) and not equal(state(first), wanted)


@pytest.mark.parametrize("held", [False, True])
def test_what_is_written_through_data_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """`p.data.clamp_(...)` between two steps: torch counts no such write, so a mixed state was saved."""
    real = Staging.fill
    monkeypatch.setattr(Staging, "fill", lambda *given: (time.sleep(0.1), real(*given))[1])
    first = trained()
    weights = [p.data for p in first.module.parameters()] if held else []
    wanted = state(first)
    first.save(tmp_path, asynchronous=True)
    for data in weights or (p.data for p in first.module.parameters()):
        data.clamp_(-0.01, 0.01)
    first.wait_saved()
    second = engine(seed=1)
    second.load(tmp_path)
    assert equal(state(second), wanted) and not equal(state(first), wanted)


def test_the_oldest_stays_until_the_newest_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, real = threading.Event(), os.fsync
    first = trained()
    before = first.save(tmp_path, durable=True)
    first.train_step(batch(2))
    monkeypatch.setattr(os, "fsync", lambda file: (hold.wait(30), real(file))[1])
    after = first.save(tmp_path, keep=1)
    assert checkpoints(tmp_path) == [after, before]
    hold.set()
    first.wait_saved()
    assert checkpoints(tmp_path) == [after]


def test_gradients_are_not_lost_in_silence(tmp_path: Path) -> None:
    first = trained()
    first.backward(first(batch(0)))
    with pytest.raises(ValueError, match=r"save after engine\.step"):
        first.save(tmp_path)


# ---- folders


def test_the_newest_are_kept(tmp_path: Path) -> None:
    first = trained()
    for _ in range(4):
        first.save(tmp_path, keep=2)
        first.train_step(batch(0))
    first.wait_saved()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000005", "step-00000004"]
    first.load(tmp_path / "step-00000004")
    first.steps = 3
    first.save(tmp_path, keep=2, durable=True)  # a run that went back has its newest last, whatever its step
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000003", "step-00000005"]
    first.save(tmp_path, keep=2, durable=True)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000003", "step-00000005"]
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000005"]


def test_of_a_link_to_a_checkpoint_only_the_link_goes(tmp_path: Path) -> None:
    first = trained()
    elsewhere = first.save(tmp_path / "archive")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / elsewhere.name).symlink_to(elsewhere)
    first.train_step(batch(2))
    saved = first.save(tmp_path / "run", keep=1, durable=True)
    assert os.listdir(tmp_path / "run") == [saved.name]
    Checkpoint(elsewhere).verify()


def test_what_killed_processes_left(tmp_path: Path) -> None:
    first = trained()
    path = first.save(tmp_path)
    path.rename(path.with_name(f"{path.name}.replaced"))  # killed while the step was saved anew
    (tmp_path / ".step-00000007.saving-ab12").mkdir()
    (tmp_path / ".step-00000001.leaving-ab12").mkdir()
    (tmp_path / "mine").mkdir()
    assert newest(tmp_path) == path.with_name(f"{path.name}.replaced")
    engine(seed=1).load(tmp_path)
    first.train_step(batch(0))
    first.save(tmp_path, durable=True)
    assert sorted(os.listdir(tmp_path)) == ["mine", path.name, "step-00000003"]
    assert newest(tmp_path / "none") is None
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        first.load(tmp_path / "none")


def test_what_is_saved_and_loaded_in_inference_mode_trains_on(tmp_path: Path) -> None:
    """One evaluates in it, and saves the best: buffers of copies and states were of that mode."""
    first = trained()
    with torch.inference_mode():
        saved = first.save(tmp_path, asynchronous=True)
    wanted = state(first)
    first.train_step(batch(2))
    first.save(tmp_path, asynchronous=True)
    first.train_step(batch(3))
    first.wait_saved()
    second = engine(seed=1)
    with torch.inference_mode():
        second.load(saved)
    assert equal(state(second), wanted)
    for step in (2, 3):
        second.train_step(batch(step))
    assert equal(state(second), state(first))


def test_a_loader_that_comes_too_late_for_its_position_is_told(tmp_path: Path) -> None:
    rows = TensorDataset(torch.randn(12, 4), torch.randn(12, 4))
    first = engine()
    loader = first.loader(rows, batch_size=6, shuffle=True)
    first.train_step(next(iter(loader)))
    first.save(tmp_path)
    second, third = engine(seed=1), engine(seed=2)
    second.load(tmp_path)
    with pytest.warns(UserWarning, match="begins at its first batch: it is made after engine.load"):
        second.loader(rows, batch_size=6, shuffle=True)
    second.loader(rows, batch_size=4)  # one of its own
    again = third.loader(rows, batch_size=6, shuffle=True)
    third.load(tmp_path)
    assert again.batch == 1
    third.loader(rows, batch_size=4)


# ---- what breaks


@pytest.fixture
def two(tmp_path: Path) -> tuple[Engine, Path, Path]:
    """An engine, and the folders of two checkpoints of it."""
    first = trained()
    one = first.save(tmp_path)
    first.train_step(batch(2))
    return first, one, first.save(tmp_path, durable=True)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(path).verify()
    return str(caught.value)


def test_every_flipped_bit_and_cut_is_seen(two: Any) -> None:
    _, one, two_ = two
    rng = random.Random(0)
    for name in ("__0_0.distcp", "index.json", "whole.json"):
        good = (two_ / name).read_bytes()
        ends = sorted({0, len(good) - 1, *(rng.randrange(len(good)) for _ in range(60))})
        # of the few bytes that are trusted first, each bit
        every = [(at, bit) for at in range(len(good)) for bit in range(8)] if name == "whole.json" else []
        for at, bit in every or [(at, rng.randrange(8)) for at in ends]:
            flipped = bytearray(good)
            flipped[at] ^= 1 << bit
            (two_ / name).write_bytes(flipped)
            told = refused(two_)
            assert f"{two_}/" in told and "damaged" in told, told
            (two_ / name).write_bytes(good[:at])
            assert "damaged" in refused(two_)
            assert newest(one.parent) == one
            (two_ / name).write_bytes(good)
        (two_ / name).unlink()
        assert name in refused(two_)
        (two_ / name).write_bytes(good)
    Checkpoint(two_).verify()


def test_the_one_before_is_loaded(two: Any) -> None:
    first, one, two_ = two
    data = bytearray((two_ / "__0_0.distcp").read_bytes())
    at = data.index(bytes(first.full_state_dict()["0.weight"][3].numpy().tobytes()))
    data[at] ^= 4
    (two_ / "__0_0.distcp").write_bytes(data)
    second = engine(seed=1)
    with pytest.raises(CheckpointError, match="are not those that were written"):
        second.load(two_)
    with pytest.warns(UserWarning, match=f"damaged.*Now {one} is tried"):
        second.load(one.parent)
    third = engine(seed=2)
    third.load(one)
    assert second.steps == 2 and equal(state(second), state(third))


def test_one_whose_age_is_not_known_is_told(two: Any) -> None:
    """Without its seal the newest came last, and an earlier one was taken without a word."""
    _, one, two_ = two
    (two_ / "whole.json").write_bytes(b"")
    second = engine(seed=1)
    with pytest.warns(UserWarning, match=rf"{two_}/whole.json is damaged.*Now {one} is tried"):
        second.load(one.parent)
    assert second.steps == 2 and newest(one.parent) == one
    with pytest.warns(UserWarning, match=rf"{two_} is damaged: {one} is taken"):
        assert open_any(one.parent).path == one


def test_nothing_goes_on_from_what_was_half_loaded(two: Any) -> None:
    first, one, two_ = two
    shutil.rmtree(one)
    data = bytearray((two_ / "__0_0.distcp").read_bytes())
    whole = bytes(data)
    data[data.index(bytes(first.full_state_dict()["3.weight"].numpy().tobytes()))] ^= 4
    (two_ / "__0_0.distcp").write_bytes(data)
    second = engine(seed=1)
    with pytest.raises(CheckpointError, match="are not those that were written"):
        second.load(one.parent)  # the first layer was read
    with pytest.raises(CheckpointError, match="partly what was there before: .* not those that were written"):
        second.train_step(batch(0))
    with pytest.raises(CheckpointError, match="partly what was there before"):
        second.save(one.parent)
    (two_ / "__0_0.distcp").write_bytes(whole)
    second.load(one.parent)
    assert equal(state(second), state(first))
    second.train_step(batch(3))


def test_a_tag_whose_program_died_as_it_was_written_is_not_the_latest(tmp_path: Path) -> None:
    """DeepSpeed's ``latest`` is written before an asynchronous save is whole."""
    first = trained()
    assert whole_tag(tmp_path, "three") == "three"  # there is none: the load says so
    for tag in ("one", "two"):
        first.save(tmp_path / tag)
    (tmp_path / "three" / ".step-00000002.saving-0").mkdir(parents=True)
    with pytest.warns(UserWarning, match="names 'three', whose checkpoint is not whole: 'two' is taken"):
        assert whole_tag(tmp_path, "three") == "two"
    assert whole_tag(tmp_path, "one") == "one"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "mkdir", "rename"])
def test_a_failed_save_leaves_what_was_there(
    two: Any, monkeypatch: pytest.MonkeyPatch, call: str, asynchronous: bool
) -> None:
    first, one, two_ = two
    first.train_step(batch(3))

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os if call in ("pwrite", "fsync") else Path, call, full)
        with pytest.raises(CheckpointError, match="No space left on device.*Earlier checkpoints are as they"):
            first.save(one.parent, asynchronous=asynchronous)
            first.wait_saved()
    assert newest(one.parent) == two_ and len(os.listdir(one.parent)) == 2
    first.save(one.parent, asynchronous=asynchronous)
    first.wait_saved()
    assert newest(one.parent) == one.with_name("step-00000004")


def test_a_program_that_ends_without_having_asked_is_told(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last asynchronous save that failed was lost without a word."""

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left")

    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    first, one, _ = two
    first.save(one.parent / "other", asynchronous=True)
    first.wait_saved()
    assert not at_exit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        first.save(one.parent / "full", asynchronous=True)
        (told,) = at_exit
        first._saver._work._thread.join()
        patch.setattr(sys, "stderr", said := io.StringIO())
        told()
    assert re.search("espalier: .* could not be written: No space left", said.getvalue())
    assert os.listdir(one.parent / "full") == []


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    command = ["mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_fills_up_and_one_that_is_read_only(mounted: Path) -> None:
    first = engine(width=4000)
    first.train_step(batch(0))
    with pytest.raises(CheckpointError, match="No space left on device"):
        first.save(mounted)
    assert os.listdir(mounted) == []
    small = trained()
    path = small.save(mounted)
    for _ in range(40):
        small.train_step(batch(0))
        small.save(mounted, keep=2)
    remount = ["mount", "-o", "remount,ro", str(mounted)]
    for _ in range(100):  # Linux lets go of removed files a moment later, and calls it busy until then
        if not subprocess.run(remount, capture_output=True).returncode:
            break
        time.sleep(0.05)
    assert os.statvfs(mounted).f_flag & os.ST_RDONLY
    small.train_step(batch(0))
    with pytest.raises(CheckpointError, match="Read-only file system"):
        small.save(mounted)
    assert newest(mounted) == path.with_name("step-00000042")
    engine(seed=1).load(mounted)


def test_the_command_tells_what_there_is(two: Any) -> None:
    _, one, two_ = two
    told = CliRunner().invoke(app, ["checkpoint", str(one.parent), "--verify"])
    lines = [line.split() for line in told.output.splitlines()]
    assert told.exit_code == 0 and [line[0] for line in lines] == ["checkpoint", two_.name, one.name]
    assert lines[1][1] == "3" and lines[1][-1] == "yes"
    data = (two_ / "__0_0.distcp").read_bytes()
    (two_ / "__0_0.distcp").write_bytes(data[:-1])
    told = CliRunner().invoke(app, ["checkpoint", str(one.parent)])
    assert told.exit_code == 1 and "it has" in told.output and "no" in told.output.splitlines()[1]
    told = CliRunner().invoke(app, ["checkpoint", str(one.parent.parent / "none")])
    assert told.exit_code == 2


# ---- who may read it


class Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


def test_nothing_in_it_is_executed(tmp_path: Path, two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, one, two_ = two
    monkeypatch.chdir(tmp_path)
    (two_ / ".metadata").write_bytes(pickle.dumps(Harm()))
    for module, name in ((pickle, "Unpickler"), (pickle, "load"), (torch, "load")):
        monkeypatch.setattr(module, name, None)
    engine(seed=1).load(two_)
    assert not Path("harmed").exists()
    index = json.loads((two_ / "index.json").read_bytes())
    index["files"][0][0] = "../elsewhere"
    content = json.dumps(index).encode()
    (two_ / "index.json").write_bytes(content)
    (two_ / "whole.json").write_bytes(Seal.on(content, 9).to_json())
    shutil.copy(one / "__0_0.distcp", tmp_path / "elsewhere")
    assert "Files elsewhere are not read" in refused(two_)
