"""Programs of stages: calls in order, on values by number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.parallel.pipeline.answers import Answer, answered
from espalier.parallel.pipeline.record import Call, SplitError, State
from espalier.parallel.pipeline.trees import Part, Ref, leaves, mapped

Env = dict[int, torch.Tensor]


class Unit(NamedTuple):
    """What is done in one go: a module that is called whole, or a torch call (``call`` is None)."""

    start: int
    end: int
    call: Call | None


class Step:
    """One call of a program.

    Args:
        func: a torch function, or a module's name.
        name: for messages.
        args, kwargs, out: trees with a :class:`Ref` for each tensor, and a :class:`Part` for each module that
            is given to another.
        state: what torch is told meanwhile, if it is not what it is told around the program.
        reads: whether Python's control flow read what it gives.

    Attributes:
        given, made: the values that it is given and gives.
        free: values that nothing needs after it.
        answers: what was asked of tensors within it when it was traced: where they have no data, it gets the
            same.
    """

    __slots__ = (
        "_args", "_flat", "_kwargs", "_out", "_state", "answers", "free", "func", "given", "made", "name",
        "reads",
    )  # fmt: skip

    def __init__(
        self, func: Any, name: str, args: Any, kwargs: Any, out: Any, state: State | None, reads: bool = False
    ) -> None:
        self.func, self.name, self.reads = func, name, reads
        self._args, self._kwargs, self._out, self._state = args, kwargs, out, state
        inner = [x for x in (*args, *kwargs.values()) if type(x) is not Ref]
        self._flat = not any(leaves(x, (Ref, Part, torch.device)) for x in inner)
        self.given = tuple(ref.number for ref in leaves((args, kwargs), Ref))
        self.made = tuple(ref.number for ref in leaves(out, Ref))
        self.free: tuple[int, ...] = ()
        self.answers: tuple[Answer, ...] = ()

    def by(self, func: Callable[..., Any]) -> Step:
        """The step that calls something else in place of what this one does."""
        step = Step(func, self.name, self._args, self._kwargs, self._out, self._state, self.reads)
        step.free, step.answers = self.free, self.answers
        return step

    def run(self, env: Env, modules: Mapping[str, nn.Module], was: torch.device, here: torch.device) -> Any:
        """Call it on what is in ``env``, and put there what it gives.

        Args:
            was, here: the device of the trace, in whose place is the one of now.
        """
        func: Any = modules[self.func] if type(self.func) is str else self.func
        if self.answers and here.type == "meta":
            func = partial(answered, func, self.answers)
        if self._flat:
            args = [env[a.number] if type(a) is Ref else a for a in self._args]
            kwargs = {k: env[a.number] if type(a) is Ref else a for k, a in self._kwargs.items()}
        else:

            def given(x: Any) -> Any:
                if type(x) is Ref:
                    return env[x.number]
                if type(x) is Part:
                    return modules[x.name]
                return here if type(x) is torch.device and x == was else x

            args, kwargs = mapped(given, (self._args, self._kwargs))
        if self._state is None:
            out = func(*args, **kwargs)
        else:
            enabled, dtype = self._state.cast
            with torch.set_grad_enabled(self._state.grad), torch.autocast(was.type, dtype, enabled):
                out = func(*args, **kwargs)
        self._keep(out, env)
        return out

    def _keep(self, out: Any, env: Env) -> None:
        if type(self._out) is Ref:
            env[self._out.number] = out
        else:
            made, wanted = leaves(out, torch.Tensor), leaves(self._out, Ref)
            if len(made) != len(wanted):
                raise SplitError(
                    f"{self.name!r} gave {len(made)} tensors, and {len(wanted)} when it was traced. A stage "
                    "is called as it was traced: let the number not depend on what its forward remembers."
                )
            env.update((ref.number, x) for ref, x in zip(wanted, made, strict=True))
        for n in self.free:
            env.pop(n, None)


class Source(NamedTuple):
    """Where a value comes from that no step makes.

    Attributes:
        number: the value's.
        kind: ``"parameter"``, ``"buffer"``, ``"batch"`` or ``"constant"``.
        place: its name, its number among the batch's tensors, or itself.
        clone: whether a step writes to it, which is not to be seen outside.
    """

    number: int
    kind: str
    place: Any
    clone: bool


class Body(NamedTuple):
    """Steps in order, and what they start from; ``device``: that of the trace."""

    sources: Sequence[Source]
    steps: Sequence[Step]
    device: torch.device

    def begin(self, model: nn.Module, batch: Sequence[torch.Tensor]) -> Env:
        """The values at the beginning."""
        env: Env = {}
        for number, kind, place, clone in self.sources:
            if kind == "batch":
                x = batch[place]
            elif kind == "constant":
                x = place
            else:
                owner, _, key = place.rpartition(".")
                module = model.get_submodule(owner)
                x = (module._parameters if kind == "parameter" else module._buffers)[key]
            env[number] = x.clone() if clone else x
        return env
