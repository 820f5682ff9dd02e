"""Loss spikes and values that are not finite: seen before the update, by all ranks alike, with the culprits.

A value is a spike when it lies more than ``factor`` deviations above the median of the last. The deviation is
the median one (times 1.4826, which makes it that of a normal distribution; Rousseeuw and Croux 1993), and at
least a twentieth of the median, so that a loss which hardly moves has no spikes.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm.collectives import sum_whole
from espalier.engine.scaling import not_finite
from espalier.mesh import Mesh

Answer = Literal["stop", "skip", "rollback"]
_NORMAL: Final = 1.4826
_FLAT: Final = 0.05
_NAMED: Final = 3


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

    on_nan: Answer = "stop"
    on_spike: Answer | Literal["ignore"] = "ignore"
    factor: float = 10.0
    window: int = 100
    least: int = 20
    limit: int = 10

    def __post_init__(self) -> None:
        wrong = [
            f"{name} = {getattr(self, name)!r} (expected one of {', '.join(known)})"
            for name, known in (("on_nan", _ANSWERS), ("on_spike", (*_ANSWERS, "ignore")))
            if getattr(self, name) not in known
        ]
        if not self.factor > 0:
            wrong.append(f"factor = {self.factor} (expected a number above 0)")
        if not 1 <= self.least <= self.window:
            wrong.append(f"least = {self.least}, window = {self.window} (expected 1 <= least <= window)")
        if self.limit < 1:
            wrong.append(f"limit = {self.limit} (expected at least 1)")
        if wrong:
            raise ValueError(f"Spikes: {'; '.join(wrong)}.")


_ANSWERS: Final = ("stop", "skip", "rollback")


class SpikeError(FloatingPointError):
    """A step that must not be made; nothing was updated.

    Attributes:
        step: which, counted from 1.
        rollback: whether the last checkpoint should be loaded, and this step's batch left out.
        culprits: names of parameters.
    """

    def __init__(self, message: str, step: int, rollback: bool, culprits: Sequence[str]) -> None:
        super().__init__(message)
        self.step, self.rollback, self.culprits = step, rollback, tuple(culprits)

    def __reduce__(self) -> Any:
        return type(self), (*self.args, self.step, self.rollback, self.culprits)


class Guard:
    """Judges each step by its loss and gradient norm, which all ranks know alike.

    Attributes:
        settings: what to do.
        skipped: steps without an update so far.
        told: of the last step, why it was not made; ``""`` if it was.
        culprits: of the last step that was not made.
    """

    def __init__(self, settings: Spikes) -> None:
        self.settings = settings
        self.skipped, self.told = 0, ""
        self.culprits: tuple[str, ...] = ()
        self._row = 0
        self._last = {name: deque[float](maxlen=settings.window) for name in ("loss", "gradient norm")}

    def admits(
        self,
        step: int,
        loss: float,
        norm: float,
        counted: Mapping[str, torch.Tensor],
        names: Sequence[str],
        mesh: Mesh,
    ) -> bool:
        """Whether a step may be made (a collective where it may not).

        Args:
            step: counted from 1.
            loss: of the batch, and ``norm``, of its gradients: the same numbers on all ranks.
            counted: by name, of the gradients what this rank alone is responsible for.
            names: of all parameters.

        Raises:
            SpikeError: on all ranks, as the settings say.
        """
        values = {"loss": loss, "gradient norm": norm}
        wrong = {name: x for name, x in values.items() if not math.isfinite(x)}
        if wrong:
            answer: str = self.settings.on_nan
            told = " and ".join(f"the {name} is {x}" for name, x in wrong.items())
        else:
            leaps = [told for name, x in values.items() if (told := self._leap(name, x))]
            if not leaps or self.settings.on_spike == "ignore":
                for name, x in values.items():
                    self._last[name].append(x)
                self._row, self.told = 0, ""
                return True
            answer, told = self.settings.on_spike, " and ".join(leaps)
        self._row += 1
        culprits, blamed = self._blamed(counted, names, mesh, bool(wrong))
        self.told, self.culprits = f"{told}; {blamed}", culprits
        if self._row > self.settings.limit:
            told = f"{self.told}. That is number {self._row} in a row: spikes.limit = {self.settings.limit}"
            raise SpikeError(told, step, False, culprits)
        if answer != "skip":
            raise SpikeError(self.told, step, answer == "rollback", culprits)
        self.skipped += 1
        return False

    def _leap(self, name: str, x: float) -> str:
        last = self._last[name]
        if len(last) < self.settings.least:
            return ""
        middle = statistics.median(last)
        spread = max(_NORMAL * statistics.median(abs(y - middle) for y in last), _FLAT * abs(middle))
        far = (x - middle) / spread if spread else 0.0
        if far <= self.settings.factor:
            return ""
        return f"the {name} leaps to {x:.6g}, {far:.1f} deviations above its median of {middle:.6g}"

    def _blamed(
        self, counted: Mapping[str, torch.Tensor], names: Sequence[str], mesh: Mesh, bad: bool
    ) -> tuple[tuple[str, ...], str]:
        """The culprits' names, and what is told of them; all ranks call this."""
        if bad:
            found = not_finite(counted, names, mesh)
            if not found:
                return (), "all gradients are finite"
            more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            told = ", ".join(f"{name} (in the part of {where})" for name, where in found[:_NAMED])
            return tuple(name for name, _ in found), f"not finite are the gradients of {told}{more}"
        with raw():
            squares = torch.zeros(len(names), dtype=torch.float64, device=mesh.device())
            for i, name in enumerate(names):
                if name in counted:
                    x = counted[name]
                    x = torch.view_as_real(x) if x.is_complex() else x
                    squares[i] = x.double().square().sum()
            whole = sum_whole(squares, mesh)
            shares = (whole / whole.sum()).tolist()
        most = sorted(zip(shares, names, strict=True), reverse=True)[:_NAMED]
        told = ", ".join(f"{name} ({share:.0%})" for share, name in most)
        return tuple(name for _, name in most), f"most of the squared gradient norm is of {told}"

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to judge alike."""
        return {
            "skipped": self.skipped,
            "row": self._row,
            "last": {n: list(x) for n, x in self._last.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.skipped, self._row = int(state["skipped"]), int(state["row"])
        for name, last in self._last.items():
            last.clear()
            last.extend(float(x) for x in state["last"][name])


__all__ = ["Guard", "SpikeError", "Spikes"]
