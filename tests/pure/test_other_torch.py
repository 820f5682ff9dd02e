"""What newer versions of torch have, imitated: they are read, and the tests run with the one that is here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import handle_torch_function, has_torch_function

import espalier
from espalier import DTensor, Mesh, Replicate, Shard
from espalier import device as devices
from espalier import torch_private as private
from espalier.cli import doctor
from espalier.comm import nccl
from espalier.mesh import mesh as meshes
from espalier.tensor import guard
from espalier.tensor.fallback import typed_recomputation
from espalier.tensor.saved import close_saving, open_saving


class Twice(torch.autograd.Function):
    """Twice its input, or so often as it is told."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: float = 2.0) -> torch.Tensor:
        ctx.times = times
        return x * times

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.times, None


def test_apply_of_c() -> None:
    """From torch 2.14 on ``Function.apply`` is a descriptor of C's."""
    descriptor = vars(torch._C._FunctionBase)["apply"]
    assert not hasattr(descriptor, "__func__")
    x = torch.ones(2, requires_grad=True)
    for method in (descriptor, classmethod(lambda cls, *args: descriptor.__get__(None, cls)(*args))):
        (grad,) = torch.autograd.grad(guard.unbound(method)(Twice, x, 3.0).sum(), x)
        assert torch.equal(grad, torch.full((2,), 3.0))


def test_checkpointing_that_is_given_arguments_in_one() -> None:
    """As torch 2.15's: plain inputs, which hooks on saved tensors give back, have their layouts again."""
    seen: list[Any] = []

    def generator(fn: Any, args: Any, kwargs: Any, *, preserve_rng_state: bool = True) -> None:
        fn(*(x.to_local() for x in args), **kwargs)

    x = espalier.zeros(4, 2, device_mesh=Mesh.single(("data",)), placements=[Shard(0)])
    typed_recomputation(generator)(lambda *xs, **named: seen.extend((*xs, named)), (x,), {"by": 2})
    assert type(seen[0]) is DTensor and seen[0].placements == x.placements and seen[1] == {"by": 2}


def visible_hooks() -> Any:
    """Those that torch 2.15's selective checkpointing takes for a program's."""
    hooks = private.saved_tensors_hooks(False)
    while hooks is not None and getattr(hooks[0], "_checkpoint_internal", False):
        hooks = hooks[0]._user_hooks
    return hooks


def test_own_hooks_are_none_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch warns of them, around each product whose input is gathered."""
    monkeypatch.setattr(private, "_looks_for_hooks", True)

    def keep(x: torch.Tensor) -> torch.Tensor:
        return x

    for of_program in (None, (keep, keep)):
        around = torch.autograd.graph.saved_tensors_hooks(keep, keep)
        if of_program:
            around.__enter__()
        hooks = open_saving([])
        assert private.saved_tensors_hooks(False) != of_program and visible_hooks() == of_program
        close_saving(hooks)
        if of_program:
            around.__exit__()


def test_time_limits_are_said_by_the_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.14 has one, and warns of the private one."""
    said: list[timedelta] = []
    monkeypatch.setattr(dist, "set_timeout", said.append, raising=False)
    private.set_group_timeout(timedelta(seconds=3))
    assert said == [timedelta(seconds=3)]


class Bound:
    """A backend whose groups are bound to devices, with one queue for all messages."""


def test_groups_of_bound_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told the device and, for a pipeline's messages, a backend with a queue for each two ranks."""
    made: list[tuple[Any, Any]] = []
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 3), _get_backend=lambda device: Bound())

    def new_group(ranks: Any, **options: Any) -> None:
        made.append((world.bound_device_id, options))

    fake = SimpleNamespace(group=SimpleNamespace(WORLD=world), new_group=new_group)
    monkeypatch.setattr(meshes, "dist", fake)
    meshes.group_among([1, 0], by_pairs=True)
    monkeypatch.setattr(devices, "_BOUND", (Bound,))
    meshes.group_among([1, 0])
    meshes.group_among([1, 0], by_pairs=True)
    alone = {"use_local_synchronization": True}
    bound = {**alone, "device_id": torch.device("cuda", 3)}
    assert made == [(None, alone), (None, bound), (None, {**bound, "backend": "nccl-lazy"})]
    assert world.bound_device_id == torch.device("cuda", 3)


def test_lanes_of_ranks_that_are_in_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The axis' own group may keep them so, as torch 2.15 splits it off; that of messages is sorted."""
    sent: list[tuple[str, int]] = []

    class Lane:
        def send(self, wires: Any, place: int, tag: int) -> None:
            sent.append(("send", place))

        def recv(self, wires: Any, place: int, tag: int) -> None:
            sent.append(("recv", place))

    monkeypatch.setattr(nccl, "group_among", lambda ranks, **how: None)
    monkeypatch.setattr(nccl, "backend_for", lambda group, device: Lane())
    mesh = Mesh.dry({"pipe": 2}, ranks=(1, 0), world_rank=1)
    monkeypatch.setattr(Mesh, "device", lambda mesh: torch.device("cpu"))
    nccl.Nccl().open_lanes(mesh, 0, {(0, 1)})
    x = torch.ones(1)
    nccl.Nccl().send([x], mesh, 0, 1, 0)
    nccl.Nccl().receive([x], mesh, 0, 1, 0)
    assert mesh.order(0) is None and sent[-2:] == [("send", 0), ("recv", 0)]


def listed(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function of lists of tensors, as those of ``torch.foreach`` in torch 2.15."""

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        flat = [x for a in (*args, *kwargs.values()) for x in (a if isinstance(a, list | tuple) else [a])]
        if has_torch_function(flat):
            return handle_torch_function(wrapped, flat, *args, **kwargs)
        return func(*args, **kwargs)

    return wrapped


@listed
def add_(inputs: Any, other: Any, /, *, alpha: float = 1) -> Any:
    """``torch.foreach.add_``."""
    torch._foreach_add_(inputs, other, alpha=alpha)
    return inputs


add_.__module__ = "torch.foreach"


def test_lists_of_tensors() -> None:
    """The public functions go as the private ones, in place, and give back the list that they were given."""
    mesh = Mesh.single(("data",))
    x = [espalier.ones(4, device_mesh=mesh, placements=[of]) for of in (Shard(0), Replicate())]
    calls = [add_] if not hasattr(torch, "foreach") else [add_, torch.foreach.add_]
    for n, call in enumerate(calls, 1):
        assert call(x, [y.clone() for y in x], alpha=0.0) is x
        assert call(x, x, alpha=1.0) is x
        assert all(type(y) is DTensor and float(y.sum()) == 4 * 2**n for y in x)


def test_doctor_tells_of_a_torch_that_was_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a note, with what to do."""
    for version, state in (("2.13.0+cpu", "good"), ("2.15.0+cu132", "good"), ("2.16.0+cu132", "note")):
        monkeypatch.setattr(torch, "__version__", version)
        found = doctor._torch()[0]
        assert (found.what, found.state, found.fix) == ("torch", state, None), found
    assert "2.11 to 2.15" in found.observed and "torch==2.15.*" in found.remedy
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    assert doctor._torch()[0].state == "wrong"
