"""The doors of torch that do not ask ``__torch_function__``: wrapped, once, when the library is imported.

``torch.autograd.Function.apply`` would hand a function's backward plain local gradients beside saved
DTensors, and the result would be silently local; ``torch.autograd.backward`` would start from local
gradients. ``torch.vmap`` and ``torch.func``'s transforms wrap tensors in C++, and the type is lost on
the way. ``nn.Module._apply`` would drop the type of what becomes of a parameter. What can be right is typed
at its edges (see ``espalier.tensor.fallback``, and below), the rest is refused.
Dispatch modes, which see what happens below the type, are shown local tensors.
For calls without DTensors that costs one look at the arguments.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.func
import torch.utils.checkpoint
import torch.utils.dlpack
import torch.utils.hooks
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import flex_attention as flex
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, handle_torch_function

from espalier.comm import move
from espalier.comm.custom_ops import answering, dividing, recorders, recording
from espalier.comm.redistribute import on_dry
from espalier.layout import Layout, any_alive, gradient_layout, local_box, same_cuts, same_data
from espalier.sharding.spec import Dims, Letter, Operand, Placed, Spec
from espalier.tensor import fallback, shortcuts
from espalier.tensor.api import knows
from espalier.tensor.asked import each_for_itself
from espalier.tensor.dispatch import carry_out, unruled
from espalier.tensor.dtensor import DTensor, kind_of, layout_of, plain, set_class, stamp, up_to_date
from espalier.tensor.encoders import install_encoders
from espalier.tensor.fallback import GatherWarning, answers_itself, cut_again, writes
from espalier.tensor.loans import pass_on, whole
from espalier.tensor.modules import typed_conversion
from espalier.tensor.muon import dealing
from espalier.tensor.observers import tell
from espalier.tensor.random import filled_by_key, true_seeds
from espalier.tensor.rules import RULES
from espalier.tensor.rules.meta import seeded, went_back, whole_starts
from espalier.tensor.uncompiled import follow_compiler
from espalier.torch_private import (
    JVP,
    UNBOUNDED_BLOCK,
    VJP,
    FakeTensor,
    TorchDispatchMode,
    close_saving_hooks,
    determinism_checks,
    flat_weights,
    function_mode_stack,
    functorch_apis,
    functorch_transforms,
    getter,
    math_attention,
    module_functions,
    noop_save_inputs,
    note_constructors,
    open_saving_hooks,
    outside_transforms,
    put_in_place,
    raw,
    replace_muon,
    same_score,
    saved_tensors_hooks,
    torch_functions_on,
    version_of,
    with_torch_functions,
    without_torch_functions,
    wrap_door,
    written_in_python,
)
from espalier.trees import flat_map, flatten, leaves, tensors_in, tree_map


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
    base.apply = classmethod(apply)  # type: ignore[assignment]
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
        is_one = isinstance(tensors, torch.Tensor) or answers_itself(tensors)
        tensors = tensors if is_one or isinstance(tensors, tuple) else tuple(tensors)
        foreign = tuple(filter(answers_itself, (tensors,) if is_one else tensors))
        if foreign:  # what a pipeline has yet to compute
            return handle_torch_function(backward, foreign, tensors, grad_tensors, *args, **kwargs)
        if kwargs.get("inputs") is not None:
            kwargs["inputs"] = _ends(kwargs["inputs"])
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


# ---- steps of torch's optimizers
#
# An optimizer that works element by element gives the same result on each rank's part as on the whole,
# wherever parameters, gradients and states lie alike. So its step runs on the local tensors with torch
# functions left alone, at the speed of plain tensors. Any other step goes operation by operation through
# the dispatcher.


# the C getter itself: to be called where torch functions are not intercepted
_grad = getter("grad")

ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


@contextmanager
def on_locals(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """While open, these DTensors and their gradients are plain, and torch functions are left alone.

    So they are spared DTensor's Python getters; and on accelerators torch's choice of the foreach
    implementation, which goes by class, falls as for any other model.
    """
    with raw():
        grads = [g for g in map(_grad, parameters) if type(g) is DTensor]
        for p in parameters:
            set_class(p, nn.Parameter)
        for g in grads:
            set_class(g, torch.Tensor)
        try:
            yield
        finally:
            for p in parameters:
                set_class(p, DTensor)
            for g in grads:
                set_class(g, DTensor)


def stamp_states(optimizer: Optimizer) -> None:
    """Let the states that a step on local tensors has made lie as their parameters do."""
    for p, state in optimizer.state.items():
        if type(p) is DTensor and state and type(next(reversed(state.values()))) is not DTensor:
            layout = p._layout.own  # others than those of this step may be cut now
            for x in state.values():  # what a step has made comes last
                if type(x) is torch.Tensor and x.ndim and x.shape == layout.local_shape:
                    stamp(x, layout)


def install_steps() -> None:
    """Let torch's optimizers step on local tensors where they can (a second call does nothing)."""
    for optimizer in ELEMENTWISE:
        step = vars(optimizer).get("step")
        if step is None or getattr(step, "_espalier", False):
            continue
        # within torch's own wrapper, which calls hooks: these see DTensors
        if getattr(step, "hooked", False):
            step = Optimizer.profile_hook_step(_stepping(step.__wrapped__))
            step.hooked = True  # type: ignore[attr-defined]
        else:
            step = _stepping(step)
        step._espalier = True  # type: ignore[attr-defined]
        optimizer.step = step  # type: ignore[method-assign]


def _stepping(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapped(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if torch.compiler.is_compiling() or not torch_functions_on() or type(self) not in ELEMENTWISE:
            return step(self, closure)
        held = [p for group in self.param_groups for p in group["params"] if type(p) is DTensor]
        if not held:
            return step(self, closure)
        for strangers in [*held[0]._layout.mesh.outermost.strangers]:
            strangers.see_step(self)
        loss = None if closure is None else torch.enable_grad()(closure)()
        parameters = _alike(self)
        with each_for_itself(held):  # as each finds gradients of its own
            if parameters is None:
                step(self)
            else:
                with on_locals(parameters):
                    step(self)
                stamp_states(self)
        return loss

    return wrapped


def _alike(optimizer: Optimizer) -> list[DTensor] | None:
    """Its DTensors, if each lies as its gradient and its states do."""
    dtensors: list[DTensor] = []
    states = optimizer.state
    with raw():
        for group in optimizer.param_groups:
            if group.get("differentiable") or any(type(x) is DTensor for x in group.values()):
                return None
            for p in group["params"]:
                if type(p) is not DTensor:
                    continue
                layout = p._layout
                if layout.own is not layout or not layout.is_firm or "_reduced" in p.__dict__:
                    return None
                grad = _grad(p)
                if grad is not None:
                    grad_layout = grad._layout if type(grad) is DTensor else gradient_layout(layout)
                    if grad_layout is not layout and not same_data(grad_layout, layout):
                        return None
                for x in states.get(p, _NONE).values():
                    if type(x) is DTensor:
                        if x._layout is not layout and not same_data(x._layout, layout):
                            return None
                    elif isinstance(x, torch.Tensor) and x.ndim and x.shape != layout.local_shape:
                        return None
                dtensors.append(p)
    return dtensors


_NONE: dict[str, Any] = {}


# ---- ``torch.vmap`` and ``torch.func``'s transforms on DTensors: functions without a rule
#
# Transforms wrap tensors in C++, where the type would be lost. So what goes into one is gathered, every
# rank computes all of it on plain tensors, and what comes out is replicated again; gradients flow. DTensors
# that the transformed function finds elsewhere (a module's parameters, what a closure holds) are gathered
# when it uses them.


# where transforms begin, looked up at each call
_DOORS = (
    (functorch_apis, "vmap_impl"),
    (functorch_transforms, "grad_impl"),
    (functorch_transforms, "grad_and_value_impl"),
    (functorch_transforms, JVP),
    (functorch_transforms, VJP),
    (functorch_transforms, "linearize"),
    (torch.func, "linearize"),
)


class Inside(TorchFunctionMode):
    """While on, calls of DTensors are calls of whole plain tensors.

    Args:
        apart: the axes along which the ranks use them differently.

    Attributes:
        held: the layouts of what was gathered.
    """

    def __init__(self, apart: Sequence[int] = ()) -> None:
        super().__init__()
        self.held: list[Layout] = []
        self._apart = apart
        self._known: dict[int, tuple[DTensor, int, torch.Tensor]] = {}

    def whole(self, x: Any) -> Any:
        """A DTensor's values on every rank, plain; gathered once. Of what holds tensors for ``vmap``, all."""
        if type(x) is not DTensor:
            return x.apply(self.whole) if _holds_for_vmap(x) else x
        with outside_transforms(), raw():
            known = self._known.get(id(x))
            count = version_of(x)
            if known is None or known[1] != count or count < 0:
                now = up_to_date(x)
                layout = layout_of(now)
                self.held.append(layout)
                to = Layout.replicated(layout.mesh, layout.shape).with_deferred(self._apart)
                known = self._known[id(x)] = (x, count, plain(move(now, layout, to)))
        return known[2]

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if DTensor not in types:
            return func(*args, **kwargs)
        if writes(func) and type(args[0]) is DTensor:
            raise NotImplementedError(
                f"{getattr(func, '__name__', func)} writes to a DTensor ({args[0]._layout!r}) inside of "
                "torch.vmap or a transform of torch.func. Give it back instead, and write to it outside."
            )
        args, kwargs = flat_map(self.whole, (args, kwargs))
        mesh = self.held[-1].mesh
        if mesh.is_dry:
            with without_torch_functions():  # the program has not called this
                args, kwargs = flat_map(lambda x: x.to(mesh.device_type), (args, kwargs), torch.Tensor)
        return func(*args, **kwargs)


_GIVING = (VJP, "linearize")  # a value and a function
_BESIDE_HOOKS = ("vmap_impl", JVP, "linearize")  # these mind none
_KEPT = (
    "A transform of torch.func in a block that is computed again in the backward pass, or has its "
    "activations elsewhere until then: what these calls save is kept as it is, since torch's transforms "
    "take no hooks. The numbers are right, and this part of the block needs the memory that it needs without "
    "a plan. To save it, write what is transformed out."
)


def _holds_for_vmap(x: Any) -> bool:
    """Whether it is a container that itself gives its tensors to ``vmap``, as tensordict's do."""
    return hasattr(type(x), "_add_batch_dim") and hasattr(type(x), "apply")


def open_transforms() -> None:
    """Let transforms take DTensors."""
    for module, name in _DOORS:
        if hasattr(module, name):  # private, so it may go
            setattr(module, name, _transform(getattr(module, name), name in _GIVING))


def _transform(door: Callable[..., Any], gives: bool = False) -> Callable[..., Any]:
    @functools.wraps(door)
    def entered(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return door(*args, **kwargs)
        if recording():
            raise _not_recorded(f"a function is transformed (torch.vmap, torch.func.grad: {door.__name__})")
        if door.__name__ not in _BESIDE_HOOKS and saved_tensors_hooks(True) is not None:
            tell(_KEPT)
            with _without_hooks():
                return entered(*args, **kwargs)
        has_dtensors = any(type(x) is DTensor for x in flatten((args, kwargs))[0])
        if not has_dtensors and (not any_alive() or in_transform() is not None):
            return door(*args, **kwargs)
        out = _on_wholes(door, args, kwargs)
        return (out[0], _transform(out[1]), *out[2:]) if gives else out

    return entered


@contextmanager
def _without_hooks() -> Iterator[None]:
    """While open, what autograd saves is kept as it is: torch's transforms take no hooks on that."""
    opened: list[tuple[Any, Any]] = []
    while (hooks := saved_tensors_hooks(True)) is not None:
        opened.append(hooks)
        close_saving_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(opened):
            open_saving_hooks(pack, unpack)


def _not_recorded(what: str) -> NotImplementedError:
    """What says that a compiled region calls something that no graph has."""
    return NotImplementedError(
        f"espalier.compile: {what} inside the compiled region. A graph is recorded of calls on tensors, not "
        "of functions that are called for each row or score. Leave this part out of the region: compile the "
        "modules around it, each on its own. Or write it on whole batches; attention as "
        "F.scaled_dot_product_attention(..., attn_mask=...), whose mask may be an argument or a buffer."
    )


def in_transform() -> Inside | None:
    """The mode of the transform that is at work."""
    modes = function_mode_stack() if recorders() else ()
    return next((mode for mode in modes if isinstance(mode, Inside)), None)


def _on_wholes(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mode = Inside()
    args, kwargs = flat_map(mode.whole, (args, kwargs))
    if mode.held and mode.held[0].mesh.is_dry:
        mesh = mode.held[0].mesh
        args, kwargs = flat_map(lambda x: on_dry(x, mesh), (args, kwargs), torch.Tensor)
    with mode:
        out = call(*args, **kwargs)
    if not mode.held or in_transform() is not None:
        return out
    if any(not lay.is_plain for lay in mode.held):
        _warn()
    mesh, of_args = mode.held[0].mesh, tuple(mode.held)

    def typed(x: torch.Tensor) -> torch.Tensor:
        if type(x) is DTensor or x.layout is not torch.strided:
            return x
        with raw():
            return cut_again(stamp(x.view_as(x), Layout.replicated(mesh, tuple(x.shape))), of_args)

    return flat_map(typed, out, torch.Tensor)


@functools.lru_cache(maxsize=1)
def _warn() -> None:
    # cached: once
    tell(
        "torch.vmap or a transform of torch.func is given DTensors that are not replicated: they are "
        "gathered and every rank computes all. The result is right, but slow. Where rows are independent, "
        "espalier.local_map(torch.vmap(f), out_placements=[...]) lets each rank compute its own.",
        GatherWarning,
    )


# ---- ``flex_attention`` on DTensors: batch, heads and queries may be cut
#
# Without ``torch.compile`` torch computes the plain formula, which keeps all scores; so does each rank for
# its part, with the batch, heads and queries counted from where its part begins. What a score or mask
# function captures is gathered where it is a DTensor.


_LN2 = math.log(2.0)


class _Functions:
    """What changes scores and what masks them: no part of the key to the dispatcher's cache."""

    def __init__(self, score: Callable[..., Any], mask: Callable[..., Any]) -> None:
        self.score, self.mask = score, mask

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Functions)

    def __hash__(self) -> int:
        return 0


def install_attention() -> None:
    """Let ``torch.nn.attention.flex_attention`` take DTensors (a second call does nothing)."""
    original = flex.flex_attention
    if getattr(original, "_espalier", False):
        return

    @functools.wraps(original)
    def flex_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if recording():
            raise _not_recorded("flex_attention is called")
        if torch.compiler.is_compiling() or not any(type(x) is DTensor for x in (query, key, value)):
            return original(query, key, value, *args, **kwargs)
        return _on_dtensors(query, key, value, *args, **kwargs)

    flex_attention._espalier = True  # type: ignore[attr-defined]
    flex.flex_attention = flex_attention
    RULES.add(_attended, _rule, loose=True)


def _on_dtensors(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise NotImplementedError("NYI: query, key, and value must be 4D tensors")
    if query.size(1) != key.size(1) and not (enable_gqa and query.size(1) % key.size(1) == 0):
        raise ValueError(
            "Expect query and key/value to have the same number of heads, or with enable_gqa=True a multiple "
            f"of them, but got Hq={query.size(1)} and Hkv={key.size(1)}."
        )
    bounded = block_mask is not None and max(block_mask.BLOCK_SIZE) < UNBOUNDED_BLOCK
    if bounded and tuple(block_mask.shape[-2:]) != (query.size(-2), key.size(-2)):
        raise ValueError(
            f"block_mask was created for block_mask.shape={block_mask.shape} but got "
            f"q_len={query.size(-2)} and kv_len={key.size(-2)}."
        )
    functions = _Functions(
        score_mod or same_score, flex.noop_mask if block_mask is None else block_mask.mask_mod
    )
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    out, lse, most = carry_out(DTensor, _attended, (), (query, key, value, functions, scale))
    if return_aux is not None:
        aux = flex.AuxOutput(
            lse=lse * _LN2 if return_aux.lse else None,
            max_scores=most * _LN2 if return_aux.max_scores else None,
        )
        return out, aux
    return (out, lse * _LN2) if return_lse else out


def _rule(query: Operand, key: Operand, value: Operand, functions: _Functions, scale: float) -> Spec:
    """query [b, h, s, d], key [b or 1, g, t, d], value [b or 1, g, t, e]."""
    h, g = query.shape[1], key.shape[1]
    axes = tuple(query.layout.mesh.shape[a] for a in query.layout.cuts[1])
    together = h == g or same_cuts(g, h // g, axes)
    heads: Letter | None = "h" if together else None
    ins: list[Dims] = [("b", "h", "s", None)]
    ins += [("b" if x.shape[0] == query.shape[0] else None, heads, None, None) for x in (key, value)]
    rows = tuple(query.shape[:3])
    return Spec(
        ins,
        [("b", "h", "s", None), ("b", "h", "s"), ("b", "h", "s")],
        [(*rows, value.shape[-1]), rows, rows],
        factors={"h": [(g, 1), (g, h // g)]} if together and h != g else {},
        run=_run,
    )


def _attended(query: Any, key: Any, value: Any, functions: _Functions, scale: float) -> Any:
    """The output, and for each query the logarithm of the sum of all and the largest score, to base 2."""
    return math_attention(
        query, key, value, functions.score, (functions.mask,), scale, {"OUTPUT_LOGSUMEXP": True}
    )


def _run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
    q, k, v = map(plain, args[:3])
    functions, scale = args[3:]
    whole_q, whole_k = placed.ins[:2]
    first = local_box(whole_q).offsets[:3]
    if k.shape[1] == whole_k.shape[1] and q.shape[1] != whole_q.shape[1]:
        pick = torch.arange(first[1], first[1] + q.shape[1], device=q.device)
        pick = pick // (whole_q.shape[1] // whole_k.shape[1])
        k, v = k.index_select(1, pick), v.index_select(1, pick)

    def score(x: Any, b: Any, h: Any, s: Any, t: Any, *more: Any) -> Any:
        return functions.score(x, b + first[0], h + first[1], s + first[2], t, *more)

    def mask(b: Any, h: Any, s: Any, t: Any, *more: Any) -> Any:
        return functions.mask(b + first[0], h + first[1], s + first[2], t, *more)

    # the ranks use differently what these functions capture
    apart = placed.axes_of(whole_q, range(3))
    with with_torch_functions(), Inside(apart):
        return func(q, k, v, _Functions(score, mask), scale)
