"""``torch.autograd.Function`` on DTensors.

A custom function computes on plain data, typed at its edges:

* one that has a rule (``register_rule(MyFunction)``) goes the way of every ruled call: its ``forward``
  and ``backward`` see local tensors, in the layouts that the rule allows;
* one that has none gets whole tensors, as any function without a rule does (see :func:`on_wholes`);
* the identity on which a module's full backward hooks hang: the hooks see DTensors;
* reentrant checkpointing: what it runs, and runs again, gets its inputs with their layouts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw
from torch.autograd import Function

from espalier.comm import move
from espalier.layout import Layout, gradient_layout
from espalier.tensor.dtensor import DTensor, layout_of, plain, stamp

Apply = Callable[..., Any]
_intercepting = torch._C._EnableTorchFunction


def layouts_of(values: Sequence[Any]) -> list[Layout | None]:
    """The layout of each DTensor, None for all else."""
    return [x._layout.own if type(x) is DTensor else None for x in values]


def stamped(values: Sequence[Any], layouts: Sequence[Layout | None]) -> list[Any]:
    """Aliases of local tensors as DTensors, where there is a layout for them."""
    return [
        x if lay is None or x is None or type(x) is DTensor else stamp(x.view_as(x), lay)
        for x, lay in zip(values, layouts, strict=True)
    ]


def run_on_locals(original: Apply, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The function on local tensors: the call that the dispatcher makes.

    Raises:
        RuntimeError: it wrote to an input, which its rule cannot say.
    """
    locals_ = [plain(a) if isinstance(a, torch.Tensor) else a for a in args]
    before = _versions(args)
    out = original(cls, *locals_, **kwargs)
    if _versions(args) != before:
        raise RuntimeError(
            f"{cls.__name__}.apply has written to a DTensor it was given. An autograd function with a rule "
            "must return new tensors; write to a clone inside it."
        )
    return out


def _versions(args: Sequence[Any]) -> list[int]:
    return [a._version for a in args if isinstance(a, torch.Tensor) and not a.is_inference()]


def on_wholes(cls: type[Function]) -> Apply:
    """``cls.apply`` for plain tensors that every rank holds whole, whatever the function meets inside.

    Its code may use more tensors than it is given: the parameters of a module, what a closure holds. So where
    DTensors come into it torch functions are intercepted, as anywhere; and what goes out of ``forward`` and
    ``backward``, or is saved between them, is whole and plain again.
    """
    twin = cls.__dict__.get("_twin")
    if twin is None:
        names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        names["espalier"] = True  # what it is given is as it should be
        saving = "setup_context" if cls.setup_context is not Function.setup_context else "forward"
        for name in ("forward", "setup_context", "backward", "vjp", "jvp"):
            if getattr(cls, name) is not getattr(Function, name):
                names[name] = staticmethod(_enclosed(getattr(cls, name), name == saving))
        made: Any = type(cls)
        twin = cls._twin = made(cls.__name__, (cls,), names)  # type: ignore[attr-defined]
    apply: Apply = twin.apply
    return apply


def _enclosed(method: Callable[..., Any], saves: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def enclosed(*args: Any, **kwargs: Any) -> Any:
        with _intercepting():
            out = method(*args, **kwargs)
        if saves and any(type(x) is DTensor for x in args[0].to_save or ()):
            args[0].to_save = tuple(map(_whole, args[0].to_save))
        return tuple(map(_whole, out)) if type(out) is tuple else _whole(out)

    return enclosed


def _whole(x: Any) -> Any:
    if type(x) is not DTensor:
        return x
    with raw():
        own = layout_of(x)
        return plain(move(x, own, Layout.replicated(own.mesh, own.shape)))


def carried(original: Apply, cls: Any, args: Sequence[Any]) -> Any:
    """A function that gives back what it gets, typed as before."""
    outs = original(cls, *map(plain, args))
    return tuple(x if lay is None else stamp(x, lay) for x, lay in zip(outs, layouts_of(args), strict=True))


def typed_recomputation(generator: Callable[..., Any]) -> Callable[..., Any]:
    """torch's non-reentrant checkpointing, whose inputs come back with their layouts.

    Hooks on saved tensors (of a checkpoint around this one, of offloading) give back plain ones.
    """
    kinds = [p.kind for p in inspect.signature(generator).parameters.values()]
    options = kinds.index(inspect.Parameter.VAR_POSITIONAL)

    @functools.wraps(generator)
    def wrapped(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layouts = layouts_of(args[options - 1 :])
        if not any(layouts):
            return generator(run, *args, **kwargs)
        return generator(lambda *xs, **named: run(*stamped(xs, layouts), **named), *args, **kwargs)

    return wrapped


def checkpointed(original: Apply, cls: Any, run: Callable[..., Any], preserve: Any, *args: Any) -> Any:
    """Reentrant checkpointing: autograd sees local tensors, ``run`` sees DTensors, both times.

    Gradients need no types of their own here: what autograd hands to the outputs and takes from the
    inputs lies in their gradient layouts, within the recomputation as without.
    """
    layouts = layouts_of(args)
    left: list[Layout | None] = []

    def local(*inputs: Any) -> Any:
        out = run(*stamped(inputs, layouts))
        alone = not isinstance(out, tuple | list)
        outs = (out,) if alone else out
        left[:] = layouts_of(outs)
        with raw():
            found = tuple(plain(x) if isinstance(x, torch.Tensor) else x for x in outs)
        return found[0] if alone else found

    with raw():
        inputs = [plain(a) if isinstance(a, torch.Tensor) else a for a in args]
    out = original(cls, local, preserve, *inputs)
    if not isinstance(out, tuple):
        return out if left[0] is None else stamp(out, left[0])
    return tuple(x if lay is None else stamp(x, lay) for x, lay in zip(out, left, strict=True))


class TypedNode:
    """A node of autograd's graph whose hooks see and return DTensors; of an identity, in these layouts."""

    def __init__(self, node: torch.autograd.graph.Node, layouts: Sequence[Layout | None]) -> None:
        self._node = node
        self._layouts = [None if lay is None else gradient_layout(lay) for lay in layouts]

    def register_hook(self, hook: Callable[[Any, Any], Any]) -> Any:
        """As the node's own."""

        def typed(inputs: Any, outputs: Any) -> Any:
            found = hook(tuple(stamped(inputs, self._layouts)), tuple(stamped(outputs, self._layouts)))
            return None if found is None else tuple(map(self._local, found, self._layouts))

        return self._node.register_hook(typed)

    @staticmethod
    def _local(grad: Any, layout: Layout | None) -> Any:
        if grad is None or layout is None:
            return grad
        with raw():
            return plain(move(grad, layout_of(grad, layout.mesh), layout))


def typed_hooks(apply_on_tensors: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``BackwardHook._apply_on_tensors``, whose hooks see DTensors where the module had them."""

    def wrapped(self: Any, fn: Callable[[Any], Any], args: Any) -> Any:
        layouts = layouts_of([a for a in args if isinstance(a, torch.Tensor)])
        if not any(layouts):
            return apply_on_tensors(self, fn, args)
        return apply_on_tensors(self, lambda node: fn(TypedNode(node, layouts)), args)

    return wrapped
