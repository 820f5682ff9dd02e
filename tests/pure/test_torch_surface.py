"""Every public name of torch.distributed.tensor is here and takes torch's calls, or has a reason."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed.tensor as tensor
import torch.distributed.tensor.experimental as experimental
import torch.distributed.tensor.parallel as parallel
from torch.distributed.device_mesh import DeviceMesh

import espalier
from espalier import Mesh

# name: why it is not here
ABSENT = {
    "context_parallel": "context parallelism is still to come; layouts Shard(sequence) are refused nothing",
    "from_group": "a DeviceMesh made by DeviceMesh.from_group is taken wherever a mesh is",
}


def missing(module: Any, ours: Any) -> list[str]:
    return [name for name in module.__all__ if not hasattr(ours, name) and name not in ABSENT]


@pytest.mark.parametrize("module", [tensor, parallel, experimental])
def test_every_name_is_here(module: Any) -> None:
    assert missing(module, espalier) == []
    for name in ABSENT:
        assert not hasattr(espalier, name), f"{name} is here now: take it from the table"


def takes(ours: Any, theirs: Any) -> list[str]:
    """What a call written for ``theirs`` may pass and ``ours`` would not take."""
    mine = inspect.signature(ours).parameters.values()
    names = {p.name for p in mine if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    places = [p.name for p in mine if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    any_place = any(p.kind is p.VAR_POSITIONAL for p in mine)
    any_name = any(p.kind is p.VAR_KEYWORD for p in mine)
    required = {
        p.name for p in mine if p.default is p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
    wrong = []
    for place, p in enumerate(inspect.signature(theirs).parameters.values()):
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            if not (any_place if p.kind is p.VAR_POSITIONAL else any_name):
                wrong.append(f"*{p.name}")
            continue
        if p.kind is p.POSITIONAL_OR_KEYWORD and not any_place and places[place : place + 1] != [p.name]:
            wrong.append(f"{p.name} in place {place}")
        if p.name not in names and not any_name:
            wrong.append(p.name)
        if p.default is not p.empty and p.name in required:
            wrong.append(f"{p.name} left out")
    return wrong


PLACEMENTS = ("Shard", "Replicate", "Partial", "Placement")
CALLABLES = sorted(
    (name, getattr(module, name))
    for module in (tensor, parallel, experimental)
    for name in module.__all__
    if name not in ABSENT
    and name not in ("DTensor", "Shard", "Replicate", "Partial", "Placement", "ParallelStyle")
)


@pytest.mark.parametrize(("name", "theirs"), CALLABLES, ids=[name for name, _ in CALLABLES])
def test_torchs_calls_are_taken(name: str, theirs: Any) -> None:
    assert takes(getattr(espalier, name), theirs) == []


def public(cls: type, beyond: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_") and name not in dir(beyond)]


def test_methods_of_dtensor() -> None:
    names = public(tensor.DTensor, torch.Tensor)
    assert "redistribute" in names
    for name in names:
        theirs, ours = getattr(tensor.DTensor, name), getattr(espalier.DTensor, name)
        assert isinstance(theirs, property) == isinstance(ours, property), name
        if callable(theirs):
            assert takes(ours, theirs) == [], name
    for name in ("_local_tensor", "_spec"):
        assert isinstance(vars(espalier.DTensor)[name], property)


def test_methods_of_device_mesh() -> None:
    mesh = Mesh.dry({"a": 2, "b": 2})
    for name in public(DeviceMesh, object):
        if name in ABSENT:
            continue
        assert hasattr(mesh, name), name
        theirs = getattr(DeviceMesh, name)
        if callable(theirs):
            assert takes(getattr(Mesh, name), theirs) == [], name
    for name in ("__getitem__", "__enter__", "__exit__", "__eq__", "__hash__"):
        assert name in dir(Mesh)


def test_placements_are_torchs_own() -> None:
    for name in PLACEMENTS:
        assert getattr(espalier, name) is getattr(tensor, name)
    assert espalier.DeviceMesh is DeviceMesh


def test_the_check_itself() -> None:
    def theirs(a: int, b: int = 1, *, c: int = 2) -> None: ...
    def good(a: int, b: int = 3, d: int = 0, *, c: int = 4) -> None: ...
    def turned(b: int = 1, a: int = 0, *, c: int = 2) -> None: ...
    def poor(a: int, *, c: int) -> None: ...

    assert takes(good, theirs) == []
    assert takes(turned, theirs) == ["a in place 0", "b in place 1"]
    assert takes(poor, theirs) == ["b in place 1", "b", "c left out"]


def of_functions(x: float, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(x) + torch.sparse_coo_tensor(i, v, [2]).to_dense()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_scripts_know_functions_that_are_wrapped() -> None:
    """TorchScript compiles a program's calls of them, as it does without the library."""
    scripted = torch.jit.script(of_functions)
    out = scripted(1.0, torch.tensor([[1]]), torch.ones(1))
    assert out.tolist() == [1.0, 2.0]
