"""The update of chunks whose states are off the device: one after the other, within one optimizer step.

While a chunk is updated the states of the next are read and those of the one before are written. States in
the host's memory are updated there, where the optimizer has a fused kernel for it, after the device was
given its own part to do (Ren et al. 2021, ZeRO-Offload; Rajbhandari et al. 2021, ZeRO-Infinity).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm.agreement import agree
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel.data.chunks import Chunk, show
from espalier.parallel.data.disk import DiskError
from espalier.parallel.data.residency import Shelf
from espalier.parallel.fused import has_host_kernel
from espalier.parallel.offload import Place
from espalier.tensor import plain, stamp
from espalier.tensor.dtensor import DTensor

Step = Callable[[torch.optim.Optimizer], None]
Turns = Callable[[Chunk, bool], AbstractContextManager[None]]

_grad: Any = torch.Tensor.grad


class _State(NamedTuple):
    """One tensor of a chunk's states; ``p`` is None for the chunk's master."""

    p: torch.Tensor | None
    name: str
    layout: Layout | None


class Away:
    """A chunk of which something is off the device."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk

    @property
    def place(self) -> Place:
        """Where its states lie between their uses."""
        return self.chunk.places.get("states", "device")

    @property
    def key(self) -> str:
        """That of its states on the shelf."""
        return f"states-{self.chunk.number}"

    def states(self, optimizer: torch.optim.Optimizer) -> tuple[list[_State], list[torch.Tensor]]:
        """All its states that are no single numbers."""
        what, tensors = [], []
        for m in self.chunk.members:
            for name, x in optimizer.state.get(m.p, {}).items():
                if isinstance(x, torch.Tensor) and x.ndim:
                    what.append(_State(m.p, name, x._layout if type(x) is DTensor else None))
                    tensors.append(x)
        if self.chunk.master is not None:
            what.append(_State(None, "master", None))
            tensors.append(self.chunk.master)
        return what, tensors

    def set(
        self, optimizer: torch.optim.Optimizer, what: Sequence[_State], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Put others in the place of these states."""
        with raw():
            for state, x in zip(what, tensors, strict=True):
                if state.p is None:
                    self.chunk.master = x
                else:
                    laid = x if state.layout is None else stamp(x.detach(), state.layout)
                    optimizer.state[state.p][state.name] = laid


class Streaming:
    """Updates the chunks of which something is off the device.

    Args:
        chunks: these, in the order of the update.
        shelf: where what is off the device lies.
        pieces: whether states are those of this rank's pieces (the stage cuts them).
        turns: gives, for a chunk, the context in which its parameters are what the optimizer updates; they
            and their gradients are on the host if that is asked for and they lie there anyway.
    """

    def __init__(self, chunks: Sequence[Chunk], shelf: Shelf, mesh: Mesh, pieces: bool, turns: Turns) -> None:
        self.away = [Away(chunk) for chunk in chunks]
        self.shelf, self._mesh, self._pieces, self._turns = shelf, mesh, pieces, turns

    def reserve(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the space for all states, before there are any (a collective, if any are on disk).

        Raises:
            DiskError: there is not enough of it, on some rank.
        """
        disk = self.shelf.disk
        on_disk = [a for a in self.away if a.place == "disk"]
        try:
            sizes = [self._expected(optimizer, a) for a in on_disk]
            if disk is not None and sizes:
                for a, size in zip(on_disk, sizes, strict=True):
                    disk.reserve(a.key, size)
        except DiskError as error:
            self.shelf.errors.append(error)
        self.agree()

    def leave_master(self, chunk: Chunk) -> None:
        """Start to take a chunk's master away, which is all that there is of its states yet."""
        if chunk.master is not None and "states" in chunk.places:
            master, chunk.master = chunk.master, None

            def away(shown: list[torch.Tensor]) -> None:
                (chunk.master,) = shown

            self.shelf.put(Away(chunk).key, [master], chunk.places["states"], away, keep=True)

    def place(self, optimizer: torch.optim.Optimizer) -> None:
        """Take away what states there are before the first step, beside masters.

        Raises:
            DiskError: something could not be written, on some rank.
        """
        for a in self.away:
            if any(state.p is not None for state in a.states(optimizer)[0]):
                self.shelf.settle()
                self.leave(optimizer, a)
        self.shelf.settle()
        self.agree()

    def update(self, optimizer: torch.optim.Optimizer, step: Step) -> None:
        """One step of the optimizer: it counts once, for its hooks and schedulers too.

        The optimizer updates what is on the device. Before its last hooks run, what is away is updated by
        shadows of it that hold a chunk each. What goes wrong is said by :meth:`agree`.
        """
        away = {id(m.p) for a in self.away for m in a.chunk.members}
        shadows = [_shadow(optimizer, a) for a in self.away]
        with _without(optimizer, away), _before_last_hooks(optimizer, lambda: self._rest(shadows, step)):
            step(optimizer)

    def agree(self) -> None:
        """Raise on all ranks what went wrong with files on one of them (a collective, if any are used).

        Raises:
            DiskError: what was updated could not be written: it stays in memory, all parameters and states
                are those after the step, and the next step tries again. Or a file is damaged: then the
                chunks from that one on are not updated.
        """
        errors, self.shelf.errors = self.shelf.errors, []
        if any("disk" in a.chunk.places.values() for a in self.away):
            agree(errors[0] if errors else None, self._mesh, range(self._mesh.ndim))

    # ---- one chunk after the other

    def _rest(self, shadows: Sequence[torch.optim.Optimizer], step: Step) -> None:
        try:
            for i, (a, shadow) in enumerate(zip(self.away, shadows, strict=True)):
                on_host = a.place != "device" and has_host_kernel(shadow)
                if a.place != "device":
                    what, shown = a.states(shadow)
                    a.set(shadow, what, self.shelf.take(a.key, shown, on_host=on_host))
                # so that three chunks are here at most: one leaves, one has its turn, one comes
                self.shelf.settle(keep=len(a.chunk.places.keys() - {"gradients"}))
                for following in self.away[i + 1 : i + 2]:
                    self.shelf.start(following.key, following.states(shadow)[1])
                with self._turns(a.chunk, on_host):
                    if on_host and self.shelf.device.type == "cuda":
                        self._step_on_host(a, shadow, step)
                    else:
                        step(shadow)
                self.leave(shadow, a)
        except DiskError as error:
            self.shelf.errors.append(error)
        finally:
            self.shelf.settle()

    def _step_on_host(self, a: Away, shadow: torch.optim.Optimizer, step: Step) -> None:
        """A step on copies of parameters and gradients in the host's memory."""
        here: list[tuple[Any, torch.Tensor]] = []
        with raw(), torch.no_grad():
            for m in a.chunk.members:
                here.append((m.p, plain(m.p.detach())))
            grads = [_grad.__get__(p) for p, _ in here]
            devices = [x for _, x in here] + [plain(g) for g in grads if g is not None]
            host = self.shelf.to_host(devices)
            copies, on_host = iter(host[len(here) :]), host[: len(here)]
            for (p, _), grad, x in zip(here, grads, on_host, strict=True):
                _grad.__set__(p, None)
                show(p, x, p._layout)
                _grad.__set__(p, None if grad is None else stamp(next(copies), grad._layout))
                for name, state in shadow.state.get(p, {}).items():
                    if isinstance(state, torch.Tensor) and not state.ndim:
                        shadow.state[p][name] = state.to("cpu")
        step(shadow)
        with raw(), torch.no_grad():
            event = self.shelf.copy([x for _, x in here], on_host)
            torch.cuda.current_stream(self.shelf.device).wait_event(event)
            for p, x in here:
                _grad.__set__(p, None)
                show(p, x, p._layout)

    def leave(self, optimizer: torch.optim.Optimizer, a: Away) -> None:
        """Start to take a chunk's states away."""
        what, tensors = a.states(optimizer)
        if tensors and a.place != "device":
            self.shelf.put(a.key, tensors, a.place, lambda shown: a.set(optimizer, what, shown))
            a.set(optimizer, what, [torch.empty(0) for _ in tensors])  # lets go of them

    def _expected(self, optimizer: torch.optim.Optimizer, a: Away) -> int:
        """Bytes of a chunk's states, by a step of the optimizer on the ``meta`` device."""
        shadow = _shadow(optimizer, a)
        shadow.state = defaultdict(dict)
        elements = 0
        with raw():
            shapes = {id(m.p): (m.shard if self._pieces else m.full).local_shape for m in a.chunk.members}
            for group in shadow.param_groups:
                dtype = torch.float32 if a.chunk.has_master else a.chunk.dtype
                like = [torch.empty(shapes[id(p)], dtype=dtype, device="meta") for p in group["params"]]
                for x in like:
                    x.grad = torch.empty_like(x)
                elements += sum(x.numel() * x.element_size() for x in like)
                group["params"] = like
                group.update({key: False for key in ("fused", "foreach") if key in group})
        master = 4 * (a.chunk.size if self._pieces else a.chunk.elements) if a.chunk.has_master else 0
        try:
            shadow.step()
        except Exception:  # one that does not run without values: two states a parameter, as most have
            return 2 * elements + master
        states = [x for state in shadow.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        return sum(x.numel() * x.element_size() + 64 for x in states if x.ndim) + master


def _shadow(optimizer: torch.optim.Optimizer, a: Away) -> torch.optim.Optimizer:
    """The optimizer again, with the parameters of one chunk, the same states, and no hooks."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # by torch.optim.Optimizer: what is within runs no hooks
        step = step.__wrapped__  # type: ignore[attr-defined]
    shadow.step = partial(step, shadow)  # type: ignore
    shadow.step.hooked = False  # type: ignore[attr-defined]
    own = {id(m.p) for m in a.chunk.members}
    shadow.param_groups = []
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if id(p) in own]
        if params:
            shadow.param_groups.append({**group, "params": params})
    return shadow


@contextmanager
def _without(optimizer: torch.optim.Optimizer, away: Collection[int]) -> Iterator[None]:
    """While open, the optimizer does not hold these parameters."""
    before = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in away]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params


@contextmanager
def _before_last_hooks(optimizer: torch.optim.Optimizer, call: Callable[[], None]) -> Iterator[None]:
    """While open, a step calls this when it is done and before the hooks that others registered."""
    handle = optimizer.register_step_post_hook(lambda *_: call())
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        handle.remove()


__all__ = ["Away", "Streaming"]
