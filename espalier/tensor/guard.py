"""The doors of torch that do not ask ``__torch_function__``: wrapped, once, when the library is imported.

``torch.autograd.Function.apply`` would hand a function's backward plain local gradients beside saved
DTensors, and the result would be silently local; ``torch.autograd.backward`` would start from local
gradients. ``torch.vmap`` and ``torch.func``'s transforms wrap tensors in C++, and the type is lost on
the way. ``nn.Module._apply`` would drop the type of what becomes of a parameter. What can be right is typed
at its edges (see ``espalier.tensor.functions`` and ``espalier.tensor.transforms``), the rest is refused.
Dispatch modes, which see what happens below the type, are shown local tensors.
For calls without DTensors that costs one look at the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.func
import torch.utils.checkpoint
import torch.utils.dlpack
import torch.utils.hooks
from torch._C import DisableTorchFunctionSubclass as raw
from torch._functorch import eager_transforms, vmap
from torch.nn.modules import _functions
from torch.overrides import handle_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from espalier.comm.traced import recorders
from espalier.layout import any_alive
from espalier.tensor import flex, functions, library, stepping, transforms
from espalier.tensor.dispatch import dispatch, unruled
from espalier.tensor.dtensor import DTensor
from espalier.tensor.memory import whole
from espalier.tensor.modules import typed_conversion
from espalier.tensor.rules.meta import seeded
from espalier.tensor.seeding import drawing_alike, true_seeds
from espalier.trees import tensors_in

_intercepted = torch._C._is_torch_function_enabled
_DOORS = (
    (vmap, "_add_batch_dim"),
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_wrap_all_tensors_to_functional"),
)


def install() -> None:
    """Wrap torch's doors (a second call does nothing)."""
    base = torch.autograd.Function
    original = base.__dict__["apply"].__func__
    if getattr(original, "_espalier", False):
        return

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return functions.checkpointed(original, cls, *args)
        for a in args:
            if type(a) is DTensor and not getattr(cls, "espalier", False):
                return _typed(original, cls, args, kwargs, a)
        if any_alive() and not getattr(cls, "espalier", False) and any(map(callable, args)):
            # a module, say, whose parameters are DTensors
            return functions.on_wholes(cls)(*args, **kwargs)
        if recorders():
            return handle_torch_function(cls.apply, (), *args, **kwargs)
        return original(cls, *args, **kwargs)

    apply._espalier = True  # type: ignore[attr-defined]
    base.apply = classmethod(apply)  # type: ignore[assignment]
    torch.autograd.backward = _backward(torch.autograd.backward)
    torch.initial_seed = torch.random.initial_seed = true_seeds(torch.random.initial_seed)
    torch.nn.init.sparse_ = _drawing_alike(torch.nn.init.sparse_)
    torch.nn.Module._apply = typed_conversion(torch.nn.Module._apply)  # type: ignore[method-assign]
    hook = torch.utils.hooks.BackwardHook
    hook._apply_on_tensors = functions.typed_hooks(hook._apply_on_tensors)  # type: ignore[method-assign]
    # checkpointing compares what it saved with what it recomputes: local parts both, wherever it asks
    checks = getattr(torch.utils.checkpoint, "_allowed_determinism_checks_to_fns", {})
    for mode, describe in checks.items():
        checks[mode] = _of_local(describe)
    name = "_checkpoint_without_reentrant_generator"
    setattr(
        torch.utils.checkpoint, name, functions.typed_recomputation(getattr(torch.utils.checkpoint, name))
    )
    for module in (torch, torch.utils.dlpack):
        if hasattr(module, "to_dlpack"):
            setattr(module, "to_dlpack", _of_whole(module.to_dlpack))  # noqa: B010
    rnn = torch.nn.RNNBase
    rnn.flatten_parameters = _flattened(rnn.flatten_parameters)  # type: ignore[method-assign, assignment]
    for module, name in _DOORS:
        if hasattr(module, name):  # private, so it may go
            setattr(module, name, _closed(getattr(module, name)))
    transforms.open_doors()
    stepping.install()
    flex.install()
    TorchDispatchMode.__enter__ = _entering(TorchDispatchMode.__enter__)  # type: ignore[method-assign]


def _typed(original: functions.Apply, cls: Any, args: tuple[Any, ...], kwargs: Any, x: DTensor) -> Any:
    """``cls.apply`` on DTensors."""
    if not _intercepted():
        return functions.run_on_locals(original, cls, args, kwargs)
    if cls is _functions.BackwardHookFunction:
        return functions.carried(original, cls, args)
    if cls is getattr(torch.utils.checkpoint, "_NoopSaveInputs", None):
        return original(cls, *args)  # of torch before 2.13: takes tensors through without computing
    inside = transforms.around()
    if inside is not None:
        return cls.apply(*map(inside.whole, args), **kwargs)
    if library.knows(cls):
        return dispatch(DTensor, cls.apply, (), args, kwargs)
    return unruled(cls.apply, args, kwargs)


def _backward(original: Callable[..., None]) -> Callable[..., None]:
    """``torch.autograd.backward``, which starts from the DTensors' local addends."""

    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if type(tensors) is torch.Tensor:
            return original(tensors, grad_tensors, *args, **kwargs)
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        if not any(type(x) is DTensor for x in roots):
            return original(tensors, grad_tensors, *args, **kwargs)
        alone = grad_tensors is None or isinstance(grad_tensors, torch.Tensor)
        grads = (grad_tensors,) * len(roots) if alone else tuple(grad_tensors)
        if len(grads) != len(roots):
            raise RuntimeError(f"{len(roots)} tensors to start from, but {len(grads)} gradients for them.")
        with raw():
            pairs = [
                seeded(x, g) if type(x) is DTensor else (x, g) for x, g in zip(roots, grads, strict=True)
            ]
        return original([x for x, _ in pairs], [g for _, g in pairs], *args, **kwargs)

    return backward


def _entering(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``TorchDispatchMode.__enter__``: the modes of others see local tensors only.

    In the forward pass the dispatcher sees to that. In the backward pass torch functions are intercepted,
    for hooks; and a mode that asks a saved DTensor for its shape would get the global one, beside local
    gradients.
    """

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        kind = type(self)
        dispatching = kind.__torch_dispatch__
        ours = kind.__module__.startswith("espalier.") or kind.is_infra_mode()
        if not ours and not getattr(dispatching, "_espalier", False):
            kind.__torch_dispatch__ = _seeing_locals(dispatching)
        return enter(self)

    return entered


def _seeing_locals(dispatching: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(dispatching)
    def on_locals(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(type(x) is DTensor for x in tensors_in((args, kwargs))):
            with raw():
                return dispatching(self, func, types, args, kwargs)
        return dispatching(self, func, types, args, kwargs)

    on_locals._espalier = True  # type: ignore[attr-defined]
    return on_locals


def _drawing_alike(fill: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An initialisation that draws plain numbers too."""

    @functools.wraps(fill)
    def filled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if type(tensor) is not DTensor:
            return fill(tensor, *args, **kwargs)
        with drawing_alike(tensor._layout.mesh):
            return fill(tensor, *args, **kwargs)

    return filled


def _of_local(describe: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def described(x: torch.Tensor) -> Any:
        with raw():
            return describe(x)

    return described


def _of_whole(to_dlpack: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to_dlpack)
    def handed_out(x: Any, *args: Any, **kwargs: Any) -> Any:
        return to_dlpack(whole(x, "to_dlpack") if type(x) is DTensor else x, *args, **kwargs)

    return handed_out


def _flattened(flatten: Callable[[Any], None]) -> Callable[[Any], None]:
    """``flatten_parameters``, which looks at addresses, and would write parameters anew, for cuDNN's sake."""

    @functools.wraps(flatten)
    def flatten_parameters(self: Any) -> None:
        if not any(type(x) is DTensor for x in self._flat_weights):
            flatten(self)

    return flatten_parameters


def _closed(door: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(door)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for a in tensors_in(args):
            if type(a) is DTensor:
                raise TypeError(
                    "torch.func.functionalize, and transforms inside of which a DTensor is made, would "
                    f"compute on local data alone; got a DTensor ({a._layout!r}). Make it outside, or wrap "
                    "the call in espalier.local_map, which states the layouts at its edges."
                )
        return door(*args, **kwargs)

    return checked
