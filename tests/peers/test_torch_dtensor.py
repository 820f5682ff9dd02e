"""The bridge to torch's own DTensor, both ways."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

import espalier
from espalier import DTensor, Layout, Mesh, Partial, Replicate, Shard, distribute_tensor, layout_of

F64 = torch.float64
R, P, S = Replicate(), Partial(), Shard


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(sum(shape)))


def grid() -> Mesh:
    return Mesh.from_torch(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


def both_ways(rank: int, world: int) -> None:
    mesh = grid()
    states = [R, S(0), S(1), P, Partial("avg"), Partial("max")]
    for placements in itertools.product(states, states):
        if len({p.reduce_op for p in placements if isinstance(p, Partial)}) > 1:
            continue  # torch has none of these
        value = seeded(5, 6)
        x = distribute_tensor(value.requires_grad_(), mesh, placements)
        y = x.to_torch()
        assert type(y) is theirs.DTensor and y.placements == placements and y.shape == x.shape
        assert y.device_mesh is mesh.to_torch() and y.stride() == (6, 1)
        assert y._local_tensor.data_ptr() == x._local_tensor.data_ptr(), "no copy"
        if placements not in ((S(0), S(0)), (S(1), S(1))):  # torch's own full_tensor is wrong there
            assert torch.equal(y.full_tensor(), value.detach())
        z = DTensor.from_torch(y)
        assert layout_of(z) is layout_of(x) and z._local_tensor.data_ptr() == x._local_tensor.data_ptr()
        if Partial("max") in placements:
            continue
        # a gradient through both
        (z * value.detach()).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), _gradient(value.detach(), placements, mesh))
    for wrong in (Mesh.dry({"a": 2}), Mesh.single(("a",))):
        with pytest.raises(ValueError, match="no torch DeviceMesh"):
            espalier.zeros(2, device_mesh=wrong).to_torch()
    with pytest.raises(TypeError, match="expects a torch"):
        DTensor.from_torch(value)


def _gradient(value: torch.Tensor, placements: Any, mesh: Mesh) -> torch.Tensor:
    """That of sum(x * value): value itself, of an average's parts its share."""
    factor = 1.0
    for p, n in zip(placements, mesh.shape, strict=True):
        factor /= n if p == Partial("avg") else 1
    return value * factor


def forget_meshes() -> None:
    """Torch remembers layouts of calls on meshes of worlds that are gone, too: these equal new ones."""
    dispatcher = theirs.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    getattr(getattr(dispatcher, "cache", dispatcher), "cache_clear", lambda: None)()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def through_torch(rank: int, world: int) -> None:
    """Half of a network ours, half torch's; and the other way round."""
    forget_meshes()
    mesh = grid()
    tensor = mesh["tp"]
    up, down, x = seeded(8, 6), seeded(3, 8), seeded(4, 6)
    right = [t.clone().requires_grad_() for t in (up, down, x)]
    expected = (torch.relu(right[2] @ right[0].T) @ right[1].T).square().sum()
    expected.backward()

    for ours_first in (True, False):
        mine, others = distribute_tensor, theirs.distribute_tensor
        on = (tensor, tensor.to_torch())
        first, second = ((mine, on[0]), (others, on[1])) if ours_first else ((others, on[1]), (mine, on[0]))
        w1 = nn.Parameter(first[0](up, first[1], [S(0)]))
        w2 = nn.Parameter(second[0](down, second[1], [S(1)]))
        given = first[0](x, first[1], [R]).requires_grad_()
        inner = torch.relu(given @ w1.T)
        crossed = inner.to_torch() if ours_first else DTensor.from_torch(inner)
        assert crossed.placements == (S(1),)
        loss = (crossed @ w2.T).redistribute(placements=[R]).square().sum()
        loss.backward()
        assert abs(loss.item() - expected.item()) < 1e-9
        for w, r in ((w1, right[0]), (w2, right[1])):
            torch.testing.assert_close(w.grad.full_tensor(), r.grad)
        # torch leaves this gradient Partial; ours is replicated
        torch.testing.assert_close(given.grad.full_tensor(), right[2].grad)

    # deferred becomes replicated, and the gradient comes back as an addend
    lay = Layout(tensor, [R], (6,), deferred=[0])
    leaf = espalier.tensor.lay_out(seeded(6).requires_grad_(), lay)
    out = leaf.to_torch()
    assert out.placements == (R,)
    (out * 3).sum().backward()
    assert leaf.grad.placements == (P,) and torch.equal(
        leaf.grad.full_tensor(), torch.full((6,), 3.0, dtype=F64)
    )
    # what torch has not waited for yet
    pending = theirs.distribute_tensor(x.requires_grad_(), tensor.to_torch(), [S(0)])
    arrived = DTensor.from_torch(pending.redistribute(placements=[R], async_op=True))
    (arrived * 2).sum().backward()
    assert torch.equal(arrived.full_tensor(), x) and torch.equal(
        pending.grad.full_tensor(), torch.full_like(x, 2)
    )


def orders(rank: int, world: int) -> None:
    """Cuts in another order than the mesh's: torch's strided shard."""
    mesh = grid()
    value = torch.arange(48.0).view(8, 6)
    lay = Layout(mesh, [S(0), S(0)], (8, 6), order=["tp", "dp"])
    x = espalier.tensor.lay_out(value, lay)
    y = x.to_torch()
    assert y.placements == (_StridedShard(0, split_factor=2), S(0))
    assert torch.equal(y.full_tensor(), value)
    assert layout_of(DTensor.from_torch(y)) is lay and x._spec.placements == y.placements
    # as FSDP over tensor parallelism makes it
    given = theirs.distribute_tensor(value, mesh.to_torch(), [_StridedShard(0, split_factor=2), S(0)])
    back = DTensor.from_torch(given)
    assert layout_of(back) is lay and torch.equal(back.full_tensor(), value)
    assert back._local_tensor.data_ptr() == given._local_tensor.data_ptr()
    uneven = espalier.tensor.lay_out(value[:7], Layout(mesh, [S(0), S(0)], (7, 6), order=["tp", "dp"]))
    with pytest.raises(ValueError, match="uneven"):
        uneven.to_torch()
    odd = theirs.DTensor.from_local(
        value[:2], mesh.to_torch(), [_StridedShard(0, split_factor=3), S(0)], shape=(8, 6), stride=(6, 1)
    )
    with pytest.raises(ValueError, match="no later axes"):
        DTensor.from_torch(odd)
    cube = Mesh.from_torch(init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c")))
    for order in itertools.permutations(range(3)):
        lay = Layout(cube, [S(1), S(1), S(1)], (3, 8), order=order)
        x = espalier.tensor.lay_out(seeded(3, 8), lay)
        assert torch.equal(x.to_torch().full_tensor(), seeded(3, 8)), order
        assert torch.equal(DTensor.from_torch(x.to_torch()).full_tensor(), seeded(3, 8)), order


def memory_order(rank: int, world: int) -> None:
    mesh = grid()
    x = distribute_tensor(seeded(4, 6), mesh, [S(0), R]).T
    y = x.to_torch()
    assert y.placements == (S(1), R) and torch.equal(y.full_tensor(), seeded(4, 6).T)
    assert y.stride() == (1, 6)
    if torch.__version__ >= "2.13":  # before, torch's own refuses it
        assert torch.equal(y.contiguous().view(-1).full_tensor(), seeded(4, 6).T.flatten())
    spec = distribute_tensor(seeded(4, 6), mesh, [S(0), R])._spec
    other = theirs.distribute_tensor(seeded(4, 6), mesh.to_torch(), [S(0), R])._spec
    assert spec == other and spec.shape == (4, 6) and spec.num_shards == 2
    private = theirs.DTensor.from_local(torch.ones(2), mesh["tp"].to_torch(), [P])
    private._spec.placements = (_Odd(),)
    with pytest.raises(ValueError, match="unknown placement"):
        DTensor.from_torch(private)


class _Odd(Partial):
    pass


@pytest.mark.parametrize("check", [both_ways, through_torch, orders, memory_order])
@pytest.mark.world(4)
def test_bridge(ranks: Any, check: Any) -> None:
    ranks(4, check)
