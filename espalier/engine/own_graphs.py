"""Backward passes that a program makes of parameters alone: penalties on those of a pipeline's stages.

The engine has no part in such a graph. What it does with gradients hangs on the passes that it makes: so it
is told of others before their first gradient, on all ranks, also on those whose stages they do not reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NoReturn

import torch

from espalier.comm.control import agree, numbers_of_all
from espalier.engine.seen import SeenGradients
from espalier.mesh import Mesh
from espalier.torch_private import raw
from espalier.trees import nodes_from


def beside(roots: Sequence[torch.Tensor], go: Callable[[], None]) -> None:
    """A backward pass by ``go``, of which the engines know whose parameters it leads to."""
    for seen in _engines_of(roots):
        go = partial(seen.of_others, go)
    go()


def tried(go: Callable[[], None]) -> Exception | None:
    """Make such a pass; gives the error that it has met: maybe on the ranks of one stage alone."""
    try:
        go()
    except Exception as error:
        return error
    return None


def any_tells(tells: bool, error: Exception | None, mesh: Mesh) -> bool:
    """Whether any rank has something to tell; an error that one has met all raise."""
    said = numbers_of_all([int(tells), int(error is not None)], mesh)
    if any(failed for _, failed in said):
        agree(error, mesh, range(mesh.ndim))
    return any(told for told, _ in said)


def _engines_of(roots: Iterable[torch.Tensor]) -> list[SeenGradients]:
    """Those of a graph's parameters: the same on all ranks, as these have the same graph."""
    found: dict[SeenGradients, None] = {}
    with raw():
        nodes = [x.grad_fn for x in roots]
    for node in nodes_from(nodes):
        held = getattr(node, "variable", None)  # of a leaf's node
        if held is not None and "_seen" in held.__dict__:
            found[held.__dict__["_seen"]] = None
    return list(found)


def come_unannounced(is_finished: bool) -> NoReturn:
    """A gradient has come that is none of the engine's, and that others may not know of."""
    raise RuntimeError(
        "A backward pass that is none of the engine's gives a parameter of a stage its gradient, and began "
        "at a plain tensor. Begin it at what torch's calls make of the parameters themselves, without "
        "full_tensor() or to_local(): all ranks know of it then."
    )
