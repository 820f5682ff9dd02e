"""What one rank's values make impossible: every rank raises torch's own error, at once, and goes on."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import (
    Categorical,
    Dirichlet,
    Distribution,
    MultivariateNormal,
    Normal,
    OneHotCategorical,
    RelaxedOneHotCategorical,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from espalier import Mesh, Replicate, Shard, distribute_tensor
from espalier.tensor.live_memory import LiveMemory

R = Replicate()
S = Shard
N = 6  # rows


TARGETS = torch.tensor([0, 1, 2, 7, -100, 9])  # of eight classes


def x() -> torch.Tensor:
    return torch.arange(1.0, N * 8 + 1).view(N, 8)


def bad(*shape: int) -> torch.Tensor:
    """Indices of rows, the last of them out of range: that is the last rank's alone."""
    index = torch.arange(torch.Size(shape).numel()) % N
    index[-1] = N + 1
    return index.view(shape)


def singular() -> torch.Tensor:
    matrices = torch.eye(2).repeat(N, 1, 1)
    matrices[-1] = 0
    return matrices


def put_in(x: Any, i: Any) -> None:
    x[i] = 1.0


Case = tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]
CASES: list[Case] = [
    ("gather", lambda x, i: torch.gather(x, 0, i), (x(), bad(N, 8))),
    ("gather of few", lambda x, i: torch.gather(x, 0, i), (x(), bad(3, 8))),
    ("negative gather", lambda x, i: torch.gather(x, 0, N - i), (x(), bad(3, 8).clamp(1))),
    ("take", torch.take, (x(), bad(N) * 8)),
    ("index_fill in one column", lambda x, i: x.index_fill(0, i, 1.0), (x()[:, :1].contiguous(), bad(3))),
    ("setitem in one column", put_in, (x()[:, :1].contiguous(), bad(N))),
    ("index_select", lambda x, i: x.index_select(0, i), (x(), bad(3))),
    ("getitem", lambda x, i: x[i], (x(), bad(N))),
    ("getitem beside a slice", lambda x, i: x[i, 1:3], (x(), bad(N))),
    ("setitem", put_in, (x(), bad(N))),
    ("index_put", lambda x, i, v: x.index_put((i,), v), (x(), bad(N), x())),
    ("scatter", lambda x, i, s: x.scatter(0, i, s), (x(), bad(N, 8), x())),
    ("scatter a number", lambda x, i: x.scatter_(0, i, 1.0), (x(), bad(N, 8))),
    ("scatter_add", lambda x, i, s: x.scatter_add(0, i, s), (x(), bad(N, 8), x())),
    ("scatter_reduce", lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), (x(), bad(N, 8), x())),
    ("index_add", lambda x, i, s: x.index_add(0, i, s), (x(), bad(N), x())),
    ("index_copy", lambda x, i, s: x.index_copy(0, i, s), (x(), bad(N), x())),
    ("index_reduce", lambda x, i, s: x.index_reduce(0, i, s, "prod"), (x(), bad(N), x())),
    ("index_fill", lambda x, i: x.index_fill(0, i, 1.0), (x(), bad(N))),
    ("one_hot", lambda i: F.one_hot(i, N), (bad(N),)),
    ("embedding", F.embedding, (bad(N), x())),
    ("embedding_bag", F.embedding_bag, (bad(N, 2), x())),
    ("nll_loss", F.nll_loss, (x().log_softmax(1), TARGETS)),
    ("nll_loss of each", lambda x, t: F.nll_loss(x, t, reduction="none"), (x(), TARGETS)),
    ("cross_entropy", F.cross_entropy, (x(), TARGETS)),
    ("cross_entropy with weights", F.cross_entropy, (x(), TARGETS, torch.ones(8))),
    ("smoothed", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (x(), TARGETS)),
    ("summed", lambda x, t: F.cross_entropy(x, t, reduction="sum"), (x(), TARGETS)),
    ("multi_margin_loss", F.multi_margin_loss, (x(), TARGETS)),
    ("binary_cross_entropy", F.binary_cross_entropy, (x() / (N * 8 - 1), torch.ones(N, 8))),
    ("inverse", torch.linalg.inv, (singular(),)),
    ("cholesky", torch.linalg.cholesky, (singular(),)),
    ("solve", torch.linalg.solve, (singular(), torch.ones(N, 2, 1))),
    ("bernoulli", torch.bernoulli, (x() / (N * 8 - 1),)),
    ("multinomial", lambda x: torch.multinomial(x, 2), (x() * torch.tensor([[1.0]] * 5 + [[-1.0]]),)),
    ("poisson", torch.poisson, (N * 8 - 1 - x(),)),
    ("searchsorted", lambda x, v, i: torch.searchsorted(x, v, sorter=i), (x(), x(), bad(N, 8) + 1)),
    (
        "ctc_loss",
        lambda x, t: F.ctc_loss(x.log_softmax(1).view(1, N, 8), t, (1, 1, 1, 1, 1, 2), (1,) * N),
        (x(), torch.ones(N, 1, dtype=torch.int64)),
    ),
    ("normal", torch.normal, (x(), 10 - x())),
]


def words(error: Exception | None) -> str:
    """What an error says; of the place in a batch a rank tells its own."""
    text = re.sub(r"(Batch element|^Index) \d+", r"\1", str(error))
    return re.sub("out of range: tried to access .*|index 7 is out of bounds for dimension 0.*", "take", text)


def layouts(name: str, tensors: tuple[torch.Tensor, ...], ndim: int) -> list[list[tuple[Any, ...]]]:
    """Each tensor cut in its first dims or not, along each axis of a mesh."""
    ways = [list(product((R, *map(S, range(min(t.ndim, 2)))), repeat=ndim)) for t in tensors]
    if name == "embedding":
        ways[0] = [(R,) * ndim]  # or the rank raises it alone: docs/limits.md
    found = [list(way) for way in product(*ways)]
    return found if ndim == 1 else random.Random(name).sample(found, min(len(found), 4))


def all_raise(rank: int, world: int, axes: dict[str, int]) -> None:
    mesh = Mesh.from_env(axes)
    wrong = []
    for name, call, tensors in CASES:
        wanted = met_by(call, [t.clone() for t in tensors])
        assert wanted is not None, f"{name} does not fail"
        for placements in layouts(name, tensors, len(axes)):
            given = [distribute_tensor(t, mesh, p) for t, p in zip(tensors, placements, strict=True)]
            began = time.monotonic()
            met = met_by(call, given)
            if type(met) is not type(wanted) or words(met) != words(wanted):
                wrong.append(f"{name} on {placements}: {met!r}, not {wanted!r}")
            if time.monotonic() - began > 20:  # the machine may be busy
                wrong.append(f"{name} on {placements}: late")
            ones = distribute_tensor(torch.ones(2 * world), mesh, [S(0)] * len(axes))
            assert ones.sum().item() == 2 * world, "the world goes on"
    assert not wrong, "\n".join(wrong)


def met_by(call: Callable[..., Any], given: list[Any]) -> Exception | None:
    try:
        call(*given)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_raise(ranks: Any, world: int) -> None:
    ranks(world, all_raise, {"axis": world}, timeout=120)


def test_all_ranks_of_a_grid_raise(ranks: Any) -> None:
    ranks(4, all_raise, {"data": 2, "tensor": 2}, timeout=120)


def recomputed(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"axis": world})
    index = torch.arange(N * 8).remainder(N).view(N, 8)

    def body(x: Any, i: Any, t: Any) -> Any:
        return F.cross_entropy(x.gather(0, i), t)

    for end in (lambda x, i, t: body(x, i, t), lambda x, i, t: x.gather(0, i)):
        plain, target = x().requires_grad_(), TARGETS.clamp(-100, 7)
        end(plain, index, target).sum().backward()
        for placements in product((R, S(0), S(1)), repeat=2):
            given = distribute_tensor(x(), mesh, [placements[0]]).requires_grad_()
            at, classes = (
                distribute_tensor(a, mesh, [p]) for a, p in ((index, placements[1]), (target, S(0)))
            )
            checkpoint(end, given, at, classes, use_reentrant=False).sum().backward()
            torch.testing.assert_close(given.grad.full_tensor(), plain.grad)


def test_checkpointing_stops_as_ever(ranks: Any) -> None:
    ranks(2, recomputed, timeout=120)


def checked_alone(rank: int, mesh: Mesh) -> None:
    """Distributions check arguments on one rank alone, as torch's compiler has turned that off elsewhere."""
    rows = distribute_tensor(torch.randn(N, 4), mesh, [S(0)])
    Distribution.set_default_validate_args(rank == 1)
    try:
        found = Categorical(logits=rows).log_prob(torch.zeros(N, dtype=torch.long)).sum()
        found = found + Normal(rows, rows.exp()).log_prob(rows + 1).sum()
        assert found.item() < 0
        cut = distribute_tensor(torch.randn(N, 4), mesh, [S(1)])
        one_hot = distribute_tensor(torch.eye(4)[torch.arange(N) % 4], mesh, [S(1)])
        covariance = distribute_tensor(torch.eye(4).repeat(N, 1, 1), mesh, [S(0)])
        found = OneHotCategorical(logits=cut).log_prob(one_hot).sum()
        found = found + RelaxedOneHotCategorical(torch.ones(()), logits=cut).base_dist.logits.sum()
        found = found + Dirichlet(cut.exp()).log_prob(cut.softmax(1)).sum() - 100
        found = found + MultivariateNormal(rows, covariance).log_prob(rows).sum()
        assert found.item() < 0
        for wrong in (lambda bad: Normal(bad, 1.0), lambda bad: Categorical(logits=bad)):
            for bad in (rows, cut):
                assert isinstance(met_by(wrong, [bad * torch.nan]), ValueError) == (rank == 1)
    finally:
        Distribution.set_default_validate_args(__debug__)


def looked_on(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"axis": world})
    checked_alone(rank, mesh)
    rows = distribute_tensor(x(), mesh, [R])
    for mode in (nullcontext(), LiveMemory(), FlopCounterMode(display=False)):
        left, right = torch.ones(4, 8, requires_grad=True), torch.ones(8, 4)
        with mode:
            total = distribute_tensor(left, mesh, [S(1)]) @ distribute_tensor(right, mesh, [S(0)])
            assert total.relu().sum().item() == 128
            assert total.placements == (R,), f"{mode}: addends were copied"
            met = met_by(torch.gather, [rows, 0, distribute_tensor(bad(3, 8), mesh, [S(0)])])
        assert met is not None, f"{mode}: the rank with the index fails alone"


def test_who_only_looks_on_changes_nothing(ranks: Any) -> None:
    """Sums are made in place, and failure is agreed on, while memory or operations are counted."""
    ranks(2, looked_on)
