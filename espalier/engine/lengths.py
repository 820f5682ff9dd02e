"""Batches that ranks collate each by itself, padded to one length: that of the longest of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from espalier.comm.control import gather_objects
from espalier.mesh import Mesh
from espalier.tensor.observers import tell

# what is known of padding, by a part of the name that Hugging Face's collators give; None: the tokenizer says
_PADS: Mapping[str, int | None] = MappingProxyType(
    {
        "special_tokens_mask": 1,
        "attention_mask": 0,
        "token_type_ids": 0,
        "position_ids": 0,
        "input_ids": None,
        "input_values": 0,
        "labels": -100,
        "bbox": 0,
    }
)
_MASK = "attention_mask"


class AlikeBatches:
    """A loader whose batches are as long on all ranks (a collective for each); the rest is as it was."""

    def __init__(self, loader: Any, mesh: Mesh, models: list[Any]) -> None:
        self._loader, self._mesh, self._models = loader, mesh, models

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        collate = self._loader.collate_fn
        return (alike(batch, self._mesh, collate, self._models) for batch in self._loader)


def alike(batch: Any, mesh: Mesh, collate: Any = None, models: list[Any] | None = None) -> Any:
    """A batch, as long as the longest of all ranks' where it is known what pads it: as if it were collated
    with theirs. Else as it is.

    Args:
        collate: what collated it, whose tokenizer pads, if it has one.
        models: what is trained, whose configuration may know the padding's number.
    """
    if not isinstance(batch, Mapping):
        return batch
    lengths = _lengths(batch)
    longest = _longest(lengths, gather_objects(lengths, mesh))
    return batch if longest == lengths else _lengthened(batch, longest, _tokenizer(collate), models or [])


def all_alike(rows: Any, mesh: Mesh) -> Any:
    """The same of every dict in what a rank gives a model, with a warning (a collective); None: it has none.

    Where labels are among it the loss is the model's. Else it stays as it is: whoever makes a loss of
    outputs has labels of the batch's own length. What pads is the number where masks are 0, on the side
    where they are, or else 0 on the right.
    """
    own = None if rows is None else [_lengths(batch) for batch in _mappings(rows)]
    of_all = [of for of in gather_objects(own, mesh) if of is not None]
    if own is None or any(len(of) != len(own) for of in of_all):
        return rows
    if not any("labels" in str(name) for batch in _mappings(rows) for name in batch):
        return rows
    longest = iter([_longest(lengths, of) for lengths, *of in zip(own, *of_all, strict=True)])

    def padded(x: Any) -> Any:
        if isinstance(x, Mapping):
            most = next(longest)
            x = {name: padded(part) for name, part in x.items()}
            return x if most == _lengths(x) else _lengthened(x, most, None, [])
        return type(x)(map(padded, x)) if type(x) in (tuple, list) else x

    tell(
        "Ranks give the model batches of several lengths, each padded to its own longest row: they are "
        "padded to the longest of all ranks, and outputs that have a length are as long. This takes messages "
        "in each step: pad to one length in the collator (max_length=, or pad_to_multiple_of=)."
    )
    return padded(rows)


class UnlikeError(ValueError):
    """Ranks with rows of their own give what cannot be one batch; those that share rows give the same."""


def refuse_unlike_batches(
    tensors: Sequence[tuple[str, torch.Tensor]] | None, mesh: Mesh, kind: type[ValueError]
) -> NoReturn:
    """Say what each rank has given (a collective); None: it has no rows left.

    Raises:
        ValueError: always, on all ranks, of that kind.
    """
    shapes = None if tensors is None else {name: tuple(x.shape) for name, x in tensors}
    kinds = None if tensors is None else {name: str(x.dtype) for name, x in tensors}
    of_all = gather_objects((mesh.world_rank, shapes, kinds), mesh)
    alike = len({str(kinds) for _, shapes, kinds in of_all if shapes is not None}) == 1
    lines = ["The batches that the ranks give to engine.local_batch do not fit together:"]
    for rank, shapes, kinds in of_all:
        lines.append(f"  rank {rank}: {'no rows left' if shapes is None else shapes if alike else kinds}")
    lines.append(
        "Along the first dim the ranks may differ. Names, dtypes and other dims must be equal (pad to "
        "one length), and ranks that differ on no data axis must give the same. What each row has its own "
        "number of goes in a list with an entry for each row."
    )
    raise kind("\n".join(lines))


def _mappings(x: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(x, Mapping):
        yield x
        x = tuple(x.values())
    if type(x) in (tuple, list):
        for part in x:
            yield from _mappings(part)


def _lengths(batch: Mapping[Any, Any]) -> dict[str, int]:
    return {name: x.shape[1] for name, x in batch.items() if _value(name, x) is not False}


def _longest(lengths: Mapping[str, int], of_all: list[dict[str, int]]) -> dict[str, int]:
    return {name: max(of.get(name, 0) for of in of_all) for name in lengths}


def _lengthened(batch: Any, longest: Mapping[str, int], tokenizer: Any, models: list[Any]) -> Any:
    masks = [x for name, x in batch.items() if _MASK in str(name)]
    if not masks and any("input_ids" in name for name in longest):
        return batch  # nothing would tell that it is padding
    is_left = getattr(tokenizer, "padding_side", "right") == "left"
    if tokenizer is None:
        is_left = any(x.ndim == 2 and not bool(x[:, 0].all()) for x in masks)
    padded = copy.copy(batch)
    for name, most in longest.items():
        x, value = batch[name], _value(name, batch[name])
        more = most - x.shape[1]
        if value is None:
            value = _pad_id(tokenizer, models, batch, name)
        around = (more, 0) if is_left else (0, more)
        padded[name] = F.pad(x, (*(0, 0) * (x.ndim - 2), *around), value=value)
    return padded


def _value(name: Any, x: Any) -> int | bool | None:
    """What pads the second dim of a part of a batch; False if that is not known."""
    if not isinstance(name, str) or not isinstance(x, torch.Tensor):
        return False
    known = next((part for part in _PADS if part in name), None)
    return False if known is None or x.ndim != (3 if known == "bbox" else 2) else _PADS[known]


def _tokenizer(collate: Any) -> Any:
    for name in ("tokenizer", "processing_class", "processor", "feature_extractor"):
        found = getattr(collate, name, None)
        if found is not None:
            return getattr(found, "tokenizer", found)
    return None


def _pad_id(tokenizer: Any, models: list[Any], batch: Mapping[str, Any], name: str) -> int:
    """The number of the padding: the tokenizer's, the model's, or what there is where the mask is 0."""
    found = getattr(tokenizer, "pad_token_id", None)
    for model in models:
        found = getattr(getattr(model, "config", None), "pad_token_id", None) if found is None else found
    mask = batch.get(name.replace("input_ids", _MASK))
    if found is None and mask is not None and mask.shape == batch[name].shape and not mask.all():
        found = batch[name][mask == 0][0].item()
    return 0 if found is None else int(found)
