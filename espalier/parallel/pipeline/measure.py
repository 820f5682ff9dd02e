"""How long the parts of a model take on a device: what ``split`` may balance by, in place of counts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from espalier.comm.agreement import agree
from espalier.comm.collectives import all_reduce_
from espalier.mesh import Mesh
from espalier.parallel.pipeline.actions import Action, Kind
from espalier.parallel.pipeline.record import SplitError
from espalier.parallel.pipeline.split import StageProgram, in_pieces
from espalier.parallel.pipeline.steps import Env
from espalier.parallel.pipeline.stopwatch import Stopwatch
from espalier.parallel.pipeline.trace import some, stand_in_values
from espalier.parallel.pipeline.trees import leaves, mapped


def measured(
    model: nn.Module,
    example: Any,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    rounds: int = 5,
    divide: bool = True,
) -> dict[str, float]:
    """Seconds that the parts of a model take here, forward and backward: the ``costs`` of :func:`split`.

    One part after another is run by itself, with random parameters, on random values where others would send
    some. So the model is not changed, may lie on the meta device, and takes no more memory than its largest
    part. What each stage computes of the batch for itself (masks, positions) is not timed. Autocast holds
    if it is open.

    On an accelerator its own clock tells, by events. On a CPU it is the processor's time of the thread that
    computes: what other programs take of a busy machine does not count, nor do waits. Of several threads in
    an operation (``torch.set_num_threads``) that thread is one, so its time is about the operation's; that of
    the whole process would count an operation as often as threads share it.

    Args:
        example: a micro-batch, as plain tensors.
        device: that computes; by default that of the parameters.
        dtype: of parameters that are floats; None: their own.
        rounds: the shortest time of so many is taken, after one that does not count.
        divide: whether blocks are taken apart, where a stage may begin within one.

    Raises:
        SplitError: a part cannot be run by itself.
    """
    names, programs, standing = in_pieces(model, example, device, dtype, divide)
    device = standing.device
    batch = mapped(lambda x: x.detach().to(device) if isinstance(x, torch.Tensor) else x, example)
    found = {}
    with ExitStack() as stack:
        twin = stack.enter_context(standing.apart(FakeTensorMode(allow_non_fake_inputs=True), batch))
        stack.enter_context(torch.enable_grad())
        for name, program in zip(names, programs, strict=True):
            try:
                found[name] = _seconds(program.on(twin.module), twin.given, device, rounds)
            except Exception as error:
                raise SplitError(
                    f"{name!r} cannot be run by itself on random values, to be measured ({error}). Let its "
                    'operations be counted, balance = "counted", or name cuts: Plan(cuts=[...]).'
                ) from error
    return found


def measured_by_all(
    mesh: Mesh, model: nn.Module, example: Any, *, divide: bool = True, **given: Any
) -> Mapping[str, float]:
    """:func:`measured` on every rank of a mesh; of each part the time of the slowest.

    Blocks are measured whole where one of their parts cannot be run by itself.
    """
    found: dict[str, float] = {}
    failure: Exception | None = None
    try:
        found = measured(model, example, device=mesh.device(), divide=divide, **given)
    except Exception as error:
        failure = error
    try:
        agree(failure, mesh, range(mesh.ndim))
    except Exception:
        if not divide:
            raise
        return measured_by_all(mesh, model, example, divide=False, **given)
    times = torch.tensor([*found.values()], dtype=torch.float64, device=mesh.device())
    for axis in range(mesh.ndim):
        all_reduce_(times, mesh, axis, "max").wait()
    return dict(zip(found, times.tolist(), strict=True))


def _seconds(program: StageProgram, batch: Any, device: torch.device, rounds: int) -> float:
    watch, first = Stopwatch(device, time.thread_time), program.begins

    def timed(program: StageProgram, env: Env, here: torch.device) -> None:
        program.do(program.steps[:first], env, here)
        watch.start()
        program.do(program.steps[first:], env, here)

    with stand_in_values(program.holders):
        for i in range(rounds + 1):
            given = [some(v.shape, v.dtype, device).requires_grad_(v.grad) for v in program.inputs]
            roots = [x for x in leaves(program(given, batch, timed), torch.Tensor) if x.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
            watch.stop(Action(Kind.F, program.number, i))
            del roots
    return min(span.end - span.start for span in watch.spans()[1:])


__all__ = ["measured", "measured_by_all"]
