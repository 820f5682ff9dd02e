"""Parameters that an optimizer holds beside the model's: of a loss, or of a head that the loop calls itself.

They stay plain tensors, whole on every rank, and so are their gradients: the loss is that of all rows. Where
each rank makes a loss of its own rows, they get the mean of the ranks' gradients, as the model's do; in a
pipeline, whose last stage makes the loss, what that has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from espalier.blocks import named_parameters_in, parameters_in
from espalier.comm.collectives import sum_whole
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel.plan import Plan
from espalier.parallel.several import parts_of
from espalier.tensor import DTensor, lay_out, plain
from espalier.torch_private import raw

_NAME = "(beside the model)."


def held_beside(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Those of an optimizer of a model that is laid out: of each step, without looking at the model."""
    return [p for p in held_by(optimizer) if type(p) is not DTensor]


def beside_model(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Those of an optimizer that are not the model's."""
    of_model = {id(p) for p in parameters_in(module)}
    return [p for p in held_by(optimizer) if id(p) not in of_model]


def named_trained(
    module: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's parameters, and under names that none of its has (:func:`is_beside`) those beside it."""
    yield from named_parameters_in(module)
    if optimizer is not None:
        yield from ((f"{_NAME}{i}", p) for i, p in enumerate(beside_model(module, optimizer)))


def names_of_trained(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[int, str]:
    """The names of these, by ``id``."""
    return {id(p): name for name, p in named_trained(module, optimizer)}


def is_beside(name: str) -> bool:
    """Whether a parameter of that name is not the model's."""
    return name.startswith(_NAME)


def held_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All that an optimizer, or several as one, updates."""
    return [p for part in parts_of(optimizer) for group in part.param_groups for p in group["params"]]


def check_beside(beside: Sequence[torch.Tensor], plan: Plan) -> None:
    """See that the program sees their gradients as they are.

    Raises:
        ValueError: they would be those of a scaled loss.
    """
    if beside and plan.precision.scales:
        raise ValueError(
            f"{len(beside)} tensor(s) beside the model's parameters (of a loss, a head, inputs) want "
            "gradients, which would be those of the scaled loss of float16. Put what has them into one "
            'module with the model, or plan precision = "autocast-bfloat16", which needs no scale.'
        )


@torch.no_grad()
def make_equal(beside: Sequence[torch.Tensor], mesh: Mesh) -> None:
    """Have each rank start with the first rank's values, as of the model's (a collective)."""
    if mesh.is_dry or mesh.size() == 1:
        return
    for p in beside:
        first = lay_out(p.detach(), Layout.replicated(mesh, tuple(p.shape)))
        with raw():
            if not torch.equal(p, own := plain(first).to(p.device)):  # what is made of it already goes on
                p.copy_(own)


def share_gradients(beside: Iterable[torch.Tensor], mesh: Mesh, *, mean: bool) -> None:
    """Make gradients the sum, or the mean, of what ranks have of them (a collective)."""
    if mesh.is_dry or mesh.size() == 1:
        return
    with raw():
        for p in beside:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            ranks_with = grad.new_full((1,), p.grad is not None)
            sums = sum_whole(torch.cat([grad.flatten(), ranks_with]), mesh)
            if sums[-1]:
                p.grad = sums[:-1].view_as(grad) / (mesh.size() if mean else 1)


def counted_beside(
    optimizer: torch.optim.Optimizer, plan: Plan, mesh: Mesh, *, is_own: bool
) -> dict[str, torch.Tensor]:
    """The gradients of what an optimizer holds beside a model: of those on each rank one counts in the norm.

    Args:
        is_own: they are of a loss of this rank's own rows, and new: the ranks' mean is taken.
    """
    beside = held_beside(optimizer)
    if not beside:
        return {}
    check_beside(beside, plan)
    if is_own:
        share_gradients(beside, mesh[plan.batch_axes], mean=True)
    here = beside if mesh.rank == 0 else ()
    return {f"beside.{i}": p.grad for i, p in enumerate(here) if p.grad is not None}
