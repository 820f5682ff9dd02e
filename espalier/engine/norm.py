"""The global gradient norm and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm.collectives import sum_whole_
from espalier.layout import Layout
from espalier.layout.layout import is_partial
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.tensor import DTensor, plain, redistribute, stamp


class Norm:
    """The 2-norm of all gradients together, and the loss, under way: one all-reduce over the whole mesh.

    Args:
        counted: of the gradients what this rank alone is responsible for, as plain tensors, whatever their
            layouts.
        loss: of the batch, where it may still be a sum over ranks.
        more: plain numbers to be summed along with them, and waited for at once.
    """

    def __init__(
        self,
        counted: Sequence[torch.Tensor],
        loss: torch.Tensor | None,
        mesh: Mesh,
        more: Sequence[torch.Tensor] = (),
    ) -> None:
        if isinstance(loss, DTensor) and any(is_partial(s) and s != "sum" for s in loss._layout.axes):
            loss = redistribute(loss, Layout.replicated(mesh, loss.shape))
        self._loss = loss
        with raw():
            total = torch.zeros((), dtype=torch.float64, device=mesh.device())
            if counted:
                real = [torch.view_as_real(g) if g.is_complex() else g for g in counted]
                total = _norms(real).to(total).square().sum()
            addend = _addend(loss, mesh)
            told = [*([] if addend is None else [addend]), *more]
            self._sums = torch.stack([total, *(x.to(total) for x in told)])
            self._more = len(more)
            self._pending = sum_whole_(self._sums, mesh, beside=not more)

    def more(self) -> tuple[torch.Tensor, ...]:
        """The sums of the numbers given, on every rank."""
        self._pending.wait()
        return self._sums[len(self._sums) - self._more :].unbind()

    def wait(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The norm (plain, float64, not finite where a gradient is not) and the loss, on every rank."""
        self._pending.wait()
        with raw():
            norm, *told = self._sums.unbind()
            if len(told) > self._more:
                assert isinstance(self._loss, DTensor)
                layout = Layout.replicated(self._loss._layout.mesh, self._loss._layout.shape)
                self._loss = stamp(told[0].to(self._loss.dtype).view(layout.local_shape), layout)
            return norm.sqrt(), self._loss


def share_of(loss: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """What this rank gives to a sum over the mesh that is to be the loss."""
    if isinstance(loss, DTensor) and any(is_partial(s) and s != "sum" for s in loss._layout.axes):
        loss = redistribute(loss, Layout.replicated(mesh, loss.shape))
    with raw():
        addend = _addend(loss, mesh)
        if addend is None:
            addend = plain(loss).view(())
            addend = torch.zeros_like(addend) if mesh.rank else addend
        return addend


def _addend(loss: torch.Tensor | None, mesh: Mesh) -> torch.Tensor | None:
    """What this rank adds to the sum that the loss is; None where it is whole already."""
    if not isinstance(loss, DTensor) or not loss._layout.partial:
        return None
    own = plain(loss).view(())
    once = not any(mesh.coordinate[a] for a in range(mesh.ndim) if a not in loss._layout.partial)
    return own if once else torch.zeros_like(own)


def scale_gradients(parameters: Sequence[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply all gradients by a scalar."""
    with raw():
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for p in parameters:
            if p.grad is not None:
                by_kind.setdefault((p.grad.device, p.grad.dtype), []).append(plain(p.grad))
        for (device, dtype), alike in by_kind.items():
            torch._foreach_mul_(alike, factor if isinstance(factor, float) else factor.to(device, dtype))


def _norms(grads: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of each, where some may be off the device; no square overflows that need not."""
    devices = {g.device for g in grads}
    if len(devices) == 1:
        return _alike_norms(grads)
    found = torch.zeros(len(grads), dtype=torch.float64, device=grads[0].device)
    for device in devices:
        alike = [i for i, g in enumerate(grads) if g.device == device]
        found[alike] = _alike_norms([grads[i] for i in alike]).to(found)
    return found


def _alike_norms(grads: list[torch.Tensor]) -> torch.Tensor:
    if grads[0].device.type == "cpu" and {g.dtype for g in grads} == {torch.float32}:
        # ten times as fast there as a sum in float64, which is left for squares that overflow
        norms = torch.stack(torch._foreach_norm(grads, 2))
        if math.isfinite(norms.sum(dtype=torch.float64)):
            return norms
    return torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64))


def clip_of(plan: Plan, max_grad_norm: float | None) -> float | None:
    """The largest norm that gradients may have.

    Raises:
        ValueError: the plan says one, and the argument another.
    """
    if max_grad_norm is not None and plan.clip not in (None, max_grad_norm):
        raise ValueError(
            f"Plan(clip={plan.clip}) and max_grad_norm={max_grad_norm} differ: give one of them."
        )
    return plan.clip if max_grad_norm is None else max_grad_norm
