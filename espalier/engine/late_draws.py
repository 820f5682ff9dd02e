"""Random numbers of calls in stages of which it is seen only when they run how many they are.

So it is where a model cannot be divided, remembers something, or throws Python's or NumPy's dice. If the
program draws between such a call and its run, the numbers come in another order than on one process: then
such calls run when they are made, and once more with the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from espalier.comm.control import any_says
from espalier.engine.call_states import LoopCalls
from espalier.mesh import Mesh
from espalier.tensor.draws import States, equal, states
from espalier.tensor.observers import tell
from espalier.tensor.traces import Generators


class LateDraws:
    """What is seen of the draws of one call, which is one of a ``loop``."""

    def __init__(self, mesh: Mesh, loop: LoopCalls) -> None:
        self._mesh, self._loop, self._device = mesh, loop, mesh.device()
        self._has_drawn = False
        self._at_call: tuple[States, Generators] | None = None  # None: what it draws is known

    def note(self) -> None:
        """It is called, and what it draws is not known."""
        self._at_call = self._now()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """While open, it runs at its call."""
        before = self._now()
        yield
        self._has_drawn = self._is_past(before)

    @contextmanager
    def open(self) -> Iterator[None]:
        """While open, it runs: if it draws, and the program has drawn before that, later ones run at once."""
        if (called := self._at_call) is None:
            yield
            return
        self._at_call, before, is_late = None, self._now(), self._is_past(called)
        try:
            yield
        except Exception:
            self._at_call = called  # it may be tried again
            raise
        if not self._has_drawn and not self._is_past(before):  # on all ranks alike
            return
        if any_says(is_late, self._mesh):
            self._loop.runs_at_call = True
            _tell()
        for run in self._loop.to_run:  # to calls behind it these draws are none of the program's
            if run.late._at_call is not None and not is_late:
                run.late.note()

    def _now(self) -> tuple[States, Generators]:
        return states(self._device), Generators()

    def _is_past(self, before: tuple[States, Generators]) -> bool:
        """Whether something was drawn since."""
        return not (equal(before[0], states(self._device)) and before[1].as_now())


@lru_cache(maxsize=1)
def _tell() -> None:
    # cached: once
    tell(
        "The program, or another model, draws random numbers between a call of the model and the pass that "
        "its loss makes, and how many the model draws is seen only when it runs. From now on it runs when it "
        "is called, and once more with the backward pass; if this comes later than in the first step, they "
        "came in another order than on one process once. Quicker is to draw before the call; or a model that "
        "can be divided, and draws from torch's generator alone."
    )
