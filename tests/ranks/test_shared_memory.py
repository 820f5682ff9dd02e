"""Ranks of one host talk through memory that they share: the same bits as over gloo, and nothing is left."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import espalier
from espalier.comm import collectives
from espalier.comm.backend import Backend, Work
from espalier.comm.gloo import Gloo
from espalier.comm.shared import Shared
from espalier.comm.shared_memory import TRANSPORT, Host
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh
from espalier.torch_private import default_store

needs_memory = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or not os.access("/proc/self/fd", os.R_OK), reason="needs Linux and /proc"
)

pytestmark = needs_memory

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.complex64,
)
SIZES = (1, 7, 4099, 70_001)


def along(world: int) -> tuple[Mesh, Shared]:
    mesh = Mesh.from_env({"data": world}, "cpu")
    found = collectives.carrier(mesh, 0, torch.device("cpu"))
    assert isinstance(found, Shared)
    return mesh, found


def every_call(
    carrier: Backend, mesh: Mesh, dtype: torch.dtype, size: int, *, rounded: bool = False
) -> list[torch.Tensor]:
    """What each collective makes of tensors of that size; of whole numbers any order gives the same sums."""

    def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * 8
        return (values.round() if rounded else values).to(dtype)

    n, here = mesh.shape[0], mesh.coordinate[0]
    x = drawn((size, 3), dtype, here)
    found = []
    ops = ("sum",) if dtype.is_complex else ("sum", "max", "min", "product")
    for op in ops if dtype.itemsize > 2 or dtype is torch.bool else ("max",):
        out = x.clone()
        carrier.all_reduce(out, mesh, 0, op, beside=False).wait()
        found.append(out)
    for dim in (0, 1):
        whole = drawn((size, 3) if dim else (size, 5), dtype, 5)
        at, length = chunk_bounds(whole.shape[dim], n, here)
        part = whole.narrow(dim, at, length).contiguous()
        found.append(carrier.all_gather(part, mesh, 0, dim, whole.shape[dim], beside=False).wait())
        assert torch.equal(found[-1], whole)
        found.append(carrier.reduce_scatter(x, mesh, 0, dim))
    pieces = [x[slice(*bounds(size, n, i))] for i in range(n)]
    own = bounds(size, n, here)
    shapes = [(own[1] - own[0], 3)] * n
    found.append(carrier.all_to_all(pieces, shapes, 0, mesh, 0))
    flat, gives = x.view(-1), [chunk_bounds(3 * size, n, (here + i) % n)[1] for i in range(n)]
    gets = [chunk_bounds(3 * size, n, (i + here) % n)[1] for i in range(n)]
    found.append(carrier.exchange(flat, mesh, 0, gets, gives))
    out = x.clone()
    carrier.broadcast(out, mesh, 0, n - 1).wait()
    found.append(out)
    for source, dim in ((0, 0), (n - 1, 1)):
        found.append(carrier.scatter(x, mesh, 0, dim, x.shape, source))
    numbers = (torch.arange(3 * size) % 7 + here).view(size, 3).to(dtype)  # of such any order is the same
    carrier.reduce(numbers, mesh, 0, n - 1).wait()
    found.append(numbers if here == n - 1 else x)
    sent = drawn((size + here,), dtype, here)
    found.append(carrier.pass_on(sent, mesh, 0, size + (here - 1) % n, 1).wait())
    rows = drawn((n, size), dtype, 9 + here)
    if dtype.itemsize > 1 and not dtype.is_complex:
        for add in (False, True):
            total = drawn((size,), dtype, 3)
            carrier.sum_rows(rows, mesh, 0).wait(total, add=add)
            found.append(total)
        copy = rows.clone()  # where its own row lies
        carrier.sum_rows(copy, mesh, 0).wait(copy[here])
        found.append(copy[here].clone())
    carrier.gather_rows(rows, rows[here].clone(), mesh, 0).wait()
    found.append(rows)
    return found


def bounds(size: int, n: int, i: int) -> tuple[int, int]:
    at, length = chunk_bounds(size, n, i)
    return at, at + length


def same_as_gloo(rank: int, world: int) -> None:
    mesh, shared = along(world)
    for dtype in DTYPES:
        for size in SIZES:
            pairs = zip(
                every_call(shared, mesh, dtype, size), every_call(Gloo(), mesh, dtype, size), strict=True
            )
            for i, (mine, theirs) in enumerate(pairs):
                assert mine.dtype is theirs.dtype
                assert torch.equal(mine, theirs), (dtype, size, i)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_collective_gives_the_bits_of_gloo(ranks: Any, world: int) -> None:
    ranks(world, same_as_gloo)


def out_of_turn(rank: int, world: int) -> None:
    mesh, shared = along(world)
    given = [torch.full((5,), float(10 * rank + i)) for i in range(4)]
    works = [shared.all_gather(x, mesh, 0, 0, 5 * world, beside=False) for x in given]
    works[1] = Work()  # nobody waits for it any more
    for i in (3, 0, 2):
        expected = torch.tensor([10.0 * r + i for r in range(world)]).repeat_interleave(5)
        assert torch.equal(works[i].wait(), expected)
    # many on their way before the first is taken
    other = 1 - rank
    late = [torch.full((3,), float(i)) for i in range(3000)]
    for i, x in enumerate(late):
        shared.send([x], mesh, 0, other, 1 + i % 2)
    # by tags, the second one's messages first
    for tag in (2, 1):
        for i in range(tag - 1, 3000, 2):
            into = torch.empty(3)
            shared.receive([into], mesh, 0, other, tag).wait()
            assert into[0] == i
    x = torch.ones(1)
    for _ in range(5000):  # its blocks come back
        shared.all_reduce(x.fill_(1), mesh, 0, "sum", beside=False).wait()
    assert x.item() == 2


def test_messages_wait_for_their_receivers(ranks: Any) -> None:
    ranks(2, out_of_turn)


def much(rank: int, world: int) -> None:
    mesh, shared = along(world)
    before = os.stat(shared._host._descriptor).st_blocks * 512
    shared._host._kept = shared._host._spare + (1 << 22)
    for size in (1 << 20, 1 << 21, 1 << 22, 1 << 23):
        x = torch.ones(size)
        for _ in range(3):
            shared.all_reduce(x, mesh, 0, "max", beside=False).wait()
    shared.all_reduce(torch.ones(1), mesh, 0, "sum", beside=False).wait()
    dist.barrier()
    shared.all_reduce(torch.ones(1), mesh, 0, "sum", beside=False).wait()
    held = os.stat(shared._host._descriptor).st_blocks * 512 - before
    # of 60 MB and more that were sent
    assert held < 1 << 24, held


def test_large_messages_give_their_memory_back(ranks: Any) -> None:
    ranks(2, much)


def forks(rank: int, world: int) -> None:
    """A child that ends as Python programs do says nothing to the ranks."""
    mesh, shared = along(world)
    late = shared.all_gather(torch.ones(3), mesh, 0, 0, 3 * world, beside=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        del late
        shared._host.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert late.wait().tolist() == [1.0] * 3 * world
    assert collectives.all_reduce(torch.ones(2), mesh, 0).tolist() == [world] * 2


def test_a_fork_says_nothing(ranks: Any) -> None:
    ranks(2, forks)


def one_leaves(mesh: Mesh, how: str, folder: str) -> None:
    x = torch.ones(4)
    collectives.all_reduce(x, mesh, 0)
    if mesh.rank:
        if how == "dies":
            os._exit(0)
        dist.destroy_process_group()
        while not list(Path(folder).iterdir()):
            time.sleep(0.05)
        return
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1 has ended, or left") as told:
        collectives.all_reduce(x, mesh, 0)
    assert time.monotonic() - began < 5
    Path(folder, "told").write_text(str(told.value))
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["dies", "leaves"])
def test_a_peer_that_has_gone_is_told(tmp_path: Path, how: str, forked: Any) -> None:
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(FileNotFoundError, match="1") if how == "dies" else nullcontext():
        espalier.spawn(one_leaves, {"data": 2}, how, str(tmp_path), device_type="cpu")
    assert list(tmp_path.iterdir())
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "espalier" in name}


def one_comes_late(mesh: Mesh) -> float:
    x = torch.full((4,), 3.0 - mesh.rank)
    if mesh.rank:
        time.sleep(1.0)  # the other has sent all that it has to, and leaves
    y = collectives.broadcast(x, mesh, 0)
    dist.destroy_process_group()
    return float(y.sum())


def test_what_one_that_leaves_has_said_is_heard_by_those_that_come_late(forked: Any) -> None:
    """They open its memory when they first use it: it may not be gone by then."""
    assert espalier.spawn(one_comes_late, {"data": 2}, device_type="cpu") == [12.0, 12.0]


def nobody_takes(mesh: Mesh) -> None:
    host = collectives.all_reduce(torch.ones(4), mesh, 0) is not None and Host.here()
    host.send(torch.ones(4), [1 - mesh.rank], 0, 1)
    began = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - began < 4  # both leave: nobody stays for the other


def test_ranks_that_all_leave_wait_for_none(forked: Any) -> None:
    espalier.spawn(nobody_takes, {"data": 2}, device_type="cpu")


def hosts(rank: int, world: int, wishes: list[str], refused: int) -> tuple[list[bool], list[str]]:
    """Which groups share memory, where ranks wish so and one cannot be looked into; and what is told."""
    opened: Callable[..., int] = os.open

    def refuse(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "Permission denied")
        return opened(path, *rest, **more)

    before = os.environ.get(TRANSPORT)
    store = dist.PrefixStore("/".join([*wishes, str(refused)]), default_store())
    os.environ[TRANSPORT] = wishes[rank]
    try:
        os.open = refuse if rank == refused else opened
        host = Host(store)
    finally:
        os.open = opened
        os.environ.pop(TRANSPORT) if before is None else os.environ.update({TRANSPORT: before})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [len(host.homes(group)) == 1 for group in ([0, 1], [0, 2], [0, 1, 2])]
    host.close()
    return found, [str(w.message) for w in told]


def test_ranks_agree_on_what_carries_their_tensors(ranks: Any) -> None:
    for found, told in ranks(3, hosts, ["shared", "gloo", "shared"], -1):
        assert found == [False, True, False] and not told


def test_where_memory_cannot_be_shared_gloo_carries_and_says_why(ranks: Any) -> None:
    answers = ranks(3, hosts, ["shared"] * 3, 2)
    assert [found for found, _ in answers] == [[True, False, False]] * 3
    assert [len(told) for _, told in answers] == [1, 0, 0]
    (words,) = answers[0][1]
    assert "slower than shared memory: rank 2: PermissionError: [Errno 13] Permission denied" in words
    assert f"{TRANSPORT}=gloo silences this" in words


def misspelt(rank: int, world: int) -> None:
    os.environ[TRANSPORT] = "shm"
    try:
        with pytest.raises(ValueError, match="ESPALIER_TRANSPORT='shm': expected 'shared' or 'gloo'"):
            Host(dist.PrefixStore("misspelt", default_store()))
    finally:
        del os.environ[TRANSPORT]


def test_an_unknown_transport_is_told(ranks: Any) -> None:
    ranks(2, misspelt)


def by_wish(mesh: Mesh) -> tuple[str, list[float]]:
    carrier = collectives.carrier(mesh, 0, torch.device("cpu"))
    return type(carrier).__name__, collectives.all_reduce(torch.ones(2), mesh, 0).tolist()


def test_gloo_carries_where_it_is_wished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRANSPORT, "gloo")
    assert espalier.spawn(by_wish, {"data": 2}, device_type="cpu") == [("Gloo", [2.0, 2.0])] * 2
