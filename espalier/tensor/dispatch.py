"""The dispatcher: from a torch call on DTensors to the same call on local tensors.

A call is looked up by (function, layouts of its tensors, its other arguments). The first time a
rule is asked and its answer solved into an *entry*; from then on the entry is carried out: bring
the inputs where they must be, call, stamp the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

import torch

from espalier.comm.custom_ops import unrecorded
from espalier.comm.redistribute import on_dry, written_on_dry
from espalier.layout import Layout, may_be_empty, same_data
from espalier.meanwhile import setting
from espalier.mesh import Mesh
from espalier.sharding.solve import solve
from espalier.sharding.spec import Operand, Placed, Spec
from espalier.tensor import loans
from espalier.tensor.dtensor import (
    Arguments,
    DTensor,
    absent,
    is_sparse,
    layout_of,
    refuse_nested,
    set_class,
    stamp,
)
from espalier.tensor.fallback import (
    answering,
    asks_in_place,
    enter_or_gather,
    function_of,
    rejected,
    torch_error,
    writes,
)
from espalier.tensor.inputs import Move, Path, at, moved_by, note_addends, put, shard_of, sum_in_place
from espalier.tensor.meshes import SeveralMeshesError, mesh_of, together
from espalier.tensor.nothing import RunnerOfNothing
from espalier.tensor.observers import DOOR, shown
from espalier.tensor.rules import RULES
from espalier.tensor.rules.joint_failure import fail_together
from espalier.tensor.saved import (
    Shard,
    apart,
    beside_saved,
    gather_before_backward,
    keep_in_step,
    saving_shards,
)
from espalier.tensor.told import adds_up, is_summed_at_once, known_at_once, note_alias, note_terms
from espalier.torch_private import (
    all_given,
    getter,
    go_at_once,
    l1_loss,
    method,
    plain_call,
    raw,
    schema_of,
)
from espalier.trees import leaves, tensors_in, tree_map

# the C getters themselves: to be called where torch functions are not intercepted
_requires_grad = getter("requires_grad")
_is_leaf = getter("is_leaf")
_is_inference = method("is_inference")
_grad_enabled, _inference_mode = torch.is_grad_enabled, torch.is_inference_mode_enabled
_CACHE_LIMIT = 10_000  # entries of one function


class CachedCall:
    """How one kind of call is carried out."""

    __slots__ = (
        "adds_up", "asks", "flat", "holds_addends", "is_addend", "keeps", "lends", "marked", "moves", "out",
        "outs", "placed", "quick", "run", "runs", "simple", "sums_here", "tail", "writes", "written",
    )  # fmt: skip

    def __init__(self, spec: Spec, placed: Placed, operands: list[Operand], is_view: bool) -> None:
        self.placed = placed
        self.run = spec.run if spec.when is None or spec.when(placed) else None
        if self.run is not None and placed.lacks():
            self.run = RunnerOfNothing(self.run, [(o.path, o.layout.shape) for o in operands])
        self.marked = any(may_be_empty(layout) for layout in (*placed.ins, *placed.outs))
        self.tail = spec.tail(placed) if spec.tail is not None else None
        self.outs = placed.outs
        self.out = placed.outs[0] if len(placed.outs) == 1 else None
        self.written = operands[spec.inplace].path if spec.inplace is not None else None
        moves = (
            Move(o.path, o.layout, dst)
            for o, dst in zip(operands, placed.ins, strict=True)
            if o.path != self.written and not same_data(o.layout, dst)
        )
        self.moves = tuple(m for m in moves if not m.plan.idle)
        # the gradient of what is linear in all it is differentiated by needs none of their values
        floats = {o.index for o in operands if o.dtype.is_floating_point or o.dtype.is_complex}
        self.keeps = not any(floats <= set(group) for group in spec.linear)
        # a view of what was moved, or of what a runner made
        self.lends = is_view and (bool(self.moves) or self.run is not None)
        self.sums_here = not self.lends and self.written is None
        # backward may need addends as they are now, and who keeps it for that is not always counted
        stay = (o.layout.partial and dst.partial for o, dst in zip(operands, placed.ins, strict=True))
        self.holds_addends = self.keeps and any(stay)
        is_number = self.out is not None and not self.out.shape
        self.adds_up = is_number and any(adds_up(o.layout) for o in operands)
        self.is_addend = (
            self.written is None
            and self.out is not None
            and is_summed_at_once(self.out)
            and not any(is_summed_at_once(o.layout) for o in operands)
        )
        if spec.fails:
            self.run = fail_together(spec, self.run, placed)
        self.asks = self.run is not None and not spec.widens
        self.simple = self.quick = self.writes = self.flat = self.runs = False

    def settle(self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After the first call: whether the next ones may take a short cut."""
        if self.out is None or not isinstance(out, torch.Tensor) or self.marked or self.placed.mesh.is_dry:
            return
        if self.holds_addends or self.adds_up or self.is_addend:
            return
        if self.run is not None:
            self.runs = not (self.moves or self.lends) and self.written is None and self.tail is None
        elif self.moves:
            plain_paths = all(len(m.path) == 1 and type(m.path[0]) is int for m in self.moves)
            kept = self.written is None and self.tail is None and not self.lends
            self.flat = kept and plain_paths and not any(m.gathers for m in self.moves)
        elif self.written is not None:
            self.writes = type(at(args, kwargs, self.written)) is DTensor
        else:
            self.simple, self.quick = self.tail is None, self.tail is not None

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry the call out; torch functions are not intercepted meanwhile."""
        with raw():
            shards: list[Shard] = []
            gathered: list[torch.Tensor] = []
            call_arguments = args, kwargs
            local = self._local
            if self.placed.mesh.is_dry:
                self._refuse_lost(args, kwargs)
                local = self._without_data
            if self.holds_addends:
                note_addends(call_arguments)
            for m in self.moves:
                x = at(args, kwargs, m.path)
                if m.total is not None and self.sums_here:
                    sum_in_place(x, m, tensors_in(call_arguments))
                if m.only_varies and not (x.requires_grad and torch.is_grad_enabled()):
                    continue
                moved = moved_by(x, m)
                args, kwargs = put(args, kwargs, m.path, moved)
                if m.gathers and self.keeps and moved.requires_grad:
                    shards.append(shard_of(x, moved, m))
                    gathered.append(moved)
            if shards:
                with saving_shards(shards):
                    out = apart(local(func, args, kwargs), gathered)
                gather_before_backward(out, shards)
            else:
                out = local(func, args, kwargs)
            if self.marked:
                keep_in_step(out)
            if self.placed.mesh.is_dry:
                out = tree_map(beside_saved, out)
        out = self._stamped(out, args, kwargs)
        if self.adds_up:
            note_terms(out, call_arguments)
        if self.is_addend:
            out = known_at_once(out)
        return loans.lend(out, func, *call_arguments) if self.lends else out

    def call_flat(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """:meth:`call`, for moves of positional arguments that gather nothing."""
        with raw():
            moved = list(args)
            for m in self.moves:
                i = m.path[0]
                x = args[i]
                if m.total is not None and self.sums_here:
                    sum_in_place(x, m, args)
                if not m.only_varies or (_requires_grad(x) and _grad_enabled()):
                    moved[i] = moved_by(x, m)
            out = func(*moved, **kwargs)
        if type(out) is DTensor:
            return _stamp(out, self.outs[0])
        set_class(out, DTensor)
        out._layout = self.out
        return out

    def _without_data(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # what is saved for backward must be plain: kernels of the meta device are partly Python, and
        # would ask a DTensor for its shape
        plain_ = partial(_plain, mesh=self.placed.mesh)
        given = args, kwargs
        args, kwargs = tree_map(plain_, args), tree_map(plain_, kwargs)
        if self.written is not None:
            note_alias(at(args, kwargs, self.written), at(*given, self.written))
        if not self.placed.mesh.is_member:
            func, args, kwargs = _staying(func, args, kwargs, self.placed.mesh.outermost.device_type)
        out = self._local(func, args, kwargs)
        if self.written is not None and type(written := at(*given, self.written)) is not DTensor:
            written_on_dry(written, at(args, kwargs, self.written))
            return out if out is None else written
        return out

    def _local(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.tail is not None:
            return func(args[0], *self.tail)
        if self.run is not None:
            return self.run(func, args, kwargs, self.placed)
        return func(*args, **kwargs)

    def _refuse_lost(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See that a plain tensor is not to hold values that are on other ranks alone.

        Raises:
            ValueError: it is: nothing would be written to it.
        """
        if self.written is None or self.placed.mesh.is_member:
            return
        written = at(args, kwargs, self.written)
        if type(written) is not DTensor and not written.is_meta:
            lie_elsewhere = [x for x in tensors_in((args, kwargs)) if type(x) is DTensor]
            raise absent(lie_elsewhere[0]._layout.own)

    def _stamped(self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.written is not None:
            written = at(args, kwargs, self.written)
            if type(written) is not DTensor:
                return out
            if self.placed.mesh.is_dry:
                return out if out is None else written
        if self.out is not None:
            if isinstance(out, torch.Tensor):
                return _stamp(out, self.out)
            if isinstance(out, tuple | list) and len(out) == 1:
                stamp(out[0], self.out)
            return out
        if any(type(x) is DTensor for x in out):
            return type(out)([_stamp(x, layout) for x, layout in zip(out, self.outs, strict=True)])
        for x, layout in zip(out, self.outs, strict=True):
            if isinstance(x, torch.Tensor):
                stamp(x, layout)
        return out


def _plain(x: Any, mesh: Mesh) -> Any:
    if type(x) is DTensor:
        out = torch.Tensor.as_subclass(x, torch.Tensor)
        # a real run has no such view, and gradients come in the order of what has
        if _grad_enabled() and _is_leaf(x):
            go_at_once(out)
        return out
    return on_dry(x, mesh) if isinstance(x, torch.Tensor) else x


def _staying(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str
) -> tuple[Any, Any, Any]:
    """A call of what has no data here, as that goes to no device."""
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("meta")}
    if getattr(func, "__name__", "") in ("cpu", device_type):
        return torch.Tensor.view_as, (args[0], args[0]), {}
    if func is torch.Tensor.to:
        meta = torch.device("meta")
        args = (args[0], *[meta if type(a) in (torch.device, str, int) else a for a in args[1:]])
    return func, args, kwargs


def _stamp(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Stamp an output; one that is an input itself, and lies otherwise, stays what it was."""
    if type(x) is DTensor and x._layout is not layout:
        with raw():
            x = x.view_as(x)
    return stamp(x, layout)


class _Slot(dict[Any, "CachedCall | None"]):
    """What is known of one function: its entries by the rest of the key, and how it is keyed."""

    __slots__ = ("special", "typed")

    def __init__(self, func: Callable[..., Any]) -> None:
        super().__init__()
        self.special = RULES.special(func)
        self.typed = func not in RULES.loose


_slots: dict[Any, _Slot] = {}

NO_KWARGS: dict[str, Any] = {}
_UNSEEN: Any = object()


def forget() -> None:
    """Drop all cached entries (a rule was added)."""
    _slots.clear()


def dispatch(
    cls: type,
    func: Callable[..., Any],
    types: Iterable[type],
    args: tuple[Any, ...] = (),
    kwargs: Any = None,
    *,
    is_shown: bool = False,
) -> Any:
    """``DTensor.__torch_function__``, of a call that watchers are shown first, unless they were."""
    if func is l1_loss:
        kwargs = all_given(func, kwargs)
    if DOOR.watchers and not is_shown:
        kwargs = kwargs or {}
        return shown(partial(carry_out, cls, func, types, args, kwargs), func, args, kwargs)
    slot = _slots.get(func)
    if slot is None:
        slot = _slots[func] = _Slot(func)
    if slot.special is not None:
        return slot.special(func, types, args, kwargs or {})
    # the way of every call, so written for speed: tensors stand for their layouts in the key
    key: Any
    n = len(args)
    if n == 1 and type(args[0]) is DTensor:
        key = args[0]._layout
    elif n == 2 and type(args[0]) is DTensor and type(args[1]) is DTensor:
        key = (args[0]._layout, args[1]._layout)
    elif n == 3 and type(args[0]) is DTensor and type(args[1]) is DTensor and type(args[2]) is DTensor:
        key = (args[0]._layout, args[1]._layout, args[2]._layout)
    else:
        key = tuple([a._layout if type(a) is DTensor else a if type(a) is int else key_of(a) for a in args])
    if kwargs:
        values = kwargs.values()
        key = (key, *kwargs, *[a._layout if type(a) is DTensor else key_of(a) for a in values])
    else:
        kwargs = NO_KWARGS
    if slot.typed:
        key = (key, *[a.dtype if type(a) is DTensor else told(a) for a in args if type(a) in TOLD])
        if kwargs:
            key = (key, *[told(a) for a in values if type(a) in TOLD])
    entry = slot.get(key, _UNSEEN)
    if entry is _UNSEEN:
        return _first(slot, key, func, args, kwargs)
    if entry is None:
        return _unruled(func, args, kwargs)
    if entry.simple:
        out = plain_call(func, types, args, kwargs)
        set_class(out, DTensor)
        out._layout = entry.out
        return out
    if entry.quick:
        out = plain_call(func, types, (args[0], *entry.tail), NO_KWARGS)
        set_class(out, DTensor)
        out._layout = entry.out
        return out
    if entry.flat:
        return entry.call_flat(func, args, kwargs)
    if entry.runs:
        out = plain_call(entry.run, types, (func, args, kwargs, entry.placed), NO_KWARGS)
        return _stamp(out, entry.out)
    if entry.writes:
        return plain_call(func, types, args, kwargs)
    return entry.call(func, args, kwargs)


carry_out = partial(dispatch, is_shown=True)  # of what is no call of the program's, or was one


def _first(
    slot: _Slot, key: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if len(slot) >= _CACHE_LIMIT:
        slot.clear()
    other = answering(args, kwargs)
    if other is not None:
        return type(other).__torch_function__(func, (type(other), DTensor), args, kwargs)
    try:
        entry = slot[key] = _build(func, args, kwargs)
        if (RULES.body(func) is not None) if entry is None else entry.asks:
            _ask_torch(func, args, kwargs)
        if entry is not None:
            out = entry.call(func, args, kwargs)
            if not _is_torchs(func):
                _check(func, entry, out)
            entry.settle(out, args, kwargs)
            return out
    except Exception as error:
        slot.pop(key, None)
        lie_elsewhere = [x for x in tensors_in((args, kwargs)) if type(x) is DTensor and _is_absent(x)]
        if isinstance(error, NotImplementedError) and lie_elsewhere:  # of tensors without data
            raise absent(lie_elsewhere[0]._layout.own) from error
        # what torch says of such arguments, if it would not take them either
        wanted = torch_error(func, args, kwargs)
        if wanted is None or (type(wanted) is type(error) and str(wanted) == str(error)):
            raise
        raise wanted from error
    return _unruled(func, args, kwargs)


def _is_absent(x: DTensor) -> bool:
    """Whether its values are on other ranks alone."""
    return not x._layout.mesh.is_member


def _is_torchs(func: Callable[..., Any]) -> bool:
    """Whether a function is torch's, and not a user's own."""
    return (getattr(func, "__module__", None) or "torch").startswith("torch")


def _check(func: Callable[..., Any], entry: CachedCall, out: Any) -> None:
    """Compare what a user's function gave with what the rule says of it.

    Raises:
        ValueError: they differ.
    """
    tensors = [x for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, torch.Tensor)]
    with raw():
        shapes = [tuple(x.shape) for x in tensors]
    wanted = [tuple(layout.local_shape) for layout in entry.outs]
    if shapes != wanted and entry.written is None:
        name = getattr(function_of(func) or func, "__name__", func)
        raise ValueError(
            f"{name}: by its rule this rank gets {len(wanted)} output(s) of the shapes "
            f"{', '.join(str(list(s)) for s in wanted)}, but the function gave {len(shapes)}: "
            f"{', '.join(str(list(s)) for s in shapes)}. A rule names outs and shapes of all outputs (see "
            "espalier.Spec)."
        )


def _ask_torch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let torch speak first where a runner or a body of ours would have to check what it is given."""
    if not _is_torchs(func):
        return
    error = rejected(func, args, kwargs)
    if error is not None:
        raise error


def _build(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachedCall | None:
    if is_strict.get():
        refuse_plain(func, tensors_in((args, kwargs)))
    asked = None if loans.are_tensors(func, args, kwargs) else ask(func, args, kwargs)
    if asked is None:
        return None
    spec, operands, mesh = asked
    with unrecorded():
        placed = solve(spec, operands, mesh)
    return None if placed is None else CachedCall(spec, placed, operands, loans.is_view(func, args))


def ask(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Spec, list[Operand], Mesh] | None:
    """What the rule for a call says of it; None if no rule does, or its tensors lie on several meshes."""
    rule = RULES.get(func)
    if rule is None or kwargs.get("out") is not None or asks_in_place(func, args, kwargs):
        return None
    tensors = tensors_in((args, kwargs))
    if loans.loans_in(tensors) or any(map(is_sparse, tensors)):
        return None
    try:
        mesh = mesh_of(func, args, kwargs)
    except SeveralMeshesError:
        return None
    operands: list[Operand] = []
    seen_args = tuple(_operands(a, mesh, operands, (i,)) for i, a in enumerate(args))
    seen_kwargs = {k: _operands(a, mesh, operands, (k,)) for k, a in kwargs.items()}
    with unrecorded():
        for other, name in ALIASES.items():
            if other in seen_kwargs:
                seen_kwargs[name] = seen_kwargs.pop(other)
        if "input" in seen_kwargs and "input" not in RULES.signature(func).parameters:
            seen_args = (seen_kwargs.pop("input"), *seen_args)
        try:
            bound = RULES.signature(func).bind(*seen_args, **seen_kwargs)
        except TypeError:
            return None  # an overload that the rule does not know
        operands = leaves(bound.arguments, Operand)
        for i, operand in enumerate(operands):  # as the rule's parameters come, not as they were given
            operand.index = i
        spec = rule(*seen_args, **seen_kwargs)
    if spec is None or len(spec.ins) != len(operands):
        return None  # or it is given a tensor where it expects a number
    return spec, operands, mesh


def _operands(a: Any, mesh: Mesh, operands: list[Operand], path: Path) -> Any:
    if isinstance(a, torch.Tensor):
        operands.append(Operand(len(operands), layout_of(a, mesh), a.dtype, path))
        return operands[-1]
    if isinstance(a, tuple | list) and not isinstance(a, torch.Size):
        return type(a)(_operands(x, mesh, operands, (*path, i)) for i, x in enumerate(a))
    return a


def unruled(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that has no rule, and is not looked up: of what it is given nothing is kept."""
    if is_strict.get():
        refuse_plain(func, tensors_in((args, kwargs)))
    return _unruled(func, args, kwargs)


def _uncached(cls: type, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    return _unruled(func, args, kwargs)


def _unruled(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lent = loans.loans_in(tensors_in((args, kwargs)))
    if lent:
        again = carry_out if RULES.get(func) is not None or function_of(func) is None else _uncached
        return loans.call(again, func, args, kwargs, lent, writes(func))
    if loans.are_tensors(func, args, kwargs):
        args, kwargs = loans.read(func, args, kwargs)
        return func(*args, **kwargs)
    for name in ("alpha", "value"):
        number = kwargs.get(name)
        if type(number) is DTensor or (isinstance(number, torch.Tensor) and not number.requires_grad):
            return func(*args, **{**kwargs, name: number.item()})  # as torch does
    placed = by_place(func, args, kwargs)
    if placed is not None:
        return func(*placed[0], **placed[1])
    body = RULES.body(func)
    if body is not None and kwargs.get("out") is None:
        named = {ALIASES.get(k, k): v for k, v in kwargs.items() if k != "out"}
        first = (named.pop("input"),) if "input" in named else ()
        out = body(*first, *args, **named)
        if out is not NotImplemented:
            return out
    try:
        mesh = mesh_of(func, args, kwargs)
    except SeveralMeshesError:
        joint = together(func, args, kwargs)
        if joint is None:
            raise
        return func(*joint[0], **joint[1])
    return enter_or_gather(func, args, kwargs, mesh)


DTensor.__torch_function__ = classmethod(dispatch)  # type: ignore[assignment, method-assign]


# ---- what of a call's arguments decides how it is carried out: the key to the dispatcher's cache


# what of an argument is not part of the key where the rule is loose: a DTensor's dtype, a float's value
TOLD = frozenset({DTensor, float, complex, tuple, list, torch.Size, dict})
# what stands for itself
_ITSELF = frozenset({int, type(None), str, torch.dtype, torch.device, torch.memory_format})


def key_of(a: Any) -> Any:
    """What stands for an argument in the key of a call, whatever the function."""
    t = type(a)
    if t in _ITSELF:
        return a
    if t is DTensor:
        return a._layout
    if t is bool:
        return (bool, a)  # else True would be found for 1
    if t is float or t is complex:
        return t if a else 0.0  # of a scalar's value, no more than whether it is zero decides
    if t is slice:
        return (slice, *[x if type(x) in _ITSELF else key_of(x) for x in (a.start, a.stop, a.step)])
    if t is tuple or t is list or t is torch.Size:
        return (t, *[x if type(x) in _ITSELF else key_of(x) for x in a])
    if isinstance(a, torch.Tensor):
        refuse_nested(a)
        return (t, a.shape, a.dtype, a.layout, is_strict.get()) if a.ndim else (t, a.dtype)
    if isinstance(a, dict):
        return (dict, *[(k, key_of(v)) for k, v in a.items()])
    try:
        hash(a)
    except TypeError:
        return t
    return a


def told(a: Any) -> Any:
    """Of an argument, what :func:`key_of` leaves out."""
    t = type(a)
    if t is DTensor:
        return a.dtype
    if t in (tuple, list, torch.Size, dict):
        return tuple([told(x) for x in (a.values() if t is dict else a) if type(x) in TOLD])
    return a if t in (float, complex) else None


# ---- arguments given by torch's names for them, which a rule's parameters need not have


# NumPy's names, which torch takes too
ALIASES = {"axis": "dim", "keepdims": "keepdim"}


def by_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """The call with arguments by their places, where its rule does not know their names; None if it does."""
    known = RULES.signature(func).parameters if RULES.get(func) is not None else {}
    strange = {k for k in kwargs if k not in known and k not in ALIASES and k not in ("input", "out")}
    if not known or not strange or any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return None
    for names in _overloads(getattr(func, "__name__", "")):
        placed, rest = list(args), dict(kwargs)
        for name in names[len(args) :]:
            if name not in rest and not (name == "self" and "input" in rest):
                break
            placed.append(rest.pop(name if name in rest else "input"))
        if not strange & rest.keys():
            return tuple(placed), rest
    return None


@lru_cache(maxsize=1024)
def _overloads(name: str) -> tuple[tuple[str, ...], ...]:
    """Of each form of an operator the names of what may be given by its place."""
    packet = getattr(torch.ops.aten, name, None) if name and not name.startswith("_") else None
    if packet is None:
        return ()
    schemas = (schema_of(getattr(packet, overload)) for overload in packet.overloads())
    return tuple(tuple(a.name for a in schema.arguments if not a.kwarg_only) for schema in schemas)


# ---- strict mode: a plain tensor among DTensors is an error instead of being taken as replicated


is_strict: ContextVar[bool] = ContextVar("espalier.strict", default=False)


def strict() -> AbstractContextManager[None]:
    """While open, a call of DTensors and a plain tensor raises; 0-d tensors, being scalars, are allowed.

    >>> with espalier.strict():                                       # doctest: +SKIP
    ...     loss = model(batch)
    """
    return setting(is_strict, True)


def implicit_replication() -> AbstractContextManager[None]:
    """While open, a plain tensor among DTensors is taken as replicated, also inside :func:`strict`."""
    return setting(is_strict, False)


def refuse_plain(func: Callable[..., Any], tensors: Iterable[torch.Tensor]) -> None:
    """Raise for a plain tensor with dims.

    Raises:
        ValueError: there is one (torch's operators would swallow a TypeError).
    """
    for i, x in enumerate(tensors):
        if x.ndim and not isinstance(x, DTensor):
            raise ValueError(
                f"{getattr(func, '__name__', func)}: tensor argument {i} (shape {list(x.shape)}) is plain "
                "among DTensors, which espalier.strict() refuses. Say how it lies: distribute_tensor or "
                "DTensor.from_local."
            )
