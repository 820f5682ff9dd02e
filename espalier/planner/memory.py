"""What a plan holds on each rank along the pipe axis, by kind."""

from __future__ import annotations

from collections.abc import Sequence

from espalier.parallel import Plan
from espalier.parallel.data.gradients import AT_ONCE
from espalier.planner.away import share_here, under_way
from espalier.planner.cells import Costs, Update


def memory_by_rank(
    plan: Plan,
    costs: Costs,
    update: Update,
    blocks: Sequence[int],
    last: int,
    sizes: Sequence[float],
    ranks: float,
    lives: Sequence[float],
    has_kernel: bool,
) -> tuple[dict[str, float], ...]:
    """Bytes on the device of each rank along the pipe axis, by kind.

    Args:
        blocks: of each rank.
        last: the rank of the last stage.
        sizes: bytes of parameters of each rank, before the data axis cuts them.
        ranks: that share what the data axis cuts.
        lives: micro-batches whose activations each rank keeps.
        has_kernel: whether the optimizer has one for the host.
    """
    here = {kind: share_here(plan.offload, kind) for kind in plan.offload.shares}
    going = under_way(plan, update, ranks, costs.block_bytes, has_kernel)
    keeps = [float(n * costs.block_kept) for n in blocks]
    keeps[last] += costs.rest_kept
    is_cut = plan.zero == 3 or (ranks == 1 and here["parameters"] < 1)
    whole = 2 * costs.block_bytes if is_cut else 0
    alike: dict[tuple[float, float], tuple[float, float, float]] = {}  # ranks of a middle stage, mostly
    by_rank = []
    for rank, (size, kept, live) in enumerate(zip(sizes, keeps, lives, strict=True)):
        if (size, kept) not in alike:
            gradients = size * (here["gradients"] if plan.zero >= 2 or ranks == 1 else 1.0)
            beside = max(whole / 2, _sending(plan, costs, size, ranks, kept))
            alike[size, kept] = (
                size / ranks * here["parameters"] + whole if is_cut else size,
                gradients / ranks + beside if plan.zero >= 2 or is_cut else gradients,
                size * update.states / (ranks if plan.zero else 1),
            )
        parameters, gradients, states = alike[size, kept]
        activations = kept * live
        transient = costs.transient if rank == last else costs.transient / 4
        # what comes for the update does so after the passes
        coming = min(going, states * (1 - here["states"])) - (activations + transient)
        by_rank.append(
            {
                "parameters": parameters,
                "gradients": gradients,
                "states": states * here["states"] + max(0.0, coming),
                "activations": activations,
                "transient": transient,
            }
        )
    return tuple(by_rank)


def _sending(plan: Plan, costs: Costs, size: float, ranks: float, kept: float) -> float:
    """Bytes of gradients that are cut and on their way, beyond the activations that have gone by then.

    Args:
        size: bytes of parameters of a rank, before the data axis cuts them.
        kept: bytes of a micro-batch's activations on it.
    """
    if plan.zero < 2 or ranks == 1:
        return 0.0
    if plan.zero == 3:  # a chunk is a block, whose experts lie in one of their own
        experts = costs.block_experts
        rest = (costs.block_bytes - experts, ranks)
        chunks = [rest, (experts, ranks / plan.expert)] if experts else [rest] * AT_ONCE
    else:
        chunks = [(min(size, plan.chunk_megabytes * 1e6), ranks)] * AT_ONCE
    # a model without blocks has all of its activations in the rest
    blocks = sum(n for n, _ in chunks) // costs.block_bytes if costs.block_bytes else 0.0
    return sum(n * _rows(of) for n, of in chunks) - min(kept, blocks * costs.block_kept)


def _rows(ranks: float) -> float:
    """What is sent of a chunk, and this rank's part of the sum, in chunks: others' are read in place."""
    return 0.0 if ranks <= 1 else 1.0 + 1.0 / ranks
