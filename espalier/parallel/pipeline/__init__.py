"""Pipelines: a model split into stages, and what runs them by a schedule.

:func:`gpipe` is all of it in thirty lines: begin there. The other files add how a model is split (``split``),
other schedules (``espalier.parallel.schedules``), and what happens when both meet (``runtime``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from espalier.comm.collectives import receive_from, send_to
from espalier.mesh import Mesh
from espalier.parallel import schedules
from espalier.parallel.pipeline.measure import measured
from espalier.parallel.pipeline.split import Split, SplitError, split
from espalier.parallel.schedules import *  # noqa: F403


def gpipe(
    stage: nn.Module,
    micro_batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    mesh: Mesh,
    like: Callable[[int], tuple[Sequence[int], torch.dtype]],
) -> float:
    """Forward and backward of a step, all micro-batches forward first (Huang et al. 2019, GPipe).

    Args:
        stage: this rank's part of the model, one tensor in and one out.
        micro_batches: inputs and targets, the same on every rank.
        loss_of: called by the last rank, with its output and the targets; a mean over rows.
        mesh: the ranks, on one axis, in the order of the stages.
        like: shape and dtype of what the stage before sends for micro-batch i.

    Returns:
        the loss, on the last rank (0 on others). Gradients are left on the stage's parameters.
    """
    here, last, total = mesh.rank, mesh.size() - 1, 0.0
    held = []
    for i, (x, targets) in enumerate(micro_batches):
        if here > 0:
            (x,) = receive_from([like(i)], mesh, 0, here - 1, tag=0).wait()
            x.requires_grad_()
        y = stage(x)
        if here < last:
            send_to([y.detach()], mesh, 0, here + 1, tag=0).wait()
        else:
            y = loss_of(y, targets) / len(micro_batches)
            total += y.item()
        held.append((x, y))
    for x, y in held:
        gradient = None
        if here < last:
            (gradient,) = receive_from([(y.shape, y.dtype)], mesh, 0, here + 1, tag=1).wait()
        y.backward(gradient)
        if here > 0:
            assert x.grad is not None
            send_to([x.grad], mesh, 0, here - 1, tag=1).wait()
    return total


__all__ = ["Split", "SplitError", "gpipe", "measured", "split"]
__all__ += schedules.__all__
