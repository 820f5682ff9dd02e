"""The sweep: torch's own op database on distributed tensors, against the same calls on plain ones.

Every operation of ``op_db`` is called on samples of its own, with drawn layouts of the tensors, in all
its forms (``op_trials.FORMS``). Each call ends in one class (:data:`CLASSES`). Which distributed tensors are
swept is said by a :class:`Kind`, so that others than ours can be; nothing here needs pytest.

A call may go wrong on one rank alone, while the others wait for it in a collective. So after each call
the ranks compare, over a store beside the process group, how it ended; one that failed and hears nothing
leaves the group, which makes the others fail at once, and all meet again in a new one.
"""

from __future__ import annotations

import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._C import DisableTorchFunctionSubclass as raw
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from tests.ranks.meeting import Meeting
from tests.ranks.op_trials import Trial, callable_of, leaves_of, put, tensors_in, tree_map, trials

# of one call, or of several the worst: carried out by a rule, by entering a composite, by gathering; refused
# with a reason; a wrong answer, or an error where the plain call has none
CLASSES = ("rule", "entered", "gathered", "refused", "wrong")

# what they hold is undefined: only shape and dtype are compared
_UNDEFINED = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_".split()
)


# torch promises that these give views; of others that do, it says that they may copy
_VIEWS = frozenset(
    """
    H T adjoint as_strided chunk detach diagonal dsplit expand expand_as hsplit imag mH mT moveaxis movedim
    narrow permute real select slice split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose
    unbind unflatten unfold unsqueeze view view_as view_as_complex view_as_real vsplit __getitem__
    """.split()
)


# of single precision the last bit of what is given moves the third digit of the plain call's own vectors
_SHAKY = frozenset(["pca_lowrank", "svd_lowrank"])


class Unclear(Exception):
    """torch leaves open what this call gives."""


class Kind(Protocol):
    """Which distributed tensors are swept."""

    type: type

    def mesh(self, world: int) -> Any:
        """A mesh of one axis over the process group (a new one each time), or over this process alone."""

    def watch(self) -> AbstractContextManager[list[str]]:
        """While open, notes ``"entered"`` and ``"gathered"`` for calls that are carried out so."""

    def is_refusal(self, error: BaseException) -> bool:
        """Whether an error says that the call is refused on purpose."""


@dataclass(frozen=True)
class Finding:
    """How one call ended."""

    op: str
    form: str
    layouts: str
    outcome: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.op} ({self.form}) on {self.layouts}: {self.outcome} {self.text}"


# ---- one call


@dataclass
class Done:
    """What a call gave, in plain tensors: outputs, inputs after it, gradients."""

    out: Any
    inputs: list[torch.Tensor]
    grads: list[torch.Tensor | None]
    reads: list[str]


def laid(value: torch.Tensor, placement: Placement, kind: Kind, mesh: Any, rank: int, world: int) -> Any:
    """This rank's part of a value as a distributed tensor."""
    local = value
    if isinstance(placement, Shard):
        chunks = list(value.chunk(world, placement.dim))
        empty = value.narrow(placement.dim, 0, 0)
        local = chunks[rank] if rank < len(chunks) else empty
    elif isinstance(placement, Partial):
        local = addends(value, world)[rank]
    local = local.detach().clone(memory_format=torch.contiguous_format)
    return kind.type.from_local(
        local, mesh, [placement], run_check=False, shape=value.shape, stride=_strides(value.shape)
    )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def addends(value: torch.Tensor, world: int) -> list[torch.Tensor]:
    """Parts that sum to about the value: two of them are not zero, so any order sums to the same."""
    offset = torch.ones_like(value) if value.numel() % 2 else torch.full_like(value, -0.5)
    parts = [value + offset, -offset, *[torch.zeros_like(value)] * (world - 2)]
    return parts[1:] + parts[:1]


def values_of(trial: Trial, world: int) -> list[torch.Tensor]:
    """The values of the tensors: of a Partial one what its addends sum to."""
    return [
        sum(addends(x.detach(), world)) if isinstance(p, Partial) else x.detach().clone()
        for x, p in zip(tensors_in(trial.sample_tree), trial.placements, strict=True)
    ]  # type: ignore[misc]


def carried_out(
    trial: Trial, leaves: Sequence[torch.Tensor], full: Callable[[Any], Any], make_out: Callable[..., Any]
) -> Done:
    """Make the call on these tensors; ``full`` makes plain tensors of what comes out."""
    call = callable_of(trial.op, trial.form)
    assert call is not None
    torch.default_generator.manual_seed(trial.seed)
    writes = "place" in trial.form
    given = [x.clone() if writes and trial.gradients and x.requires_grad else x for x in leaves]
    first, args, kwargs = put(trial.sample_tree, iter(given))
    reads = []
    with torch.set_grad_enabled(trial.gradients):
        if trial.form == "out":
            plain = put(trial.sample_tree, iter([x.detach() for x in tensors_in(trial.sample_tree)]))
            result = trial.op.op(plain[0], *plain[1], **plain[2])
            outs = make_out(result)
            out = call(first, *args, **kwargs, out=outs)
            reads += [str(a is b) for a, b in zip(tensors_in(out), tensors_in(outs), strict=True)]
            if make_out is _zeros and not trial.is_random and _misses(trial, outs, result):
                raise Unclear  # fft.ihfftn of one dim leaves out as it was
        else:
            out = call(first, *args, **kwargs)
        if writes:
            reads.append(f"same {out is first}")
        if trial.form == "alias":
            aliased = any(_share(a, b) for a in tensors_in(out) for b in leaves)
            if aliased and trial.op.name.rpartition(".")[2] not in _VIEWS and make_out is _zeros:
                raise Unclear
            if any(map(_overlaps, tensors_in(out))):
                raise Unclear
            _write(out, given)
        reads += [f"requires_grad {t.requires_grad} {t.dtype}" for t in leaves_of(out)]
        whole = tree_map(full, out)
        inputs = [full(x) for x in given]
        grads = _gradients(trial, whole, leaves) if trial.gradients else []
    return Done(
        tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, whole),
        [x.detach() for x in inputs],
        [None if g is None else full(g).detach() for g in grads],
        reads,
    )


def _overlaps(x: torch.Tensor) -> bool:
    """Whether elements share memory: torch does not say what writing to them gives."""
    if type(x) is not torch.Tensor:
        return False
    places = sum(
        (torch.arange(n) * step).view(-1, *[1] * (x.ndim - 1 - d))
        for d, (n, step) in enumerate(zip(x.shape, x.stride(), strict=True))
    )
    return isinstance(places, torch.Tensor) and places.unique().numel() < x.numel()


def _misses(trial: Trial, outs: Any, result: Any) -> bool:
    values = trial.op.name not in _UNDEFINED
    return bool(unequal(tensors_in(outs), tensors_in(result), 4, values))


def _write(out: Any, given: Sequence[torch.Tensor]) -> None:
    """Write to what came out, then to the inputs: what are views show both."""
    for t in tensors_in(out)[:2]:
        t.mul_(3) if t.dtype != torch.bool else t.logical_not_()
    for t in given[:1]:
        t.add_(1) if t.dtype != torch.bool else t.logical_not_()


def _gradients(trial: Trial, whole: Any, leaves: Sequence[torch.Tensor]) -> list[Any]:
    process = trial.sample.output_process_fn_grad
    ends = [x for x in leaves_of(process(whole) if process is not None else whole) if x.requires_grad]
    cotangents = []
    for x in ends:
        drawn = torch.rand(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(trial.seed))
        cotangents.append(drawn + 0.5)
    if ends:
        torch.autograd.backward(ends, cotangents)
    return [x.grad for x in leaves]


def differences(trial: Trial, found: Done, right: Done) -> str:
    """What differs between two ways of making a call; nothing if they agree."""
    if found.reads != right.reads:
        return f"{found.reads}, not {right.reads}"
    floats = [x.dtype for x in found.inputs if x.is_floating_point() or x.is_complex()]
    double = trial.gradients and all(kind in (torch.float64, torch.complex128) for kind in floats)
    digits = 7 if double else 2 if trial.op.name in _SHAKY else 4
    pairs = [("output", found.out, right.out), ("inputs after it", found.inputs, right.inputs)]
    pairs += [
        (f"gradient {i}", g, torch.zeros_like(g) if h is None and g is not None else h)
        for i, (g, h) in enumerate(zip(found.grads, right.grads, strict=True))
    ]
    rounding = _rounding(trial, right)
    for what, a, b in pairs:
        text = unequal(a, b, digits, values=trial.op.name not in _UNDEFINED, rounding=rounding)
        if text:
            return f"{what}: {text}"
    return ""


def _rounding(trial: Trial, right: Done) -> float:
    """What a convolution's sums may differ by in single precision: an eps of the sizes of all its terms."""
    if not trial.op.name.startswith("nn.functional.conv") or right.inputs[0].dtype != torch.float32:
        return 0.0
    x, weight = right.inputs[:2]
    terms = weight.numel() / max(weight.shape["transpose" in trial.op.name], 1)
    largest = [t.abs().max().item() if t.numel() else 0.0 for t in (x, weight)]
    return torch.finfo(torch.float32).eps * terms * largest[0] * largest[1]


def unequal(a: Any, b: Any, digits: int, values: bool = True, rounding: float = 0.0) -> str:
    """What is unequal in two trees of plain tensors."""
    if isinstance(b, torch.Tensor):
        if not isinstance(a, torch.Tensor):
            return f"{type(a).__name__}, not a tensor"
        if a.layout is not torch.strided or b.layout is not torch.strided:
            return "" if a.layout is b.layout else f"{a.layout}, not {b.layout}"
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        coarse = b.is_floating_point() or b.is_complex()
        digits = min(digits, 4) if coarse and b.dtype.to_real().itemsize < 8 else digits
        rtol = 2 * 10.0**-digits if coarse else 0.0
        if b.dtype.itemsize == 1 and coarse:
            values = False  # of eight bits: torch itself rounds otherwise in another memory format
        try:
            if values:
                atol = max(rtol / 10, rounding)
                torch.testing.assert_close(a, b, equal_nan=True, rtol=rtol, atol=atol)
        except AssertionError as error:
            return " ".join(str(error).split())[:160]
        return ""
    if isinstance(b, tuple | list) and not isinstance(b, torch.Size):
        if type(a) is not type(b) or len(a) != len(b):
            return f"{type(a).__name__}{_length(a)}, not {type(b).__name__}{_length(b)}"
        return next(
            filter(None, (unequal(x, y, digits, values, rounding) for x, y in zip(a, b, strict=True))), ""
        )
    if isinstance(b, dict):
        return unequal(tuple(a.items()), tuple(b.items()), digits, values, rounding)
    if isinstance(b, float):
        return "" if isinstance(a, float) and (a == b or abs(a - b) < 1e-4 or a != a) else f"{a!r}, not {b!r}"
    return "" if a == b else f"{a!r}, not {b!r}"


def _length(a: Any) -> str:
    return f" of {len(a)}" if isinstance(a, tuple | list) else ""


# ---- the ranks


class Sweep:
    """The sweep on one rank.

    Args:
        notes: a folder in which each rank notes the call that it is at: gloo may end a process whose
            collectives do not fit those of the others.
    """

    def __init__(self, kind: Kind, rank: int, world: int, notes: Path | None = None) -> None:
        self.kind, self.rank, self.world = kind, rank, world
        self.note = None if notes is None else notes / f"rank {rank}"
        if self.note is not None:
            self.note.touch()
        self.meeting = Meeting(rank, world)
        self.meeting.rejoin()
        self.mesh = kind.mesh(world)
        self.alone = kind.mesh(1)

    def run(self, ops: Sequence[Any], seed: int, few: int) -> Iterator[Finding]:
        """All calls of these operations; every rank gets the same findings."""
        for op in ops:
            for trial in trials(op, seed, few):
                found = self.attempt(trial)
                if found is not None:
                    yield found

    def attempt(self, trial: Trial) -> Finding | None:
        """One call; None if the plain one cannot be made."""
        if self.note is not None:
            # over what stood there: a file system may write out at once what was cut and written again
            with self.note.open("r+") as note:
                note.write(f"{trial.name} ({trial.form}) on {trial.layouts}\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = values_of(trial, self.world)
            right, error = self._plain(trial, values)
            if error is not None and trial.form != "error":
                return None
            if error is None and trial.form == "error":
                return None
            outcome, text, failed = self._tried(trial, values, right, error)
        told, broken = self.meeting.exchange(f"{int(failed)}{outcome}|{text}", failed)
        if broken:
            self.meeting.rejoin()
            self.mesh = self.kind.mesh(self.world)
        words = [t[1:].partition("|") for t in told]
        worst = max(range(self.world), key=lambda r: CLASSES.index(words[r][0]))
        if len({t[0] for t in told}) > 1:
            outcome, text = "wrong", "ranks differ: " + " / ".join(t[1:] for t in told)
        else:
            outcome, text = words[worst][0], words[worst][2]
        return Finding(trial.name, trial.form, trial.layouts, outcome, text)

    def _plain(self, trial: Trial, values: Sequence[torch.Tensor]) -> tuple[Done | None, Exception | None]:
        alone = trial.is_random and trial.form != "error"
        leaves = []
        for value, x, p in zip(values, tensors_in(trial.sample_tree), trial.placements, strict=True):
            leaf = value.clone()
            if alone and p is not None:
                leaf = laid(value, Replicate(), self.kind, self.alone, 0, 1)
            leaves.append(leaf.requires_grad_(trial.gradients and x.requires_grad))
        try:
            return carried_out(trial, leaves, self._full, _zeros), None
        except Exception as error:
            return None, error

    def _full(self, x: Any) -> Any:
        return x.full_tensor() if isinstance(x, self.kind.type) else x

    def _tried(
        self, trial: Trial, values: Sequence[torch.Tensor], right: Done | None, wanted: Exception | None
    ) -> tuple[str, str, bool]:
        rng = random.Random(trial.seed)
        untyped: list[str] = []

        def full(x: Any) -> Any:
            if isinstance(x, torch.Tensor) and not isinstance(x, self.kind.type) and tensors_in(x):
                untyped.append("an output is plain")
            return self._full(x)

        def out_like(x: Any) -> Any:
            states = [Replicate(), *map(Shard, range(x.ndim))]
            return laid(_zeros(x), rng.choice(states), self.kind, self.mesh, self.rank, self.world)

        try:
            leaves = []
            for value, x, p in zip(values, tensors_in(trial.sample_tree), trial.placements, strict=True):
                leaf = (
                    value.clone()
                    if p is None
                    else laid(value, p, self.kind, self.mesh, self.rank, self.world)
                )
                leaves.append(leaf.requires_grad_(trial.gradients and x.requires_grad))
            with self.kind.watch() as how:
                found = carried_out(trial, leaves, full, lambda out: tree_map(out_like, out))
        except Exception as error:
            return (*self._failed(error, wanted), True)
        if wanted is not None:
            return "wrong", f"no error, but {_summary(wanted)}", False
        assert right is not None
        text = differences(trial, found, right)
        if text:
            return "wrong", text, False
        return ("gathered" if "gathered" in how else "entered" if "entered" in how else "rule"), "", False

    def _failed(self, error: Exception, wanted: Exception | None) -> tuple[str, str]:
        if wanted is None:
            where = traceback.extract_tb(error.__traceback__)[-1]
            at = f" [{where.filename.rpartition('/')[2]}:{where.lineno}]"
            return ("refused" if self.kind.is_refusal(error) else "wrong"), _summary(error) + at
        same = type(error) is type(wanted) and _core(error) == _core(wanted)
        return ("rule", "") if same else ("wrong", f"{_summary(error)}, not {_summary(wanted)}")


def _zeros(out: Any) -> Any:
    return tree_map(lambda x: torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x, out)


def _share(x: torch.Tensor, y: torch.Tensor) -> bool:
    with raw():  # a DTensor hands its memory out only where it is whole
        return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


def _core(error: BaseException) -> str:
    """An error's message without what names the tensor's class."""
    text, _, _ = " ".join(str(error).split()).partition(" didn't match because")
    return text.replace("DTensor", "Tensor")


def coverage(findings: Sequence[Finding]) -> dict[str, str]:
    """For each operation the worst class of its calls."""
    worst: dict[str, str] = {}
    for f in findings:
        worst[f.op] = max(worst.get(f.op, "rule"), f.outcome, key=CLASSES.index)
    return worst


def part(index: int, of: int) -> list[Any]:
    """One of several parts of the database, of about equal cost."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes a second

    return list(op_db)[index::of]
