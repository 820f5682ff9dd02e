"""torch's helpers for state dicts, which know torch's own DTensor by its type, taught ours: once, at import.

Those of ``torch.distributed.checkpoint.state_dict`` gather, send and offload what a dict holds, and
``async_save`` copies it first. What torch's checkpoints ask of a tensor itself: ``espalier.tensor.stored``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw
from torch.distributed import _state_dict_utils as dicts
from torch.distributed.checkpoint import _state_dict_stager as stagers
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint import state_dict as helpers

from espalier.tensor import DTensor, lay_out, plain, stamp
from espalier.tensor.memory import here


def install() -> None:
    """Wrap torch's helpers (a second call does nothing)."""
    if hasattr(dicts._iterate_state_dict, "__wrapped__"):
        return
    dicts._iterate_state_dict = _iterating(dicts._iterate_state_dict)
    dicts._broadcast_tensors = _broadcasting(dicts._broadcast_tensors)
    helpers._broadcast_state_dict = _broadcasting_numbers(helpers._broadcast_state_dict)
    helpers._distribute_state_dict = _distributing(helpers._distribute_state_dict)
    planner_helpers._iterate_state_dict = _making(planner_helpers._iterate_state_dict)
    stager = stagers.StateDictStager
    stager._offload_tensor = _staging(stager._offload_tensor)  # type: ignore[method-assign]


def _iterating(original: Callable[..., Any]) -> Callable[..., Any]:
    """To a tensor of ours is done what is to be done to a DTensor."""

    @functools.wraps(original)
    def iterate(tree: Any, of_sharded: Any, of_dtensor: Any, of_tensor: Any, **options: Any) -> Any:
        chosen = of_dtensor if type(tree) is DTensor else of_tensor
        return original(tree, of_sharded, of_dtensor, chosen, **options)

    return iterate


def _broadcasting(original: Callable[..., None]) -> Callable[..., None]:
    """Of the whole tensors that arrive, those of ours take their parts."""

    @functools.wraps(original)
    def broadcast(full: Any, local: dict[str, Any], keys: list[str], *args: Any, **options: Any) -> None:
        ours = {key: local[key] for key in keys if type(local.get(key)) is DTensor}
        original(full, local, keys, *args, **options)
        for key, x in ours.items():
            local[key] = _filled(x, local[key])

    return broadcast


def _broadcasting_numbers(original: Callable[..., None]) -> Callable[..., None]:
    """The same, of tensors without dims, which go with the names."""

    @functools.wraps(original)
    def broadcast(full: Any, local: dict[str, Any], *args: Any, **options: Any) -> None:
        ours = {key: x for key, x in local.items() if type(x) is DTensor and not x.ndim}
        original(full, local, *args, **options)
        for key, x in ours.items():
            if key in local:
                local[key] = _filled(x, local[key])

    return broadcast


def _distributing(original: Callable[..., None]) -> Callable[..., None]:
    """The same, of whole tensors that every rank has."""

    @functools.wraps(original)
    def distribute(full: dict[str, Any], local: dict[str, Any], *args: Any, **options: Any) -> None:
        for key, value in full.items():
            x = local.get(key)
            original({key: value}, local, *args, **options)
            if type(x) is DTensor:
                local[key] = _filled(x, local[key])

    return distribute


def _filled(x: DTensor, value: Any) -> Any:
    """``x`` with the values of a whole tensor; where it is on the meta device, one like it."""
    if not isinstance(value, torch.Tensor) or type(value) is DTensor:
        return value
    with torch.no_grad():
        laid = lay_out(value, x._layout.own, source=None)
        if x.is_meta:
            return laid
        with raw():
            plain(x.detach()).copy_(plain(laid))
    return x


def _making(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before a load, what is on the meta device gets memory, on ranks that hold a part of it."""

    @functools.wraps(original)
    def iterate(tree: Any, *of_kinds: Any) -> Any:
        if type(tree) is not DTensor:
            return original(tree, *of_kinds)
        layout = tree._layout.own
        if not tree.is_meta or layout.mesh.is_dry:
            return tree
        made = torch.empty(layout.local_shape, dtype=tree.dtype, device=layout.mesh.device())
        return stamp(made, layout)

    return iterate


def _staging(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """This rank's part is copied, in its layout."""

    @functools.wraps(original)
    def offload(self: Any, x: torch.Tensor, memo: dict[int, Any], **options: Any) -> torch.Tensor:
        if type(x) is not DTensor:
            return original(self, x, memo, **options)
        layout, local = here(x)
        copy = stamp(original(self, local, memo, **options), layout)
        self._keep_alive(local, memo)  # which knows it by its id
        memo[id(x)] = copy
        return copy

    return offload


__all__ = ["install"]
