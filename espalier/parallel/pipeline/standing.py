"""What stands for a model's parameters while it is traced, and that the model is left as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from espalier.tensor import full_tensor
from espalier.tensor.dtensor import DTensor

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_HELD = ("_parameters", "_buffers", "_modules")


class Standing:
    """A model as its author made it: made before anything is laid out, hooked in or replaced.

    Args:
        model: the model.
        device: on which stand-ins claim to be.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self._own = {
            id(m): ({name: set(vars(m)[name]) for name in _HOOKS if name in vars(m)}, vars(m).get("forward"))
            for m in model.modules()
        }

    def hooked(self, module: nn.Module) -> bool:
        """Whether its author has given a module hooks."""
        hooks, _ = self._own.get(id(module), ({}, None))
        return any(hooks.values())

    @contextlib.contextmanager
    def in_place(self, fake: FakeTensorMode, changed: dict[str, list[str]]) -> Iterator[None]:
        """While open, parameters are fakes, buffers copies, and the model is as its author made it.

        Args:
            changed: to be filled with the Python attributes that forward passes have changed.
        """
        kept = {name: dict(vars(m)) for name, m in self.model.named_modules()}
        modules = dict(self.model.named_modules())
        stood: dict[int, Any] = {}
        caching = _caching(modules.values())
        for config in caching:
            config.use_cache = False
        try:
            for m in modules.values():
                self._stand(m, fake, stood)
            before = {name: _snapshot(m) for name, m in modules.items()}
            yield
            for name, m in modules.items():
                if found := _changes(before[name], m):
                    changed.setdefault(name, []).extend(f"sets {key!r}" for key in found)
        finally:
            for config in caching:
                config.use_cache = True
            for name, m in modules.items():
                m.__dict__.clear()
                m.__dict__.update(kept[name])

    def _stand(self, m: nn.Module, fake: FakeTensorMode, stood: dict[int, Any]) -> None:
        attributes = m.__dict__
        hooks, forward = self._own.get(id(m), ({}, None))
        for name in _HOOKS:
            if name in attributes:
                own = hooks.get(name, set())
                attributes[name] = type(attributes[name])(
                    (k, v) for k, v in attributes[name].items() if k in own
                )
        if forward is not None:
            attributes["forward"] = forward
        else:
            attributes.pop("forward", None)
        for name in _HELD:
            attributes[name] = dict(attributes[name])
        for key, p in m._parameters.items():
            if p is not None:
                if id(p) not in stood:
                    like = self._fake(p, fake)
                    stood[id(p)] = nn.Parameter(like, requires_grad=p.requires_grad)
                m._parameters[key] = stood[id(p)]
        for key, b in m._buffers.items():
            if b is not None:
                if id(b) not in stood:
                    stood[id(b)] = self._copied(b, fake)
                m._buffers[key] = stood[id(b)]

    def _fake(self, x: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
        with fake:
            return torch.empty(tuple(x.shape), dtype=x.dtype, device=self.device)

    def _copied(self, b: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
        if type(b) is DTensor and not b.is_meta:
            b = full_tensor(b)
        return self._fake(b, fake) if b.is_meta else b.detach().clone().to(self.device)


def _caching(modules: Iterable[nn.Module]) -> list[Any]:
    """Configurations of transformers' models that ask for a cache of keys and values.

    A cache is an object that blocks write to, and would have to travel from stage to stage.
    """
    found = {id(c): c for m in modules if getattr(c := getattr(m, "config", None), "use_cache", None) is True}
    return list(found.values())


def _snapshot(m: nn.Module) -> dict[str, Any]:
    return {k: _shallow(v) for k, v in vars(m).items() if k not in _HELD}


def _shallow(x: Any) -> Any:
    return (x, type(x)(x)) if type(x) in (list, dict, set) else (x, None)


def _changes(before: dict[str, Any], m: nn.Module) -> list[str]:
    found = []
    for k, v in vars(m).items():
        if k in _HELD:
            continue
        if k not in before:
            found.append(k)
            continue
        was, content = before[k]
        if v is not was and not _equal(v, was):
            found.append(k)
        elif content is not None and not _equal(v, content):
            found.append(k)
            v.clear()
            (v.extend if isinstance(v, list) else v.update)(content)
    return found + [k for k in before if k not in vars(m)]


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:
        return False


def name_of(func: Any) -> str:
    """What a torch function is called."""
    return str(getattr(func, "__name__", func))
