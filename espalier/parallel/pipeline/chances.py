"""What stages draw from torch's generators, known from a run without data.

One process draws for one stage after the other, micro-batch by micro-batch. A rank draws what others draw in
between as well, and drops it: so its own stages find the generators as one process would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass as raw
from torch.utils._python_dispatch import TorchDispatchMode

from espalier.comm.words import words_of_all
from espalier.mesh import Mesh
from espalier.tensor.seeding import at_position, same_position, same_seed, without_tag
from espalier.tensor.traces import Generators
from espalier.trees import tree_map

_META = torch.device("meta")
States = tuple[torch.Tensor, ...]


class _Like(NamedTuple):
    """Stands for a tensor of a call; one without data is one of the device that computes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Draw(NamedTuple):
    """An operation that draws from a default generator, so many times in a row."""

    func: Any
    args: Any
    kwargs: Any
    times: int = 1

    def again(self, device: torch.device) -> None:
        """Draw as much, on the device that computes, and drop it."""

        def real(x: Any) -> Any:
            if type(x) is _Like:
                on = device if x.device == _META else x.device
                return torch.full(x.shape, 0.5 if x.dtype.is_floating_point else 1, dtype=x.dtype, device=on)
            return device if x == _META and isinstance(x, torch.device) else x

        with torch.no_grad(), raw():
            args = [real(x) for x in self.args]
            kwargs = {name: real(x) for name, x in self.kwargs.items()}
            for _ in range(self.times):
                self.func(*args, **kwargs)


class Drawing(TorchDispatchMode):
    """Notes what is drawn while it is open.

    Args:
        device: on which what has no data here is drawn all the same; None: it is not.

    Attributes:
        found: the draws, in order.
    """

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self.found: list[Draw] = []
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with raw():
            if not _draws(func, kwargs):
                return func(*args, **kwargs)
            # an overload with a generator is called with it, be it None
            given = args, {k: x for k, x in kwargs.items() if x is not None or k == "generator"}
            draw = Draw(func, *tree_map(_like, given))
            out = func(*args, **kwargs)
            if isinstance(out, torch.Tensor) and out.is_meta and self._device is not None:
                draw.again(self._device)
        last = self.found[-1] if self.found else None
        if last is not None and last[:3] == draw[:3]:
            self.found[-1] = last._replace(times=last.times + 1)
        else:
            self.found.append(draw)
        return out


def _draws(func: Any, kwargs: Any) -> bool:
    """Whether an operation draws; fused ones, attention say, draw nothing where DTensors call them."""
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    return seeded and kwargs.get("generator") is None and not func.overloadpacket.__name__.startswith("_")


def _like(x: Any) -> Any:
    return _Like(tuple(x.shape), x.dtype, x.device) if isinstance(x, torch.Tensor) else x


def states(device: torch.device) -> States:
    """Of the generators from which a program on a device draws."""
    found = torch.get_rng_state()
    return (found, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (found,)


def restore(device: torch.device, found: States) -> None:
    """Let them go on from there."""
    torch.set_rng_state(found[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(found[1], device)


def equal(a: States, b: States) -> bool:
    """Whether these are the same."""
    return same_position(a[0], b[0]) and all(map(torch.equal, a[1:], b[1:]))


def draw_again(draws: Sequence[Draw], device: torch.device) -> None:
    """Draw what was noted, and drop it."""
    for draw in draws:
        draw.again(device)


class Dice:
    """What one stage alone draws from generators of random numbers, so that all ranks go on from there.

    Other ranks cannot know it: it may hang on values, or the generators are Python's or NumPy's. Made on
    all of them before that stage runs.

    Args:
        mesh: of the whole model.
        source: the coordinate on the axis ``pipe`` of the rank that draws.
    """

    def __init__(self, mesh: Mesh, source: int) -> None:
        self._line, self._source, self._device = mesh["pipe"], source, mesh.device()
        self._before, self._others = states(self._device), Generators()

    def tell(self) -> None:
        """After it has run: all ranks along the axis come here."""
        drawn = self._drawn() if self._line.rank == self._source else None
        torchs, others = words_of_all(drawn, self._line)[self._source]
        if torchs is not None:
            is_seeded, (cpu, *device) = torchs
            here = states(self._device)[0]
            restore(self._device, (cpu if is_seeded else at_position(here, cpu), *device))
        if others is not None:
            others.restore()

    def _drawn(self) -> tuple[tuple[bool, States] | None, Generators | None]:
        """What has changed: states of torch's generators, and whether they were seeded; others' states."""
        now, was = states(self._device), self._before
        is_seeded = not same_seed(now[0], was[0])
        has_drawn = is_seeded or not equal(now, was)
        torchs = (is_seeded, (without_tag(now[0]), *now[1:])) if has_drawn else None
        return torchs, None if self._others.as_now() else Generators()


__all__ = ["Dice", "Draw", "Drawing", "States", "draw_again", "equal", "restore", "states"]
