"""The global gradient norm and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm import collectives as door
from espalier.mesh import Mesh
from espalier.tensor import DTensor, plain


def global_norm(parameters: Sequence[DTensor], mesh: Mesh) -> torch.Tensor:
    """The 2-norm of all gradients together (a plain scalar, equal on all ranks).

    Parameters that the same axes cut share one reduction along each of these axes.
    """
    groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for p in parameters:
        grad = p.grad
        assert isinstance(grad, DTensor)
        axes = tuple(sorted(a for a in grad._layout.order if mesh.shape[a] > 1))
        assert not any(mesh.shape[a] > 1 for a in grad._layout.partial), "reduce gradients first"
        groups.setdefault(axes, []).append(grad)
    with raw():
        total = torch.zeros((), dtype=torch.float64 if _wide(groups) else torch.float32, device=mesh.device())
        for axes, grads in sorted(groups.items()):
            norms = torch._foreach_norm([plain(g) for g in grads], 2)
            squares = torch.stack([n.to(total.device, total.dtype) for n in norms]).square().sum()
            for axis in axes:
                squares = door.all_reduce(squares, mesh, axis)
            total = total + squares
        return total.sqrt()


def scale_gradients(parameters: Sequence[DTensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale all gradients down to ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does."""
    with raw():
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        grads = [plain(p.grad) for p in parameters if p.grad is not None]
        by_kind: dict[torch.dtype, list[torch.Tensor]] = {}
        for g in grads:
            by_kind.setdefault(g.dtype, []).append(g)
        for kind, alike in by_kind.items():
            torch._foreach_mul_(alike, factor.to(kind))


def _wide(groups: dict[tuple[int, ...], list[torch.Tensor]]) -> bool:
    return any(g.dtype == torch.float64 for grads in groups.values() for g in grads)
