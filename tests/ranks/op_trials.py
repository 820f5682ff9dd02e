"""Which calls of torch's op database are tried: samples, forms, and where their tensors lie."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

FORMS = ("function", "method", "operator", "in place", "in-place operator", "out", "alias", "error")


@dataclass
class Trial:
    """One call to be tried: an operation, one of its forms, a sample, and where its tensors lie."""

    op: Any
    form: str
    sample: Any
    placements: tuple[Placement | None, ...]  # None: the tensor stays plain
    gradients: bool
    seed: int

    @property
    def name(self) -> str:
        """The operation's name, with that of its variant."""
        return name_of(self.op)

    @property
    def layouts(self) -> str:
        """The tensors' dtypes, shapes and placements."""
        tensors = tensors_in(self.sample_tree)
        given = (
            f"{str(t.dtype)[6:]}{list(t.shape)}{_short(p)}"
            for t, p in zip(tensors, self.placements, strict=True)
        )
        return " ".join(given) + (f" {_options(self.sample)}" if _options(self.sample) else "")

    @property
    def sample_tree(self) -> Any:
        """input, args and kwargs as one tree."""
        return (self.sample.input, self.sample.args, self.sample.kwargs)

    @property
    def is_random(self) -> bool:
        """Whether the values are drawn: they are compared with those of one rank."""
        return is_random(self.op)


def name_of(op: Any) -> str:
    """An operation's name, with that of its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def is_random(op: Any) -> bool:
    """Whether an operation draws random numbers."""
    words = """
        dropout rand multinomial bernoulli normal uniform cauchy exponential geometric rrelu lowrank
        fractional_max_pool dot_product_attention multi_head_attention
    """
    return any(word in op.name for word in words.split())


def _short(p: Placement | None) -> str:
    return "" if p is None else f"S({p.dim})" if isinstance(p, Shard) else type(p).__name__[0]


def _options(sample: Any) -> str:
    words = [_word(a) for a in sample.args] + [f"{k}={_word(v)}" for k, v in sample.kwargs.items()]
    return "(" + ", ".join(words)[:200] + ")" if words else ""


def _word(a: Any) -> str:
    return repr(tree_map(lambda x: "T" if isinstance(x, torch.Tensor) else x, a))


# ---- trees


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among arguments that can be laid out."""
    if isinstance(tree, torch.Tensor):
        return [tree] if tree.layout is torch.strided and not tree.is_quantized else []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [t for x in tree for t in tensors_in(x)]


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``fn`` on every leaf of nested tuples, lists and dicts."""
    if isinstance(tree, dict):
        return {k: tree_map(fn, v) for k, v in tree.items()}
    if isinstance(tree, tuple | list) and not isinstance(tree, torch.Size):
        parts = [tree_map(fn, x) for x in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return fn(tree)


def leaves_of(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda x: found.append(x) if isinstance(x, torch.Tensor) else None, tree)
    return found


def put(tree: Any, tensors: Iterator[Any]) -> Any:
    """The arguments with other tensors."""
    return tree_map(lambda x: next(tensors) if isinstance(x, torch.Tensor) and tensors_in(x) else x, tree)


# ---- which calls


def trials(op: Any, seed: int, few: int) -> Iterator[Trial]:
    """Calls of one operation: of the function ``few`` in each pass, fewer of its other forms.

    The layouts of the first tensor go through all its placements; those of the others are drawn.
    """
    rng = random.Random(f"{name_of(op)} {seed}")
    turn = rng.randrange(64)
    for dtype, gradients in _passes(op):
        _seed(seed)
        samples = _sampled(op.sample_inputs_func(op, "cpu", dtype, gradients))
        rng.shuffle(samples)
        if not samples:
            continue
        for form in FORMS[:-1]:
            if (dtype.is_complex or gradients) and form in ("out", "alias", "operator", "in-place operator"):
                continue
            if callable_of(op, form) is None or (
                gradients and form != "function" and not op.supports_inplace_autograd
            ):
                continue
            count = few if form == "function" else max(few // 2, 1)
            for sample in itertools.islice(itertools.cycle(samples), count):
                if "in" in form and "place" in form and sample.broadcasts_input:
                    continue
                turn += 1
                placements = _drawn(sample, turn, rng)
                if any(placements):
                    yield Trial(op, form, sample, placements, gradients, rng.randrange(1 << 30))
    if op.error_inputs_func is not None:
        _seed(seed)
        samples = _sampled(op.error_inputs_func(op, "cpu"))
        for given in rng.sample(samples, min(few, len(samples))):
            turn += 1
            placements = _drawn(given.sample_input, turn, rng)
            if any(placements):
                yield Trial(op, "error", given.sample_input, placements, False, rng.randrange(1 << 30))


def _passes(op: Any) -> list[tuple[torch.dtype, bool]]:
    """Dtype, and whether gradients are compared."""
    kinds = op.dtypes
    first = torch.float32 if torch.float32 in kinds else min(kinds, key=str, default=None)
    found = [(first, False)] if first is not None else []
    if op.supports_autograd and torch.float64 in kinds:
        found.append((torch.float64, True))
    found += [(t, False) for t in (torch.complex64, torch.int64, torch.bool) if t in kinds and t != first][:1]
    return found


def _seed(seed: int) -> None:
    """The database draws from all of these, and every rank must get the same."""
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)


def _sampled(samples: Iterable[Any]) -> list[Any]:
    found = []
    # the database itself may be unable to make some; torch warns once in a process, so not on all ranks alike
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in itertools.islice(samples, 40):
            found.append(sample)
    if any("indexing" in getattr(sample, "kwargs", ()) for sample in found):
        _bring_in_order(found)
    return found


def _bring_in_order(samples: list[Any]) -> None:
    """Those of meshgrid come out of a set, in another order in each process, and so do their values."""
    samples.sort(key=lambda sample: str(sample.kwargs.get("indexing")))
    generator = torch.Generator().manual_seed(0)
    for x in (x for sample in samples for x in tensors_in((sample.input, sample.args))):
        x.data.copy_(torch.rand(x.shape, generator=generator).mul(8))


def _drawn(sample: Any, turn: int, rng: random.Random) -> tuple[Placement | None, ...]:
    tensors = tensors_in((sample.input, sample.args, sample.kwargs))
    placements: list[Placement | None] = []
    for i, x in enumerate(tensors):
        states: list[Placement | None] = [*map(Shard, range(x.ndim)), Replicate()]
        if (x.dtype.is_floating_point or x.dtype.is_complex) and x.dtype.itemsize > 1:
            states.append(Partial())
        if i == 0:
            placements.append(states[turn % len(states)])
        elif len(tensors) == 2 and rng.random() < 0.1:
            placements.append(None)
        else:
            placements.append(rng.choice(states))
    return tuple(placements)


def callable_of(op: Any, form: str) -> Callable[..., Any] | None:
    return {
        "function": op.op,
        "method": op.method_variant,
        "operator": op.operator_variant,
        "in place": op.inplace_variant,
        "in-place operator": op.inplace_operator_variant,
        "out": op.op if op.supports_out else None,
        "alias": op.op,
        "error": op.op,
    }[form]
