"""What a plan holds on each rank along the pipe axis, by kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from espalier.parallel import Plan
from espalier.parallel.data.gradients import AT_ONCE
from espalier.parallel.plan import Offload
from espalier.planner.cells import LEAST_ZERO, Away, Costs, Update
from espalier.planner.prediction import DIVIDED
from espalier.planner.prices import Prices


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
    is_cut = plan.zero == 3 or (ranks == 1 and here["parameters"] < 1)
    block_kept = costs.block_kept - (costs.block_casts if is_cut else 0)
    keeps = [float(n * block_kept) for n in blocks]
    keeps[last] += costs.rest_kept
    # two blocks, or the head, which is about half of the rest
    whole = max(2 * costs.block_bytes, costs.rest_bytes / 2 if costs.block_bytes else 0) if is_cut else 0
    has_masters = plan.precision.parameters is not None
    # ranks of a middle stage, mostly
    alike: dict[tuple[float, float], tuple[float, float, float, float]] = {}
    by_rank = []
    for rank, (n, size, kept, live) in enumerate(zip(blocks, sizes, keeps, lives, strict=True)):
        if (size, kept) not in alike:
            gradients = size * (here["gradients"] if plan.zero >= 2 or ranks == 1 else 1.0)
            alike[size, kept] = (
                size / ranks * here["parameters"] + whole if is_cut else size,
                gradients / ranks if _sends_early(plan, ranks) else gradients,
                max(costs.block_bytes if is_cut else 0, _under_way(plan, costs, size, ranks)),
                size * update.states / (ranks if plan.zero else 1),
            )
        parameters, own, beside, states = alike[size, kept]
        # masters take whole gradients in their own dtype
        wide = own if has_masters and (plan.zero == 0 or ranks == 1) and not is_cut else 0.0
        coming = max(min(going, states * (1 - here["states"])), wide)
        fullest = max(
            *_moments(plan, costs, (n, rank == last), (kept, live), (own, beside, size)),
            (own + beside, 0.0, coming),  # the update
            key=sum,
        )
        by_rank.append(
            {
                "parameters": parameters,
                "gradients": fullest[0],
                "states": states * here["states"],
                "activations": fullest[1] + min(0.0, fullest[2]),
                "transient": max(0.0, fullest[2]),
            }
        )
    return tuple(by_rank)


def _moments(
    plan: Plan,
    costs: Costs,
    stage: tuple[int, bool],
    activations: tuple[float, float],
    gradients: tuple[float, float, float],
) -> Iterator[tuple[float, float, float]]:
    """Gradients, activations and what else lives at the times of passes that may be the fullest.

    Args:
        stage: how many blocks it has, and whether it is the last.
        activations: a micro-batch's, and how many micro-batches' live.
        gradients: a rank's own, those that are under way, and all before the data axis cuts them.
    """
    (blocks, is_last), (kept, live), (own, beside, whole) = stage, activations, gradients
    block = max(0.0, costs.late + costs.rest_kept)
    if plan.schedule in DIVIDED and plan.recompute == "none":
        block /= 4  # what weights' gradients are made of waits among activations
    late = block - costs.rest_kept if is_last else block
    # what a micro-batch has kept goes as its gradients come; what other micro-batches gave is there
    before = own if plan.accumulate > live else 0.0
    each = (kept - (costs.rest_kept if is_last else 0)) / max(1, blocks)
    gone = each * max(0, blocks - 1) if costs.block_bytes else kept
    # gradients that leave the device are on their way when the next micro-batch comes
    leaving = beside if plan.offload.away and plan.accumulate > 1 else 0.0
    if is_last:
        yield before + leaving, kept * live, costs.transient
        if live > 1:
            yield own, kept * (live - 1), costs.transient
    if costs.block_bytes:
        passed = min(gone, beside // costs.block_bytes * each)
        yield before + beside, kept * live - passed, late
        # a block's gradients come before all of its activations are gone
        yield before + min(beside, costs.block_bytes), kept * live, late
    # those of the block that comes last are not there while it has most else
    missing = 0.0 if before or not whole else min(costs.block_bytes * own / whole, block)
    yield own + beside, kept * live - gone, late - missing


def _under_way(plan: Plan, costs: Costs, size: float, ranks: float) -> float:
    """Bytes of gradients that are cut and on their way.

    Args:
        size: bytes of parameters of a rank, before the data axis cuts them.
    """
    if not _sends_early(plan, ranks):
        return 0.0
    if plan.zero == 3:  # a chunk is a block, whose experts lie in one of their own
        experts = costs.block_experts
        rest = (costs.block_bytes - experts, ranks)
        chunks = [rest, (experts, ranks / plan.expert)] if experts else [rest] * AT_ONCE
    else:
        chunks = [(min(size / AT_ONCE, plan.chunk_megabytes * 1e6), ranks)] * AT_ONCE
    return sum(n * _rows(of) for n, of in chunks)


def _sends_early(plan: Plan, ranks: float) -> bool:
    """Whether gradients are cut as each chunk of them comes: of ZeRO-1 those of a single micro-batch are."""
    return ranks > 1 and (plan.zero >= 2 or (plan.zero == 1 and plan.accumulate == 1))


def _rows(ranks: float) -> float:
    """What is sent of a chunk, and this rank's part of the sum, in chunks: others' are read in place."""
    return 0.0 if ranks <= 1 else 1.0 + 1.0 / ranks


# ---- what is off the device between its uses: which ways there are, what they spare, and what they take
#
# How many bytes go where, and when, is recorded of the engine's own dry steps; a cluster says how fast its
# hosts and disks are. Where a device has its own memory, an optimizer with a kernel for the host updates
# states there, chunk by chunk: gradients come and parameters go meanwhile, so what is slowest of these is
# waited for. What passes bring and take goes beside what is computed.

_CHUNKS = 3  # of states are here at once while they are updated


class Carried(NamedTuple):
    """What offloading takes of a step.

    Attributes:
        waited: seconds in which nothing else goes on.
        hidden: seconds beside what is computed.
        update: of what was to be updated on the device, the share that still is.
        sent: bytes that go to and from each place.
        rests: bytes that lie there.
    """

    waited: float = 0.0
    hidden: float = 0.0
    update: float = 1.0
    sent: Mapping[str, float] = {}
    rests: Mapping[str, float] = {}


NOTHING = Carried()


def may_leave(plan: Plan) -> tuple[str, ...]:
    """The kinds of state that a plan's ZeRO stage lets off the device."""
    alone = plan.data * plan.context == 1
    return tuple(kind for kind, least in LEAST_ZERO.items() if alone or plan.zero >= least)


def ways(plan: Plan, directory: str) -> Iterator[Offload]:
    """Where states, gradients and parameters may be, those that take least time first."""
    kinds = may_leave(plan)
    for states in ("host", "disk"):
        for n in range(1, len(kinds) + 1):
            yield _offload({"states": states, **dict.fromkeys(kinds[1:n], "host")}, directory)
    if "parameters" in kinds:
        yield _offload({"states": "disk", "gradients": "host", "parameters": "disk"}, directory)


def _offload(places: Mapping[str, str], directory: str) -> Offload:
    on_disk = {"directory": directory} if "disk" in places.values() else {}
    return Offload.model_validate({**places, **on_disk})


def share_here(offload: Offload, kind: str) -> float:
    """The share of a kind of state that stays on the device."""
    share = offload.shares[kind]
    if share.place == "device":
        return 1.0
    return 0.0 if share.ratio == "auto" else 1.0 - share.ratio


def under_way(plan: Plan, update: Update, ranks: float, block: float, has_kernel: bool) -> float:
    """Bytes of states that are on the device for a time while those that are off it are updated.

    Args:
        block: bytes of a block's parameters, which are a chunk with ZeRO-3.
        has_kernel: whether the optimizer has one for the host, which then updates all of them there.
    """
    if has_kernel and (plan.offload.update == "host" or plan.offload.states.place == "disk"):
        return 0.0
    cut = ranks if plan.zero else 1
    chunk = max(plan.chunk_megabytes * 1e6, block if plan.zero == 3 else 0.0)
    return _CHUNKS * chunk * update.states / cut


def carried(
    plan: Plan,
    away: Away,
    prices: Prices,
    *,
    size: float,
    ranks: float,
    moved: float,
    behind: float,
    updated: float,
    has_kernel: bool,
) -> Carried:
    """What the offloading of a plan takes.

    Args:
        away: what was recorded of its ZeRO stage.
        size: bytes of parameters of a rank, before the data axis cuts them.
        ranks: that share what the data axis cuts.
        moved: bytes that an update reads and writes, a byte of parameters.
        behind: seconds that passes compute.
        updated: seconds of the update on the device.
        has_kernel: whether the optimizer has one for the host.
    """
    cluster = prices.cluster
    sharing = min(plan.world_size, cluster.level[0].ranks)
    link = cluster.host.to_device_gbs * 1e9
    own = size / ranks if plan.zero else size  # of this rank's pieces
    recorded = own * away.ranks if plan.zero and ranks > 1 else own
    gone = {kind: 1.0 - share_here(plan.offload, kind) for kind in plan.offload.shares}
    by_host = plan.offload.update != "device" or plan.offload.states.place == "disk"
    at_host = has_kernel and by_host and gone["states"] > 0 and not cluster.device.waits
    sent: dict[str, float] = {}
    rests: dict[str, float] = {}
    lines = {part: dict.fromkeys(("up", "down", "copies", "disk"), 0.0) for part in ("passes", "step")}
    for (part, kind, way), n in away.total(plan.accumulate).items():
        nbytes, place = n * recorded * gone[kind], plan.offload.shares[kind].place
        if not nbytes:
            continue
        line, stays = lines[part], part == "step" and at_host
        if place == "disk":
            rate = cluster.disk.write_gbs if way == "away" else cluster.disk.read_gbs
            line["disk"] += nbytes * sharing / (rate * 1e9)
        if not stays:
            line["down" if way == "away" else "up"] += nbytes
        if way == "away" and kind != "states":
            line["copies"] += nbytes  # a CPU's states are updated where they lie
        if not stays or place == "disk":
            sent[place] = sent.get(place, 0.0) + nbytes
    for kind, n in away.rests.items():
        place = plan.offload.shares[kind].place
        if gone[kind]:
            rests[place] = rests.get(place, 0.0) + n * recorded * gone[kind]
    share = gone["states"] if at_host else 0.0
    if at_host:
        for kind, way in (("gradients", "down"), ("parameters", "up")):
            if not gone[kind]:
                lines["step"][way] += own * share
                sent["host"] = sent.get("host", 0.0) + own * share
    if cluster.device.waits:
        passes, step = (prices.moved("copy_", 2 * x) if (x := lines[p]["copies"]) else 0.0 for p in lines)
        hidden = min(lines["passes"]["disk"], behind)
        late = max(0.0, lines["step"]["disk"] - updated) + lines["passes"]["disk"] - hidden
        return Carried(passes + step + late, hidden, 1.0, sent, rests)
    took = {part: max(x["up"] / link, x["down"] / link, x["disk"]) for part, x in lines.items()}
    hidden = min(took["passes"], behind)
    host = own * moved * share * sharing / (cluster.host.update_gbs * 1e9)
    step = max(took["step"], host)
    return Carried(took["passes"] - hidden + step, hidden, 1.0 - share, sent, rests)
