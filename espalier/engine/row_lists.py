"""Batches in which a list has an entry for each row: the boxes of each image, as many as it shows.

Nothing in such an entry is a row of the batch. So these lists are closed while rows are cut and change
places; each rank is given the entries of all rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch

from espalier.comm.control import gather_objects
from espalier.device import moved
from espalier.mesh import Mesh
from espalier.trees import leaves, tensors_in, tree_map


class RowList:
    """A list with an entry for each row, which is no container."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows


def closed(batch: Any, tensors: Literal["none", "ragged", "all"] = "none") -> Any:
    """A batch whose lists with an entry for each row are closed.

    Lists of dicts are, where tensors beside them tell the number of rows. ``tensors`` says which others are,
    those of tensors (the masks of each image): none, for they may be several inputs with all rows in each;
    those whose tensors have other first dims; all, and lists of dicts with nothing beside them.
    """
    lists = list(_lists(batch))
    if not lists:
        return batch
    within = {id(x) for x in tensors_in(lists)}
    sizes = {x.shape[0] for x in tensors_in(batch) if x.ndim and id(x) not in within}
    is_told = len(sizes) == 1
    if not is_told:  # a list is rather a batch's tensors
        sizes = {len(x) for x in lists}
        if tensors != "all" or len(sizes) != 1 or not any(map(_has_dicts, lists)):
            return batch
    (n,) = sizes

    def is_of_rows(x: list[Any]) -> bool:
        if len(x) != n or not tensors_in(x):
            return False
        if tensors == "all" or _has_dicts(x):
            return True
        return tensors == "ragged" and {part.shape[0] for part in tensors_in(x) if part.ndim} != {n}

    of_rows = {id(x): RowList(x) for x in lists if is_of_rows(x)}
    return _replaced(batch, of_rows) if of_rows else batch


def _has_dicts(x: list[Any]) -> bool:
    return all(isinstance(entry, Mapping) for entry in x)


def opened(batch: Any, device: torch.device) -> Any:
    """The batch with its lists, whose tensors are on the device."""

    def entry(x: Any) -> Any:
        return moved(x, device) if isinstance(x, torch.Tensor) else x

    return tree_map(lambda x: tree_map(entry, x.rows) if isinstance(x, RowList) else x, batch)


def part_of(batch: Any, start: int, n: int, has_rows: Callable[[Any], bool], device: torch.device) -> Any:
    """So many rows of a batch, with their entries."""
    rows = slice(start, start + n)
    part = tree_map(lambda x: x[rows] if has_rows(x) else x, batch)
    return opened(on_lists(lambda entries: entries[rows], part), device) if lists_in(part) else part


def lists_in(batch: Any) -> list[RowList]:
    """Those that are closed."""
    return [x for x in leaves(batch) if isinstance(x, RowList)]


def on_lists(fn: Callable[[list[Any]], list[Any]], batch: Any) -> Any:
    """A batch with something done to the lists that are closed."""
    return tree_map(lambda x: RowList(fn(x.rows)) if isinstance(x, RowList) else x, batch)


def with_all_lists(
    rows: Any, is_exhausted: bool, by_place: Callable[[list[Any]], Mapping[Any, list[Any]]], mesh: Mesh
) -> Any:
    """A batch whose lists have the entries of all ranks (a collective, if there are any).

    Args:
        is_exhausted: whether this rank has none, and this is another's.
        by_place: sorts what ranks say by which rows they have.
    """
    lists = lists_in(rows)
    if not lists:
        return rows
    host = torch.device("cpu")
    own = [[] if is_exhausted else opened(x, host) for x in lists]
    of_all = [of[0] for _, of in sorted(by_place(gather_objects(own, mesh)).items())]
    whole = iter([[*itertools.chain(*parts)] for parts in zip(*of_all, strict=True)])
    return on_lists(lambda _: next(whole), rows)


def _lists(batch: Any) -> Iterator[list[Any]]:
    if type(batch) is list:
        yield batch
    elif isinstance(batch, Mapping | tuple):
        for x in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _lists(x)


def _replaced(batch: Any, of_rows: Mapping[int, RowList]) -> Any:
    if id(batch) in of_rows:
        return of_rows[id(batch)]
    if isinstance(batch, Mapping):
        return {name: _replaced(x, of_rows) for name, x in batch.items()}
    if isinstance(batch, tuple):
        parts = [_replaced(x, of_rows) for x in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return batch
