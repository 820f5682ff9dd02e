"""Random functions: values by global element index (see ``espalier.tensor.random``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from espalier.comm.moves import as_addend
from espalier.tensor.random import draw_key, integers, normal, uniform
from espalier.tensor.rules.pointwise import found, letters
from espalier.tensor.rules.spec import Dims, Operand, Placed, Rules, Spec, writing


def dropout(input: Operand, p: float = 0.5, training: bool = True, inplace: bool = False) -> Spec:
    """The same mask under every layout."""
    dims = input.dims()
    # a product with the mask, so linear
    written = input.index if inplace is True else None
    return Spec([dims], [dims], [input.shape], linear=[(0,)], run=_drop, inplace=written)


def _drop(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    names = ("input", "p", "training" if func is not torch.dropout else "train", "inplace")
    bound = dict(zip(names, args, strict=False)) | kwargs
    x, p = bound["input"], bound.get("p", 0.5)
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not bound.get("training", bound.get("train", True)) or p == 0:
        return x
    mask = keep_mask(placed, p, x)
    return x.mul_(mask) if bound.get("inplace") or func is torch.dropout_ else x * mask


def keep_mask(placed: Placed, p: float, like: torch.Tensor) -> torch.Tensor:
    """1/(1-p) with probability 1-p, else 0, for each element of the first output."""
    if p == 1:
        return torch.zeros_like(like)
    lay = placed.outs[0]
    return (uniform(lay, draw_key(), torch.float32, like.device) >= p).to(like.dtype).div_(1 - p)


def letters_of_all(operands: list[Operand]) -> list[Dims]:
    """Letters of operands that are broadcast to the first."""
    return [letters(o.shape, operands[0].shape) for o in operands]


def _filler(draw: Callable[..., torch.Tensor]) -> Callable[..., Spec]:
    """An in-place random function: operand 0 takes the values."""

    def rule(x: Operand, *args: Any, **kwargs: Any) -> Spec:
        others = found(args, kwargs)

        def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
            if not others:
                func(args[0].new_empty(0), *args[1:], **kwargs)  # torch's own word on the parameters
            drawn = draw(placed, args[0], *args[1:], **kwargs)
            return args[0].copy_(as_addend(drawn, placed.outs[0]))

        full = letters_of_all([x, *others])
        return Spec(full, full[:1], [x.shape], linear=[(0,)], run=run, inplace=x.index)

    return rule


def _uniform(
    placed: Placed, x: torch.Tensor, a: float = 0.0, b: float = 1.0, *, generator: Any = None, **kw: Any
) -> torch.Tensor:
    a, b = kw.get("from", a), kw.get("to", b)
    return uniform(placed.outs[0], draw_key(generator), x.dtype, x.device) * (b - a) + a


def _normal(
    placed: Placed, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
) -> torch.Tensor:
    return normal(placed.outs[0], draw_key(generator), x.dtype, x.device) * std + mean


def _bernoulli(placed: Placed, x: torch.Tensor, p: Any = 0.5, *, generator: Any = None) -> torch.Tensor:
    return uniform(placed.outs[0], draw_key(generator), torch.float32, x.device) < p


def _integers(
    placed: Placed, x: torch.Tensor, low: int = 0, high: int | None = None, *, generator: Any = None
) -> torch.Tensor:
    if high is None:
        low, high = (0, low) if low else (0, 2**24 if x.is_floating_point() else torch.iinfo(x.dtype).max)
    return integers(placed.outs[0], draw_key(generator), low, high, x.device)


def _exponential(
    placed: Placed, x: torch.Tensor, lambd: float = 1.0, *, generator: Any = None
) -> torch.Tensor:
    return -torch.log1p(-uniform(placed.outs[0], draw_key(generator), x.dtype, x.device)) / lambd


def _like(draw: Callable[..., torch.Tensor]) -> Callable[..., Spec]:
    """rand_like and randn_like: a new tensor that lies as the given one."""

    def rule(x: Operand, **kwargs: Any) -> Spec:
        def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
            x, generator = args[0], kwargs.get("generator")
            dtype, device = kwargs.get("dtype") or x.dtype, kwargs.get("device") or x.device
            out = draw(placed.outs[0], draw_key(generator), dtype, torch.device(device))
            return out.requires_grad_(kwargs.get("requires_grad", False))

        return Spec([x.dims()], [x.dims()], [x.shape], run=run)

    return rule


def bernoulli(x: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    """Each element is the probability of its own 1."""
    if args:
        return None

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        p = args[0]
        drawn = uniform(placed.outs[0], draw_key(kwargs.get("generator")), torch.float32, p.device)
        return (drawn < p).to(p.dtype)

    return Spec([x.dims()], [x.dims()], [x.shape], run=run)


def register(rules: Rules) -> None:
    """Put the rules of this file into the table."""
    rules.add(torch.nn.functional.dropout, dropout)
    rules.add(torch.dropout, dropout)
    rules.add(torch.dropout_, writing(dropout))
    fillers: dict[str, Callable[..., torch.Tensor]] = {
        "uniform_": _uniform,
        "normal_": _normal,
        "bernoulli_": _bernoulli,
        "random_": _integers,
        "exponential_": _exponential,
    }
    for name, draw in fillers.items():
        rules.add(getattr(torch.Tensor, name), _filler(draw))
    rules.add(torch.rand_like, _like(uniform))
    rules.add(torch.randn_like, _like(normal))
    for f in (torch.bernoulli, torch.Tensor.bernoulli):
        rules.add(f, bernoulli)
