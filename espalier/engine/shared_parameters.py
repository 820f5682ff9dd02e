"""Parameters that several stages of a pipeline use: each has a copy, of one value and one gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from espalier.comm.collectives import swap_with
from espalier.layout import gradient_layout
from espalier.mesh import Mesh
from espalier.parallel.compose import Stages
from espalier.parallel.data.gradients import gradient_of
from espalier.parallel.data.zero import ZeroState
from espalier.tensor import plain, stamp
from espalier.tensor.dtensor import layout_of
from espalier.torch_private import raw, setter

_set_grad = setter("grad")


class SharedParameters:
    """Those of this rank that stages of other ranks use too.

    Args:
        data: the parameters of this rank.
        mesh: with the axis ``pipe``.
        tag: of messages: no other ones along that axis have it.
    """

    def __init__(self, data: ZeroState, stages: Stages, mesh: Mesh, tag: int) -> None:
        self._data, self._mesh, self._tag = data, mesh, tag
        self._axis = mesh.axis("pipe")
        # with the coordinates of the others and this rank, in order
        users = ((m.p, stages.users[m.name]) for m in data.members)
        self._shared = [(p, among) for p, among in users if len(among) > 1]
        data.gradients.share({id(p) for p, _ in self._shared})

    def _exchanged(self, x: torch.Tensor, among: Sequence[int]) -> list[torch.Tensor]:
        """What each of some coordinates of the pipe has in place of this rank's tensor."""
        here = self._mesh.coordinate[self._axis]
        others = swap_with(x, self._mesh, self._axis, [i for i in among if i != here], self._tag).wait()
        others.insert(list(among).index(here), x)
        return others

    def share_values(self) -> None:
        """Copies of a parameter have the values of the first."""
        with self._data.updating(), raw():
            for p, among in self._shared:
                own = plain(p.detach())
                own.copy_(self._exchanged(own.contiguous(), among)[0])

    def sum_gradients(self) -> None:
        """The gradient of a parameter is the sum of those of its copies; None if none of them has one."""
        gradients = self._data.gradients
        with raw():
            for p, among in self._shared:
                grad = gradient_of(p)
                is_there = grad is not None and id(p) not in gradients.without
                if grad is None:
                    own = plain(p.detach())
                    grad = stamp(own.new_zeros(own.shape, dtype=p.grad_dtype), gradient_layout(layout_of(p)))
                here = plain(grad)
                # with it whether there is one
                wire = torch.empty(here.numel() + 1, dtype=here.dtype, device=here.device)
                wire[:-1].copy_(here.reshape(-1))
                wire[-1] = float(is_there)
                others = self._exchanged(wire, among)
                # others of a dry mesh have one, if any may have
                told = (p.requires_grad,) if self._mesh.is_dry else (x[-1].item() for x in others)
                if not is_there and not any(told):  # asked only here: a device is waited for
                    p.grad = None
                    continue
                total = others[0][:-1]
                for other in others[1:]:
                    total = total + other[:-1]
                here.copy_(total.view(here.shape))
                if gradient_of(p) is None:
                    _set_grad(p, grad)
        gradients.have_shared()
