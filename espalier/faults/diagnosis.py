"""Who is to blame, by the signs of life of all ranks; pure, so that it can be tested without any.

Each rank gives a :class:`Sign` twice a second (:mod:`espalier.faults.watchdog`). From them :func:`judge`
finds what can't go on: a rank that raised, one whose process is gone, one that left, one that is silent; or
that every living rank waits, and nobody does anything. A rank that computes is none of these, however long it
takes, and neither are those that wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Self

from espalier.comm.control import met_by, named
from espalier.faults.settings import Faults

_SOON: Final = 2.0  # seconds without a move, where the cause is known
_UNHEARD: Final = (
    "Does the network between the machines lose large packets, as where it carries none of the size that "
    "their interfaces have (the MTU: `ip link`, `ping -M do -s 8972 HOST`), or stands a firewall there?"
)
_TOGETHER: Final = (
    "A collective is made by all of its ranks: so are a step, a call of a prepared model, full_tensor(), "
    ".numpy() and a print of a tensor that is cut, state_dict() of a model or an optimizer that is, and "
    ".item() of a number made of rows that ranks share. (A loss is known to all once it has gone back: ask "
    "then. Or let all ranks ask, and one print, or save. To evaluate on one rank, where the plan cuts no "
    "parameters, call model.module.) Batches of plain tensors are whole ones, equal on all ranks: where "
    "their sizes differ ranks part ways, too (rows of each rank's own: engine.local_batch)."
)


@dataclass
class Sign:
    """A rank's sign of life.

    Attributes:
        number: of signs so far.
        step: steps of training begun; ``doing``: the last collective or action that it began.
        state: see :class:`~espalier.faults.liveness.Look`; ``where`` likewise.
        quiet: seconds without anything done.
        end: ``""`` as long as it runs; ``"failed"``, ``"consequence"`` (an error that tells of another's),
            ``"left"``; ``message`` is the error's text, and ``at`` when it was.
        words: the last lines of its standard error.
        peers: of other ranks on its machine the seconds computed; None where the process has ended.
        ready: of these, those that give no sign but would compute if they had a core.
        recent: its last collectives as (ranks, number among these, what, step).
        resends: whether what it has sent does not arrive.
    """

    rank: int
    machine: str
    pid: int
    number: int = 0
    step: int = 0
    doing: str = ""
    state: str = "busy"
    where: str = ""
    quiet: float = 0.0
    end: str = ""
    message: str = ""
    at: float = 0.0
    words: list[str] = field(default_factory=list)
    peers: dict[int, float | None] = field(default_factory=dict)
    ready: list[int] = field(default_factory=list)
    recent: list[tuple[str, int, str, int]] = field(default_factory=list)
    resends: bool = False

    @property
    def host(self) -> str:
        """The machine's name."""
        return self.machine.partition(" ")[0]

    @property
    def place(self) -> str:
        """What it is at, in words."""
        at_step = f", at step {self.step}" if self.step else ""
        if self.doing:
            at_step += f", {'in' if self.state == 'waits' else 'last in'} {self.doing}"
        return at_step + (f" ({self.where})" if self.where else "")

    def dumps(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str | bytes) -> Self:
        """From text."""
        fields: dict[str, Any] = json.loads(text)
        fields["peers"] = {int(rank): computed for rank, computed in fields["peers"].items()}
        fields["recent"] = [(str(g), int(n), str(what), int(step)) for g, n, what, step in fields["recent"]]
        return cls(**fields)


@dataclass(frozen=True)
class Verdict:
    """What has happened.

    Attributes:
        ranks: those to blame; empty if nobody can be.
        text: the report, but for the end of a process that only its parent knows.
        delay: seconds from the last sign of life, or the last thing done, to this verdict.
        words: the last lines of standard error of the first to blame.
        leave: whether those to blame have told of their end, and are about to say why.
        silent: whether they give no sign of life, so that they are ended from without.
    """

    ranks: tuple[int, ...]
    text: str
    delay: float
    words: tuple[str, ...] = ()
    leave: bool = False
    silent: bool = False

    def dumps(self, by: int = 0) -> str:
        """As text; of each rank another one."""
        return json.dumps({**asdict(self), "by": by})

    @classmethod
    def loads(cls, text: str | bytes) -> Self:
        """From text."""
        fields = json.loads(text)
        del fields["by"]
        return cls(**{**fields, "ranks": tuple(fields["ranks"]), "words": tuple(fields["words"])})


@dataclass(frozen=True)
class Heard:
    """What is known of a rank: its last sign, and the seconds since that came; None: never heard of."""

    sign: Sign | None
    silent: float
    vouched: bool = False

    @property
    def runs(self) -> bool:
        """Whether it has not told of its end."""
        return self.sign is None or not self.sign.end

    @property
    def quiet(self) -> float:
        """Seconds without anything done."""
        return 0.0 if self.sign is None or self.vouched else self.sign.quiet + min(self.silent, 1.0)


def judge(heard: Mapping[int, Heard], faults: Faults) -> Verdict | None:
    """The verdict, or None while all may yet go well.

    Args:
        heard: every rank of the world.
    """
    signs = {rank: of.sign for rank, of in heard.items() if of.sign is not None}
    failed = sorted((s.at, rank) for rank, s in signs.items() if s.end == "failed")
    if failed:
        first = failed[0][1]
        origin = met_by(signs[first].message)  # all raise what one has met, and the others don't know where
        if origin is not None and origin in signs and signs[origin].end == "failed":
            first = origin
        verdict = _verdict(heard, [first], lambda s: f"failed: {s.message}", 0.0)
        return replace(verdict, leave=True)
    ended = {peer for s in signs.values() for peer, computed in s.peers.items() if computed is None}
    gone = sorted(rank for rank in ended if rank in signs and heard[rank].runs)
    if gone:
        delay = max(heard[rank].silent for rank in gone)
        return _verdict(heard, gone, lambda s: "is gone: its process has ended without a word.", delay)
    silent = [
        r for r, of in heard.items() if of.sign and of.runs and of.silent > faults.limit and not of.vouched
    ]
    if silent:
        delay = min(heard[rank].silent for rank in silent)
        says = f"gave no sign of life for {delay:.1f} s"
        verdict = _verdict(heard, silent, lambda s: f"{says} (on {s.host})", delay)
        return replace(verdict, silent=True)
    left = sorted(rank for rank, s in signs.items() if s.end == "left")
    hurt = [rank for rank, s in signs.items() if s.end == "consequence"]
    rest = [of for of in heard.values() if of.runs]
    if left and (hurt or _stuck(rest, min(faults.limit, _SOON), faults)):
        delay = max((of.quiet for of in rest), default=0.0)
        verdict = _verdict(heard, left, lambda s: f"has left: {s.message}", delay)
        return replace(verdict, text=f"{verdict.text}\n{_TOGETHER}")
    if hurt and all(of.silent > _SOON for of in (heard[rank] for rank in hurt)):
        delay = max(heard[rank].silent for rank in hurt)
        return _verdict(heard, hurt, lambda s: f"lost its connection: {s.message}", delay)
    if left or hurt:
        return None
    # ranks that do not make the same calls wait for what will never come
    known = _parting(list(signs.values())) is not None
    if _stuck(rest, min(faults.limit, _SOON) if known else faults.limit, faults):
        return _hanging(heard, signs)
    return None


def _stuck(ranks: Sequence[Heard], limit: float, faults: Faults) -> bool:
    """Whether all of them have done nothing for long, and one waits for others."""
    if not any(of.sign is not None and of.sign.state == "waits" for of in ranks):
        return False
    for of in ranks:
        if of.sign is None or of.sign.state in ("busy", "held"):
            return False
        if of.quiet < (faults.outside if of.sign.state == "outside" else limit):
            return False
    return True


def _hanging(heard: Mapping[int, Heard], signs: Mapping[int, Sign]) -> Verdict:
    delay = min(heard[rank].quiet for rank in signs)
    elsewhere = sorted(rank for rank, s in signs.items() if s.state != "waits")
    if elsewhere:
        says = f"has done nothing for {delay:.1f} s, and the others wait"
        return _verdict(heard, elsewhere, lambda s: says, delay)
    unheard = sorted(rank for rank, s in signs.items() if s.resends)
    if unheard and _parting(list(signs.values())) is None:
        text = (
            f"What {named(unheard)} sent does not arrive, though signs of life do: it is sent again and "
            f"again, and nothing has come for {delay:.1f} s. {_UNHEARD}\n"
            f"{_rest(heard, ())}"
        )
        return Verdict((), text, delay)
    parted = divergence(list(signs.values()))
    if parted is not None:
        ranks, what = parted
        text = f"{what}\n{_rest(heard, ())}\nNoticed {delay:.1f} s after the last move.\n{_TOGETHER}"
        return Verdict(ranks, text, delay, tuple(signs[ranks[0]].words if ranks else ()))
    text = (
        f"All ranks wait for each other, and nothing has come for {delay:.1f} s: is the network between them "
        f"whole?\n{_rest(heard, ())}"
    )
    return Verdict((), text, delay)


def divergence(signs: Sequence[Sign]) -> tuple[tuple[int, ...], str] | None:
    """Where ranks' collectives part ways: the minority, or those behind, and both sides in words."""
    return _parting(signs) or _lag(signs)


def _recent(signs: Sequence[Sign]) -> dict[str, dict[int, dict[int, tuple[str, int]]]]:
    """By the ranks that take part, and by rank: of a collective's number, what it was and at which step."""
    by_group: dict[str, dict[int, dict[int, tuple[str, int]]]] = {}
    for sign in signs:
        for group, number, what, step in sign.recent:
            by_group.setdefault(group, {}).setdefault(sign.rank, {})[number] = (what, step)
    return {group: of for group, of in by_group.items() if len(of) > 1}


def _parting(signs: Sequence[Sign]) -> tuple[tuple[int, ...], str] | None:
    """The first collective that is not the same on all of its ranks, and whose it is."""
    for group, of in _recent(signs).items():
        shared = sorted(set.intersection(*(set(rows) for rows in of.values())))
        for number in shared:
            sides: dict[str, list[int]] = {}
            for rank, rows in of.items():
                sides.setdefault(rows[number][0], []).append(rank)
            if len(sides) > 1:
                where = "; ".join(
                    f"{named(ranks)}: {what} (step {of[ranks[0]][number][1]})"
                    for what, ranks in sides.items()
                )
                odd = min(sides.values(), key=lambda side: (len(side), -min(side)))
                about = f"The collectives of ranks {group} part ways at their no. {number}: {where}."
                return tuple(sorted(odd)), about
    return None


def _lag(signs: Sequence[Sign]) -> tuple[tuple[int, ...], str] | None:
    """The ranks that have begun fewer collectives than the others of theirs."""
    for group, of in _recent(signs).items():
        last = {rank: max(rows) for rank, rows in of.items()}
        most, least = max(last.values()), min(last.values())
        if most == least:
            continue
        ahead, behind = (sorted(r for r, n in last.items() if n == end) for end in (most, least))
        what, step = of[ahead[0]][most]
        own, at = of[behind[0]][least]
        return tuple(behind), (
            f"The ranks are out of step among ranks {group}: {named(ahead)} wait{_s(ahead)} in no. {most}, "
            f"{what} (step {step}), but {named(behind)} ha{'s' if len(behind) == 1 else 've'} begun no more "
            f"than no. {least}, {own} (step {at})."
        )
    return None


def _verdict(
    heard: Mapping[int, Heard], ranks: Sequence[int], what: Callable[[Sign], str], delay: float
) -> Verdict:
    first = heard[ranks[0]].sign
    assert first is not None
    said, place = what(first), first.place
    if "\n" in said or said.endswith("."):  # sentences of an error's own
        place = f"\nIt was{place.removeprefix(',')}" if place else ""
        said = said.removesuffix(".") if not place else said
    lines = [f"rank {first.rank} of {len(heard)} {said}{place}."]
    if len(ranks) > 1:
        lines.append(f"So it is with {named(ranks[1:])}.")
    lines.append(f"Noticed {delay:.1f} s after its last move.")
    parted = divergence([of.sign for of in heard.values() if of.sign is not None])
    if parted is not None:
        lines.append(parted[1])
    rest = _rest(heard, ranks)
    return Verdict(tuple(ranks), "\n".join([*lines, rest] if rest else lines), delay, tuple(first.words))


def _rest(heard: Mapping[int, Heard], ranks: Sequence[int]) -> str:
    """What the others do, those alike in one line."""
    alike: dict[str, list[int]] = {}
    for rank, of in sorted(heard.items()):
        if rank in ranks:
            continue
        sign = of.sign
        if sign is None:
            doing = "not heard of yet"
        elif sign.end:
            doing = {"left": "gone", "failed": "failed too"}.get(sign.end, "connection lost")
            doing += sign.place
        else:
            doing = {"waits": "waiting", "busy": "going on"}.get(sign.state, "doing nothing") + sign.place
        alike.setdefault(doing, []).append(rank)
    return "\n".join(f"{named(of).capitalize()}: {doing}." for doing, of in alike.items())


def _s(ranks: Sequence[int]) -> str:
    return "s" if len(ranks) == 1 else ""
