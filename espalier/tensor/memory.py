"""What hands out the memory of a DTensor: right where this rank holds the whole value, refused elsewhere.

Who takes an address believes the shape that stands beside it, and would read past the end of this rank's
part: ``safetensors`` and kernels of one's own do. Nothing can be gathered here, as often one rank asks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.layout import Layout
from espalier.layout.layout import R, V
from espalier.tensor.dtensor import DTensor, plain, up_to_date

_plain_call = torch._C._disabled_torch_function_impl


def is_whole(layout: Layout) -> bool:
    """Whether every rank of the mesh holds the whole value."""
    return layout.mesh.is_member and all(
        n == 1 or s in (R, V) for n, s in zip(layout.mesh.shape, layout.axes, strict=True)
    )


def here(x: DTensor) -> tuple[Layout, torch.Tensor]:
    """How a tensor lies, and what this rank holds of it, plain and outside autograd."""
    from espalier.tensor.loans import Elsewhere

    if not isinstance(x.__dict__.get("_source"), Elsewhere):
        x = up_to_date(x)
    with raw():
        return x._layout.own, plain(x.detach())


def whole(x: DTensor, what: str) -> torch.Tensor:
    """The plain tensor over the memory of one that this rank holds all of.

    Raises:
        ValueError: it holds but a part.
    """
    layout, local = here(x)
    if not is_whole(layout):
        raise ValueError(
            f"{what} of a DTensor would give the memory of this rank's part ({layout!r}) for all of it. "
            "x.full_tensor() is the whole value (call it on all ranks), x.to_local() this rank's part. To "
            "write a model's weights: engine.export(path), or give what writes them "
            "state_dict=engine.full_state_dict(), on all ranks."
        )
    return local


def address(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``data_ptr`` and DLPack."""
    x = args[0]
    return func(whole(x, func.__name__).requires_grad_(x.requires_grad), *args[1:], **kwargs)


def interface(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``__cuda_array_interface__``, which is not there, for those who try, where it is refused."""
    try:
        local = whole(args[0], "__cuda_array_interface__")
    except ValueError as error:
        raise AttributeError(str(error)) from None
    return func(local.requires_grad_(args[0].requires_grad))


def storage(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``untyped_storage`` and its like."""
    return func(_apart(whole(args[0], func.__name__)), *args[1:], **kwargs)


def storage_offset(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Where the tensor begins in what ``untyped_storage`` gives."""
    local = here(args[0])[1]
    return 0 if _is_member(local) else local.storage_offset()


def _apart(local: torch.Tensor) -> torch.Tensor:
    """The same memory; what is one of many tensors in a flat buffer has a storage of its own.

    So tensors in one buffer are not taken for tied, and each for complete.
    """
    if not _is_member(local):
        return local
    start, n = local.storage_offset() * local.element_size(), local.numel() * local.element_size()
    own = local.untyped_storage()[start : start + n]
    return torch.empty(0, dtype=local.dtype, device=local.device).set_(own, 0, local.size(), local.stride())


def _is_member(local: torch.Tensor) -> bool:
    if local.is_meta or not local.is_contiguous() or local._is_view():
        return False
    return local.untyped_storage().nbytes() > local.numel() * local.element_size()


__all__ = ["address", "here", "interface", "is_whole", "storage", "storage_offset", "whole"]
