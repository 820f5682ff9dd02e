"""Shorter ways to the dispatcher lead where torch's own do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from espalier import DTensor, Mesh, Shard, explaining
from espalier.tensor import shortcuts
from espalier.torch_private import raw

MESH = Mesh.single(("data",), "cpu")


def laid(*shape: int) -> DTensor:
    return DTensor.from_local(torch.randn(*shape), MESH, [Shard(0)])


class Seen(TorchFunctionMode):
    """What comes to a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, int, dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, len(args), kwargs or {}))
        return func(*args, **kwargs or {})


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, int, dict[str, Any]]]]:
    """What comes to the dispatcher."""
    calls: list[tuple[Any, int, dict[str, Any]]] = []
    before = vars(DTensor)["__torch_function__"].__func__

    def noting(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls.append((func, len(args), kwargs or {}))
        return before(cls, func, types, args, kwargs)

    monkeypatch.setattr(DTensor, "__torch_function__", classmethod(noting))
    yield calls


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "__add__": lambda x, y: x + y,
    "__radd__": lambda x, y: 2 + x,
    "__sub__": lambda x, y: x - y,
    "__mul__": lambda x, y: x * y,
    "__rmul__": lambda x, y: 2.0 * x,
    "__truediv__": lambda x, y: x / y,
    "__matmul__": lambda x, y: x @ y,
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.view(2, 2, 4),
    "view of one": lambda x: x.view((2, 8)),
    "transpose": lambda x: x.transpose(0, 1),
    "sum": lambda x: x.sum(dim=1, keepdim=True),
    "to": lambda x: x.to(torch.float64),
    "in place": lambda x: x.add_(1.0, alpha=2),
    "chunk": lambda x: x.chunk(2, dim=-1),
}


def test_every_operator_is_here() -> None:
    assert OPERATORS.keys() == shortcuts._OPERATORS.keys()


def call_of(name: str) -> Callable[[Any], Any]:
    return CALLS.get(name) or (lambda x: OPERATORS[name](x, x))


@pytest.mark.parametrize("name", [*OPERATORS, *CALLS])
def test_the_dispatcher_gets_what_torch_hands_on(
    name: str, dispatched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = laid(4, 4)
    out = call_of(name)(x)
    first = list(dispatched)
    dispatched.clear()
    for each, method in list(vars(DTensor).items()):
        if getattr(getattr(method, "__code__", None), "co_filename", "") == shortcuts.__file__:
            monkeypatch.delattr(DTensor, each)
    call_of(name)(x)
    assert first == dispatched and len(first) == 1
    assert all(type(part) is DTensor for part in (out if isinstance(out, tuple) else (out,)))


@pytest.mark.parametrize("name", [*OPERATORS, *CALLS])
def test_modes_see_calls(name: str) -> None:
    with Seen() as seen:
        out = call_of(name)(laid(4, 4))
    named = shortcuts._OPERATORS.get(name)
    if named is not None:
        assert getattr(torch.Tensor, named) in [func for func, _, _ in seen.calls]
    assert seen.calls and all(type(part) is DTensor for part in (out if isinstance(out, tuple) else (out,)))


def test_functions_of_modules() -> None:
    x, ones = laid(4, 4), torch.ones(4)
    with Seen() as seen:
        F.layer_norm(x, (4,), ones, ones)
    assert F.layer_norm in [func for func, _, _ in seen.calls]
    assert type(F.layer_norm(x, (4,), ones, ones)) is DTensor
    with explaining() as told:
        F.layer_norm(x.view(4, 4) + x, (4,))
    assert len(told.rows) == 3


def test_other_sides_are_asked() -> None:
    class Other:
        def __radd__(self, x: object) -> str:
            return "asked"

    assert laid(4, 4) + Other() == "asked"
    with pytest.raises(TypeError):
        laid(4, 4) + "text"  # type: ignore[operator]


def test_local_tensors_stay_local() -> None:
    x = laid(4, 4)
    with raw():
        assert type(x.view(2, 8)) is torch.Tensor and type(x + x) is torch.Tensor
