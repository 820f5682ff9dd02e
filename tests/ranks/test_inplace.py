"""Writing in place: the layout stays, views alias, and what is saved for backward is watched over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
        # of another size it is resized, as torch does
        out = laid(value[:0], mesh, [Shard(0)])
        assert torch.mul(x, 2, out=out) is out
        assert torch.equal(out.full_tensor(), value * 2) and out.placements == (Shard(0),)
        values, indices = laid(value[:0], mesh, [Shard(0)]), laid(value[:0].long(), mesh, [Replicate()])
        found = torch.sort(x, 0, True, out=(values, indices))
        assert found.values is values and torch.equal(values.full_tensor(), value.flip(0))
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.add(x.requires_grad_(), 1, out=values)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(x.detach(), 1, out=indices)


def sums_are_told(rank: int, world: int) -> None:
    """Who writes to addends in place is told to make a new tensor, which has a rule."""
    mesh, value = given(rank, world)
    x = laid(value - 12, mesh, [Shard(1)]).sum(1)
    assert x.placements == (Partial(),)
    with pytest.warns(
        UserWarning, match=r"clamp_ has no sharding rule for what it writes to(.|\n)*underscore"
    ):
        x.clamp_(0.5, 20.5)
    assert torch.equal(x.full_tensor(), (value - 12).sum(1).clamp(0.5, 20.5))


def errors_are_torchs(rank: int, world: int) -> None:
    mesh, value = given(rank, world)
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda x: x.view(5, 5),
        lambda x: x + x[:, :5].contiguous(),
        lambda x: x.sum(3),
        lambda x: x[0].tril(),
        lambda x: x @ x,
        lambda x: x.movedim((0, 1), (0, 0)),
        lambda x: x.long().mean(),
        lambda x: torch.cat([x, x[0]]),
        lambda x: torch.linalg.inv(x),
        lambda x: x.exponential_(-1),
        lambda x: torch.nn.functional.embedding(x.long()[0], x[0]),
        lambda x: x.sum(dim="name", dtype=1),
    ]
    for placements in PLACES:
        for call in calls:
            with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)) as wanted:
                call(value.clone())
            with pytest.raises(wanted.type) as found:
                call(laid(value, mesh, placements))
            assert str(found.value).replace("DTensor", "Tensor") == str(wanted.value)


def gathered_views_alias(rank: int, world: int) -> None:
    """A view that needs communication is a copy; what is written to either reaches the other."""
    mesh, value = given(rank, world)
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "row": lambda x: x[1],
        "stretch": lambda x: x[1:3, ::2],
        "of a view": lambda x: x[1:][:, 2:5][0],
        "merged": lambda x: x.view(3, 8),
        "diagonal": lambda x: x.diagonal(),
        "as_strided": lambda x: x.as_strided((2, 3), (5, 2), 1),
        "split": lambda x: x.split([1, 5], 1)[1],
        "unfold": lambda x: x.unfold(0, 2, 2),
        "chunk": lambda x: x.chunk(3)[1],
        "detached": lambda x: x[1].detach(),
        "data": lambda x: x[1].data,
    }
    for placements in (*PLACES, [Partial()]):
        for name, view in views.items():
            plain, x = value.clone(), laid(value, mesh, [Replicate()]).redistribute(placements=placements)
            a, b = view(x), view(plain)
            a.mul_(3)
            b.mul_(3)
            assert torch.equal(x.full_tensor(), plain), (name, placements, "written to the view")
            x[1:, 1:] += 1
            plain[1:, 1:] += 1
            assert torch.equal(a.full_tensor(), b), (name, placements, "written to the tensor")
            assert torch.equal((a + 1).full_tensor(), b + 1), (name, placements)
            a += 1
            b += 1
            assert torch.equal(x.full_tensor(), plain), (name, placements, "written to again")
            assert x.placements == tuple(placements)


def writes_through_views_have_gradients(rank: int, world: int) -> None:
    mesh, value = given(rank, world)
    for placements in PLACES:
        leaves = laid(value, mesh, placements).requires_grad_(), value.clone().requires_grad_()
        ends = []
        for leaf in leaves:
            x = leaf * 2
            row, other = x[1], x[:, 2]
            row.mul_(x[2].detach().clone())
            end = (row * leaf[0]).sum() + (other * leaf[:, 0]).sum()
            ends.append(end + x.square().sum())
        assert torch.equal(ends[0].full_tensor(), ends[1])
        for end in ends:
            end.backward()
        torch.testing.assert_close(leaves[0].grad.full_tensor(), leaves[1].grad)
    x = laid(value, mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x[0].mul_(2)


def shapes_change_in_place(rank: int, world: int) -> None:
    mesh, value = given(rank, world)
    for placements, after in (
        ([Replicate()], [Replicate()]),
        ([Shard(0)], [Shard(1)]),
        ([Shard(1)], [Shard(0)]),
    ):
        x = laid(value, mesh, placements)
        assert x.t_() is x and x.placements == tuple(after)
        assert torch.equal(x.full_tensor(), value.t())
        x.unsqueeze_(0)
        assert torch.equal(x.full_tensor(), value.t()[None])
    x = laid(value, mesh, [Replicate()])
    x.resize_(2, 3)
    assert x.shape == (2, 3) and torch.equal(x.full_tensor(), value.view(-1)[:6].view(2, 3))
    x = laid(value, mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match="Redistribute to Replicate first"):
        x.resize_(2, 3)
    with pytest.raises(NotImplementedError, match="its data would have to move"):
        laid(value.view(1, 24), mesh, [Shard(0)]).squeeze_()


def written_unannounced(rank: int, world: int) -> None:
    mesh, value = given(rank, world)
    for placements in ([Replicate()], [Shard(0)]):
        plain = torch.zeros(6, dtype=value.dtype), torch.ones(6, dtype=value.dtype)
        mean, var = (laid(x, mesh, placements) for x in plain)
        torch.native_batch_norm(laid(value, mesh, [Shard(1)]), None, None, mean, var, True, 0.1, 1e-5)
        torch.native_batch_norm(value, None, None, *plain, True, 0.1, 1e-5)
        torch.testing.assert_close(mean.full_tensor(), plain[0])
        torch.testing.assert_close(var.full_tensor(), plain[1])
    wide = value.view(4, 6, 1).expand(4, 6, 2) * torch.tensor([1.0, -2.0], dtype=value.dtype)
    for norm in (torch.nn.functional.batch_norm, torch.nn.functional.instance_norm):
        plain = torch.zeros(6, dtype=value.dtype), torch.ones(6, dtype=value.dtype)
        mean, var = laid(plain[0], mesh, [Shard(0)]), DTensor.from_local(plain[1] / world, mesh, [Partial()])
        out = norm(laid(wide, mesh, [Shard(1)]), mean, var, None, None, True)
        torch.testing.assert_close(out.full_tensor(), norm(wide, *plain, None, None, True))
        assert mean.placements == (Shard(0),) and var.placements == (Partial(),)
        torch.testing.assert_close(mean.full_tensor(), plain[0])
        torch.testing.assert_close(var.full_tensor(), plain[1])
    x = DTensor.from_local(value.clone(), mesh, [Partial()])
    out = torch.nn.functional.elu(x, inplace=True)
    assert out is x
    torch.testing.assert_close(x.full_tensor(), torch.nn.functional.elu(value * world))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "body",
    [
        gathered_views_alias,
        writes_through_views_have_gradients,
        shapes_change_in_place,
        written_unannounced,
    ],
)
@pytest.mark.filterwarnings("ignore:.*no sharding rule")
def test_what_is_gathered_is_written_back(ranks, world, body):
    ranks(world, body)


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
@pytest.mark.parametrize("body", [out_arguments, errors_are_torchs, sums_are_told])
@pytest.mark.filterwarnings("ignore:.*no sharding rule")
def test_out_and_errors(ranks, world, body):
    ranks(world, body)
