"""Batches that ranks collate each by itself, padded to one length: that of the longest of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from espalier.comm.control import gather_objects
from espalier.mesh import Mesh

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
    lengths = {name: x.shape[1] for name, x in batch.items() if _value(name, x) is not False}
    of_all = gather_objects(lengths, mesh)
    longest = {name: max(of.get(name, 0) for of in of_all) for name in lengths}
    if all(of == longest for of in of_all):
        return batch
    if not any(_MASK in name for name in batch) and any("input_ids" in name for name in lengths):
        return batch  # nothing would tell that it is padding
    tokenizer = _tokenizer(collate)
    is_left = getattr(tokenizer, "padding_side", "right") == "left"
    padded = copy.copy(batch)
    for name, most in longest.items():
        x, value = batch[name], _value(name, batch[name])
        more = most - x.shape[1]
        if value is None:
            value = _pad_id(tokenizer, models or [], batch, name)
        around = (more, 0) if is_left else (0, more)
        padded[name] = F.pad(x, (*(0, 0) * (x.ndim - 2), *around), value=value)  # type: ignore[index]
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
