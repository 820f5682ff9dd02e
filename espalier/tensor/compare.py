"""Comparing what ranks say they did: the sanitizer's desk.

Between two meetings each rank writes down its calls and the hashes of what should be equal. The
ranks meet only where the program meets anyway: before a collective, at an optimizer's step, at the
end. So one rank may well do something by itself (log a value, say) as long as nobody has to wait.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from espalier.comm.side import Absent, Side, named
from espalier.layout import Layout, local_box
from espalier.mesh import Mesh
from espalier.tensor.fingerprint import fingerprint

_HELD = 1 << 26  # bytes of values held until the next meeting, to tell where they differ
_KEPT = 100_000  # records
_BLOCKS = 64


class SanitizeError(RuntimeError):
    """Ranks differ where they must not.

    Attributes:
        op: what was done.
        where: ``file:line`` in the user's program.
        axes: names of the axes along which values differ; empty if it is not values.
        ranks: the ranks (of the world) that are unlike the others.
    """

    def __init__(
        self,
        message: str,
        op: str = "",
        where: str = "",
        axes: Sequence[str] = (),
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.op, self.where, self.axes, self.ranks = op, where, tuple(axes), tuple(ranks)


@dataclass(slots=True)
class Record:
    """Something that this rank did, and a value that must be equal along some axes.

    Attributes:
        what: in words; with ``where`` it tells which records of two ranks belong together.
        form: what must be equal as text: shapes, dtypes, layouts, arguments.
        axes: the axes along which the value must be equal.
        hash: of the value (a 0-d int64 tensor, or a number), if there are axes.
        cause: what the reason for a difference usually is.
        value: the value itself, as long as it is held.
    """

    what: str
    where: str
    form: str
    axes: tuple[int, ...] = ()
    hash: Any = 0
    cause: str = ""
    value: torch.Tensor | None = None
    version: int = 0
    layout: Layout | None = None

    def flat(self) -> torch.Tensor:
        """The held value, row after row."""
        assert self.value is not None
        return self.value.resolve_conj().resolve_neg().contiguous().reshape(-1)

    def place(self, flat: int) -> str:
        """The global index of an element of the held value."""
        assert self.value is not None
        index: list[int] = []
        for n in reversed(self.value.shape):
            flat, i = divmod(flat, n)
            index.insert(0, i)
        if self.layout is not None:
            index = [i + start for i, start in zip(index, local_box(self.layout).offsets, strict=True)]
        return str(index)


def version(x: torch.Tensor) -> int:
    """How often a tensor was changed in place; inference tensors don't count."""
    return -1 if x.is_inference() else x._version


@dataclass(frozen=True)
class _Difference:
    """The record that differs, along which axes, the rank compared with, and those unlike it."""

    record: dict[str, Any]
    axes: list[int]
    first: int
    others: list[int]


class Desk:
    """The records of one mesh."""

    def __init__(self, mesh: Mesh, limit: float, tolerance: float) -> None:
        self.mesh, self._limit, self._tolerance = mesh, limit, tolerance
        self._records: list[Record] = []
        self._held = 0
        self._side: Side | None = None

    def write(self, record: Record) -> None:
        """Put down a record."""
        if record.value is not None:
            self._held += record.value.nbytes
            if self._held > _HELD and not self._tolerance:
                record.value = None
        self._records.append(record)
        if len(self._records) > _KEPT:
            # a program that never communicates must not fill the memory
            del self._records[: _KEPT // 2]

    def leave(self, doing: str) -> None:
        """Tell the others, who may be waiting, that this rank will not come again."""
        if self._side is not None:
            self._side.note(doing, left=True)

    def meet(self, doing: str, where: str, size: str = "", axis: int | None = None) -> None:
        """Compare with the other ranks what was written down since the last meeting, and this meeting.

        Args:
            size: of what is to be done; it must be equal along ``axis``.

        Raises:
            SanitizeError: on every rank, if something differs, or someone did not come.
        """
        records, self._records, self._held = self._records, [], 0
        summary = {"doing": doing, "where": where, "size": size, "digests": self._digests(records)}
        answers = self._ask(summary, _told(summary))
        groups = [list(range(self.mesh.size())), *(line for a, line in lines(self.mesh) if a == axis)]
        keys = [("doing", "where"), *[("size",)] * (len(groups) - 1)]
        meets = all(
            len({answers[i][key] for i in group}) == 1
            for group, compared in zip(groups, keys, strict=True)
            for key in compared
        )
        digests = [(0, groups[0]), *((a + 1, line) for a, line in lines(self.mesh))]
        if meets and all(len({answers[i]["digests"][k] for i in line}) == 1 for k, line in digests):
            return
        self._settle(records, _told(summary))
        if not meets:
            raise self._out_of_step(answers)

    def _digests(self, records: list[Record]) -> list[str]:
        """Of all records as text, then for each axis of the hashes that must be equal along it."""
        hashed = [r for r in records if isinstance(r.hash, torch.Tensor)]
        if hashed:
            # one wait for the device
            values = torch.stack([r.hash.to(self.mesh.device()) for r in hashed]).tolist()
            for r, value in zip(hashed, values, strict=True):
                r.hash = value
        texts = [_digest((r.what, r.where, r.form, r.axes) for r in records)]
        return texts + [
            _digest((i, r.hash) for i, r in enumerate(records) if axis in r.axes)
            for axis in range(self.mesh.ndim)
        ]

    def _ask(self, told: Any, doing: str) -> list[Any]:
        return [json.loads(m) for m in self._exchange(json.dumps(told).encode(), doing)]

    def _exchange(self, message: bytes, doing: str) -> list[bytes]:
        try:
            if self._side is None:
                self._side = Side(self.mesh, self._limit, doing)
            return self._side.exchange(message, doing)
        except Absent as absent:
            raise self._absence(absent, doing) from None

    # ---- the ranks differ: in what?

    def _settle(self, records: list[Record], doing: str) -> None:
        """Find the first difference that matters.

        Raises:
            SanitizeError: there is one.
        """
        mine = [
            {k: getattr(r, k) for k in ("what", "where", "form", "axes", "hash", "cause")}
            | {"held": r.value is not None and version(r.value) == r.version}
            for r in records
        ]
        told: list[list[dict[str, Any]]] = self._ask(mine, doing)
        rows = _aligned([[(r["what"], r["where"]) for r in one] for one in told])
        for row in rows:
            present = {rank: told[rank][i] for rank, i in enumerate(row) if i is not None}
            forms = {rank: r["form"] for rank, r in present.items()}
            if len(set(forms.values())) > 1:
                raise self._other_form(next(iter(present.values())), forms)
            here = row[self.mesh.rank]
            own = records[here] if here is not None else None
            held = all(r["held"] for r in present.values())
            for found in _differing(self.mesh, present):
                if not (held and self._tolerance and self._close(own, found, doing)):
                    raise self._unequal(found, self._first_difference(own, found, doing) if held else "")

    def _first_difference(self, own: Record | None, found: _Difference, doing: str) -> str:
        """Where the values of two ranks differ first, by hashes of ever smaller blocks."""
        a, b = found.first, found.others[0]
        flat = None if own is None else own.flat()
        start, end = 0, self._ask(None if flat is None else flat.numel(), doing)[a]
        while end - start > 1:
            step = -(-(end - start) // _BLOCKS)
            cuts = range(start, end, step)
            mine: Any = (
                None if flat is None else [int(fingerprint(flat[c : min(c + step, end)])) for c in cuts]
            )
            hashes = self._ask(mine, doing)
            start = next((c for c, x, y in zip(cuts, hashes[a], hashes[b], strict=True) if x != y), end)
            end = min(start + step, end)
        if start == end:
            return ""
        place = (
            None
            if flat is None or own is None
            else [own.place(start), repr(flat[start : start + 1].tolist())]
        )
        told = self._ask(place, doing)
        one, other = (told[rank][1].strip("[]") for rank in (a, b))
        ranks = self.mesh.ranks
        return (
            f" The first difference is at {told[a][0]}: {one} on rank {ranks[a]}, {other} on rank {ranks[b]}."
        )

    def _close(self, own: Record | None, found: _Difference, doing: str) -> bool:
        """Whether values that differ do so within the tolerance, relative to the largest of them."""
        mine = b""
        if own is not None:
            flat = own.flat()
            wide = torch.view_as_real(flat) if flat.is_complex() else flat
            mine = wide.double().cpu().numpy().tobytes()
        told = self._exchange(mine, doing)
        one, *others = (
            torch.frombuffer(bytearray(told[rank]), dtype=torch.float64)
            for rank in (found.first, *found.others)
        )
        allowed = self._tolerance * float(one.nan_to_num(0, 0, 0).abs().max())
        return all(torch.allclose(x, one, rtol=0, atol=allowed, equal_nan=True) for x in others)

    # ---- what is said

    def _unequal(self, found: _Difference, detail: str) -> SanitizeError:
        r, names = found.record, [self.mesh.names[axis] for axis in found.axes]
        along = f"ax{'e' if len(names) > 1 else 'i'}s {' and '.join(map(repr, names))}"
        first, *others = (self.mesh.ranks[i] for i in (found.first, *found.others))
        differ = "differ" if len(others) > 1 else "differs"
        return SanitizeError(
            f"{r['what']} ({r['where']}) must be equal on all ranks along the {along}, but "
            f"{named(others)} {differ} from rank {first}.{detail} It is {r['form']}. {r['cause']}",
            r["what"],
            r["where"],
            names,
            others,
        )

    def _other_form(self, record: dict[str, Any], forms: dict[int, str]) -> SanitizeError:
        text, others = self._sides(forms)
        return SanitizeError(
            f"{record['what']} ({record['where']}) is not the same on all ranks: {text}. Every rank must "
            "make the same call, with the same shapes and arguments: look for sizes or numbers that depend "
            "on the rank or on its data.",
            record["what"],
            record["where"],
            (),
            others,
        )

    def _out_of_step(self, answers: list[dict[str, Any]]) -> SanitizeError:
        text, others = self._sides({i: _told(a) for i, a in enumerate(answers)})
        first = answers[self.mesh.ranks.index(others[0])]
        return SanitizeError(
            f"The ranks are out of step: {text}. Left alone they would hang, or mix up each other's data. "
            "Usually a collective stands in a branch that not all ranks take, or is skipped by one of them; "
            "all ranks must communicate from the same lines, in the same order.",
            first["doing"],
            first["where"],
            (),
            others,
        )

    def _absence(self, absent: Absent, doing: str) -> SanitizeError:
        late = [i for i, (count, _) in enumerate(absent.seen) if count < absent.number]
        missing = [self.mesh.ranks[i] for i in late]
        last = "; ".join(f"rank {self.mesh.ranks[i]} was last seen at {absent.seen[i][1]}" for i in late)
        text = (
            f"{named(missing)} did not come (the limit is {self._limit:g} seconds). {last}."
            if missing
            else f"the others came too late, or went away ({absent})."
        )
        op, _, where = doing.rpartition(" (")
        return SanitizeError(
            f"{doing}: {text} It may have ended, failed or taken another branch; if it is only slow, raise "
            "espalier.sanitize(limit=...).",
            op,
            where.rstrip(")"),
            (),
            missing,
        )

    def _sides(self, said: dict[int, str]) -> tuple[str, list[int]]:
        """Who said what, and the ranks that are not with the most."""
        groups: dict[str, list[int]] = {}
        for i, text in said.items():
            groups.setdefault(text, []).append(self.mesh.ranks[i])
        most = max(groups.values(), key=len)
        parts = [f"{named(ranks)}: {text}" for text, ranks in groups.items()]
        return " | ".join(parts), sorted(r for ranks in groups.values() if ranks is not most for r in ranks)


def _told(summary: dict[str, Any]) -> str:
    """A meeting in words."""
    op, _, rest = summary["doing"].partition(" ")
    size = f" of {summary['size']}" if summary["size"] else ""
    return f"{op}{size} {rest} ({summary['where']})"


def lines(mesh: Mesh) -> Iterator[tuple[int, list[int]]]:
    """For each axis of size > 1 the groups of ranks (of the mesh) that differ along it alone."""
    for axis, n in enumerate(mesh.shape):
        inner = math.prod(mesh.shape[axis + 1 :])
        if n > 1:
            for rank in range(mesh.size()):
                if rank // inner % n == 0:
                    yield axis, [rank + i * inner for i in range(n)]


def _differing(mesh: Mesh, present: dict[int, dict[str, Any]]) -> Iterator[_Difference]:
    """The differences among ranks that must be equal: those that differ along the record's axes alone."""
    record = next(iter(present.values()))
    groups: dict[tuple[int, ...], dict[int, int]] = {}
    for i, r in present.items():
        place = _coordinate(mesh, i)
        key = tuple(c for axis, c in enumerate(place) if axis not in record["axes"])
        groups.setdefault(key, {})[i] = r["hash"]
    for hashes in groups.values():
        if len(set(hashes.values())) > 1:
            counted = list(hashes.values())
            usual = max(counted, key=counted.count)  # of equal counts the first rank's
            axes = [
                axis
                for axis in record["axes"]
                if any(
                    len({hashes[i] for i in line if i in hashes}) > 1 for a, line in lines(mesh) if a == axis
                )
            ]
            first = next(i for i, value in hashes.items() if value == usual)
            yield _Difference(record, axes, first, [i for i, value in hashes.items() if value != usual])


def _coordinate(mesh: Mesh, place: int) -> tuple[int, ...]:
    found: list[int] = []
    for n in reversed(mesh.shape):
        place, c = divmod(place, n)
        found.insert(0, c)
    return tuple(found)


def _aligned(told: list[list[tuple[str, str]]]) -> list[list[int | None]]:
    """Which records belong together: for each of the first rank's, its place in every rank's list."""
    rows: list[list[int | None]] = [[i] for i in range(len(told[0]))]
    for other in told[1:]:
        place: dict[int, int] = {}
        matcher = difflib.SequenceMatcher(None, told[0], other, autojunk=False)
        for block in matcher.get_matching_blocks():
            place |= {block.a + i: block.b + i for i in range(block.size)}
        for i, row in enumerate(rows):
            row.append(place.get(i))
    return rows


def _digest(items: Iterable[Any]) -> str:
    total = hashlib.blake2b(digest_size=12)
    for item in items:
        total.update(repr(item).encode())
    return total.hexdigest()
