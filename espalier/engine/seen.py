"""What a program sees of gradients in ``p.grad``, and torch's clipping by their norm."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from espalier.comm.collectives import all_reduce, sum_whole
from espalier.engine.norm import LossScaler, Norm
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.parallel.data.gradients import gradient_of
from espalier.tensor import DTensor, plain, stamp
from espalier.tensor.observers import user_frame
from espalier.torch_private import foreach_norms, raw, wrap_door

Counted = Mapping[str, torch.Tensor]


class SeenGradients:
    """Bars ``p.grad`` while it is no gradient of the whole batch; tells of changes to what is another thing.

    Gradients of several micro-batches lack a factor, or are under way, until they are finished. Those of a
    pipeline are one rank's, those of float16 are scaled: fine to look at, wrong to change by what one rank
    sees. ``clip_grad_norm_`` is given the norm over all stages, without the scale.

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
        self._is_finished = False  # on all ranks alike
        self._reasons: list[str] = []  # to bar them; the parameters hold it
        self._is_partial = scaler is not None or plan.pipe > 1

    def __reduce__(self) -> Any:
        return type(None), ()  # a parameter that is saved goes without

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Bar these when all are barred."""
        for p in parameters:
            p._unfinished = self._reasons  # type: ignore[attr-defined]

    def watch_clipping(self) -> None:
        """The model is laid out: clipping by what a rank sees would be wrong, if its gradients are a part."""
        if self._is_partial and not self._mesh.is_dry:
            for p in self._module.parameters():
                p._seen = self  # type: ignore[attr-defined]

    @property
    def is_barred(self) -> bool:
        """Whether reading a gradient is an error."""
        return bool(self._reasons)

    def bar(self) -> None:
        """Gradients are not finished."""
        here = ", on each rank those of its own stages" if self._plan.pipe > 1 else ""
        self._reasons.append(
            "p.grad between engine.accumulate(parts) and engine.step(): gradients are known after "
            f"engine.finish_gradients(){here}. To clip by the norm of all, write Plan(clip=1.0), or "
            "initialize(..., max_grad_norm=1.0); to drop them, engine.zero_grad()."
        )

    def admit(self) -> None:
        """Gradients are about to be finished."""
        self._reasons.clear()

    def forget(self) -> None:
        """There are none."""
        self._reasons.clear()
        self._noted, self._is_finished = None, False

    def note(self) -> None:
        """Remember gradients as they were finished, where they are not those of the whole batch."""
        if self._is_partial:
            self._noted, self._is_finished = self._mark(), True

    def _mark(self) -> tuple[int, int] | None:
        """Changes when gradients are written to."""
        with raw():
            grads = (gradient_of(p) for p in self._module.parameters())
            return next(((id(grad), grad._version) for grad in grads if grad is not None), None)

    def check(self) -> None:
        """Before a step: tell of gradients that were changed since."""
        noted, self._noted = self._noted, None
        if noted is not None and self._mark() != noted:
            reason = f"the gradient times engine.scale ({self._plan.precision})"
            if self._plan.pipe > 1:
                reason = "that of this rank's stages alone"
            warnings.warn(
                f"p.grad was changed before the step. With {self._plan} what is there is {reason}: a norm of "
                "all of them is another. Plan(clip=1.0), or torch.nn.utils.clip_grad_norm_, clips by the "
                "right one.",
                stacklevel=user_frame()[0],
            )

    def norm(self, parameters: Iterable[torch.Tensor], order: float) -> torch.Tensor | None:
        """Of the gradients of these, over all ranks (a collective); None if they are not known yet.

        Args:
            parameters: the same on all ranks: those of other stages too.
            order: of the norm, above 0.
        """
        counted = self._counted()
        if counted is None or not self._is_finished:
            return None
        asked = set(map(id, parameters))
        names = {name for name, p in self._module.named_parameters() if id(p) in asked}
        own = [grad for name, grad in counted().items() if name in names]
        norm = Norm(own, self._mesh).wait() if order == 2 else _norm_of(own, order, self._mesh)
        return norm if self._scaler is None else norm / self._scaler.scale


def _norm_of(grads: Sequence[torch.Tensor], order: float, mesh: Mesh) -> torch.Tensor:
    with raw():
        total = torch.zeros((), dtype=torch.float64, device=mesh.device())
        norms = [x.to(total) for x in foreach_norms(list(grads), order, dtype=torch.float64)] if grads else []
        if math.isinf(order):
            total = torch.stack([total, *norms]).max()
            for axis in range(mesh.ndim):
                total = all_reduce(total, mesh, axis, "max")
            return total
        return sum_whole(torch.stack([total, *(x**order for x in norms)]).sum(), mesh) ** (1 / order)


def install() -> None:
    """Let torch's clipping take the norm over all stages of a pipeline, and without a loss scale."""
    wrap_door("norm", _saying_its_order)
    wrap_door("clipping", _clipping)


def _saying_its_order(total_norm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> torch.Tensor:
        total = total_norm(tensors, norm_type, *args, **kwargs)
        total._order = float(norm_type)  # type: ignore[attr-defined]
        return total

    return get_total_norm


def _clipping(clip: Callable[..., None]) -> Callable[..., None]:
    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        order = getattr(total_norm, "_order", 0.0)
        seen: set[SeenGradients] = {p.__dict__["_seen"] for p in held if "_seen" in p.__dict__}
        known = len(seen) == 1 and order > 0
        norm = next(iter(seen)).norm(held, order) if known else None
        if norm is not None:
            with raw():
                if isinstance(total_norm, DTensor):
                    plain(total_norm).copy_(norm)
                    stamp(total_norm, Layout.replicated(total_norm._layout.mesh, ()))
                else:  # of no gradients here: in torch's default dtype
                    total_norm.data = norm.to(total_norm.device, held[0].dtype.to_real())
        clip(held, max_norm, total_norm, *args, **kwargs)
        if norm is not None:
            for of in seen:
                of.note()

    return clip_grads_with_norm_
