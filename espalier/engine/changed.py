"""Tensors that a pipeline is to compute with later, and that were written to meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from espalier.tensor import DTensor
from espalier.tensor.loans import written_mark

Mark = tuple[torch.Tensor, int]  # and how often it was written to, but past autograd (x.data)


def marks_of(tensors: Iterable[torch.Tensor]) -> list[Mark]:
    """Of plain tensors, what tells later whether they were written to."""
    return [(x, written_mark(x)[0]) for x in tensors if not isinstance(x, DTensor) and not x.is_inference()]


def refuse_changed(marks: Iterable[Mark]) -> None:
    """See that tensors are as they were.

    Raises:
        ValueError: one was written to.
    """
    changed = next((x for x, mark in marks if written_mark(x)[0] != mark), None)
    if changed is not None:
        raise ValueError(
            f"A tensor of shape {tuple(changed.shape)} was written to since the model, "
            "or what is made of its output, was given it. In a pipeline that is computed when the loss goes "
            "back, or when a value is asked for: ask before the write (x.item(), x.detach().sum()), or give "
            "a copy (x.clone())."
        )


def asked_after_step() -> ValueError:
    """A value is asked for that was not kept, and hangs on parameters that a step has changed since."""
    return ValueError(
        "A value of the model's output is asked for after optimizer.step(). In a pipeline it was not "
        "kept, and the parameters are others now. Ask for it before the step (x.item(), x.detach().sum()); "
        "or after the first step too: then the output is kept in each, but not what is made of it with "
        "parameters, as by a call of one of the model's modules."
    )
