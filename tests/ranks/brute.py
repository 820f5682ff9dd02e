"""Brute force over layouts: a torch call on DTensors against the same call on plain tensors.

A :class:`Case` names functions and gives sample arguments, in which an :class:`X` stands for a tensor.
:func:`check` runs on every rank: for each function, sample and layout of the tensors it compares the
values and the gradients, and returns what went wrong as text.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

import espalier
from espalier import DTensor, GatherWarning, Layout, Mesh
from espalier.comm import all_reduce
from espalier.comm.redistribute import carry_out
from espalier.layout import gradient_layout, local_box
from espalier.layout.layout import D, R, is_partial
from espalier.sharding.spec import spellings
from espalier.tensor import plain, stamp
from espalier.tensor.rules import RULES
from tests.asked import ASKED
from tests.ranks.samples import A, X, described, others, put, without_gradient
from tests.ranks.samples import bools as bools
from tests.ranks.samples import ints as ints

# values and addends are multiples of this, so that sums of addends are exact
GRAIN = 2.0**-10
SEED = 1234
# so many combinations of layouts are tried at most for what is no first spelling
FEW = 1
# of more layouts of a sample after the first, so many are drawn, in which each state of each tensor comes;
# where few are of the first, half as many; but not on sweeps
LATER = 8


@dataclass
class Case:
    """Functions with sample arguments.

    Attributes:
        functions: what is called; every one of them at least once.
        samples: the arguments to try; a spelling that cannot take one of them is skipped for it.
        random: compared with the same call on one rank under the same seed, not with torch's.
        gathers: may warn that it gathers, in these (documented) circumstances.
        gathers_in_place: likewise, its in-place spellings.
        shape_only: the values are undefined (``empty_like``).
        most: of more combinations of layouts than this, so many are drawn.
    """

    name: str
    functions: list[Callable[..., Any]]
    samples: Sequence[A]
    random: bool = False
    gathers: bool = False
    shape_only: bool = False
    gathers_in_place: bool = False
    most: int = 130


def case(names: str, *samples: A, also: Sequence[Callable[..., Any]] = (), **options: Any) -> Case:
    """A case for all ruled spellings of the names, in place too."""
    functions: list[Callable[..., Any]] = list(also)
    for name in names.split():
        for f in spellings(name) + spellings(name + "_", f"__i{name}__"):
            if (RULES.get(f) or RULES.body(f)) is not None and f not in functions:
                functions.append(f)
    assert functions, f"no rule for {names}"
    return Case(names.split()[0] if names else name_of(also[0]), functions, samples, **options)


def name_of(function: Callable[..., Any]) -> str:
    """What to call a function in a report."""
    owner = getattr(function, "__objclass__", None) or getattr(function, "__module__", None)
    return f"{getattr(owner, '__name__', owner)}.{getattr(function, '__name__', function)}"


class Call(NamedTuple):
    """A call, as a report names it: written out only if it goes wrong, as nearly none does."""

    function: Callable[..., Any]
    sample: A
    layouts: Sequence[Layout]

    def __str__(self) -> str:
        return f"{name_of(self.function)}{self.sample} on {', '.join(map(repr, self.layouts))}"


class Laid(NamedTuple):
    """A tensor of a call, likewise."""

    name: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.name} as {self.layout}"


def writes(function: Callable[..., Any]) -> bool:
    """Whether the function writes to its first argument."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_")


# ---- layouts


def states(x: X, ndim: int | None = None) -> list[Any]:
    """The states that a tensor can have along one axis."""
    found: list[Any] = [R, *range(len(x.shape))]
    if x.is_real_or_complex:
        found.append("sum")
        if x.differentiable:
            found.append(D)
    return found


def axis_layouts(
    tensors: Sequence[X], mesh: Mesh, few: int | None, most: int, rng: random.Random
) -> Iterator[Any]:
    """Tuples of layouts on a mesh of one axis: all of them, or ``few`` in which each state comes once."""
    choices = [states(x) for x in tensors]
    total = math.prod(map(len, choices))
    if few is None and total > most:
        # deferred differs from replicated in the gradient only; drawn ones show that often enough
        settled = [[s for s in c if s != D] for c in choices]
        if math.prod(map(len, settled)) > 10**6:
            firm = [tuple(rng.choice(c) for c in settled) for _ in range(most)]
        else:
            firm = list(itertools.product(*settled))
        drawn = [tuple(rng.choice(c) for c in choices) for _ in range(most // 3)]
        combos: Any = [*(firm if len(firm) <= most else rng.sample(firm, most)), *drawn]
    elif few is not None and total > few:
        # one after another in a drawn order: of so many as there are states, none is left out
        turns = [rng.sample(c, len(c)) for c in choices]
        # once through, tensors go on apart from each other: nothing comes twice
        combos = [tuple(t[(i + k * (i // len(t))) % len(t)] for k, t in enumerate(turns)) for i in range(few)]
    else:
        combos = itertools.product(*choices)
    for combo in combos:
        yield tuple(made((s,), x.shape, mesh, rng) for s, x in zip(combo, tensors, strict=True))


def drawn_layouts(tensors: Sequence[X], mesh: Mesh, count: int, rng: random.Random) -> Iterator[Any]:
    """Tuples of layouts on a mesh of any axes, drawn; shards are likelier than the rest."""
    for _ in range(count):
        yield tuple(
            made(
                tuple(rng.choice([*states(x), *range(len(x.shape))]) for _ in mesh.shape),
                x.shape,
                mesh,
                rng,
            )
            for x in tensors
        )


def made(axes: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh, rng: random.Random) -> Layout:
    """The layout with these states, its cuts in a drawn order."""
    cuts = []
    for d in range(len(shape)):
        cut = [a for a, s in enumerate(axes) if s == d]
        rng.shuffle(cut)
        cuts.append(tuple(cut))
    return Layout.of(mesh, axes, tuple(cuts), shape)


def value_of(x: X, generator: torch.Generator) -> torch.Tensor:
    """A plain tensor as described, the same on every rank."""
    if x.values is not None:
        return torch.tensor(x.values, dtype=x.dtype).view(x.shape)
    if not x.is_real_or_complex:
        return torch.randint(int(x.low), int(x.high), x.shape, generator=generator).to(x.dtype)
    if x.dtype.is_complex:
        parts = [value_of(replace(x, dtype=x.dtype.to_real()), generator) for _ in range(2)]
        return torch.complex(*parts)
    low, high = math.ceil(x.low / GRAIN), math.ceil(x.high / GRAIN)
    return torch.randint(low, high, x.shape, generator=generator).to(x.dtype).mul_(GRAIN)


def quarters(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random multiples of a quarter, in the shape and dtype of another tensor."""
    drawn = torch.randint(-8, 8, like.shape, generator=generator).to(like.dtype).mul_(0.25)
    return drawn * (1 - 2j) if like.dtype.is_complex else drawn


def laid(value: torch.Tensor, layout: Layout, generator: torch.Generator) -> DTensor:
    """A DTensor of that value; where it is Partial, made of random addends."""
    mesh, own = layout.mesh, 0
    partial = [a for a, s in enumerate(layout.axes) if is_partial(s)]
    for a in partial:
        own = own * mesh.shape[a] + mesh.coordinate[a]
    n = math.prod(mesh.shape[a] for a in partial)
    parts = [quarters(value, generator) for _ in range(n - 1)]
    parts.append(value - sum(parts) if parts else value)
    return stamp(parts[own][local_box(layout).slices].clone(), layout)


# ---- one call


def called(function: Callable[..., Any], sample: A, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The tensors that come out; of a function that writes, what was written."""
    queue = iter(tensors)
    args, kwargs = put(sample.args, queue), put(sample.kwargs, queue)
    if writes(function) or kwargs.get("inplace") is True:
        # a leaf that needs a gradient cannot be written to
        args = (args[0].clone(), *args[1:])
        out = function(*args, **kwargs)
        assert out is None or out is args[0], "an in-place function must return its first argument"
        return [args[0]]
    out = function(*args, **kwargs)
    # the kind of sequence is part of what is compared
    return [type(out).__name__, *out] if isinstance(out, tuple | list) else [out]


@dataclass
class Truth:
    """What the plain call gives."""

    outs: list[Any]
    cotangents: list[torch.Tensor | None]
    grads: list[torch.Tensor | None]


def truth(
    function: Callable[..., Any],
    sample: A,
    values: Sequence[torch.Tensor],
    of: Case,
    generator: torch.Generator,
) -> Truth:
    """Outputs and gradients of the plain call (for random functions: of the call on one rank)."""
    xs = described((sample.args, sample.kwargs))
    leaves = [v.clone().requires_grad_(x.differentiable) for v, x in zip(values, xs, strict=True)]
    inputs = leaves
    if of.random:
        torch.manual_seed(SEED)
        single = Mesh.single()
        inputs = [espalier.DTensor.from_local(x, single, [espalier.Replicate()]) for x in leaves]
    outs = [
        espalier.full_tensor(o) if isinstance(o, torch.Tensor) else o
        for o in called(function, sample, inputs)
    ]
    cotangents = [
        quarters(o, generator) if isinstance(o, torch.Tensor) and o.requires_grad else None for o in outs
    ]
    _backward(outs, cotangents)
    outs = [o.detach() if isinstance(o, torch.Tensor) else o for o in outs]
    return Truth(outs, cotangents, [x.grad for x in leaves])


def _backward(outs: Sequence[Any], cotangents: Sequence[torch.Tensor | None]) -> None:
    pairs = [(o, c) for o, c in zip(outs, cotangents, strict=True) if c is not None]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [c for _, c in pairs])


def compare(
    function: Callable[..., Any], sample: A, layouts: Sequence[Layout], values: Sequence[torch.Tensor],
    wanted: Truth, of: Case, generator: torch.Generator, agree: Agree,
) -> None:  # fmt: skip
    """One call on DTensors against the truth.

    Raises:
        AssertionError: it differs.
    """
    xs = described((sample.args, sample.kwargs))
    leaves = []
    for value, layout, x in zip(values, layouts, xs, strict=True):
        leaf = laid(value, layout, generator)
        leaf.requires_grad_(x.differentiable)
        leaves.append(leaf)
    if of.random:
        torch.manual_seed(SEED)
    outs = called(function, sample, leaves)
    assert len(outs) == len(wanted.outs), f"{len(outs)} outputs, not {len(wanted.outs)}"
    reached: list[Any] = []
    cotangents: list[Any] = []
    for k, (out, right) in enumerate(zip(outs, wanted.outs, strict=True)):
        if not isinstance(right, torch.Tensor):
            assert out == right, f"output {k}: {out!r} is not {right!r}"
            continue
        assert isinstance(out, DTensor), f"output {k} is no DTensor"
        local, layout = plain(out), out._layout
        assert out.shape == right.shape, f"output {k}: shape {tuple(out.shape)}, not {tuple(right.shape)}"
        assert out.dtype == right.dtype, f"output {k}: {out.dtype}, not {right.dtype}"
        if not of.shape_only:
            agree(local, layout, right, Laid(f"output {k}", layout), right.dtype)
        cotangent = wanted.cotangents[k]
        assert out.requires_grad == (cotangent is not None), (
            f"output {k}: requires_grad is {out.requires_grad}"
        )
        if cotangent is not None:
            reached.append(local)
            cotangents.append(plain(laid(cotangent, gradient_layout(layout), generator)))
    if writes(function):
        assert same_place(outs[0]._layout, layouts[0]), f"written {layouts[0]}, now {outs[0]._layout}"
    if reached:
        torch.autograd.backward(reached, cotangents)
    # of what the call computed in, the coarsest
    dtype = min((c.dtype for c in cotangents), key=lambda d: d.itemsize, default=torch.float64)
    for k, (leaf, right) in enumerate(zip(leaves, wanted.grads, strict=True)):
        if not xs[k].differentiable:
            continue
        grad = leaf.grad
        if grad is not None:
            assert grad._layout is gradient_layout(layouts[k])
        elif right is not None:
            raise AssertionError(f"input {k} as {layouts[k]} has no gradient")
        else:
            continue
        right = torch.zeros(grad.shape, dtype=grad.dtype) if right is None else right
        agree(
            plain(grad),
            grad._layout,
            right,
            Laid(f"gradient of input {k}", layouts[k]),
            min(dtype, right.dtype, key=lambda d: d.itemsize),
        )


class Agree:
    """Called, it says that what this rank holds is its part of ``right``.

    What is Partial is summed first, of many calls in one message: :meth:`settle` compares it then.
    """

    def __init__(self) -> None:
        self.call: Call | None = None
        self._sums: dict[Any, list[tuple[torch.Tensor, torch.Tensor, Laid, torch.dtype, Call | None]]] = {}

    def __call__(
        self, local: torch.Tensor, layout: Layout, right: torch.Tensor, what: Laid, dtype: torch.dtype
    ) -> None:
        """Compare, now or later.

        Raises:
            AssertionError: it differs.
        """
        assert tuple(local.shape) == layout.local_shape, f"{what}: holds {tuple(local.shape)}"
        local = local.detach()
        firm = Layout.of(
            layout.mesh, tuple(R if is_partial(s) else s for s in layout.axes), layout.cuts, layout.shape
        )
        right = right[local_box(firm).slices]
        if {s for s in layout.axes if is_partial(s)} == {"sum"}:
            axes = tuple(a for a, s in enumerate(layout.axes) if s == "sum")
            waiting = self._sums.setdefault((layout.mesh, axes, local.dtype), [])
            waiting.append((local, right, what, dtype, self.call))
        else:
            close(carry_out(local, layout, firm), right, what, dtype)

    def settle(self) -> Iterator[str]:
        """Compare what was put off; the failures, one line each."""
        for (mesh, axes, _), waiting in self._sums.items():
            total = torch.cat([local.reshape(-1) for local, *_ in waiting])
            for axis in axes:
                total = all_reduce(total, mesh, axis)
            parts = total.split([local.numel() for local, *_ in waiting])
            for part, (local, right, what, dtype, call) in zip(parts, waiting, strict=True):
                try:
                    close(part.view(local.shape), right, what, dtype)
                except AssertionError as error:
                    yield f"{call}: {error}"
        self._sums.clear()


def same_place(a: Layout, b: Layout) -> bool:
    """Whether two layouts differ in nothing but what is deferred."""
    firm = [tuple(R if s == D else s for s in lay.axes) for lay in (a, b)]
    return firm[0] == firm[1] and a.cuts == b.cuts


def close(given: torch.Tensor, right: torch.Tensor, what: Laid, dtype: torch.dtype) -> None:
    """Equal but for rounding (where the call computes in float32, in that precision)."""
    if torch.equal(given, right):
        return
    coarse = dtype.to_real().itemsize < 8 and (dtype.is_floating_point or dtype.is_complex)
    rtol, atol = (1e-3, 1e-4) if coarse else (1e-10, 1e-11)
    try:
        torch.testing.assert_close(given, right, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        text = str(error).splitlines()
        raise AssertionError(f"{what} is wrong: {' '.join(text[:4])}") from None


# ---- all calls of a case


def check(rank: int, world: int, group: str, axes: dict[str, int], few: int | None = None) -> list[str]:
    """All cases of a group on a mesh; the failures, one line each."""
    from tests.ranks.cases import CASES

    mesh = Mesh.from_env(axes)
    # torch's own remarks, which the plain call makes too
    remarks = "deprecated|in beta|default value of dim|window was not provided"
    warnings.filterwarnings("ignore", f"(?s).*({remarks})", UserWarning)
    failures: list[str] = []
    for of in CASES[group]:
        for line in check_case(of, mesh, few):
            failures.append(line)
            if len(failures) > 500:
                # perhaps one rank alone failed amid a collective, and nothing fits from there on
                return failures
    return failures


def check_case(of: Case, mesh: Mesh, few: int | None = None) -> Iterator[str]:
    """One case: its first spelling (and its first in-place one) under all layouts, the others under some.

    Args:
        few: of the layouts for a first spelling, so many are drawn for each sample.
    """
    generator = torch.Generator().manual_seed(SEED)
    rng = random.Random(SEED)
    agree = Agree()
    seen = set()
    for place, function in enumerate(of.functions):
        first = writes(function) not in seen
        fitted = 0
        for sample in (*of.samples, *(others(of.samples) if first and mesh.size() == 2 else ())):
            again = sample not in of.samples
            xs = described((sample.args, sample.kwargs))
            values = [value_of(x, generator) for x in xs]
            try:
                wanted = truth(function, sample, values, of, generator)
            except (TypeError, RuntimeError, IndexError, AttributeError) as error:
                reason = error
                if not any(word in str(error) for word in ("derivative", "automatic differentiation")):
                    continue
                sample = A(*without_gradient(sample.args), **without_gradient(sample.kwargs))
                xs = described((sample.args, sample.kwargs))
                wanted = truth(function, sample, values, of, generator)
            fitted += 1
            some = few if first and not again else FEW
            if sample is not of.samples[0] and not ASKED:
                some = LATER if some is None else -(-some // 2)
            if not first and mesh.size() > 2 and place % 2 == mesh.ndim % 2:
                continue  # on three ranks or on a grid
            if mesh.ndim > 1:
                combos = drawn_layouts(xs, mesh, some, rng) if few else iter(())
            else:
                combos = axis_layouts(xs, mesh, some, of.most if mesh.size() == 2 else of.most // 5, rng)
            for layouts in combos:
                agree.call = Call(function, sample, layouts)
                line = _tried(function, sample, layouts, values, wanted, of, generator, agree)
                if line:
                    yield f"{agree.call}: {line}"
            yield from agree.settle()
        seen.add(writes(function))
        if not fitted and "now removed" not in str(reason):  # a newer torch has it no more
            yield f"{name_of(function)}: no sample fits: {reason}"


def _tried(
    function: Callable[..., Any],
    sample: A,
    layouts: Any,
    values: Any,
    wanted: Truth,
    of: Case,
    generator: Any,
    agree: Agree,
) -> str:
    gathers = of.gathers or (writes(function) and (of.gathers_in_place or bool(layouts[0].partial)))
    failure = ""
    try:
        if gathers:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GatherWarning)
                compare(function, sample, layouts, values, wanted, of, generator, agree)
        else:
            compare(function, sample, layouts, values, wanted, of, generator, agree)
    except Exception as error:
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return failure
