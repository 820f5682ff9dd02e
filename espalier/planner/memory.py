"""What a plan holds on each rank along the pipe axis, by kind."""

from __future__ import annotations

from collections.abc import Sequence

from espalier.parallel import Plan
from espalier.planner.away import share_here, under_way
from espalier.planner.cells import Costs, Update
from espalier.planner.compose import pipe_rank


def memory_by_rank(
    plan: Plan,
    costs: Costs,
    update: Update,
    layers: Sequence[int],
    sizes: Sequence[float],
    ranks: float,
    lives: Sequence[float],
    has_kernel: bool,
) -> tuple[dict[str, float], ...]:
    """Bytes on the device of each rank along the pipe axis, by kind.

    Args:
        layers: blocks of each stage.
        sizes: bytes of parameters of each rank, before the data axis cuts them.
        ranks: that share what the data axis cuts.
        lives: micro-batches whose activations each rank keeps.
        has_kernel: whether the optimizer has one for the host.
    """
    here = {kind: share_here(plan.offload, kind) for kind in plan.offload.shares}
    going = under_way(plan, update, ranks, costs.block_bytes, has_kernel)
    last = pipe_rank(plan, len(layers) - 1)
    keeps = [0.0] * plan.pipe
    for stage, n in enumerate(layers):
        keeps[pipe_rank(plan, stage)] += n * costs.block_kept
    keeps[last] += costs.rest_kept
    by_rank = []
    for rank, (size, kept) in enumerate(zip(sizes, keeps, strict=True)):
        is_cut = plan.zero == 3 or (ranks == 1 and here["parameters"] < 1)
        whole = 2 * costs.block_bytes if is_cut else 0
        states = size * update.states / (ranks if plan.zero else 1)
        passing = {
            "activations": kept * lives[rank],
            "transient": costs.transient if rank == last else costs.transient / 4,
        }
        # what comes for the update does so after the passes
        coming = min(going, states * (1 - here["states"])) - sum(passing.values())
        gradients = size * (here["gradients"] if plan.zero >= 2 or ranks == 1 else 1.0)
        kinds = {
            "parameters": size / ranks * here["parameters"] + whole if is_cut else size,
            "gradients": gradients / ranks + whole / 2 if plan.zero >= 2 or is_cut else gradients,
            "states": states * here["states"] + max(0.0, coming),
            **passing,
        }
        by_rank.append(kinds)
    return tuple(by_rank)
