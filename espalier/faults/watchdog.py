"""The watch over ranks: each gives signs of life through the store: who is missed stops all, with a report.

Two threads do it. One looks at what this process does, twice a second; the other tells the store, and hears
what became of the others. The program itself only notes what it is at: attributes of a :class:`Watchdog`. One
rank at a time, the first that lives, reads all signs and judges by them
(:mod:`espalier.faults.diagnosis`); the others look at that one, and for a verdict.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from espalier.comm.ledger import Collective, observed
from espalier.faults.alike import same_package
from espalier.faults.diagnosis import Heard, Sign, Verdict, judge
from espalier.faults.liveness import Activity, Device, Look, Signals, computed_by, is_ready, machine
from espalier.faults.settings import Faults
from espalier.mesh import Mesh
from espalier.mesh.process import (
    ACCOUNT,
    FOLDER,
    STOPPED,
    Exits,
    die_fast,
    first_line,
    is_consequence,
    is_fake,
)
from espalier.torch_private import default_store

_EVERY: Final = 0.5  # seconds between two signs
_RECENT: Final = 64  # collectives remembered
_WORDS: Final = 30  # lines of standard error remembered
_BUSY_SHARE: Final = 0.2  # of a core: a process that computes so much is alive, though it gives no sign
_FRESH: Final = 2.0  # seconds for which it is believed that a silent process is short of a core
_QUIET: Final = 10.0  # seconds without a new collective, after which the device is looked at
_LAST: Final = 3.0  # seconds that the cause of a verdict has to end before the others do
_OFF: Final = "ESPALIER_FAULTS"


class Watchdog:
    """What this rank is at, and its part in the watch. Made by :func:`watched`.

    Attributes:
        step: of training; ``action``: of a schedule, ``""`` without one. Both are only written to here; the
            threads of the watch read them.
        running: whether there is anybody to watch.
        farewells: what is told of a verdict before this rank is ended by it, ``farewell(ranks, text)``.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.step = 0
        self.action: Any = ""
        self.running = False
        self.rank, self.size = 0, 1
        self.signals = Signals()
        self._count = 0
        self._groups: dict[tuple[Mesh, int, Mesh | None], str] = {}
        self._counts: Counter[str] = Counter()
        self._recent: deque[tuple[str, int, Collective, int]] = deque(maxlen=_RECENT)
        self._begun: tuple[Collective, int] | None = None
        self._quiet_since = time.monotonic()
        self._seen: Any = None
        self._look = Look("busy", "")
        self._end, self._message, self._at = "", "", 0.0
        self._patient = 0
        self._verdict: Verdict | None = None
        self.farewells: weakref.WeakSet[Any] = weakref.WeakSet()
        self._world: Any = None
        self._wish = self._voted = False
        self._urgent = threading.Event()

    # ---- what the program tells

    def saw(self, event: Collective) -> None:
        """A collective is about to start."""
        if event.mesh.is_dry:  # a trial, of which each rank makes others
            return
        key = event.mesh, event.axis, event.goal
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _group(event)
        self._count += 1
        number = self._counts[group]
        if event.whole is not None:  # what all of its ranks make alike
            number = self._counts[group] = number + 1
            self._recent.append((group, number, event, self.step))
        self._begun = event, number

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """While open this rank may do nothing for as long as it likes: it waits for what others can't see."""
        self._patient += 1
        try:
            yield
        finally:
            self._patient -= 1

    def to_leave(self, step: int) -> bool:
        """Whether all ranks shall save and leave after this step, for one was asked to (SIGTERM, SIGUSR1).

        To be asked by every rank at the end of every step; all get the same answer. Costs a look at an
        attribute, until a signal has come; where nobody watches, a question to the store.
        """
        if not self.running:
            if _is_alone():
                return self.signals.asked
            if self._world is not dist.group.WORLD:
                self._meet()
            self._exchange_wish()  # no thread does
        if not (self.signals.asked or self._wish):
            return False
        if not self._voted:
            self._store.set(f"vote/{self.rank}", str(step))
            self._voted = True
            self._urgent.set()
        votes = [f"vote/{rank}" for rank in range(self.size)]
        if not self._store.check(votes):
            return False
        # the last to vote did so at the end of a step that no other can have passed by more than one
        return step > max(int(vote) for vote in self._store.multi_get(votes))

    def _meet(self) -> None:
        """Find the store of the running world."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._world = dist.group.WORLD
        self._default = default_store()
        number = self._default.add(f"espalier.watch/{self.rank}", 1)
        # the clone has a connection of its own, which nobody else waits on
        self._store = dist.PrefixStore(f"espalier.watch/{number}", self._default.clone())
        self._store.set_timeout(timedelta(seconds=self.faults.limit))

    def _exchange_wish(self) -> None:
        """Tell that this rank was asked to leave, and hear whether another was."""
        if self.signals.asked and not self._wish:
            self._store.set("wish", str(self.rank))
        self._wish = self._wish or self._store.check(["wish"])

    # ---- beginning and end

    def start(self) -> None:
        """Begin to watch the running world."""
        self._meet()
        local, size = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        self._near = [r for r in range(self.rank - local, self.rank - local + size) if r != self.rank]
        self._machine, self._number, self._answered = machine(), 0, time.monotonic()
        self._signs: dict[int, tuple[Sign, float]] = {}
        self._computed: dict[int, tuple[float, float, bool]] = {}
        self._ready: dict[int, float] = {}
        self._chair, self._lost = 0, ""
        self._posted, self._over = threading.Event(), threading.Event()
        self._watching: AbstractContextManager[None] = observed(self)
        self._watching.__enter__()
        self._folder = os.environ.get(FOLDER)
        # where gloo carries all, the program waits in the collectives themselves
        self._device = Device(None) if dist.get_backend() == "gloo" else Device.of_program()
        self._stderr = None if self._folder or sys.stderr is None else _Stderr.over(sys.stderr)
        self.running = True
        die_fast(self.rank)
        Exits.listeners = (*Exits.listeners, self.leaving)
        atexit.register(self._join)  # called after the next: where the watch has ended by itself, say
        atexit.register(self._exiting)
        self.signals.hear()
        self._threads = [
            threading.Thread(target=task, name=f"espalier{task.__name__}", daemon=True)
            for task in (self._look_on, self._talk_on)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the watch; nothing more is told."""
        if not self.running:
            return
        self.running = False
        self._watching.__exit__(None, None, None)
        Exits.listeners = tuple(tell for tell in Exits.listeners if tell != self.leaving)
        atexit.unregister(self._exiting)
        self.signals.forget()
        if self._stderr is not None:
            self._stderr.end()
        self._join()
        # gloo's threads must not outlive the interpreter: hold nothing of the world
        self._world = None
        self._groups.clear()
        self._recent.clear()

    def _join(self) -> None:
        """End the threads: one that comes back from C++ after the interpreter's end aborts the process."""
        self._over.set()
        self._urgent.set()
        self.signals.wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self.faults.limit + 1)

    def leaving(self, error: BaseException | None) -> bool:
        """This rank leaves its world, well or with an error; whether the report of it stands elsewhere."""
        if not self.running:
            return False
        first = not self._end
        if error is None or isinstance(error, SystemExit):
            self._message = "its program has ended" + (
                f" with {error.code!r}" if error and error.code else ""
            )
            self._end = self._end or "left"
        elif first:
            text = "".join(traceback.format_exception_only(error)).strip()
            self._message, self._at = text, time.time()
            if self._stderr is not None:
                self._stderr.add("".join(traceback.format_exception(error)))
            self._end = "consequence" if is_consequence(text) else "failed"
        if first:
            self._urgent.set()
            self._posted.wait(self.faults.limit)
        if self._end == "left":
            self.stop()
            return False
        # the one whose connection broke waits until it is known why
        patience = self.faults.limit + 5 if self._end == "consequence" else 2.0
        until = time.monotonic() + patience
        while self._verdict is None and not self._lost and time.monotonic() < until:
            time.sleep(0.05)
        if self._verdict is None and self._lost and self._end == "consequence":
            self._verdict = self._cut_off(time.monotonic())
        verdict = self._verdict
        return verdict is not None and (self._end == "consequence" or self.rank not in verdict.ranks)

    def verdict_on(self, error: BaseException) -> Verdict | None:
        """Why a connection broke, for which it waits; None: an error says no more than it does."""
        if not self.running or not is_consequence("".join(traceback.format_exception_only(error))):
            return None
        self.leaving(error)
        return self._verdict

    def _exiting(self) -> None:
        """The last of the process: its code says how it ended, and a SIGTERM would hide it."""
        self.leaving(None)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    # ---- the thread that looks

    def _look_on(self) -> None:
        own = {
            thread.native_id or 0 for thread in threading.enumerate() if thread.name.startswith("espalier_")
        }
        port = os.environ.get("MASTER_PORT", "")
        activity = Activity(own, int(port) if port.isdecimal() else None)
        device, begun = self._device, time.monotonic()
        while not self._over.is_set():
            if self.signals.came(_EVERY):
                self._urgent.set()
            if self._over.is_set():
                return
            if dist.group.WORLD is not self._world and not self._end:
                self._end, self._message = "left", "it has given up the world"
                self._urgent.set()
                self._posted.wait(self.faults.limit)
                self.stop()
                return
            now = time.monotonic()
            look = activity.look(hard=now - self._quiet_since > 1.5)
            seen = self._count, self.step, self.action, self._end
            if seen != self._seen:
                device.moves()
                begun = now
            elif look.state == "busy" and now - begun > _QUIET and device.stuck(now) > self.faults.outside:
                look = look._replace(state="waits")
            if look.state in ("busy", "held") or self._patient or seen != self._seen:
                self._quiet_since = now
            self._look, self._seen = self._look if self._end else look, seen
            if self._verdict is not None:
                self._obey(self._verdict)
            elif now - max(self._answered, self._quiet_since) > self.faults.limit and look.state == "waits":
                self._obey(self._cut_off(now))
            elif self.signals.fatal():
                self.signals.die()

    def _cut_off(self, now: float) -> Verdict:
        """The verdict of a rank that waits, or has lost a connection, and can't reach the store either."""
        gone = self._peers().get(0, 0.0) is None
        cause = "its machine is gone, or the network to it"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            cause = "rank 0, whose process kept it, is gone, or its machine, or the network to it"
            if gone:
                cause = "rank 0, whose process kept it, is gone: it has ended without a word"
        text = (
            f"rank {self.rank} of {self.size} {'has lost a connection' if self._end else 'waits'} in "
            f"{self._doing()} ({self._look.where}) at step {self.step}, and the store at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} has not answered for "
            f"{now - self._answered:.1f} s: {cause}. {self._lost}"
        )
        verdict = Verdict((0,) if gone else (), text.strip(), now - self._answered)
        if self._folder is not None or all(rank > self.rank or (gone and not rank) for rank in self._near):
            self._publish(verdict)
        return verdict

    def _obey(self, verdict: Verdict) -> None:
        if self._end and time.monotonic() < self._quiet_since + self.faults.limit:
            return  # it is on its way out by itself
        culprits = []
        for rank in verdict.ranks:
            sign, at = self._signs.get(rank, (None, 0.0))
            if sign and rank in self._near and sign.machine == self._machine:
                culprits.append(sign.pid)
                # one that gives no sign hears of no verdict either; but who is on the way out has to say why
                if time.monotonic() > at + 2 and not verdict.leave:
                    with contextlib.suppress(OSError):
                        os.kill(sign.pid, signal.SIGKILL)
        # who has started the ranks takes the first to end for the cause
        until = time.monotonic() + _LAST
        while time.monotonic() < until and any(computed_by(pid) is not None for pid in culprits):
            time.sleep(0.02)
        for told in list(self.farewells):
            with contextlib.suppress(Exception):
                told.farewell(verdict.ranks, verdict.text)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(STOPPED)

    # ---- the thread that talks

    def _talk_on(self) -> None:
        try:
            while True:
                urgent = self._urgent.is_set()
                self._urgent.clear()
                self._talk(urgent)
                if self._over.is_set():
                    return
                self._urgent.wait(_EVERY)
                if self._over.is_set():
                    return
        except (RuntimeError, dist.DistStoreError) as error:
            self._lost = first_line(error)
            self._posted.set()

    def _talk(self, urgent: bool) -> None:
        end = self._end
        self._number += 1
        self._store.set(f"sign/{self.rank}", self._sign(end).dumps())
        if end:
            self._posted.set()
        self._exchange_wish()
        if self._verdict is None and self._store.check(["verdict"]):
            self._verdict = Verdict.loads(self._store.get("verdict"))
            self._leave_account(self._verdict)
            self.signals.wake()
        self._answered = time.monotonic()
        if self._verdict is not None:
            return
        self._hear([self._chair, *self._near])
        gone = any(computed is None for computed in self._peers().values())
        if end in ("failed", "consequence") or (urgent and gone) or self._presides():
            self._judge()

    def _presides(self) -> bool:
        """Whether this rank is the first that lives."""
        while self._chair < self.rank:
            self._hear([self._chair])
            of = self._heard(self._chair)
            ended = self._peers().get(self._chair, 0.0) is None
            if of.runs and not ended and (of.silent <= self.faults.limit or of.vouched):
                return False
            self._chair += 1
        return True

    def _judge(self) -> None:
        everyone = range(self.size)
        self._hear(everyone)
        if judge({rank: self._heard(rank) for rank in everyone}, self.faults) is None:
            return
        # again, with what came meanwhile: a rank that has just left had said so
        time.sleep(0.2)
        self._hear(everyone)
        verdict = judge({rank: self._heard(rank) for rank in everyone}, self.faults)
        if verdict is None:
            return
        text = verdict.dumps(by=self.rank)
        if bytes(self._store.compare_set("verdict", "", text)).decode() == text:
            self._publish(verdict)
        self._verdict = Verdict.loads(self._store.get("verdict"))
        self._leave_account(self._verdict)
        self.signals.wake()

    def _leave_account(self, verdict: Verdict) -> None:
        """Leave the verdict of a rank on another host for this one's launcher."""
        if self._folder is not None and not Path(self._folder, ACCOUNT).exists():
            self._publish(verdict)

    def _publish(self, verdict: Verdict) -> None:
        if self._folder is not None:
            path = Path(self._folder, ACCOUNT)
            with contextlib.suppress(OSError):
                part = path.with_suffix(f".part{self.rank}")
                part.write_text(verdict.dumps(), "utf-8")
                part.replace(path)
            return
        lines = [f"espalier: {verdict.text}"]
        if verdict.words and self._end != "failed":
            lines += ["The last it wrote to standard error:", *(f"    {line}" for line in verdict.words)]
        with contextlib.suppress(Exception):
            print("\n".join([*lines, "All ranks are stopped."]), file=sys.stderr, flush=True)

    def _hear(self, ranks: Any) -> None:
        known = [
            r for r in ranks if r != self.rank and (r in self._signs or self._store.check([f"sign/{r}"]))
        ]
        now = time.monotonic()
        texts = self._store.multi_get([f"sign/{rank}" for rank in known]) if known else []
        for rank, text in zip(known, texts, strict=True):
            sign = Sign.loads(bytes(text))
            before = self._signs.get(rank)
            if before is None or before[0].number != sign.number:
                self._signs[rank] = sign, now
        self._signs[self.rank] = self._sign(self._end), now
        for sign, told_at in list(self._signs.values()):
            if now - told_at < _FRESH:
                self._ready.update(dict.fromkeys(sign.ready, now))
            for peer, computed in sign.peers.items():
                last, at, _ = self._computed.get(peer, (computed or 0.0, now, False))
                if computed is not None and now - at >= 1.0:
                    busy = computed - last > _BUSY_SHARE * (now - at)
                    self._computed[peer] = computed, now, busy
                else:
                    self._computed.setdefault(peer, (last, at, False))

    def _heard(self, rank: int) -> Heard:
        if rank not in self._signs:
            return Heard(None, 0.0)
        sign, at = self._signs[rank]
        silent = time.monotonic() - at
        ready = time.monotonic() - self._ready.get(rank, -math.inf) < _FRESH
        busy = ready or self._computed.get(rank, (0.0, 0.0, False))[2]
        return Heard(sign, silent, silent > 1.0 and busy)

    def _peers(self) -> dict[int, float | None]:
        near = [self._signs[rank][0] for rank in self._near if rank in self._signs]
        return {s.rank: computed_by(s.pid) for s in near if s.machine == self._machine and s.end != "left"}

    def _sign(self, end: str) -> Sign:
        quiet = time.monotonic() - self._quiet_since
        sign = Sign(self.rank, self._machine, os.getpid(), self._number, self.step, self._doing())
        sign.state, sign.where, sign.quiet = self._look.state, self._look.where, quiet
        sign.resends = self._look.resends
        sign.end, sign.message, sign.at = end, self._message, self._at
        sign.words = [] if self._stderr is None else self._stderr.last()
        sign.peers = self._peers()
        silent = [rank for rank in sign.peers if self._heard(rank).silent > 1.0]
        sign.ready = [rank for rank in silent if is_ready(self._signs[rank][0].pid)]
        if quiet > 1.0 or end in ("failed", "consequence"):
            sign.recent = [(group, n, _what(event), step) for group, n, event, step in list(self._recent)]
        return sign

    def _doing(self) -> str:
        collective = ""
        if self._begun is not None:
            event, number = self._begun
            what = f"its no. {number}" if event.whole is not None else f"after its no. {number}"
            collective = f"{_what(event)} along {event.where!r} ({what})"
        action = str(self.action)
        return ", ".join(what for what in (action and f"action {action}", collective) if what)


class _Stderr:
    """Standard error, with its last lines remembered."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._lines, self._part = stream, deque[str](maxlen=_WORDS), ""

    @classmethod
    def over(cls, stream: Any) -> _Stderr:
        """Put in the place of ``sys.stderr``."""
        wrapper = cls(stream)
        sys.stderr = wrapper
        return wrapper

    def end(self) -> None:
        if sys.stderr is self:
            sys.stderr = self._stream

    def write(self, text: str) -> int:
        self.add(text)
        written = self._stream.write(text)
        return len(text) if written is None else int(written)  # Ray's streams answer nothing

    def add(self, text: str) -> None:
        *lines, self._part = (self._part + text).split("\n")
        self._lines.extend(lines)

    def last(self) -> list[str]:
        return [line for line in (*list(self._lines), self._part) if line.strip()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def watched(faults: Faults | None = None) -> Watchdog:
    """The pulse of this process in the running world; the watch begins with the first call.

    The first mesh of a world calls it. ``ESPALIER_FAULTS=off`` in the environment lets none begin.

    Args:
        faults: how it looks for them from now on; by default as it does, or as :class:`Faults` says.

    Raises:
        ValueError: another machine has another version of the package, or of torch.
    """
    running = next((each for each in Mesh.everywhere if type(each) is Watchdog), None)
    if running is not None and running._world is dist.group.WORLD:
        if faults is None:
            return running
        if faults.watch:
            running.faults = faults
            return running
        running.stop()
    pulse = Watchdog(faults or Faults())
    if not _is_alone() and pulse.faults.watch and os.environ.get(_OFF) != "off":
        pulse.start()
        same_package()  # an error reaches the others by the watch
    return pulse


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1 or is_fake()


def _group(event: Collective) -> str:
    """The ranks that take part."""
    mesh, axis = event.mesh, event.axis
    ranks = mesh.ranks
    if event.goal is not None:
        ranks = tuple(sorted({*ranks, *event.goal.ranks}))
    elif axis >= 0 and mesh.is_member:
        stride = math.prod(mesh.shape[axis + 1 :])
        first = mesh.rank - mesh.coordinate[axis] * stride
        ranks = tuple(ranks[first + i * stride] for i in range(mesh.shape[axis]))
    return ", ".join(map(str, ranks))


def _what(event: Collective) -> str:
    size = "" if event.whole is None else f" of {list(event.whole)} {event.dtype}".replace("torch.", "")
    return f"{event.op}{size}"


# Programs without an engine are watched too, also those that made their meshes before this was imported.
Mesh.joined = (*Mesh.joined, watched)
if Mesh.built[0] is not None and Mesh.built[0] is dist.group.WORLD:
    watched()
