"""What may be said of ranks that die or hang, and of steps that go wrong; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

from espalier.texts import MistakeError

_EXPECTED: Final = {bool: "true or false", int: "a whole number", int | float: "a number"}


def _of_other_kinds(settings: object, **kinds: Any) -> list[tuple[str, Any, str]]:
    """What of settings is not of its kind."""
    given = {name: getattr(settings, name) for name in kinds}
    return [
        (name, value, f"expected {_EXPECTED[kinds[name]]}")
        for name, value in given.items()
        if not isinstance(value, kinds[name]) or (isinstance(value, bool) and kinds[name] is not bool)
    ]


SpikeAnswer = Literal["stop", "skip", "rollback"]


@dataclass(frozen=True)
class Faults:
    """How ranks that die or hang are looked for.

    Attributes:
        watch: False for not at all.
        limit: seconds after which a silent rank is taken for lost, and all for hanging where no rank
            has done anything: computed, sent, written, or begun another collective. Ranks whose collectives
            are not the same are told after 2 seconds of that.
        outside: the same where a rank waits for something outside of the program: a socket, a process it
            started, a file that is slow to come.
    """

    watch: bool = True
    limit: float = 5.0
    outside: float = 60.0

    def __post_init__(self) -> None:
        wrong = _of_other_kinds(self, watch=bool, limit=int | float, outside=int | float)
        if wrong:
            raise MistakeError("Faults", wrong)
        if not 1 <= self.limit < math.inf:
            expected = "a rank gives a sign of life twice a second: expected at least 1 (second), and finite"
            wrong.append(("limit", self.limit, expected))
        if not self.outside >= self.limit:
            wrong.append(("outside", self.outside, f"expected at least limit = {self.limit}"))
        if wrong:
            raise MistakeError("Faults", wrong)


@dataclass(frozen=True)
class Spikes:
    """What to do about steps that look wrong. Each answer leaves parameters and optimizer as they were.

    Attributes:
        on_nan: where loss or gradients are not finite. ``"skip"``: no update, and on to the next batch;
            ``"stop"``: raise; ``"rollback"``: raise, for the trainer to load the last checkpoint.
        on_spike: where loss or gradient norm leap up; ``"ignore"`` for nothing.
        factor: deviations above the median that are a spike.
        window: steps that the median is of; ``least``: as many must have been before one is looked for.
        limit: so many answers in a row, of any kind, and it stops.
    """

    on_nan: SpikeAnswer = "stop"
    on_spike: SpikeAnswer | Literal["ignore"] = "ignore"
    factor: float = 10.0
    window: int = 100
    least: int = 20
    limit: int = 10

    def __post_init__(self) -> None:
        wrong = _of_other_kinds(self, factor=int | float, window=int, least=int, limit=int)
        if wrong:
            raise MistakeError("Spikes", wrong)
        wrong = [
            (name, getattr(self, name), f"expected one of {', '.join(known)}")
            for name, known in (("on_nan", _ANSWERS), ("on_spike", (*_ANSWERS, "ignore")))
            if getattr(self, name) not in known
        ]
        if not self.factor > 0:
            wrong.append(("factor", self.factor, "expected a number above 0"))
        if not 1 <= self.least <= self.window:
            wrong.append(("least", self.least, f"expected at least 1 and at most window = {self.window}"))
        if self.limit < 1:
            wrong.append(("limit", self.limit, "expected at least 1"))
        if wrong:
            raise MistakeError("Spikes", wrong)


_ANSWERS: Final = ("stop", "skip", "rollback")
