"""Where micro-batches' outputs have their rows: these, and their gradients, cut and joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from espalier.device import is_accelerator
from espalier.engine.batches import Own
from espalier.parallel.pipeline.arguments import leaves, refilled
from espalier.tensor import DTensor, plain, stamp
from espalier.torch_private import raw


def cut_gradient(
    grad: torch.Tensor, way: int | str | None, cuts: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    """The gradient of each micro-batch."""
    if len(cuts) == 1:
        return [grad]
    if way == "sum":
        return [grad] * len(cuts)
    rows = sum(size for _, size in cuts)
    if way == "mean":
        return [grad * (size / rows) for _, size in cuts]
    if not isinstance(way, int):
        raise ValueError(
            "The loss hangs on what a hook has taken, which has no rows and is no mean or sum over them. "
            "Let the model's forward return it, or plan accumulate = 1."
        )
    each = grad.shape[way] // rows
    return [grad.narrow(way, start * each, size * each) for start, size in cuts]


def joined_gradients(several: Sequence[Any], rows: Sequence[int], factor: Any) -> Any:
    """Gradients of the whole batch, of those of micro-batches."""
    parts = [leaves(of, torch.Tensor) for of in several]
    joined = []
    for xs in zip(*parts, strict=True):
        dims = [
            d for d in range(xs[0].ndim) if all(x.shape[d] % n == 0 for x, n in zip(xs, rows, strict=True))
        ]
        whole = xs[0] if len(xs) == 1 else torch.cat(xs, dims[0]) if dims else sum(xs[1:], xs[0])
        joined.append(whole * torch.as_tensor(factor).to(whole))
    return refilled(several[0], joined)


def row_dim(parts: Sequence[torch.Size], whole: torch.Size) -> int | None:
    """The dim of the batch's rows, by shapes of micro-batches and of the whole; None: there is none."""
    dims = [d for d in range(len(whole)) if any(shape[d : d + 1] != whole[d : d + 1] for shape in parts)]
    is_one = len(dims) == 1 and sum(shape[dims[0]] for shape in parts) == whole[dims[0]]
    return dims[0] if is_one else None


def way_of(parts: Sequence[torch.Tensor], cuts: Sequence[tuple[int, int]], whole: torch.Tensor) -> str | None:
    """What a tensor without rows is of those of micro-batches: their mean, or their sum; None: neither."""
    if len({x.shape for x in (*parts, whole)}) > 1 or not whole.is_floating_point():
        return None
    sizes = torch.tensor([float(size) for _, size in cuts], dtype=torch.float64)
    each = torch.stack([x.double().cpu() for x in parts])
    means = torch.tensordot(sizes / sizes.sum(), each, 1)
    for name, found in (("mean", means), ("sum", each.sum(0))):
        if torch.allclose(found, whole.double().cpu(), rtol=1e-9 if whole.dtype is torch.float64 else 1e-4):
            return name
    return None


def may_lie(dims: Sequence[int | None], parts: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether tensors of micro-batches may have their rows in these dims."""
    return len(dims) == len(parts[0]) and all(
        dim is None or (dim < x[0].ndim and len({(*y.shape[:dim], *y.shape[dim + 1 :]) for y in x}) == 1)
        for dim, *x in zip(dims, *parts, strict=True)
    )


def own_rows(of: Own | None, x: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's rows of what came of a batch; what has no rows is whole."""
    each, odd = (0, 1) if of is None else divmod(x.shape[dim], of.size)
    return (
        x if of is None or odd else x.narrow(dim, of.rows.start * each, (of.rows.stop - of.rows.start) * each)
    )


def like(x: Any) -> Any:
    """A tensor of that shape, on ``meta``."""
    if not isinstance(x, torch.Tensor):
        return x
    like = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return like.requires_grad_(x.is_floating_point() or x.is_complex())


def on_host(x: Any) -> Any:
    """A tensor of an output off its device, or this rank's part of it, which knows whence it came."""
    if not isinstance(x, torch.Tensor):
        return x
    with raw():
        here = plain(x).detach()
        host = here.cpu() if is_accelerator(here.device) else here.view_as(here)
        host._came_from = here.device, x._layout if isinstance(x, DTensor) else None  # type: ignore[attr-defined]
    return host


def on_device(x: Any) -> Any:
    """What :func:`on_host` has brought, where it was."""
    if not isinstance(x, torch.Tensor):
        return x
    device, layout = x._came_from  # type: ignore[attr-defined]
    here = x.to(device)
    return here if layout is None else stamp(here.view_as(here), layout)


class OfParts:
    """What has no rows, of each micro-batch: a loss, say. What it is of all, the program's own loss knows."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(
            "This number of the model's output is another in each micro-batch. Ask the loss that went back "
            "for its value: loss.item(). Other tensors without rows ask for before it goes back."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls().item  # noqa: B018
