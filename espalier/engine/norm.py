"""The global gradient norm and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm.collectives import sum_whole
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.tensor import plain


def global_norm(counted: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """The 2-norm of all gradients together (a plain float64 scalar, equal on all ranks).

    One all-reduce over the whole mesh, whatever the layouts. It is not finite where a gradient is not.

    Args:
        counted: of the gradients what this rank alone is responsible for, as plain tensors.
    """
    with raw():
        total = torch.zeros((), dtype=torch.float64, device=mesh.device())
        if counted:
            real = [torch.view_as_real(g) if g.is_complex() else g for g in counted]
            norms = _norms(real)
            total = torch.stack([n.to(total) for n in norms]).square().sum()
        return sum_whole(total, mesh).sqrt()


def scale_gradients(parameters: Sequence[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply all gradients by a scalar."""
    with raw():
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for p in parameters:
            if p.grad is not None:
                by_kind.setdefault((p.grad.device, p.grad.dtype), []).append(plain(p.grad))
        for (device, dtype), alike in by_kind.items():
            torch._foreach_mul_(alike, factor if isinstance(factor, float) else factor.to(device, dtype))


def _norms(grads: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The 2-norm of each, where some may be off the device; no square overflows that need not."""
    devices = {g.device for g in grads}
    if len(devices) == 1:
        return _alike_norms(grads)
    found: dict[int, torch.Tensor] = {}
    for device in devices:
        alike = [i for i, g in enumerate(grads) if g.device == device]
        found.update(zip(alike, _alike_norms([grads[i] for i in alike]), strict=True))
    return [found[i] for i in range(len(grads))]


def _alike_norms(grads: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    if grads[0].device.type == "cpu" and all(g.dtype is torch.float32 for g in grads):
        # ten times as fast there as a sum in float64, which is left for squares that overflow
        norms = torch._foreach_norm(grads, 2)
        if torch.stack(norms).isfinite().all():
            return norms
    return torch._foreach_norm(grads, 2, dtype=torch.float64)


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
