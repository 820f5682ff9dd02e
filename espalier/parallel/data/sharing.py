"""Which of the chunks whose states lie in the host's memory the device updates, by measured speeds.

The host updates a chunk where its states lie; the device has them brought, and sent back. Both work at the
same time, so an update is over soonest where both need equally long for their shares (Ren et al. 2021,
ZeRO-Offload; Wang et al. 2024, Deep Optimizer States).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from espalier.comm.control import numbers_of_all
from espalier.device import is_accelerator, synchronize
from espalier.mesh import Mesh
from espalier.parallel.plan import Updater

_MEASURED: tuple[Updater | None, ...] = (None, "host", None, "device")
"""Whom the first updates measure: before each is one that makes states, or brings kernels and counts."""


class UpdateShares:
    """How the host and the device share the update of what lies in the host's memory.

    Args:
        updater: who updates; ``"auto"``: both, as the first updates show.

    Attributes:
        share: of the bytes, that which the device updates.
        speeds: of those measured, bytes of states that were updated in a second, copies included.
    """

    def __init__(self, updater: Updater, mesh: Mesh) -> None:
        self._mesh, self._seen = mesh, 0
        there = is_accelerator(mesh.device()) and not mesh.is_dry
        self.share = 1.0 if updater == "device" else 0.0
        self.speeds: dict[str, float] = {}
        self._is_decided = updater != "auto" or not there

    @property
    def is_asked(self) -> bool:
        """Whether it is not the host alone."""
        return self.share > 0 or bool(self.speeds) or not self._is_decided

    def by_device(self, sizes: Sequence[int]) -> list[bool]:
        """Which chunks of such sizes, in the order of the update, the device updates: evenly spread."""
        share = self.share if self._is_decided else float(_MEASURED[self._seen // 2 * 2 + 1] == "device")
        chosen, ahead = [], 0.0
        for size in sizes:
            ahead += share * size
            chosen.append(share > 0 and ahead >= size / 2)
            ahead -= size * chosen[-1]
        return chosen

    @contextmanager
    def measured(self, nbytes: Callable[[], int]) -> Iterator[None]:
        """An update of chunks, of which all ranks have some.

        Args:
            nbytes: gives those of their states, on this rank.
        """
        if self._is_decided:
            yield
            return
        who = _MEASURED[self._seen]
        if who is not None:
            synchronize(self._mesh.device())
        start = time.perf_counter()
        yield
        self._seen += 1
        if who is not None:
            synchronize(self._mesh.device())
            self._note(who, nbytes(), time.perf_counter() - start)

    def _note(self, who: str, nbytes: int, seconds: float) -> None:
        """Take in a measurement: what counts is the slowest rank's, on all of them."""
        picoseconds = int(1e12 * seconds / max(nbytes, 1))
        slowest = max(took for (took,) in numbers_of_all([picoseconds], self._mesh))
        self.speeds[who] = 1e12 / max(slowest, 1)
        if self._seen == len(_MEASURED):
            host, device = self.speeds["host"], self.speeds["device"]
            self.share, self._is_decided = device / (host + device), True

    def __str__(self) -> str:
        if not self._is_decided:
            return "updates: how the host and the device share them is being measured"
        speeds = ", ".join(f"the {who} {speed / 1e9:.3g} GB/s" for who, speed in self.speeds.items())
        how = f" ({speeds} of states)" if speeds else ""
        return f"updates of states on the host: {self.share:.0%} by the device{how}"
