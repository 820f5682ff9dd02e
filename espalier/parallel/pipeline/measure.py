"""How long the parts of a model take on a device: what ``split`` may balance by, in place of counts."""

from __future__ import annotations

import platform
import statistics
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from espalier.comm import all_gather
from espalier.comm.collectives import all_reduce_
from espalier.comm.control import agree
from espalier.device import is_accelerator, timed_event
from espalier.mesh import Mesh
from espalier.parallel.pipeline.arguments import leaves, mapped
from espalier.parallel.pipeline.model_stand_ins import stand_in_values
from espalier.parallel.pipeline.objects import some
from espalier.parallel.pipeline.programs import Env
from espalier.parallel.pipeline.record import SplitError
from espalier.parallel.pipeline.split import StageProgram, in_segments
from espalier.parallel.schedules.actions import Action, ActionKind, Schedule
from espalier.parallel.schedules.simulate import Span, Timeline
from espalier.torch_private import FakeTensorMode


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
    names, programs, stand_ins = in_segments(model, example, device, dtype, divide)
    device = stand_ins.device
    batch = mapped(lambda x: x.detach().to(device) if isinstance(x, torch.Tensor) else x, example)
    seconds = {}
    with ExitStack() as stack:
        twin = stack.enter_context(stand_ins.apart(FakeTensorMode(allow_non_fake_inputs=True), batch))
        stack.enter_context(torch.enable_grad())
        for name, program in zip(names, programs, strict=True):
            try:
                seconds[name] = _seconds(program.on(twin.module), twin.extra, device, rounds)
            except Exception as error:
                raise SplitError(
                    f"{name!r} cannot be run by itself on random values, to be measured ({error}). Let its "
                    'operations be counted, balance = "counted", or name cuts: Plan(cuts=[...]).'
                ) from error
    return seconds


def measured_by_all(
    mesh: Mesh, model: nn.Module, example: Any, *, divide: bool = True, **options: Any
) -> Mapping[str, float]:
    """:func:`measured` on every rank of a mesh; of each part the time of the slowest.

    Blocks are measured whole where one of their parts cannot be run by itself.
    """
    seconds: dict[str, float] = {}
    failure: Exception | None = None
    try:
        seconds = measured(model, example, device=mesh.device(), divide=divide, **options)
    except Exception as error:
        failure = error
    try:
        agree(failure, mesh, range(mesh.ndim))
    except Exception:
        if not divide:
            raise
        return measured_by_all(mesh, model, example, divide=False, **options)
    times = torch.tensor([*seconds.values()], dtype=torch.float64, device=mesh.device())
    for axis in range(mesh.ndim):
        all_reduce_(times, mesh, axis, "max").wait()
    return dict(zip(seconds, times.tolist(), strict=True))


def _seconds(program: StageProgram, batch: Any, device: torch.device, rounds: int) -> float:
    stopwatch, first = Stopwatch(device, time.thread_time), program.begins

    def timed(program: StageProgram, env: Env, here: torch.device) -> None:
        program.do(program.steps[:first], env, here)
        stopwatch.start()
        program.do(program.steps[first:], env, here)

    with stand_in_values(program.holders):
        for i in range(rounds + 1):
            inputs = [some(v.shape, v.dtype, device).requires_grad_(v.grad) for v in program.inputs]
            roots = [x for x in leaves(program(inputs, batch, timed), torch.Tensor) if x.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
            stopwatch.stop(Action(ActionKind.F, program.number, i))
            del roots
    return min(span.end - span.start for span in stopwatch.spans()[1:])


# ---- when a rank's actions really happen, and all ranks' as one timeline


_ROUNDS = 7  # of looks at the clocks of several machines


class Stopwatch:
    """Takes the time of a rank's actions.

    On an accelerator by events of its stream, so without waiting for it; else by the clock.

    Args:
        device: that computes.
        clock: in seconds; what :meth:`spans` are by, and what is looked at where there is no accelerator.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._by_events = is_accelerator(device)
        self._taken: list[tuple[Action, Any, Any]] = []
        self._began: Any = None

    def start(self) -> None:
        """An action begins now, if it has not done anything before but wait."""
        self._began = self._now()

    def stop(self, action: Action) -> None:
        """It ends."""
        self._taken.append((action, self._began, self._now()))

    def _now(self) -> Any:
        return timed_event(self._device) if self._by_events else self._clock()

    def spans(self) -> list[Span]:
        """What has been done, by the clock."""
        if not self._by_events:
            return [Span(*taken) for taken in self._taken]
        last = self._now()
        last.synchronize()
        now = self._clock()
        return [
            Span(action, *(now - moment.elapsed_time(last) / 1e3 for moment in moments))
            for action, *moments in self._taken
        ]


def gathered(own: list[Span], schedule: Schedule, mesh: Mesh, axis: int) -> Timeline:
    """The timeline of all ranks along an axis, which all call this.

    Clocks of other machines are set by looking at them right after collectives, a few times.

    Args:
        own: this rank's spans.
        schedule: that they are of.
    """

    def all_of(values: list[float]) -> list[list[float]]:
        table = torch.tensor([values], dtype=torch.float64, device=mesh.device())
        return all_gather(table, mesh, axis, 0, mesh.shape[axis]).tolist()

    looks = []
    for _ in range(_ROUNDS):
        all_of([0.0])
        looks.append(time.perf_counter())
    of_all = all_of([_machine(), *looks])
    ahead = [
        0.0
        if row[0] == of_all[0][0]
        else statistics.median(a - b for a, b in zip(row[1:], of_all[0][1:], strict=True))
        for row in of_all
    ]
    rows = [[action for action in row if action.kind.computes] for row in schedule.actions]
    times = [moment for span in own for moment in span[1:]]
    times += [0.0] * (2 * max(map(len, rows)) - len(times))
    table = all_of(times)
    begin = min(row[0] - late for row, late, done in zip(table, ahead, rows, strict=True) if done)
    return Timeline(
        schedule,
        tuple(
            tuple(
                Span(action, row[2 * i] - late - begin, row[2 * i + 1] - late - begin)
                for i, action in enumerate(done)
            )
            for row, late, done in zip(table, ahead, rows, strict=True)
        ),
    )


def _machine() -> float:
    """A number that is the same where clocks are."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text() if boot.exists() else platform.node()
    return float(zlib.crc32(name.encode()))
