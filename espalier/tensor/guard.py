"""The doors of torch that do not ask ``__torch_function__``: wrapped, once, when the library is imported.

``torch.autograd.Function.apply`` would hand a function's backward plain local gradients beside saved
DTensors, and the result would be silently local; ``torch.autograd.backward`` would start from local
gradients. ``torch.vmap`` and ``torch.func``'s transforms wrap tensors in C++, and the type is lost on
the way. ``nn.Module._apply`` would drop the type of what becomes of a parameter. What can be right is typed
at its edges (``fallback``, ``transforms``, ``flex_attention``, ``optimizer_steps``), the rest is refused.
Dispatch modes, which see what happens below the type, are shown local tensors.
For calls without DTensors that costs one look at the arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.func
import torch.utils.checkpoint
import torch.utils.dlpack
import torch.utils.hooks
from torch.autograd.graph import get_gradient_edge
from torch.distributions import OneHotCategorical, RelaxedOneHotCategorical, constraints
from torch.distributions.relaxed_categorical import ExpRelaxedCategorical
from torch.overrides import handle_torch_function

from espalier.comm.custom_ops import answering, dividing, recorders
from espalier.layout import any_alive
from espalier.tensor import fallback, shortcuts
from espalier.tensor.api import knows
from espalier.tensor.dispatch import carry_out, unruled
from espalier.tensor.dtensor import DTensor, kind_of, plain
from espalier.tensor.encoders import install_encoders
from espalier.tensor.fallback import answers_itself
from espalier.tensor.flex_attention import install_attention
from espalier.tensor.loans import pass_on, whole
from espalier.tensor.modules import typed_conversion
from espalier.tensor.muon import dealing
from espalier.tensor.observers import distributions_check
from espalier.tensor.optimizer_steps import install_steps
from espalier.tensor.random import filled_by_key, true_seeds
from espalier.tensor.rules.meta import seeded, went_back, whole_starts
from espalier.tensor.transforms import in_transform, open_transforms
from espalier.tensor.uncompiled import follow_compiler
from espalier.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    determinism_checks,
    flat_weights,
    let_check,
    module_functions,
    noop_save_inputs,
    note_constructors,
    put_in_place,
    raw,
    replace_muon,
    torch_functions_on,
    wrap_door,
    written_in_python,
)
from espalier.trees import leaves, tensors_in, tree_map


def install() -> None:
    """Wrap torch's doors (a second call does nothing)."""
    base = torch.autograd.Function
    original = unbound(vars(base)["apply"])
    if getattr(original, "_espalier", False):
        return

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            run, _, *inputs = args
            divider = dividing()
            if divider is None:
                return fallback.checkpointed(original, cls, *args)
            with divider.again():  # who is to see what it computes, with gradients
                return run(*inputs)
        for a in args:
            if type(a) is DTensor and not getattr(cls, "espalier", False):
                if answering():
                    break
                return _typed(original, cls, args, kwargs, a)
        if any(map(answers_itself, args)):
            # what stands for a tensor that is yet to be computed: forward would go through with it
            return handle_torch_function(cls.apply, args, *args, **kwargs)
        is_own = getattr(cls, "espalier", False) or answering()
        if any_alive() and not is_own and any(map(callable, args)):
            # a module, say, whose parameters are DTensors
            return fallback.on_wholes(cls)(*args, **kwargs)
        if recorders():
            return handle_torch_function(cls.apply, (), *args, **kwargs)
        return original(cls, *args, **kwargs)

    apply._espalier = True  # type: ignore[attr-defined]
    base.apply = classmethod(apply)  # type: ignore[assignment, unused-ignore]
    torch.autograd.backward = _backward(torch.autograd.backward)
    wrap_door("starts", whole_starts)
    wrap_door("kinds of parameters", _by_kind)
    torch.initial_seed = torch.random.initial_seed = true_seeds(torch.random.initial_seed)
    for name in ("orthogonal_", "sparse_", "trunc_normal_"):
        setattr(torch.nn.init, name, filled_by_key(getattr(torch.nn.init, name)))
    wrap_door("conversion", typed_conversion)
    wrap_door("backward hooks", fallback.typed_hooks)
    # checkpointing compares what it saved with what it recomputes: local parts both, wherever it asks
    for mode, describe in determinism_checks.items():
        determinism_checks[mode] = _of_local(describe)
    for door in ("recomputation", "recomputation of what is given"):
        wrap_door(door, fallback.typed_recomputation)
    for module in (torch, torch.utils.dlpack):
        if hasattr(module, "to_dlpack"):
            setattr(module, "to_dlpack", _of_whole(module.to_dlpack))  # noqa: B010
    note_constructors()
    for name in ("as_tensor", "asarray"):
        put_in_place(torch, name, _of_its_kind)
    for way in ("coo", "csr", "csc", "bsr", "bsc", "compressed"):
        put_in_place(torch, f"sparse_{way}_tensor", _of_whole_values)
    rnn = torch.nn.RNNBase
    rnn.flatten_parameters = _flattened(rnn.flatten_parameters)  # type: ignore[method-assign, assignment]
    for door in ("vmap", "grad", "functionalize"):
        wrap_door(door, _closed)
    open_transforms()
    install_steps()
    replace_muon(dealing)
    install_attention()
    install_encoders()
    follow_compiler()
    shortcuts.install()
    setattr(torch.Tensor, "__setattr__", _set_attribute)  # noqa: B010
    for kind in (DTensor, FakeTensor):
        setattr(kind, "__setattr__", object.__setattr__)  # noqa: B010 (at C's speed)
    for scripted in (torch.jit.ScriptFunction, torch.ScriptMethod):
        setattr(scripted, "__call__", _of_scripted(scripted.__call__))  # noqa: B010
    # as any other function; torch's cannot be copied, nor can modules that have one then
    setattr(torch.jit.ScriptFunction, "__deepcopy__", lambda function, memo: function)  # noqa: B010
    _let_distributions_check_alone()
    TorchDispatchMode.__enter__ = _entering(TorchDispatchMode.__enter__)  # type: ignore[method-assign]


def unbound(method: Any) -> Callable[..., Any]:
    """What a method of a class calls, given the class; of C's, as ``apply`` is from torch 2.14 on, too."""
    if isinstance(method, classmethod):
        return method.__func__

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, cls)(*args, **kwargs)

    return call


def _of_its_kind(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.as_tensor`` and ``asarray`` ask no types: of another dtype they would give this rank's part."""

    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if type(x) is not DTensor or not torch_functions_on():
            return original(*args, **kwargs)
        to = {name: kwargs[name] for name in ("dtype", "device", "copy") if kwargs.get(name) is not None}
        out = x.to(**to) if to else x
        wants = kwargs.get("requires_grad")
        if wants is None:
            return out
        return (out if wants and out.requires_grad else out.detach()).requires_grad_(wants)

    return made


def _of_whole_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.sparse_coo_tensor`` and its kin ask no types: they would take this rank's part, and no rank
    would sum its gradient."""

    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> Any:
        if torch_functions_on() and any(type(x) is DTensor for x in tensors_in((args, kwargs))):
            args, kwargs = tree_map(lambda x: x.full_tensor() if type(x) is DTensor else x, (args, kwargs))
        return original(*args, **kwargs)

    return made


def _set_attribute(x: torch.Tensor, name: str, value: Any) -> None:
    """Of a plain tensor: ``x.data = y`` and ``x.grad = y`` would take this rank's part of a DTensor."""
    if name in ("data", "grad") and type(value) is DTensor and torch_functions_on():
        pass_on(value, x)
        value = cast(DTensor, value.detach() if name == "data" else value).full_tensor()
    object.__setattr__(x, name, value)


def _of_scripted(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of TorchScript, which asks no types: it would compute on this rank's parts.

    Nor does it know what stands for a tensor that a pipeline has yet to compute, or who records its calls.
    Where it was written in Python, that is called.
    """

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        given = leaves([list(args), kwargs]) if torch_functions_on() else []
        is_cut = any(type(x) is DTensor for x in given)
        stands = list(filter(answers_itself, given))
        if not (is_cut or stands or recorders()):
            return original(function, *args, **kwargs)
        if (source := written_in_python(function)) is not None:
            return source(*args, **kwargs)
        if is_cut:
            return carry_out(DTensor, function, (), args, kwargs)
        return handle_torch_function(function, stands, *args, **kwargs)

    return call


def _typed(original: fallback.Apply, cls: Any, args: tuple[Any, ...], kwargs: Any, x: DTensor) -> Any:
    """``cls.apply`` on DTensors."""
    if not torch_functions_on():
        return fallback.run_on_locals(original, cls, args, kwargs)
    if cls is module_functions.BackwardHookFunction:
        return fallback.carried(original, cls, args)
    if cls is noop_save_inputs:
        return original(cls, *args)  # takes tensors through without computing
    inside = in_transform()
    if inside is not None:
        return cls.apply(*map(inside.whole, args), **kwargs)
    if knows(cls):
        return carry_out(DTensor, cls.apply, (), args, kwargs)
    return unruled(cls.apply, args, kwargs)


def _backward(original: Callable[..., None]) -> Callable[..., None]:
    """``torch.autograd.backward``, which starts from the DTensors' local addends."""

    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if len(args) == 4:
            *args, kwargs["inputs"] = args  # type: ignore[assignment]
        if type(tensors) is torch.Tensor and kwargs.get("inputs") is None:  # of most passes
            return original(tensors, grad_tensors, *args, **kwargs)
        is_one = isinstance(tensors, torch.Tensor) or answers_itself(tensors)
        tensors = tensors if is_one or isinstance(tensors, tuple) else tuple(tensors)
        foreign = tuple(filter(answers_itself, (tensors,) if is_one else tensors))
        if foreign:  # what a pipeline has yet to compute
            return handle_torch_function(backward, foreign, tensors, grad_tensors, *args, **kwargs)
        if kwargs.get("inputs") is not None:
            kwargs["inputs"] = _ends(kwargs["inputs"])
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
        go = functools.partial(original, [x for x, _ in pairs], [g for _, g in pairs], *args, **kwargs)
        return went_back(roots, go)

    return backward


def _by_kind(original: Callable[[type, Any], bool]) -> Callable[[type, Any], bool]:
    """``isinstance`` of a class of parameters: a DTensor is of the class that its parameter was of."""

    @functools.wraps(original)
    def check(kind: type, x: Any) -> bool:
        if type(x) is DTensor and kind is not torch.nn.Parameter:
            return issubclass(kind_of(x), kind)
        return original(kind, x)

    return check


def _ends(inputs: Any) -> Any:
    """The only tensors that a backward pass gives gradients: by their places in the graph.

    torch would call what it finds to be a subclass with what is gathered of it, which no graph knows.
    """
    several = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    several = tuple(several.values() if isinstance(several, Mapping) else several)
    if not any(type(x) is DTensor for x in several):
        return several if type(inputs) is dict else inputs  # torch 2.11 takes no dict
    for x in several:
        if isinstance(x, torch.Tensor) and x.grad_fn is not None:
            x.retain_grad()
    with raw():
        return tuple(get_gradient_edge(x) if isinstance(x, torch.Tensor) else x for x in several)


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


def _let_distributions_check_alone() -> None:
    """A distribution's checks of its arguments are of what this rank has of them.

    They check on some ranks alone, it may be: torch's compiler turns that off in a process that has compiled.
    """
    for kind in {x for x in vars(constraints).values() if isinstance(x, type)}:
        if issubclass(kind, constraints.Constraint) and "check" in vars(kind):
            setattr(kind, "check", _of_own_part(kind.check))  # noqa: B010
    for made in (OneHotCategorical, ExpRelaxedCategorical, RelaxedOneHotCategorical):
        setattr(made, "__init__", _checked_within(made.__init__))  # noqa: B010


def _checked_within(make: Callable[..., None]) -> Callable[..., None]:
    """A distribution around a Categorical, which checks what is given.

    The other of probabilities and their logarithms would be computed for a check.
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if not any(type(x) is DTensor for x in (*args, *kwargs.values())):
            return make(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        checks = bound.arguments.get("validate_args")
        bound.arguments["validate_args"] = False
        make(*bound.args, **bound.kwargs)
        let_check(self, checks)

    return made


def _of_own_part(check: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A constraint, as distributions ask it of their arguments: of this rank's part, and nothing is sent."""

    @functools.wraps(check)
    def checked(self: Any, value: Any) -> Any:
        mesh = value._layout.mesh if type(value) is DTensor else None
        if mesh is None or mesh.is_dry or not mesh.is_member or not distributions_check():
            return check(self, value)
        if any(type(x) is DTensor for x in vars(self).values()):  # bounds
            return check(self, value)
        return _may_hold(self, value, check)

    return checked


def _may_hold(constraint: Any, value: DTensor, check: Callable[[Any, Any], Any]) -> Any:
    """Whether a constraint holds, as far as this rank's part tells: each number where classes are cut."""
    layout, here = value._layout, plain(value)
    cut = {d for d, axes in enumerate(layout.cuts) if any(layout.mesh.shape[a] > 1 for a in axes)}
    unknown = torch.ones((), dtype=torch.bool, device=here.device)
    if not layout.is_firm or layout.own is not layout or not here.numel():
        return unknown
    if not any(d >= value.ndim - constraint.event_dim for d in cut):
        several = isinstance(constraint, (constraints.cat, constraints.stack))
        return unknown if several and cut else check(constraint, here)
    if isinstance(constraint, constraints.independent):
        inner = constraint.base_constraint
        return _may_hold(inner, value, type(inner).check)
    if isinstance(constraint, type(constraints.one_hot)):
        return constraints.boolean.check(here)
    if isinstance(constraint, (type(constraints.simplex), constraints.multinomial)):
        return here >= 0
    return unknown


def _flattened(flatten: Callable[[Any], None]) -> Callable[[Any], None]:
    """``flatten_parameters``, which looks at addresses, and would write parameters anew, for cuDNN's sake."""

    @functools.wraps(flatten)
    def flatten_parameters(self: Any) -> None:
        if not any(type(x) is DTensor for x in flat_weights(self)):
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
