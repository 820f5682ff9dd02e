"""Comparing what ranks say: the sanitizer's desk, and gradients that nobody spoke of.

Between two meetings each rank writes down its calls and the hashes of what should be equal. The
ranks meet only where the program meets anyway: before a collective, at an optimizer's step, at the
end. So one rank may well do something by itself (log a value, say) as long as nobody has to wait.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import handle_torch_function

from espalier.comm.control import Absent, OutOfBand, named
from espalier.comm.custom_ops import collective, recorders
from espalier.layout import Layout, Shard, gradient_layout, local_box
from espalier.mesh import Mesh
from espalier.mesh.mesh import coordinate_at
from espalier.tensor.dtensor import plain
from espalier.tensor.observers import site, user_frame
from espalier.tensor.random import bits
from espalier.torch_private import after_backward, current_graph_task_id, raw, version_of

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
class CheckRecord:
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
        index = [*coordinate_at(flat, self.value.shape)]
        if self.layout is not None:
            index = [i + start for i, start in zip(index, local_box(self.layout).offsets, strict=True)]
        return str(index)


@dataclass(frozen=True)
class _Difference:
    """The record that differs, along which axes, the rank compared with, and those unlike it."""

    record: dict[str, Any]
    axes: list[int]
    first: int
    others: list[int]


class Comparison:
    """The records of one mesh."""

    def __init__(self, mesh: Mesh, limit: float, tolerance: float) -> None:
        self.mesh, self._limit, self._tolerance = mesh, limit, tolerance
        self._records: list[CheckRecord] = []
        self._held = 0
        self._side: OutOfBand | None = None

    def write(self, record: CheckRecord) -> None:
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
        answers = self._ask(summary, _summed_up(summary))
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
        self._settle(records, _summed_up(summary))
        if not meets:
            raise self._out_of_step(answers)

    def _digests(self, records: list[CheckRecord]) -> list[str]:
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

    def _ask(self, question: Any, doing: str) -> list[Any]:
        return [json.loads(m) for m in self._exchange(json.dumps(question).encode(), doing)]

    def _exchange(self, message: bytes, doing: str) -> list[bytes]:
        try:
            if self._side is None:
                self._side = OutOfBand(self.mesh, self._limit, doing)
            return self._side.exchange(message, doing)
        except Absent as absent:
            raise self._absence(absent, doing) from None

    # ---- the ranks differ: in what?

    def _settle(self, records: list[CheckRecord], doing: str) -> None:
        """Find the first difference that matters.

        Raises:
            SanitizeError: there is one.
        """
        mine = [
            {k: getattr(r, k) for k in ("what", "where", "form", "axes", "hash", "cause")}
            | {"held": r.value is not None and version_of(r.value) == r.version}
            for r in records
        ]
        of_all: list[list[dict[str, Any]]] = self._ask(mine, doing)
        rows = _aligned([[(r["what"], r["where"]) for r in one] for one in of_all])
        for row in rows:
            present = {rank: of_all[rank][i] for rank, i in enumerate(row) if i is not None}
            forms = {rank: r["form"] for rank, r in present.items()}
            if len(set(forms.values())) > 1:
                raise self._other_form(next(iter(present.values())), forms)
            here = row[self.mesh.rank]
            own = records[here] if here is not None else None
            all_held = all(r["held"] for r in present.values())
            for difference in _differing(self.mesh, present):
                if not (all_held and self._tolerance and self._close(own, difference, doing)):
                    raise self._unequal(
                        difference, self._first_difference(own, difference, doing) if all_held else ""
                    )

    def _first_difference(self, own: CheckRecord | None, difference: _Difference, doing: str) -> str:
        """Where the values of two ranks differ first, by hashes of ever smaller blocks."""
        a, b = difference.first, difference.others[0]
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
        of_all = self._ask(place, doing)
        one, other = (of_all[rank][1].strip("[]") for rank in (a, b))
        ranks = self.mesh.ranks
        there = of_all[a][0]
        return f" The first difference is at {there}: {one} on rank {ranks[a]}, {other} on rank {ranks[b]}."

    def _close(self, own: CheckRecord | None, difference: _Difference, doing: str) -> bool:
        """Whether values that differ do so within the tolerance, relative to the largest of them."""
        mine = b""
        if own is not None:
            flat = own.flat()
            wide = torch.view_as_real(flat) if flat.is_complex() else flat
            mine = wide.double().cpu().numpy().tobytes()
        of_all = self._exchange(mine, doing)
        one, *others = (
            torch.frombuffer(bytearray(of_all[rank]), dtype=torch.float64)
            for rank in (difference.first, *difference.others)
        )
        allowed = self._tolerance * float(one.nan_to_num(0, 0, 0).abs().max())
        return all(torch.allclose(x, one, rtol=0, atol=allowed, equal_nan=True) for x in others)

    # ---- what is said

    def _unequal(self, difference: _Difference, detail: str) -> SanitizeError:
        r, names = difference.record, [self.mesh.names[axis] for axis in difference.axes]
        along = f"ax{'e' if len(names) > 1 else 'i'}s {' and '.join(map(repr, names))}"
        first, *others = (self.mesh.ranks[i] for i in (difference.first, *difference.others))
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
        text, others = self._sides({i: _summed_up(a) for i, a in enumerate(answers)})
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


def _summed_up(summary: dict[str, Any]) -> str:
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
        coordinate = coordinate_at(i, mesh.shape)
        key = tuple(c for axis, c in enumerate(coordinate) if axis not in record["axes"])
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


def _aligned(records: list[list[tuple[str, str]]]) -> list[list[int | None]]:
    """Which records belong together: for each of the first rank's, its place in every rank's list."""
    rows: list[list[int | None]] = [[i] for i in range(len(records[0]))]
    for other in records[1:]:
        place: dict[int, int] = {}
        matcher = difflib.SequenceMatcher(None, records[0], other, autojunk=False)
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


# ---- a 64-bit hash of a tensor's bytes: equal for equal bytes, a NaN's and a negative zero's too
#
# Each 8-byte word is mixed with its place and the results are added up, so a large tensor is hashed in
# parallel, in any order, where it lies.


_STEP = 0x2545F4914F6CDD1D  # odd: places stay apart
_PIECE = 1 << 20  # words hashed at once, which bounds the memory


def fingerprint(x: torch.Tensor) -> torch.Tensor:
    """The hash of a plain tensor's elements, in row-major order, as a 0-d int64 tensor on its device."""
    words = _words(x.detach())
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE]
        place = torch.arange(start + 1, start + 1 + piece.numel(), device=words.device)
        total += bits(place.mul_(_STEP).add_(piece), 0).sum()
    return total


def _words(x: torch.Tensor) -> torch.Tensor:
    if x.layout is not torch.strided:
        x = x.to_dense()
    flat = x.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.element_size() < 8 or flat.storage_offset() * flat.element_size() % 8:
        flat = flat.view(torch.uint8)
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 8)])
    return flat.view(torch.int64)


# ---- gradients of what leaves the type without a word on them: taken as replicated, and compared
#
# Outside of the type nobody knows whether the ranks go on to compute the same from a replicated value or
# different things. ``to_local()`` and ``full_tensor()`` take it, as torch does, that they compute the same,
# so that each rank's gradient is the whole one. When such a gradient flows, it is written down in a few
# numbers; at the end of the backward pass the ranks compare these, in one message beside the traffic.


_LIMIT = 1800.0  # seconds to wait for the others, as torch's own groups do
_NUMBERS = 8  # of a sketch
_WIDTH = 1024
_PASSES = 8  # backward passes, one within the other, whose gradients are kept


class _Flown(NamedTuple):
    """A gradient: of which call, where, of what, what it was taken as along each axis, and its sketch."""

    call: str
    where: str
    form: str
    taken: tuple[tuple[str, str], ...]
    sketch: torch.Tensor

    @property
    def key(self) -> str:
        """What is the same on all ranks."""
        return f"{self.call} ({self.where}) of {self.form}"


class Comparing:
    """What the ranks of a mesh, of axes along which something is replicated, have to compare."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.flown: dict[int, list[_Flown]] = {}
        self._side: OutOfBand | None = None

    def compare(self, flown: Sequence[_Flown]) -> None:
        """Compare the gradients of a backward pass; every rank of the mesh does.

        Raises:
            ValueError: on every rank, if one differs, or did not come to all.
        """
        values = torch.stack([g.sketch for g in flown]).tolist()  # one wait for the device
        counts: dict[str, int] = {}
        mine = []
        for g, numbers in zip(flown, values, strict=True):
            counts[g.key] = counts.get(g.key, 0) + 1
            mine.append((g.key, counts[g.key], numbers))
        doing = f"the gradient of {flown[0].call} ({flown[0].where})"
        try:
            if self._side is None:
                self._side = OutOfBand(self.mesh, _LIMIT, doing)
            of_all = [json.loads(m) for m in self._side.exchange(json.dumps(mine).encode(), doing)]
        except Absent as absent:
            late = [self.mesh.ranks[i] for i, (n, _) in enumerate(absent.seen) if n < absent.number]
            raise ValueError(
                f"{doing} flows on this rank, but {named(late)} did not come to compare it ({absent}). "
                f"{_remedy(flown[0], self.mesh.names)}"
            ) from None
        by_rank = [{(key, number): numbers for key, number, numbers in one} for one in of_all]
        for key, number in sorted({each for one in by_rank for each in one}):
            of = [one.get((key, number)) for one in by_rank]
            unlike = [i for i, numbers in enumerate(of) if not _alike(numbers, of[0], key)]
            if unlike:
                mine_here = next((g for g in flown if g.key == key), flown[0])
                raise ValueError(self._difference(key, of, unlike, mine_here))

    def _difference(self, key: str, of: Sequence[Any], unlike: Sequence[int], here: _Flown) -> str:
        ranks = self.mesh.ranks
        split = {
            self.mesh.names[a]
            for a, line in lines(self.mesh) for i in line if not _alike(of[i], of[line[0]], key)
        }  # fmt: skip
        absent = [ranks[i] for i, numbers in enumerate(of) if numbers is None]
        what = (
            f"flows on {named([r for r in ranks if r not in absent])}, but not on {named(absent)}"
            if absent
            else f"differs on {named([ranks[i] for i in unlike])} from that on rank {ranks[0]}"
        )
        call, _, form = key.rpartition(" of ")
        return (
            f"The gradient of {call}, of {form}, {what}. Nothing was said of it, so each rank's was taken as "
            f"the whole one; but the ranks compute different things. {_remedy(here, split)}"
        )


def compared(
    out: torch.Tensor, layout: Layout, axes: Sequence[int], call: str, where: str | None = None
) -> torch.Tensor:
    """``out``, an alias of which nobody holds more, whose gradient will be compared along the axes.

    Args:
        layout: of the gradient's value, for words.
        call: what the user called, and ``where``: here, if nothing is said.
    """
    where = where or site(user_frame()[1])
    if recorders():
        return handle_torch_function(_compared_again, (), out, layout, axes, call, where)
    mesh = layout.mesh
    names = tuple(mesh.names[a] for a in axes)
    node = out.grad_fn
    if mesh.is_dry or node is None:
        return out
    part = mesh if len(names) == mesh.ndim else mesh[names]
    dtype = out.dtype

    def note(grads: tuple[torch.Tensor | None, ...]) -> None:
        if grads[0] is None:
            return
        form = f"{layout!r} {dtype}".replace("torch.", "")
        words = [
            f"{type(p).__name__}({p.dim if isinstance(p, Shard) else ''})"
            for p in gradient_layout(layout).placements
        ]
        taken = tuple(zip(mesh.names, words, strict=True))
        note_gradient(grads[0], part, 0, call, where, form, taken)

    node.register_prehook(note)
    return out


def _compared_again(
    out: torch.Tensor, layout: Layout, axes: Sequence[int], call: str, where: str
) -> torch.Tensor:
    """Another alias, which a recorded program goes on with: its inputs have no node."""
    return compared(out.view_as(out), layout, axes, call, where)


@collective
def note_gradient(
    grad: torch.Tensor,
    mesh: Mesh,
    axis: int,
    call: str,
    where: str,
    form: str,
    taken: tuple[tuple[str, str], ...],
) -> torch.Tensor:
    """Keep a sketch of a gradient, to be compared at the end of this backward pass; gives nothing."""
    if not mesh.is_dry:
        with raw(), torch.no_grad():
            _keep(mesh, _Flown(call, where, form, taken, _sketch(grad)))
    return grad.new_empty(0)


def _keep(mesh: Mesh, gradient: _Flown) -> None:
    if mesh.comparing is None:
        mesh.comparing = Comparing(mesh)
    comparing: Comparing = mesh.comparing
    task = current_graph_task_id()
    flown = comparing.flown.get(task)
    if flown is None:
        # what an error left behind goes
        for old in sorted(comparing.flown)[: -_PASSES or None]:
            del comparing.flown[old]
        flown = comparing.flown[task] = []
        after_backward(lambda: _compare_all(task))
    flown.append(gradient)


def _compare_all(task: int) -> None:
    """At the end of a backward pass: the first that is called does it for all meshes, in one order."""
    with raw(), torch.no_grad():
        waiting = [m.comparing for m in Mesh.known if m.comparing is not None and task in m.comparing.flown]
        for comparing in sorted(waiting, key=lambda c: (c.mesh.names, c.mesh.shape, c.mesh.ranks)):
            comparing.compare(comparing.flown.pop(task))


def _sketch(grad: torch.Tensor) -> torch.Tensor:
    """A gradient in a few numbers: its length, and products with random vectors.

    The products of two gradients differ by the length of their difference, more or less, wherever it lies.
    """
    x = plain(grad.detach())
    x = x.to_dense() if x.layout is not torch.strided else x
    x = torch.view_as_real(x) if x.is_complex() else x
    x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32).reshape(-1)
    n = x.numel()
    width = min(_WIDTH, max(n, 1))
    full = n // width
    generator = torch.Generator().manual_seed(n)
    sides = torch.randn(_NUMBERS, width + full + 1, generator=generator, dtype=torch.float64).to(x)
    across, along = sides[:, :width], sides[:, width:]
    products = ((x[: full * width].view(full, width) @ across.T) * along[:, :full].T).sum(0)
    products += across[:, : n - full * width] @ x[full * width :] * along[:, full]
    length = torch.linalg.vector_norm(x)
    return torch.cat([length.view(1), products]).to(torch.float64 if x.device.type != "mps" else x.dtype)


def _alike(a: Sequence[float] | None, b: Sequence[float] | None, key: str) -> bool:
    """Whether two sketches are of one gradient, but for rounding."""
    if a is None or b is None:
        return a is b
    if not all(map(math.isfinite, (*a, *b))):
        return [math.isfinite(x) for x in a] == [math.isfinite(x) for x in b]
    dtype = getattr(torch, key.rpartition(" ")[2])
    eps = torch.finfo(dtype).eps
    allowed = max(math.sqrt(eps), 4 * eps) if eps < 1e-4 else 4 * eps
    rms = math.sqrt(sum((x - y) ** 2 for x, y in zip(a[1:], b[1:], strict=True)) / _NUMBERS)
    return rms <= allowed * max(a[0], b[0])


def _remedy(of: _Flown, axes: Collection[str]) -> str:
    words = ", ".join("Partial()" if name in axes else word for name, word in of.taken)
    return (
        f"Say so: {of.call}(grad_placements=[{words}]) adds the ranks' gradients up; or let all ranks "
        "compute the same from it."
    )
