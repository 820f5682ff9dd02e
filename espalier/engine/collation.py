"""Whether rows of a dataset may be loaded apart: what is made of some is what is made of all.

A ``DataLoader`` of one process loads all rows of a batch, one after the other, and makes a batch of them.
Each rank may load its own alone where nothing in that hangs on the others: no random number is drawn (a
transform would draw others, and ranks would be out of step), and the ``collate_fn`` makes of a row what it
makes of it beside all others (it mixes none, pads to no longest one, and has rows first).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from espalier.tensor.traces import MOST_HELD, Generators, generator_state, held_by
from espalier.trees import leaves, tree_map

_DEPTH = 5  # of what holds generators: a subset's dataset's composed transforms


def fetched(dataset: Any, numbers: Sequence[int]) -> list[Any]:
    """Rows of a dataset, as a ``DataLoader`` fetches them."""
    if getattr(dataset, "__getitems__", None):
        return list(dataset.__getitems__(list(numbers)))
    return [dataset[i] for i in numbers]


def hangs_together(
    dataset: Any, collate: Callable[[list[Any]], Any], numbers: Sequence[int], parts: Sequence[slice]
) -> str | None:
    """Why these rows cannot be loaded in such parts; None if they can.

    All ranks find the same: each looks at all parts. Generators are left as they were.
    """
    generators, state = Generators(), torch.get_rng_state()
    held = _states(dataset)
    try:
        rows = fetched(dataset, numbers)
        is_again = _same(rows[0], fetched(dataset, numbers[:1])[0])
        whole = collate(list(rows))
        alone = [slice(i, i + 1) for i in range(len(rows))]  # of unequal lengths two may be the longest
        is_alike = all(
            _made_alike(collate, rows[part], whole, part) for part in (*parts, *alone) if rows[part]
        )
        is_still = _same([before for _, before in held], [now for _, now in _states(dataset)])
        if not (is_still and generators.as_now() and torch.equal(torch.get_rng_state(), state)):
            return "random numbers are drawn for its rows"
        if not is_again:
            return "its dataset gives another row the second time"
        return None if is_alike else "its collate_fn makes of a part of the rows another thing than of all"
    finally:
        generators.restore()
        torch.set_rng_state(state)
        for set_state, before in held:
            set_state(before)


def _made_alike(collate: Callable[[list[Any]], Any], rows: list[Any], whole: Any, part: slice) -> bool:
    try:
        own = collate(list(rows))
    except Exception:  # it wants more rows than these, say
        return False
    return _same(own, tree_map(lambda x: x[part] if isinstance(x, torch.Tensor) and x.ndim else x, whole))


def _same(a: Any, b: Any) -> bool:
    """Whether two trees hold the same."""
    own, others = leaves(a), leaves(b)
    return len(own) == len(others) and all(map(_equal, own, others))


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    try:
        return bool((a == b) if not hasattr(a, "shape") else a.shape == b.shape and (a == b).all())
    except Exception:  # it cannot be compared
        return False


def _states(dataset: Any) -> list[tuple[Callable[[Any], Any], Any]]:
    """Of each generator that a dataset holds, what sets its state, and this."""
    found = map(generator_state, _generators(dataset, _DEPTH))
    return [one for one in found if one is not None]


def _generators(x: Any, depth: int) -> Iterator[Any]:
    """Generators of random numbers that a dataset holds, or an object within it."""
    if isinstance(x, random.Random | torch.Generator) or type(x).__module__.startswith("numpy.random"):
        yield x
        return
    inner: Any = x if isinstance(x, list | tuple) and len(x) <= MOST_HELD else ()
    if not inner:
        inner = (vars(x) if isinstance(x, Dataset) else held_by(x) or {}).values()
    for one in inner if depth else ():
        yield from _generators(one, depth - 1)
