"""Factories: torch's own, with a mesh and placements; the same values under every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from espalier.comm.moves import as_addend
from espalier.layout import Layout, Placement, Replicate, local_box
from espalier.mesh.mesh import MeshLike, as_mesh
from espalier.tensor.dtensor import DTensor, stamp
from espalier.tensor.random import Key, bits, draw_key, integers, normal, uniform

Make = Callable[[Layout, torch.device], torch.Tensor]


def _factory(
    size: tuple[Any, ...],
    make: Make,
    *,
    device_mesh: MeshLike | None = None,
    placements: Sequence[Placement] | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    order: Sequence[int | str] | None = None,
) -> DTensor:
    if layout is not torch.strided:
        raise ValueError(f"layout={layout}: a DTensor is strided. (How it lies on the mesh: placements=.)")
    mesh = as_mesh(device_mesh)
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    lay = Layout(mesh, placements or [Replicate()] * mesh.ndim, shape, order=order)
    return stamp(as_addend(make(lay, mesh.device()), lay).requires_grad_(requires_grad), lay)


def full(
    size: Sequence[int], fill_value: Any, *, dtype: torch.dtype | None = None, **options: Any
) -> DTensor:
    """``torch.full`` on a mesh (options: device_mesh, placements, order, requires_grad, layout).

    Every factory takes these options. Without ``device_mesh`` the mesh is the one whose ``with`` block is
    open; without ``placements`` the tensor is replicated.
    """
    return _factory(
        (size,),
        lambda lay, device: torch.full(lay.local_shape, fill_value, dtype=dtype, device=device),
        **options,
    )


def zeros(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> DTensor:
    """``torch.zeros`` on a mesh (options as for :func:`full`)."""
    return _factory(
        size, lambda lay, device: torch.zeros(lay.local_shape, dtype=dtype, device=device), **options
    )


def ones(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> DTensor:
    """``torch.ones`` on a mesh (options as for :func:`full`)."""
    return _factory(
        size, lambda lay, device: torch.ones(lay.local_shape, dtype=dtype, device=device), **options
    )


def empty(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> DTensor:
    """``torch.empty`` on a mesh (options as for :func:`full`)."""
    return _factory(
        size, lambda lay, device: torch.empty(lay.local_shape, dtype=dtype, device=device), **options
    )


def _vector(make: Callable[..., torch.Tensor], args: tuple[Any, ...], options: dict[str, Any]) -> DTensor:
    """A vector that is made whole and cut, so that each element is rounded as in the whole one."""
    kwargs = {
        name: options.pop(name) for name in ("dtype", "base", "steps", "end", "step") if name in options
    }

    def cut(lay: Layout, device: torch.device) -> torch.Tensor:
        whole = make(*args, device=device, **kwargs)
        return whole[local_box(lay).slices].clone()

    length = make(*args, device="meta", **kwargs).shape[0]
    return _factory((length,), cut, **options)


def arange(*bounds: Any, **options: Any) -> DTensor:
    """``torch.arange([start,] end[, step])`` on a mesh (options as for :func:`full`, and dtype)."""
    return _vector(torch.arange, bounds, options)


def linspace(start: Any, end: Any, steps: int, **options: Any) -> DTensor:
    """``torch.linspace`` on a mesh (options as for :func:`full`, and dtype)."""
    return _vector(torch.linspace, (start, end, steps), options)


def logspace(start: Any, end: Any, steps: int, base: float = 10.0, **options: Any) -> DTensor:
    """``torch.logspace`` on a mesh (options as for :func:`full`, and dtype)."""
    return _vector(torch.logspace, (start, end, steps, base), options)


def eye(n: int, m: int | None = None, *, dtype: torch.dtype | None = None, **options: Any) -> DTensor:
    """``torch.eye`` on a mesh (options as for :func:`full`)."""

    def make(lay: Layout, device: torch.device) -> torch.Tensor:
        (top, left), (height, width) = local_box(lay)
        rows, columns = (
            torch.arange(start, start + length, device=device)
            for start, length in ((top, height), (left, width))
        )
        return (rows[:, None] == columns).to(dtype or torch.get_default_dtype())

    return _factory((n, n if m is None else m), make, **options)


def rand(
    *size: Any, dtype: torch.dtype | None = None, generator: torch.Generator | None = None, **options: Any
) -> DTensor:
    """Uniform values in [0, 1), the same under every layout (options as for :func:`full`)."""
    kind = dtype or torch.get_default_dtype()
    return _factory(
        size, _random(lambda lay, key, device: uniform(lay, key, kind, device), generator), **options
    )


def randn(
    *size: Any, dtype: torch.dtype | None = None, generator: torch.Generator | None = None, **options: Any
) -> DTensor:
    """Standard normal values, the same under every layout (options as for :func:`full`)."""
    kind = dtype or torch.get_default_dtype()
    return _factory(
        size, _random(lambda lay, key, device: normal(lay, key, kind, device), generator), **options
    )


def randint(
    *args: Any,
    dtype: torch.dtype = torch.int64,
    generator: torch.Generator | None = None,
    **options: Any,
) -> DTensor:
    """``torch.randint([low,] high, size)`` on a mesh (options as for :func:`full`).

    The values are the same under every layout and number of ranks.
    """
    given = dict(zip(("high", "size") if len(args) < 3 else ("low", "high", "size"), args, strict=False))
    given |= {name: options.pop(name) for name in ("low", "high", "size") if name in options}
    low, high = given.get("low", 0), given["high"]
    if low >= high:
        raise ValueError(f"randint: low must be less than high; got {low} and {high}.")
    make = _random(lambda lay, key, device: integers(lay, key, low, high, device).to(dtype), generator)
    return _factory((given["size"],), make, **options)


def randperm(
    n: int, *, dtype: torch.dtype = torch.int64, generator: torch.Generator | None = None, **options: Any
) -> DTensor:
    """``torch.randperm`` on a mesh (options as for :func:`full`): the same order under every layout.

    Every rank makes all of it, and keeps its part.
    """

    def make(lay: Layout, key: Key, device: torch.device) -> torch.Tensor:
        order = bits(torch.arange(n, device=device), key).sort(stable=True).indices
        return order[local_box(lay).slices].to(dtype)

    return _factory((n,), _random(make, generator), **options)


def _random(
    make: Callable[[Layout, Key, torch.device], torch.Tensor], generator: torch.Generator | None
) -> Make:
    def checked(lay: Layout, device: torch.device) -> torch.Tensor:
        if lay.partial:
            raise ValueError(f"Random values cannot be Partial ({lay!r}): use Replicate or Shard.")
        return make(lay, draw_key(lay.mesh, generator), device)

    return checked
