"""What stands for a model's parameters while it is traced, and that the model is left as it was."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from espalier.tensor import full_tensor
from espalier.tensor.apart import ABSENT, Apart, apart
from espalier.tensor.dtensor import DTensor

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BESIDE = (
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
_HELD = ("_parameters", "_buffers", "_modules")


class Standing:
    """A model as its author made it: made before anything is laid out, hooked in or replaced.

    Args:
        model: the model.
        device: on which stand-ins claim to be.
        dtype: of parameters' stand-ins, if these are floats; None: their own.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.model, self.device, self._dtype = model, device, dtype
        self._forwards = {id(m): vars(m)["forward"] for m in model.modules() if "forward" in vars(m)}

    def hooked(self, module: nn.Module) -> bool:
        """Whether a module has hooks, but for this library's and transformers' own."""
        found = [hook for name in _HOOKS for hook in vars(module).get(name, {}).values()]
        return any(not _made_in(hook, "espalier", "transformers") for hook in found)

    @contextmanager
    def apart(self, fake: FakeTensorMode, given: Any = None) -> Iterator[Apart]:
        """A copy of the model as its author made it, to be run while this is open, and of what is given.

        Its parameters are fakes.
        """
        with apart(self.model, given, partial(self._stand, fake), self._as_made) as twin:
            for config in _caching(twin.module.modules()):
                config.use_cache = False
            yield twin

    @staticmethod
    def snapshot(model: nn.Module) -> dict[str, dict[str, Any]]:
        """The Python attributes of all modules of a copy, for :meth:`changes`."""
        return {name: _attributes(m) for name, m in model.named_modules()}

    @staticmethod
    def changes(model: nn.Module, before: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
        """The names of attributes that are others now, by module."""
        found = {}
        for name, m in model.named_modules():
            was, now = before[name], _attributes(m)
            keys = [k for k in {**was, **now} if k not in was or k not in now or not _equal(was[k], now[k])]
            if keys:
                found[name] = keys
        return found

    def _as_made(self, m: nn.Module) -> dict[str, Any]:
        """What a module's author made of it, where this library has put its own."""
        found: dict[str, Any] = {}
        for name in _HOOKS:
            hooks = vars(m).get(name, {})
            own = {k: hook for k, hook in hooks.items() if not _made_in(hook, "espalier")}
            if len(own) < len(hooks):
                found[name] = type(hooks)(own)
        now, then = vars(m).get("forward"), self._forwards.get(id(m))
        if now is not then:
            found["forward"] = ABSENT if then is None else then
        return found

    def _stand(self, fake: FakeTensorMode, x: torch.Tensor) -> torch.Tensor:
        """What stands for a parameter or buffer."""
        if not isinstance(x, nn.Parameter):
            return self._copied(x, fake)
        cast = self._dtype is not None and x.is_floating_point()
        return nn.Parameter(self._fake(x, fake, self._dtype if cast else None), requires_grad=x.requires_grad)

    def _fake(self, x: torch.Tensor, fake: FakeTensorMode, dtype: torch.dtype | None = None) -> torch.Tensor:
        with fake:
            return torch.empty(tuple(x.shape), dtype=dtype or x.dtype, device=self.device)

    def _copied(self, b: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
        if type(b) is DTensor and not b.is_meta:
            b = full_tensor(b)
        return self._fake(b, fake) if b.is_meta else b.detach().clone().to(self.device)


def _made_in(hook: Any, *packages: str) -> bool:
    return (getattr(hook, "__module__", None) or "").partition(".")[0] in packages


def _caching(modules: Iterable[nn.Module]) -> list[Any]:
    """Configurations of transformers' models that ask for a cache of keys and values.

    A cache is an object that blocks write to, and would have to travel from stage to stage.
    """
    found = {id(c): c for m in modules if getattr(c := getattr(m, "config", None), "use_cache", None) is True}
    return list(found.values())


def _attributes(m: nn.Module) -> dict[str, Any]:
    held = {k: x for k, x in vars(m).items() if k not in (*_HELD, *_HOOKS, *_BESIDE)}
    return {k: type(x)(x) if type(x) in (list, dict, set) else x for k, x in held.items()}


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, weakref.ref):  # whose == is that of what they refer to: an operation, of tensors
        return a() is b()
    if type(a) is dict:
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    try:
        return a is b or (not isinstance(a, torch.Tensor) and bool(a == b))
    except Exception:
        return False


def name_of(func: Any) -> str:
    """What a torch function is called."""
    return str(getattr(func, "__name__", func))
