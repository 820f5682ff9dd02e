"""A stage of one rank computes on plain tensors.

Where a mesh has one rank every layout is the whole tensor, and DTensors add nothing but the time to dispatch
them. So a stage's steps are done with parameters, buffers and values that are plain meanwhile. Except for
those that need DTensors, as a run without data shows (see ``shape_inference``): those that draw random
values, which are the same under any layout, those of which torch refuses plain tensors, and those that make
or use values that are followed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from espalier.comm.custom_ops import recording
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel.pipeline.programs import Env, ProgramStep
from espalier.parallel.pipeline.record import SIZED
from espalier.parallel.pipeline.split import StageProgram
from espalier.tensor import DTensor, plain, stamp
from espalier.tensor.dtensor import layout_of
from espalier.tensor.names import made_in
from espalier.tensor.observers import Go, Watcher, watchers, watching
from espalier.tensor.saved import outer_hooks
from espalier.torch_private import FORWARD_HOOKS, TorchDispatchMode, forward_hooks, hooks_of_all_modules
from espalier.trees import tensors_in

_Facts = tuple[tuple[int, ...], torch.dtype, bool]


_Instead = Callable[..., torch.Tensor]


class Followed(NamedTuple):
    """Who follows values through a forward pass, and whether one is followed.

    Attributes:
        instead: of a function and what it has made, what makes the same of plain tensors, to be followed from
            there on, whatever it is given; None if there is no such thing.
        see_sized: is told of a function whose result has, in a run without data, sizes that values told; of
            what it was given; and of what it gave.
    """

    watcher: Watcher
    is_followed: Callable[[torch.Tensor], bool]
    instead: Callable[[Callable[..., Any], torch.Tensor], _Instead | None]
    see_sized: Callable[[Any, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]

    def open(self) -> AbstractContextManager[None]:
        """While open, values are followed."""
        return watching(self.watcher)


class SingleRank:
    """Does the steps of a program on one rank.

    Args:
        typed: for each step, whether it is done on DTensors.
        layouts: by their numbers, those of values that are DTensors.
        lasts: whether none of the former uses parameters or buffers.
        instead: what other steps do in place of what they say, by their places.
    """

    def __init__(
        self,
        typed: Sequence[bool],
        layouts: Mapping[int, Layout],
        lasts: bool,
        instead: Mapping[int, _Instead],
    ) -> None:
        self.typed, self._layouts, self.lasts, self._instead = typed, layouts, lasts, instead
        self._steps: dict[StageProgram, list[ProgramStep]] = {}
        places = groupby(range(len(typed)), typed.__getitem__)
        stretches = [(kind, tuple(some)) for kind, some in places]
        self._stretches = [(kind, slice(some[0], some[-1] + 1)) for kind, some in stretches]

    def on(self, mesh: Mesh) -> SingleRank:
        """The same on another mesh of one rank."""
        layouts = {n: Layout.of(mesh, lay.axes, lay.cuts, lay.shape) for n, lay in self._layouts.items()}
        return SingleRank(self.typed, layouts, self.lasts, self._instead)

    @staticmethod
    def fits(program: StageProgram, followed: Followed | None) -> bool:
        """Whether nobody looks on who expects DTensors, but for who follows values."""
        others = [w for w in watchers() if followed is None or w is not followed.watcher]
        if any(w.passes for w in others) or recording():
            return False
        if any(hooks_of_all_modules(FORWARD_HOOKS)):
            return False
        hooks = (x for m in program.inner for table in forward_hooks(m) for x in table.values())
        return all(made_in(x, "transformers") for x in hooks)

    def __call__(self, program: StageProgram, env: Env, here: torch.device, plain: bool = False) -> None:
        """Do them; what is in ``env``, before and after, are DTensors.

        Args:
            plain: what the program holds is plain meanwhile, by :func:`as_plain`; it must be one that
                :attr:`lasts`.
        """
        steps = self._steps.get(program)
        if steps is None:
            steps = self._steps[program] = list(program.steps)
            for i, func in self._instead.items():
                steps[i] = steps[i].by(func)
        for typed, some in self._stretches:
            if typed:
                self.do(steps[some], program, env, here)
                continue
            with nullcontext() if plain else as_plain(program):
                try:
                    _untype(env, program.batch_values)
                    self.do(steps[some], program, env, here)
                finally:
                    for n, x in env.items():
                        if type(x) is torch.Tensor and n in self._layouts:
                            stamp(x, self._layouts[n])

    def do(self, steps: Sequence[ProgramStep], program: StageProgram, env: Env, here: torch.device) -> None:
        """Do some."""
        program.do(steps, env, here)


def _untype(env: Env, batch: Collection[int]) -> None:
    for n, x in env.items():
        if type(x) is DTensor:
            if n in batch:  # others have it too
                env[n] = plain(x)
            else:
                x.__class__ = torch.Tensor  # type: ignore[assignment]


@contextmanager
def as_plain(*programs: StageProgram) -> Iterator[None]:
    """While open, parameters and buffers of programs are plain."""
    parameters = [x for program in programs for x in program.parameters() if type(x) is DTensor]
    buffers = [x for program in programs for x in program.buffers() if type(x) is DTensor]
    for x in parameters:
        x.__class__ = nn.Parameter  # type: ignore[assignment]
    for x in buffers:
        x.__class__ = torch.Tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for x in (*parameters, *buffers):
            x.__class__ = DTensor


_STATISTICS = (F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm)


class _Mixing(Watcher):
    """Sees norms whose parameters are of another dtype than their statistics: the dispatcher can do them."""

    traffic = False

    def __init__(self) -> None:
        self.is_seen = False

    def around(self, func: Any, args: Any, kwargs: Any, go: Go) -> Any:
        """Look, and carry it out."""
        if func in _STATISTICS:
            self.is_seen |= len({x.dtype for x in tensors_in((args, kwargs)) if x.ndim == 1}) > 1
        return go()


class SingleRankStudy(SingleRank):
    """Does the steps of a program without data, on DTensors, to find how it can be run on one rank."""

    def __init__(self, program: StageProgram, followed: Followed | None) -> None:
        super().__init__([True] * len(program.steps), {}, False, {})
        self._program, self._followed = program, followed
        self._facts: dict[int, _Facts] = {}
        self._seen: dict[int, Layout] = {}
        self._typed: list[bool] = []
        self._marks: set[int] = set()  # values that are followed
        self._other: dict[int, _Instead] = {}

    def __call__(self, program: StageProgram, env: Env, here: torch.device, plain: bool = False) -> None:
        """Do them, and take down what they give."""
        self._note(env, env)
        with nullcontext() if self._followed is None else self._followed.open():
            super().__call__(program, env, here)

    def do(self, steps: Sequence[ProgramStep], program: StageProgram, env: Env, here: torch.device) -> None:
        """Do some, and see which need DTensors."""
        for step in steps:
            before = torch.get_rng_state()
            inputs, mixing = [env[n] for n in step.inputs], _Mixing()
            with watching(mixing):
                program.do([step], env, here)
            outputs = [n for n in step.outputs if n in env]
            self._note(env, outputs)
            if self._followed is not None and step.func in SIZED:
                self._followed.see_sized(step.func, inputs, [env[n] for n in outputs])
            self._marks.update(n for n, x in zip(step.inputs, inputs, strict=True) if self._is_followed(x))
            self._marks.update(n for n in outputs if self._is_followed(env[n]))
            if self._followed is not None and len(outputs) == 1 and not isinstance(step.func, str):
                other = self._followed.instead(step.func, env[outputs[0]])
                if other is not None:
                    self._other[len(self._typed)] = other
            self._typed.append(mixing.is_seen or not torch.equal(torch.get_rng_state(), before))

    def _is_followed(self, x: torch.Tensor) -> bool:
        return self._followed is not None and self._followed.is_followed(x)

    def _needs(self) -> list[bool]:
        """Which steps need DTensors: those that draw or mix, or that make or use what is followed.

        Not if they only make it for a step that has its own way to do without.
        """
        steps = self._program.steps
        users: dict[int, set[int]] = {}
        for i, step in enumerate(steps):
            for n in step.inputs:
                users.setdefault(n, set()).add(i)
        ended = {n for step in steps for n in step.free}
        needs = []
        for i, step in enumerate(steps):
            marked = self._marks.intersection((*step.inputs, *step.outputs))
            others = set().union(*(users.get(n, ()) for n in marked)) - {i}
            feeds = marked <= ended and marked.isdisjoint(step.inputs) and others <= self._other.keys()
            does_without = i in self._other or feeds
            needs.append(self._typed[i] or (bool(marked) and not does_without))
        return needs

    def _note(self, env: Env, numbers: Iterable[int]) -> None:
        for n in numbers:
            self._facts[n] = _facts(env[n])
            if type(env[n]) is DTensor:
                self._seen[n] = layout_of(env[n])

    def found(self, run: Callable[[SingleRank], Any]) -> SingleRank | None:
        """How it is run on one rank; None: on DTensors.

        Args:
            run: does it once more without data, so.
        """
        needs = self._needs()
        if all(needs):
            return None
        program = self._program
        lasts = not any(need and program.holds(step) for need, step in zip(needs, program.steps, strict=True))
        alone = SingleRank(needs, self._seen, lasts, self._other)
        try:
            with _NothingSaved():
                run(_Trial(alone, self._facts))
        except Exception:
            return None
        return alone


class _Trial(SingleRank):
    """Sees whether plain tensors give the same."""

    def __init__(self, tried: SingleRank, facts: Mapping[int, _Facts]) -> None:
        super().__init__(tried.typed, tried._layouts, tried.lasts, tried._instead)
        self._facts = facts

    def do(self, steps: Sequence[ProgramStep], program: StageProgram, env: Env, here: torch.device) -> None:
        for step in steps:
            program.do([step], env, here)
            if any(_facts(env[n]) != self._facts[n] for n in step.outputs if n in env):
                raise _OtherwiseError


class _OtherwiseError(Exception):
    """On plain tensors something else comes about."""


class _NothingSaved(TorchDispatchMode):
    """Refuses what computes again in the backward pass, where parameters are DTensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if outer_hooks(True) is not None:
            raise _OtherwiseError
        return func(*args, **(kwargs or {}))


def _facts(x: torch.Tensor) -> _Facts:
    return tuple(x.shape), x.dtype, x.requires_grad
