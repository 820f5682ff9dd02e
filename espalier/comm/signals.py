"""Signals that ask a rank to leave, heard while its main thread is in C++ too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

_PATIENCE: Final = (
    1.5  # seconds in which the cause of a SIGTERM may be found: torchrun sends it when a rank died
)
_LEAVE: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Signals:
    """What this process was told by signals.

    Python's own handlers run when the main thread comes back to Python: one that waits for other ranks never
    does. So the interpreter is told to write the signal's number to a pipe, and a thread hears.

    Attributes:
        asked: whether the process shall save and leave.
    """

    def __init__(self) -> None:
        self.asked = False
        self._saves = False
        self._terminated = 0.0
        self._pipe = -1, -1  # left open: a thread may still read
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self._wakes = False

    def hear(self) -> None:
        """Hear of SIGTERM, where nobody else does; only the main thread may ask for it."""
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        if threading.current_thread() is not threading.main_thread():
            return
        self._take(signal.SIGTERM)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """While open SIGTERM and SIGUSR1 ask this process to save and leave; it does not die of them."""
        main = threading.current_thread() is threading.main_thread()
        had = set(self._before)
        self._saves = True
        for number in _LEAVE if main else ():
            self._take(number)
        try:
            yield
        finally:
            self._saves = False
            for number in set(self._before) - had:
                signal.signal(number, self._before.pop(number))

    def _take(self, number: int) -> None:
        if signal.getsignal(number) is not signal.SIG_DFL:
            return
        if not self._wakes and self._pipe[1] >= 0:
            before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)  # somebody else's, an event loop's
            self._wakes = before == -1
            os.register_at_fork(after_in_child=self._in_child)
        self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._note(number)

    def _note(self, number: int) -> None:
        if self._saves and number in _LEAVE:
            self.asked = True
        if number == signal.SIGTERM and not self._terminated:
            self._terminated = time.monotonic()

    def _in_child(self) -> None:
        """A forked child (of a data loader) dies of signals as any other."""
        if self._wakes:
            signal.set_wakeup_fd(-1)
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()
        self._wakes = False

    def came(self, timeout: float) -> bool:
        """Wait for a signal, or for :meth:`wake`; whether something came."""
        if not select.select([self._pipe[0]], [], [], timeout)[0]:
            return False
        with contextlib.suppress(OSError):
            for number in os.read(self._pipe[0], 64):
                if number in self._before:
                    self._note(number)
        return True

    def wake(self) -> None:
        """End a wait."""
        with contextlib.suppress(OSError):
            os.write(self._pipe[1], b"\0")

    def fatal(self, quiet: float) -> bool:
        """Whether the process shall die of SIGTERM now: it came, no other cause showed, and nobody saves."""
        if not self._terminated or time.monotonic() - self._terminated < _PATIENCE:
            return False
        return not self._saves or quiet > _PATIENCE

    def die(self) -> None:
        """As if nobody had heard."""
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
        os.kill(os.getpid(), signal.SIGTERM)

    def forget(self) -> None:
        """Put back what was before; only the main thread may, others leave it to the end of the process."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._wakes:
            signal.set_wakeup_fd(-1)
            self._wakes = False
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()


__all__ = ["Signals"]
