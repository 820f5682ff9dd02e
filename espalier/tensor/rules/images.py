"""Resampling and rearranging of images: batch and channels sharded, space whole unless said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from espalier.tensor.rules.space import meta_shapes
from espalier.tensor.rules.spec import Dims, Operand, Placed, Spec, bound_to, of_nothing
from espalier.tensor.rules.table import rule, rule_of_each

_nn = torch._C._nn
_UPSAMPLE = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
).split()


def _empty(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    """For a rank without a part: torch resamples no empty tensors."""
    return of_nothing(placed, *(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)))


@rule_of_each(tuple(getattr(_nn, name) for name in _UPSAMPLE if hasattr(_nn, name)))
def upsample(function: Callable[..., Any]) -> Callable[..., Spec]:
    """input[b, c, s...]; linear."""

    def rule(input: Operand, *args: Any, **kwargs: Any) -> Spec:
        space: Dims = (None,) * (input.ndim - 2)
        dims: Dims = ("b", "c", *space)
        shapes = meta_shapes(function, input, *args, **kwargs)
        return Spec([dims], [dims], shapes, linear=[(0,)], run=_empty, when=Placed.lacks)

    return rule


@rule(torch.grid_sampler)
def grid_sampler(input: Operand, grid: Operand, *args: Any) -> Spec:
    """input[b, c, s...] sampled at grid[b, o..., :], whose points may be sharded; linear in input."""
    points: Dims = tuple(("o", i) for i in range(grid.ndim - 2))
    space: Dims = (None,) * (input.ndim - 2)
    return Spec(
        [("b", "c", *space), ("b", *points, None)],
        [("b", "c", *points)],
        [(*input.shape[:2], *grid.shape[1:-1])],
        linear=[(0,)],
        run=_empty,
        when=Placed.lacks,
    )


@rule(torch.affine_grid_generator)
def affine_grid(theta: Operand, size: Any, align_corners: bool) -> Spec:
    """A grid for each theta[b, :, :]; linear."""

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        local = bound_to("theta size align_corners", args, kwargs)["theta"]
        return func(local, (local.shape[0], *size[1:]), align_corners)

    space = tuple(size[2:])
    out: Dims = ("b", *(None,) * len(space), None)
    return Spec([("b", None, None)], [out], [(size[0], *space, len(space))], linear=[(0,)], run=run)


@rule(_nn.im2col)
def im2col(input: Operand, kernel_size: Any, *args: Any) -> Spec:
    """Patches of input[b, c, h, w] (F.unfold): a patch of a channel stays together; linear."""
    (shape,) = meta_shapes(_nn.im2col, input, kernel_size, *args)
    batch: Dims = ("b",) if input.ndim == 4 else ()
    return _patches((*batch, "c", None, None), (*batch, "c", None), input.shape[-3], shape, shape[-2])


@rule(_nn.col2im)
def col2im(input: Operand, output_size: Any, kernel_size: Any, *args: Any) -> Spec:
    """Patches added up to [b, c, h, w] (F.fold); linear."""
    (shape,) = meta_shapes(_nn.col2im, input, output_size, kernel_size, *args)
    batch: Dims = ("b",) if input.ndim == 3 else ()
    return _patches((*batch, "c", None), (*batch, "c", None, None), shape[-3], shape, input.shape[-2])


def _patches(dims: Dims, out: Dims, channels: int, shape: tuple[int, ...], rows: int) -> Spec:
    factors = {"c": [(channels, 1), (channels, rows // channels)]}
    return Spec([dims], [out], [shape], factors=factors, linear=[(0,)], run=_empty, when=Placed.lacks)


@rule("pixel_shuffle")
def pixel_shuffle(input: Operand, upscale_factor: int) -> Spec:
    """[..., c·r², h, w] to [..., c, h·r, w·r]: every dim may be sharded between whole groups; linear."""
    return _shuffled(input, upscale_factor, 1)


@rule("pixel_unshuffle")
def pixel_unshuffle(input: Operand, downscale_factor: int) -> Spec:
    """[..., c, h·r, w·r] to [..., c·r², h, w]: every dim may be sharded between whole groups; linear."""
    return _shuffled(input, 1, downscale_factor)


def _shuffled(x: Operand, up: int, down: int) -> Spec:
    r = up * down
    *lead, c, h, w = x.shape
    shape = (*lead, c * down**2 // up**2, h * up // down, w * up // down)
    small = (min(c, shape[-3]), min(h, shape[-2]), min(w, shape[-1]))
    many, one, pair = (small[0], r**2), (small[0], 1), [(n, f) for n in small[1:] for f in (1, r)]
    dims: Dims = tuple(("d", i) for i in range(x.ndim))
    factors = {dims[-3]: [many, one], dims[-2]: pair[:2], dims[-1]: pair[2:]}
    return Spec([dims], [dims], [shape], factors=factors, linear=[(0,)], run=_empty, when=Placed.lacks)


@rule("channel_shuffle")
def channel_shuffle(input: Operand, groups: int) -> Spec:
    """The channels, dim 1, must be whole; linear."""
    dims = input.dims()
    return Spec([dims], [dims], [input.shape], linear=[(0,)], blocked=frozenset([dims[1]]))
