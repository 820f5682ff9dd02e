"""What a program sees of gradients in ``p.grad``, and torch's clipping by their norm."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.blocks import named_parameters_in, parameters_in
from espalier.comm.collectives import all_reduce, sum_whole
from espalier.engine.norm import LossScaler, Norm
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.parallel.data.gradients import gradient_of
from espalier.tensor import DTensor, layout_of, plain, stamp
from espalier.tensor.asked import name_value
from espalier.tensor.meshes import brought, seen_on
from espalier.tensor.observers import tell, tell_of_absent_gradient, who_asks_for_gradients
from espalier.tensor.told import note_alias
from espalier.torch_private import clipped_now, foreach_norms, raw, version_of, wrap_door

Counted = Mapping[str, torch.Tensor]
DtypeOf = Callable[[str, torch.Tensor], torch.dtype | None]
Around = Callable[[Callable[[], None]], None]


def held_gradients(module: nn.Module) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """The whole gradients that a program has given parameters which are plain yet: those of a file, say."""
    return [(p, p.grad) for p in parameters_in(module) if type(p) is not DTensor and p.grad is not None]


def give_back(gradients: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Let parameters that are laid out now have their gradients again, which went with the plain ones."""
    for p, grad in gradients:
        p.grad = grad.to(p.dtype)


class SeenGradients:
    """Bars ``p.grad`` while it is no gradient of the whole batch; tells of changes to what is another thing.

    Gradients of several micro-batches lack a factor, or are under way, until they are finished. Those of
    float16 are scaled: fine to look at, wrong to change by what is seen. Of a pipeline the program sees those
    of all stages: in the place of another one's a tensor that lies there, as its parameter does. What updates
    is to find this rank's own; so ``clip_grad_norm_`` is given the norm over all stages, without the scale.

    Attributes:
        is_stepping: whether an optimizer updates: it finds this rank's own gradients alone.
        is_scaled: whether gradients have the scale that the loss had, where there is any.
        are_given: whether the program has set some by hand, in stages: on all ranks alike.

    Args:
        mesh: all of it, stages too.
        counted: as :meth:`Passes.counted`, held weakly: parameters hold this.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        plan: Plan,
        counted: weakref.WeakMethod[Callable[[], Counted]],
        scaler: LossScaler | None,
    ) -> None:
        self._module, self._mesh, self._plan = module, mesh, plan
        self._counted, self._scaler = counted, scaler
        self._noted: tuple[int, int] | None = None
        self._is_finished = self.are_given = False  # on all ranks alike
        self._reasons: list[str] = []  # to bar them; the parameters hold it
        self._is_partial = scaler is not None or plan.pipe > 1
        self.is_stepping, self.is_scaled = False, True
        self._places: dict[
            int, tuple[str, Mesh]
        ] = {}  # by parameter, its name and where its gradient is seen
        self._elsewhere: dict[int, DTensor | None] = {}  # by parameter, what stands here for its gradient
        self._dtype_of: weakref.WeakMethod[DtypeOf] | None = None
        self._around: weakref.WeakMethod[Around] | None = None
        self._number = 0  # of the engines with stages on the mesh

    def __reduce__(self) -> Any:
        return type(None), ()  # a parameter that is saved goes without

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Bar these when all are barred."""
        for p in parameters:
            p._unfinished = self._reasons  # type: ignore[attr-defined]

    def watch_clipping(self) -> None:
        """The model is laid out: clipping by what a rank sees would be wrong, if its gradients are a part."""
        if self._is_partial and not self._mesh.is_dry:
            for p in parameters_in(self._module):
                p._seen = self  # type: ignore[attr-defined]

    def show_all(
        self,
        meshes: Mapping[str, Mesh],
        dtype_of: weakref.WeakMethod[DtypeOf],
        around: weakref.WeakMethod[Around],
    ) -> None:
        """Let the program see gradients of all stages, and add to them.

        Args:
            meshes: on which those of parameters are seen, by name.
            dtype_of: that of the gradient of a parameter of other ranks, by its name; None: it has none.
            around: makes a backward pass that is none of the engine's.
        """
        self._places.clear()
        self._number = self._mesh.asked.joined(self)
        self._dtype_of, self._around = dtype_of, around
        self._show(meshes)

    def show_later(self) -> None:
        """Let it see those of parameters that came since."""
        later = {
            name: layout_of(p).mesh
            for name, p in named_parameters_in(self._module)
            if type(p) is DTensor and self._places.get(id(p), ("",))[0] != name
        }
        if later:
            self._show(later)
            self.watch_clipping()

    def _show(self, meshes: Mapping[str, Mesh]) -> None:
        parameters = dict(named_parameters_in(self._module))
        for name, mesh in meshes.items():
            self._places[id(parameters[name])] = name, mesh
            name_value(parameters[name], "parameter", self._number, name)

    def of_others(self, go: Callable[[], None]) -> None:
        """A backward pass that may be none of the engine's, by ``go``."""
        around = None if self._around is None else self._around()
        if around is None:
            go()
        else:
            around(go)

    def shown(self, p: DTensor, grad: DTensor | None, *, asked: bool = False) -> DTensor | None:
        """What a program finds in ``p.grad``, where ``grad`` is this rank's own.

        Args:
            asked: whether the program asks, by a function of ours.

        Raises:
            RuntimeError: gradients are not finished.
        """
        if (place := self._places.get(id(p))) is None:
            return grad
        (name, mesh), here = place, p._layout.mesh
        who = "program" if asked else who_asks_for_gradients()
        if who in ("program", "torch"):
            self._mesh.asked.sees(own=who == "torch")
        if grad is not None:
            name_value(grad, "gradient", self._number, name)
        if (here is mesh and here.is_member) or who not in ("program", "zero_grad"):
            return grad
        if here.is_member:
            if grad is None or self.is_stepping or not (self._is_finished or self.are_given):
                return grad
            there = name_value(seen_on(grad, mesh), "gradient", self._number, name)
            note_alias(there, grad)
            return there
        if self._reasons:
            raise RuntimeError(self._reasons[0])
        if self.is_stepping:
            tell_of_absent_gradient(here, level=3)
            return None
        if id(p) not in self._elsewhere and self._is_finished:
            dtype_of = None if self._dtype_of is None else self._dtype_of()
            dtype = None if dtype_of is None else dtype_of(name, p)
            self._elsewhere[id(p)] = None if dtype is None else self._stand_in(p, mesh, dtype)
        return self._elsewhere.get(id(p))

    def given(self, p: DTensor, grad: torch.Tensor | None) -> torch.Tensor | None:
        """What is to be this rank's own where a program sets ``p.grad``."""
        if (place := self._places.get(id(p))) is None:
            return grad
        here = p._layout.mesh
        if who_asks_for_gradients() == "program":
            self._mesh.asked.changed()
        self.are_given = self.are_given or grad is not None
        if isinstance(grad, DTensor) and grad._layout.mesh is not here:
            grad = brought(grad, here)
        if not here.is_member:
            if grad is None and not (self._is_finished or self.are_given):
                self._elsewhere.pop(id(p), None)  # there is none yet
            else:
                self._elsewhere[id(p)] = None if grad is None else self._stand_in(p, place[1], grad.dtype)
        return grad

    def _stand_in(self, p: DTensor, mesh: Mesh, dtype: torch.dtype) -> DTensor:
        """What has the shape of a gradient that lies on other ranks."""
        layout = Layout.replicated(mesh, p.shape)
        with raw():
            grad = stamp(torch.empty(layout.local_shape, dtype=dtype, device="meta"), layout)
        return name_value(grad, "gradient", self._number, self._places[id(p)][0])

    @property
    def is_barred(self) -> bool:
        """Whether reading a gradient is an error."""
        return bool(self._reasons)

    def bar(self) -> None:
        """Gradients are not finished."""
        self._reasons.append(
            "p.grad between engine.accumulate(parts) and engine.step(): gradients are known after "
            "engine.finish_gradients(). To clip by the norm of all, write Plan(clip=1.0), or "
            "initialize(..., max_grad_norm=1.0); to drop them, engine.zero_grad()."
        )

    def admit(self) -> None:
        """Gradients are about to be finished."""
        self._reasons.clear()

    def forget(self) -> None:
        """There are none."""
        self._reasons.clear()
        self._elsewhere.clear()
        self._noted, self._is_finished, self.are_given = None, False, False

    def note(self) -> None:
        """Remember gradients as they were finished, where they are not those of the whole batch."""
        if self._is_partial:
            self._noted, self._is_finished = self._mark(), True

    def scaled(self) -> None:
        """All ranks have scaled gradients, by torch's clipping."""
        self.note()
        if self._mesh.asked is not None:
            self._mesh.asked.changed()

    def _mark(self) -> tuple[int, int] | None:
        """Changes when gradients are written to."""
        with raw():
            grads = (gradient_of(p) for p in parameters_in(self._module))
            return next(((id(grad), version_of(grad)) for grad in grads if grad is not None), None)

    def check(self) -> None:
        """Before a step: tell of gradients that were changed since."""
        noted, self._noted = self._noted, None
        if self._scaler is not None and noted is not None and self._mark() != noted:
            tell(
                f"p.grad was changed before the step. With {self._plan} what is there is the gradient times "
                f"engine.scale ({self._plan.precision}): a norm of all of them is another. Plan(clip=1.0), "
                "or torch.nn.utils.clip_grad_norm_, clips by the right one."
            )

    def norm(self, parameters: Iterable[torch.Tensor], order: float) -> torch.Tensor | None:
        """Of the gradients of these, over all ranks (a collective).

        None if they are not known yet, and where an optimizer asks for those of parameters that are all here.

        Args:
            parameters: the same on all ranks: those of other stages too.
            order: of the norm, above 0.
        """
        parameters = list(parameters)
        counted = self._counted()
        if counted is None or not (self._is_finished or self.are_given or self.is_stepping):
            return None
        if self.is_stepping and all(layout_of(p, self._mesh).mesh.is_member for p in parameters):
            return None  # other ranks update others, and ask for these
        asked = set(map(id, parameters))
        if asked <= self._places.keys():
            names = {self._places[i][0] for i in asked}
        else:
            names = {name for name, p in named_parameters_in(self._module) if id(p) in asked}
        own = [grad for name, grad in counted().items() if name in names]
        if self._mesh.rank == 0:  # others than the model's are whole on each
            own += [p.grad for p in parameters if not isinstance(p, DTensor) and p.grad is not None]
        norm = Norm(own, self._mesh).wait() if order == 2 else _norm_of(own, order, self._mesh)
        is_scaled = self._scaler is not None and self.is_scaled and not self.is_stepping
        return norm / self._scaler.scale if is_scaled else norm  # type: ignore[union-attr]


def gradients_seen(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that there are, as a program finds them in ``p.grad``: of all stages."""
    held = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return [grad for p in held if (grad := gradient_seen(p)) is not None]


def gradient_seen(p: torch.Tensor) -> torch.Tensor | None:
    """``p.grad``, as a program finds it."""
    seen: SeenGradients | None = p.__dict__.get("_seen")
    own: Any = p.grad  # this rank's, as we ask
    return own if seen is None or not isinstance(p, DTensor) else seen.shown(p, own, asked=True)


def _norm_of(grads: Sequence[torch.Tensor], order: float, mesh: Mesh) -> torch.Tensor:
    grads = [grad for grad in grads if grad.numel()]  # a rank may have none of a piece
    with raw():
        total = torch.zeros((), dtype=torch.float64, device=mesh.device())
        norms = [x.to(total) for x in foreach_norms(grads, order, dtype=torch.float64)] if grads else []
        if math.isinf(order):
            total = torch.stack([total, *norms]).max()
            for axis in range(mesh.ndim):
                total = all_reduce(total, mesh, axis, "max")
            return total
        return sum_whole(torch.stack([total, *(x**order for x in norms)]).sum(), mesh) ** (1 / order)


def install() -> None:
    """Let torch's clipping take the norm over all stages of a pipeline, and without a loss scale."""
    for of in ("", "named "):
        wrap_door(f"{of}norm", _norming)
        wrap_door(f"{of}clipping", _clipping)
    for of in ("", " of averages"):
        wrap_door(f"grouping{of}", _in_one_order)


def _norming(total_norm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> torch.Tensor:
        held, order = clipped_now(), float(norm_type)
        norm = None if held is None else _norm_over_stages(held, order)
        if norm is None:
            total = total_norm(tensors, norm_type, *args, **kwargs)
        else:
            assert held is not None
            norm = norm.to(held[0].dtype.to_real())
            total = total_norm([norm], norm_type, *args, **kwargs)  # which says if it is not finite
        total._order, total._is_whole = order, norm is not None  # type: ignore[attr-defined]
        return total

    return get_total_norm


def _norm_over_stages(parameters: Sequence[torch.Tensor], order: float) -> torch.Tensor | None:
    """The norm of their gradients that torch's clipping is to take for its own: plain, on all ranks."""
    seen = _who_shows(parameters)
    return next(iter(seen)).norm(parameters, order) if len(seen) == 1 and order > 0 else None


def _who_shows(parameters: Iterable[torch.Tensor]) -> set[SeenGradients]:
    return {p.__dict__["_seen"] for p in parameters if "_seen" in p.__dict__}


def _in_one_order(grouped: Callable[..., Any]) -> Callable[..., Any]:
    """Of tensors of several stages all ranks are to ask in one order: torch goes by where data is."""

    def group(lists: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = lists[0]
        if not tensors:
            return {}  # a rank may have none of the gradients that are clipped by value
        meshes = {x._layout.mesh for of in lists for x in of if isinstance(x, DTensor)}
        if len(meshes) < 2 and all(mesh.is_member for mesh in meshes):
            return grouped(lists, *args, **kwargs)
        places: dict[Any, list[int]] = {}
        for i, x in enumerate(tensors):
            places.setdefault((x.device, x.dtype), []).append(i)
        return {key: ([[of[i] for i in held] for of in lists], held) for key, held in places.items()}

    return group


def _clipping(clip: Callable[..., None]) -> Callable[..., None]:
    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        known = total_norm
        if not getattr(total_norm, "_is_whole", False):
            norm = _norm_over_stages(held, getattr(total_norm, "_order", 0.0))
            if norm is None:
                return clip(held, max_norm, total_norm, *args, **kwargs)
            with raw():
                if isinstance(total_norm, DTensor):
                    plain(total_norm).copy_(norm)
                    stamp(total_norm, Layout.replicated(total_norm._layout.mesh, ()))
                else:  # of no gradients here: in torch's default dtype
                    total_norm.data = norm.to(total_norm.device, held[0].dtype.to_real())
                known = plain(total_norm)  # on each rank, whichever stages' gradients it was made of
        own = [grad for p in held if (grad := p.grad) is not None]
        if any(type(grad) is DTensor and grad._layout.own is not grad._layout for grad in own):
            clip(held, max_norm, known, *args, **kwargs)  # views that are to be written back
        else:
            with raw():  # however gradients lie, each rank scales what it has
                clip([_Holder(plain(grad)) for grad in own], max_norm, known, *args, **kwargs)
        for of in _who_shows(held):
            of.scaled()

    return clip_grads_with_norm_


class _Holder(NamedTuple):
    """What torch's clipping asks for a gradient."""

    grad: torch.Tensor
