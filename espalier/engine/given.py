"""What is given to an engine: wrong arguments are told in words, with what was expected in their place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from espalier.blocks import named_parameters_in, parameters_in
from espalier.faults.settings import Faults, Spikes
from espalier.parallel import Plan
from espalier.texts import expect, shown, whole

Rows = Literal["all", "whole", "own"]
_ROWS = get_args(Rows)


def check_rows(rows: Any) -> Rows:
    """What a call of a model is given and gives.

    Raises:
        ValueError: it is no such word.
    """
    if rows not in _ROWS:
        raise ValueError(f"rows is {shown(rows)}, expected one of {', '.join(map(repr, _ROWS))}.")
    return cast(Rows, rows)


def rows_in(size: Any, least: int = 0) -> int:
    """How many rows a global batch has."""
    return whole("The number of rows of a global batch", size, least)


def check_prompt(ids: Any, max_new_tokens: Any) -> None:
    """See that there is something to go on with, and how far.

    Raises:
        TypeError, ValueError: there is not.
    """
    expect("engine.generate: ids", ids, torch.Tensor, "a tensor of whole numbers [batch, sequence]")
    whole("engine.generate: max_new_tokens", max_new_tokens)


def name_own(model: nn.Module, values: Any) -> list[str]:
    """The names in a model of parameters that something is told of.

    Raises:
        TypeError: it is told of none.
        ValueError: one is not the model's.
    """
    expect("engine.set_parameters", values, Mapping, "a dict of parameters to tensors")
    names = {id(p): name for name, p in reversed([*named_parameters_in(model)])}  # the first of several
    for x in values:
        if id(x) not in names:
            raise ValueError(
                f"{type(model).__name__} has no parameter that is the one given ({shown(x)}): expected one "
                "of engine.parameters(), the object itself."
            )
    return [names[id(x)] for x in values]


def check_export(dtype: Any, shard_gigabytes: float) -> None:
    """See how weights are to be written.

    Raises:
        TypeError, ValueError: so they cannot.
    """
    expect("engine.export: dtype", dtype, torch.dtype | None, "a torch.dtype, or None")
    if not shard_gigabytes > 0:
        raise ValueError(f"engine.export: shard_gigabytes is {shard_gigabytes}, expected a number above 0.")


def check_kinds(model: Any, plan: Any) -> None:
    """See that the first arguments are what they should be.

    Raises:
        TypeError: they are not; they may have been swapped.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"initialize(model, optimizer, plan): the model is {shown(model)}, expected a torch.nn.Module."
        )
    if (what := _by_torch(model)) is not None:
        raise ValueError(
            f"initialize(model, optimizer, plan): {what} has laid the model out already. Give the plain "
            "model: what it does is Plan(zero=3), or tensor=...; or import it from espalier.compat.torch, "
            "which makes an engine of it (docs/torch-wrappers.md)."
        )
    if plan is not None and not isinstance(plan, Plan | Mapping):
        raise TypeError(
            f"initialize(model, optimizer, plan): the plan is {shown(plan)}, expected a Plan or a dict of "
            'its arguments, such as espalier.Plan(data=4) or {"data": 2, "tensor": 2, "zero": 1}.'
        )


def _by_torch(model: nn.Module) -> str | None:
    """What of torch has cut a model's parameters, if anything has."""
    fsdp, tensors = (sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "tensor"))
    if fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()):
        return "torch's FullyShardedDataParallel"
    if tensors is not None and any(issubclass(type(p), tensors.DTensor) for p in parameters_in(model)):
        return "torch's fully_shard, parallelize_module or distribute_tensor"
    return None


def check_options(
    loss_fn: Any,
    layouts: Any,
    branches: Any,
    count: Any,
    recompute_policy: Any,
    faults: Any,
    spikes: Any,
    compile: Any,
) -> None:
    """See that each is what it should be.

    Raises:
        TypeError: it is not.
    """
    for what, given, kinds, expected in (
        ("loss_fn", loss_fn, Callable, "a function, such as torch.nn.functional.mse_loss"),
        ("layouts", layouts, Mapping, "a dict, such as {'*.up': 'column', '*.down': 'row'}"),
        ("branches", branches, Mapping, "a dict, such as {'*.attention': 0, '*.mlp': 1}"),
        ("recompute_policy", recompute_policy, Callable, "policy(context, op, *args, **kwargs)"),
        ("faults", faults, Faults, "an espalier.Faults (Faults(watch=False) for no watch)"),
        ("spikes", spikes, Spikes, "an espalier.Spikes, such as Spikes(on_nan='skip')"),
        ("compile", compile, (bool, str, Callable), "True, False, or a backend"),
    ):
        if given is not None:
            expect(f"initialize: {what}", given, kinds, expected)
    if isinstance(loss_fn, type):
        expected = f"a function, or a criterion that is made: {loss_fn.__name__}()"
        raise TypeError(f"initialize: loss_fn is the class {loss_fn.__name__}, expected {expected}.")
    if count is not None and count != "sum":
        expect("initialize: count", count, Callable, "a function of a micro-batch, or 'sum'")
