"""What hands out a DTensor's memory: right where a rank holds the whole value, refused elsewhere."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import espalier
from espalier import DTensor, Mesh, Partial, Replicate, Shard, distribute_tensor


def read(x: torch.Tensor, address: int) -> torch.Tensor:
    """The values that stand where C would look for them."""
    return torch.frombuffer(bytearray(ctypes.string_at(address, x.nbytes)), dtype=x.dtype).view(x.shape)


DOORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "data_ptr": lambda x: read(x, x.data_ptr()),
    "untyped_storage": lambda x: read(x, x.untyped_storage().data_ptr()),
    "_typed_storage": lambda x: read(x, x._typed_storage()._data_ptr()),
    "from_dlpack": torch.from_dlpack,
    "to_dlpack": lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
    "numpy": lambda x: torch.from_numpy(np.from_dlpack(x)),
}


def at_the_doors(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"a": world // 2, "b": 2})
    value = torch.arange(12.0).view(4, 3)
    whole = distribute_tensor(value, mesh, [Replicate(), Replicate()])
    own = DTensor.from_local(value.clone(), mesh, [Replicate(), Partial()])
    parts = [distribute_tensor(value, mesh, [Replicate(), Shard(d)]) for d in (0, 1)]
    uneven = distribute_tensor(value[:3], mesh, [Shard(0), Shard(0)])
    for name, door in DOORS.items():
        got = door(whole)
        assert type(got) is torch.Tensor and torch.equal(got, value), name
        for x in (own, uneven, *parts):
            # ranks ask one after the other: nothing is gathered, and nobody waits
            if rank == world - 1:
                with pytest.raises(ValueError, match=r"engine\.export.*full_state_dict|full_tensor"):
                    door(x)
    torch.from_dlpack(whole)[0, 0] = 5.0
    assert whole.to_local()[0, 0] == 5.0
    for x in (whole, *parts):
        assert not hasattr(x, "__cuda_array_interface__")
        assert not hasattr(type(x), "__dlpack_c_exchange_api__")
        assert x.share_memory_() is x and x.is_shared()
        full = x.full_tensor()
        assert torch.equal(torch.from_numpy(np.array(x, copy=True)), full)
        assert np.asarray(x, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="without a copy"):
        np.array(parts[0], copy=False)
    loss = whole.sum().requires_grad_()
    with pytest.raises(BufferError):  # torch's own word for what needs a gradient
        torch.from_dlpack(loss)


def the_doors_of_recurrent(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"a": world})
    net = nn.LSTM(4, 8)
    for name, p in list(net.named_parameters()):
        laid = nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
        setattr(net, name, laid)
    net.flatten_parameters()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embed(x)))).square().mean()


def saved_beside_engine(rank: int, world: int, folder: str) -> None:
    torch.manual_seed(0)
    model = Tied()
    for i, plan in enumerate([{"data": world}, {"data": world, "zero": 1}]):
        net, want = trained(model, plan)
        path = Path(folder) / f"{i}.safetensors"
        if rank == 0:
            save_model(net, str(path))  # it must see which are tied, though all are in one buffer
            got = load_file(path)
            assert sorted(got) == ["embed.weight", "inner.bias", "inner.weight"]
            assert all(torch.equal(x, want[name]) for name, x in got.items())
            with pytest.raises(RuntimeError, match="share memory"):
                save_file(net.state_dict(), path)
        named = dict(net.named_parameters(remove_duplicate=False))
        storages = {name: p.untyped_storage() for name, p in named.items()}
        assert storages["embed.weight"].data_ptr() == storages["head.weight"].data_ptr()
        for name, p in named.items():
            assert p.storage_offset() == 0 and storages[name].nbytes() == p.nbytes
            assert storages[name].data_ptr() == p.data_ptr()
    for plan in ({"data": world, "zero": 3}, {"tensor": world}):
        net, want = trained(model, plan)
        path = Path(folder) / "parts.safetensors"
        if rank == 0:
            with pytest.raises(ValueError, match=r"engine\.export"):
                save_model(net, str(path))
            with pytest.raises(ValueError, match=r"engine\.export"):
                save_file({"x": net.inner.weight.detach()}, path)
            assert not path.exists()
            save_file({name: x for name, x in want.items() if name != "head.weight"}, path)
            path.unlink()


def trained(model: nn.Module, plan: dict[str, int]) -> tuple[Any, dict[str, torch.Tensor]]:
    """A copy of the model after a step, and its whole weights."""
    net = copy.deepcopy(model)
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), plan)
    engine.train_step(torch.arange(4)[:, None])
    return net, engine.full_state_dict()


@pytest.mark.world(4)
def test_memory_is_handed_out_where_it_is_whole(ranks: Any) -> None:
    ranks(4, at_the_doors)


def of_another_kind(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"a": world})
    value = torch.arange(12.0).view(4, 3)
    x = distribute_tensor(value, mesh, [Shard(0)]).requires_grad_()
    for name in ("as_tensor", "asarray"):
        make = getattr(torch, name)
        assert torch.equal(make(x).full_tensor(), value)
        made = make(x, dtype=torch.float64)
        assert torch.equal(made.full_tensor(), value.double()), name
        assert made.requires_grad, name
    assert not torch.asarray(x, requires_grad=False).requires_grad and x.requires_grad
    with torch.device("meta"):
        assert torch.as_tensor([1.0]).is_meta
    torch.as_tensor(data=x, dtype=torch.float64).square().sum().backward()
    assert x.grad is not None and torch.equal(x.grad.full_tensor(), 2 * value)


@pytest.mark.world(2)
def test_a_tensor_of_another_kind_is_whole(ranks: Any) -> None:
    ranks(2, of_another_kind)


@pytest.mark.world(2)
def test_recurrent_layers_look_at_no_addresses(ranks: Any) -> None:
    ranks(2, the_doors_of_recurrent)


@pytest.mark.world(2)
def test_safetensors_writes_right_or_nothing(ranks: Any, tmp_path: Path) -> None:
    ranks(2, saved_beside_engine, str(tmp_path))
