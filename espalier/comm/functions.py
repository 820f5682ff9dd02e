"""What the library's own functions with a backward pass have in common."""

from __future__ import annotations

import torch


class OwnFunction(torch.autograd.Function):
    """Of the library's own: it is given local tensors, or DTensors that it knows how to take.

    Attributes:
        meets: whether ranks meet in a collective in its backward pass.
    """

    espalier = True
    meets = False


class MeetingFunction(OwnFunction):
    """One in whose backward pass ranks meet."""

    meets = True
