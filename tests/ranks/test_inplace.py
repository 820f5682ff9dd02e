"""Writing in place: the layout stays, views alias, and what is saved for backward is watched over."""

from __future__ import annotations

import pytest
import torch

from espalier import DTensor, Mesh, Partial, Replicate, Shard, distribute_tensor

PLACES = ([Replicate()], [Shard(0)], [Shard(1)])


def given(rank: int, world: int) -> tuple[Mesh, torch.Tensor]:
    return Mesh.from_env({"axis": world}), torch.arange(24.0, dtype=torch.float64).view(4, 6)


def laid(value: torch.Tensor, mesh: Mesh, placements: list) -> DTensor:
    return distribute_tensor(value.clone(), mesh, placements)


def views_alias(rank: int, world: int) -> None:
    mesh, value = given(rank, world)
    views = {
        "view": lambda x: x.view(4, 6, 1),
        "split dim": lambda x: x.view(4, 2, 3) if x.placements != (Shard(1),) else x.view(4, 6),
        "transpose": lambda x: x.transpose(0, 1),
        "T": lambda x: x.T,
        "permute": lambda x: x.permute(1, 0),
        "unsqueeze": lambda x: x.unsqueeze(1),
        "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
        "expand": lambda x: x.expand(4, 6),
        "detach": lambda x: x.detach(),
        "data": lambda x: x.data,
        "all": lambda x: x[:],
        "none": lambda x: x[None],
        "contiguous": lambda x: x.contiguous(),
    }
    for placements in PLACES:
        for name, view in views.items():
            x = laid(value, mesh, placements)
            view(x).add_(1)
            assert torch.equal(x.full_tensor(), value + 1), (name, placements)
            assert x.placements == tuple(placements), name


def rows_and_columns_alias(rank: int, world: int) -> None:
    mesh, value = given(rank, world)
    for placements, view in (
        ([Shard(1)], lambda x: x[1]),
        ([Shard(1)], lambda x: x[1:3]),
        ([Shard(0)], lambda x: x[:, ::2]),
        ([Shard(0)], lambda x: x.select(1, -1)),
        ([Shard(0)], lambda x: x.narrow(1, 2, 3)),
        ([Shard(0)], lambda x: x.chunk(2, 1)[1]),
        ([Shard(1)], lambda x: x.unbind(0)[2]),
        ([Shard(0)], lambda x: x.split([1, 5], 1)[0]),
    ):
        x, plain = laid(value, mesh, placements), value.clone()
        view(x).zero_()
        view(plain).zero_()
        assert torch.equal(x.full_tensor(), plain)


def chains_have_gradients(rank: int, world: int) -> None:
    mesh, value = given(rank, world)
    for placements in (*PLACES, [Partial()]):
        plain = value.clone().requires_grad_()
        if placements == [Partial()]:
            x = DTensor.from_local(value / world, mesh, placements).requires_grad_()
        else:
            x = laid(value, mesh, placements).requires_grad_()
        results = []
        for leaf in (x, plain):
            y = leaf * 2
            y.mul_(3)
            y += leaf
            y -= 1
            y[1:3] = 0.0
            y[:, 0] *= 5
            y.clamp_(min=0) if placements != [Partial()] else y.neg_()
            results.append(y)
        assert results[0].placements == tuple(placements)
        torch.testing.assert_close(results[0].full_tensor(), results[1])
        results[0].pow(2).sum().backward()
        results[1].pow(2).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


def a_shard_changed_after_it_was_saved(rank: int, world: int) -> None:
    mesh, value = given(rank, world)
    weight = laid(value, mesh, [Shard(0)]).requires_grad_()
    x = laid(value, mesh, [Replicate()]).requires_grad_()
    h = weight * 1
    out = (x @ (h.redistribute(placements=[Shard(1)]).T)).sum()
    out.backward()
    # the weight is gathered for a product whose other factor is cut along the rows
    rows = laid(value, mesh, [Shard(0)]).requires_grad_()
    h = weight * 1
    out = (rows @ h.T).sum()
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an in-?place operation"):
        out.backward()


def out_arguments(rank: int, world: int) -> None:
    mesh, value = given(rank, world)
    for placements in PLACES:
        x, out = laid(value, mesh, placements), laid(value, mesh, [Shard(0)])
        assert torch.add(x, 1, out=out) is out
        assert torch.equal(out.full_tensor(), value + 1)
        assert out.placements == (Shard(0),)


@pytest.mark.parametrize("world", [2, 3])
def test_views_alias(ranks, world):
    ranks(world, views_alias)


@pytest.mark.parametrize("world", [2, 3])
def test_parts_alias(ranks, world):
    ranks(world, rows_and_columns_alias)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.filterwarnings("ignore:.*no sharding rule")
def test_chains_of_writes_have_the_right_gradients(ranks, world):
    ranks(world, chains_have_gradients)


@pytest.mark.parametrize("world", [2])
def test_a_shard_that_was_changed_cannot_stand_for_what_was_saved(ranks, world):
    ranks(world, a_shard_changed_after_it_was_saved)


@pytest.mark.parametrize("world", [2])
def test_out(ranks, world):
    ranks(world, out_arguments)
