"""One optimizer over several models, each on an engine of its own: the first of them makes its steps.

The others do what they do before and after an update of their own around that one's: a generator's and an
encoder's weights, say, in one AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from espalier.engine.passes import Passes
from espalier.engine.steps import Steps, engine_of_steps
from espalier.mesh import Mesh
from espalier.parallel.data.zero import ZeroState
from espalier.parallel.plan import Offload, Plan
from espalier.parallel.several import parts_of
from espalier.tensor import DTensor
from espalier.tensor.loans import is_whole
from espalier.trees import instances_of


class Trains(Steps, Protocol):
    """An engine, as far as another's step has to do with it."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    plan: Plan
    mesh: Mesh
    passes: Passes
    max_grad_norm: float | None
    led: list[Any]


def follow_leader(optimizer: torch.optim.Optimizer, engine: Trains) -> Any:
    """Have an engine follow that of another model which makes the steps of its optimizer.

    Returns:
        that one; None: there is none, and the engine makes them itself.

    Raises:
        ValueError: one does that cannot take this model along.
    """
    for part in parts_of(optimizer):
        other: Trains | None = engine_of_steps(part)
        if other is None or other is engine:
            continue
        reasons = _against(optimizer, engine, other)
        if reasons:
            raise ValueError(_refused(part, type(other.module).__name__, engine.module, ", ".join(reasons)))
        other.led.append(engine)
        return other
    return None


def _against(optimizer: torch.optim.Optimizer, engine: Trains, other: Trains) -> list[str]:
    """Why two engines cannot make the steps of one optimizer together."""
    plans = [engine.plan, other.plan]
    is_one_mesh = (engine.mesh.names, engine.mesh.shape, engine.mesh.ranks) == (
        other.mesh.names,
        other.mesh.shape,
        other.mesh.ranks,
    )
    against = {
        "other axes or ranks": not is_one_mesh,
        "pipe": any(plan.pipe > 1 for plan in plans),
        "branch": any(plan.branch > 1 for plan in plans),
        "accumulate": any(plan.accumulate > 1 for plan in plans),
        "offload": any(plan.offload != Offload() for plan in plans),
        "another clip": engine.max_grad_norm != other.max_grad_norm,
        "a loss scale": any(plan.precision.scales for plan in plans),
        'gradients = "in-place"': any(plan.gradients == "in-place" for plan in plans),
        "several optimizers of one model": other.optimizer is not optimizer,
    }
    return [said for said, holds in against.items() if holds]


def refuse_cut_elsewhere(
    optimizer: torch.optim.Optimizer, model: nn.Module, beside: Sequence[torch.Tensor]
) -> None:
    """See that what an optimizer holds in pieces beside a model is of others that are there.

    Raises:
        ValueError: their engines are gone.
    """
    cut = {
        id(p) for p in beside if type(p) is DTensor and p._layout.mesh.is_member and not is_whole(p._layout)
    }
    for passes in instances_of(Passes) if cut else ():
        cut -= set(map(id, passes.call.module.parameters()))
    if cut:
        raise ValueError(_refused(optimizer, "another", model, "the other's engine is gone"))


def _refused(optimizer: torch.optim.Optimizer, other: str, model: nn.Module, reason: str) -> str:
    return (
        f"{type(optimizer).__name__} holds parameters of two models ({other} and {type(model).__name__}), "
        f"each of which is prepared by itself: that does not go with {reason}. Put them into one, "
        "both = nn.ModuleDict({'a': a, 'b': b}), prepare that with the optimizer, and call its parts, "
        "both['a'](x) (behind DistributedDataParallel: wrap one module, whose forward calls both); or give "
        "each an optimizer of its own."
    )


def finish_together(engines: Sequence[Trains]) -> tuple[dict[str, torch.Tensor], list[ZeroState]]:
    """Finish the gradients of models whose parameters another one's step updates, too.

    Returns:
        what this rank counts of them in the norm, and where those lie that are laid out.
    """
    counted: dict[str, torch.Tensor] = {}
    states: list[ZeroState] = []
    for i, engine in enumerate(engines):
        passes = engine.passes
        if passes.data is None:
            continue
        passes.check_step()
        passes.seen.check()
        passes.finish()
        counted |= {f"{i}.{name}": grad for name, grad in passes.counted().items()}
        states.append(passes.data)
    return counted, states


def settle_together(engines: Sequence[Trains], *, keep: bool) -> None:
    """After that step: their gradients are kept, or forgotten."""
    for engine in engines:
        passes = engine.passes
        if passes.data is None:
            continue
        passes.has_gradients = False
        if keep:
            passes.data.gradients.settle()
        else:
            passes.forget()
        passes.traffic.end()
