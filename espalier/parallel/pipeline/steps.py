"""Programs of stages: calls in order, on values by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from espalier.parallel.pipeline.trace import Call, SplitError, State
from espalier.parallel.pipeline.trees import Ref, leaves, mapped


class Unit(NamedTuple):
    """What is done in one go: a module that is called whole, or a torch call (``call`` is None)."""

    start: int
    end: int
    call: Call | None


class Step:
    """One call of a program: of a module or of a torch function."""

    __slots__ = ("_args", "_flat", "_kwargs", "_out", "_state", "free", "func", "name", "reads")

    def __init__(self, func: Any, name: str, args: Any, kwargs: Any, out: Any, state: State | None) -> None:
        self.func, self.name, self._args, self._kwargs, self._out, self._state = (
            func,
            name,
            args,
            kwargs,
            out,
            state,
        )
        self._flat = not any(leaves(x, Ref) for x in (*args, *kwargs.values()) if not isinstance(x, Ref))
        self.free: tuple[int, ...] = ()
        self.reads = False  # whether what it gives was read by Python

    def run(self, env: dict[int, torch.Tensor], kind: str) -> Any:
        """Call it on what is in ``env`` and put there what it gives."""
        if self._flat:
            args = [env[a.number] if type(a) is Ref else a for a in self._args]
            kwargs = {k: env[a.number] if type(a) is Ref else a for k, a in self._kwargs.items()}
        else:
            args, kwargs = mapped(
                lambda x: env[x.number] if type(x) is Ref else x, (self._args, self._kwargs)
            )
        if self._state is None:
            out = self.func(*args, **kwargs)
        else:
            enabled, dtype = self._state.cast
            with torch.set_grad_enabled(self._state.grad), torch.autocast(kind, dtype, enabled):
                out = self.func(*args, **kwargs)
        if type(self._out) is Ref:
            env[self._out.number] = out
        else:
            made, wanted = leaves(out, torch.Tensor), leaves(self._out, Ref)
            if len(made) != len(wanted):
                raise SplitError(
                    f"{self.name!r} gave {len(made)} tensors and {len(wanted)} when it was traced. A stage "
                    "is called "
                    "as it was traced: let the number not depend on what its forward remembers."
                )
            env.update((ref.number, x) for ref, x in zip(wanted, made, strict=True))
        for n in self.free:
            env.pop(n, None)
        return out


class Source(NamedTuple):
    """Where a value comes from that no step makes: a parameter or buffer, the batch, a constant."""

    number: int
    kind: str
    place: Any
    clone: bool


class Body:
    """Steps in order, and what they start from."""

    def __init__(self, sources: Sequence[Source], steps: Sequence[Step], kind: str) -> None:
        self.sources, self.steps, self.kind = sources, steps, kind

    def start(self, batch: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The values at the beginning."""
        env = {}
        for s in self.sources:
            if s.kind == "batch":
                x = batch[s.place]
            elif s.kind == "constant":
                x = s.place
            else:
                held, key = s.place
                x = held[key]
            env[s.number] = x.clone() if s.clone else x
        return env

    def run(self, env: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Do all steps."""
        for step in self.steps:
            step.run(env, self.kind)
        return env
