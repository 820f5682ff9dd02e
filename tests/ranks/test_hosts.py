"""Ranks on several hosts, several on each: memory within a host, gloo between, each byte once over the wire.

The hosts are played: ranks that share a machine are told different names of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import espalier
from espalier.comm import collectives, hosts, shared_memory
from espalier.comm.gloo import Gloo, exchange_among
from espalier.comm.hosts import Hosts
from espalier.comm.shared_memory import Host
from espalier.faults import alike
from espalier.mesh import Mesh
from espalier.torch_private import default_store
from tests.ranks.test_engine import batch, model
from tests.ranks.test_shared_memory import SIZES, every_call, needs_memory

pytestmark = needs_memory


@contextmanager
def played(rank: int, homes: Sequence[Sequence[int]], run: str = "") -> Iterator[None]:
    """These ranks are on a host each; meshes made within this find it so."""
    before, name = Host.of_world, shared_memory._host_name
    at = next(i for i, home in enumerate(homes) if rank in home)
    shared_memory._host_name = lambda: f"host {at}"
    try:
        host = Host(dist.PrefixStore(f"hosts of {homes} {run}", default_store()))
        Host.of_world = (dist.group.WORLD, host)
        yield
        dist.barrier()
        host.close()
    finally:
        Host.of_world, shared_memory._host_name = before, name


def same_as_gloo(rank: int, world: int, homes: list[list[int]], dtypes: Sequence[torch.dtype]) -> None:
    with played(rank, homes):
        mesh = Mesh.from_env({"played": world}, "cpu")
        mesh.carriers.clear()
        carrier = collectives.carrier(mesh, 0, torch.device("cpu"))
        assert isinstance(carrier, Hosts)
        for dtype in dtypes:
            for size in SIZES:
                pairs = zip(
                    every_call(carrier, mesh, dtype, size, rounded=True),
                    every_call(Gloo(), mesh, dtype, size, rounded=True),
                    strict=True,
                )
                for i, (mine, theirs) in enumerate(pairs):
                    assert mine.dtype is theirs.dtype
                    assert torch.equal(mine, theirs), (dtype, size, i)
        mesh.carriers.clear()


@pytest.mark.parametrize("homes", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1, 2, 3]], [[0, 1], [2]]])
def test_every_collective_over_hosts(ranks: Any, homes: list[list[int]]) -> None:
    dtypes = [torch.float32, torch.bfloat16]  # who is where is nothing to the others
    if homes == [[0, 1], [2, 3]]:
        dtypes += [torch.float64, torch.int64, torch.bool]
    ranks(sum(map(len, homes)), same_as_gloo, homes, dtypes)


def trained(
    rank: int, world: int, plan: dict[str, Any], homes: list[list[int]]
) -> tuple[list[float], dict[str, int], dict[str, int], int]:
    """Losses; of the last step: bytes, those that left the host by the ledger, and as they were sent."""
    sent = [0]

    def counted(kind: str, gives: Any, gets: Any, backend: Any, here: int, order: Sequence[int]) -> Any:
        sent[0] += sum(give.nbytes for i, give in enumerate(gives) if i != here)
        return exchange_among(kind, gives, gets, backend, here, order)

    with played(rank, homes, str(plan)):
        net = model()
        engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), plan)
        engine.mesh.carriers.clear()
        losses = [float(engine.train_step(batch(8, step))) for step in range(3)]
        hosts.exchange_among = counted
        try:
            with espalier.ledger(engine.mesh) as book:
                losses.append(float(engine.train_step(batch(8, 3))))
        finally:
            hosts.exchange_among = exchange_among
        engine.mesh.carriers.clear()
    return losses, book.by_axis(), dict(book.beyond_host), sent[0]


PLANS: list[dict[str, Any]] = [
    {"data": 4},
    {"data": 4, "zero": 2},
    {"data": 4, "zero": 3},
    {"data": 2, "tensor": 2},
    {"tensor": 2, "data": 2, "zero": 3},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_training_over_hosts(ranks: Any, plan: dict[str, Any]) -> None:
    homes = [[0, 1], [2, 3]]
    net = model()
    alone = espalier.initialize(net, torch.optim.AdamW(net.parameters()), {})
    wanted = [float(alone.train_step(batch(8, step))) for step in range(4)]
    answers = ranks(4, trained, plan, homes)
    told, beyond = Counter[str](), Counter[str]()
    for losses, along, over, _ in answers:
        assert losses == pytest.approx(wanted, abs=1e-12)
        told.update(along)
        beyond.update(over)
    sent = [each[-1] for each in answers]
    assert sent[1] == sent[3] == 0
    if plan["data"] == 4:
        # of three that get a rank's bytes two are on the other host, to which they go once
        assert beyond["data"] == pytest.approx(told["data"] * 2 / 3 / 2, rel=1e-3)
        assert sum(sent) == pytest.approx(beyond["data"], rel=1e-3)
    else:
        # the axis over hosts has one rank on each; tensor's bytes stay
        assert beyond["data"] == told["data"] and "tensor" not in beyond


def told_apart(rank: int, world: int) -> list[str]:
    """What this rank is told of jobs, and of packages, that are not the same on all."""

    def said(check: Any, *given: Any) -> str:
        try:
            check(*given)
        except ValueError as error:
            return str(error)
        return ""

    job = {"train": {"lr": 0.1, "steps": 5}, "data": {"source": "a"}}
    found = [said(alike.same_on_all, "the same job", job, "")]
    job["train"]["lr"] = float(rank)
    found.append(said(alike.same_on_all, "the same job", job, "Give all one file."))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(world))
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        found.append(said(alike.same_package))
        patch.setattr(espalier, "__version__", f"0.1.{rank}")
        found.append(said(alike.same_package))
    return found


def test_hosts_with_another_job_or_another_version_say_so(ranks: Any) -> None:
    """The one that comes later does; nobody waits for it."""
    alike_, job, also_alike, package = (sorted(words) for words in zip(*ranks(2, told_apart), strict=True))
    assert alike_ == also_alike == ["", ""] and job[0] == package[0] == ""
    assert "do not have the same job:" in job[1] and job[1].endswith("Give all one file.")
    (line,) = [line.split() for line in job[1].splitlines() if line.startswith("  ")]
    assert line[0] == "train.lr:" and {line[1], line[3]} == {"0.0", "1.0"}
    assert 'espalier: "0.1.' in package[1] and "Install the same on both" in package[1]
