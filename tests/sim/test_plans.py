"""Every kind of plan on the simulated device: nothing races, nothing waits, NCCL could carry it out.

A waiting host is a fault, unless it stands in ``WAITS`` with the reason.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import espalier
from espalier import device
from espalier.comm import ring
from espalier.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from espalier.engine import norm, recompute
from espalier.faults.settings import Spikes
from espalier.parallel.data import residency, unshard
from espalier.parallel.data.offloaded_step import OffloadedStep
from espalier.parallel.data.residency import OffloadStore
from espalier.parallel.data.unshard import Unsharded
from espalier.parallel.pipeline.runtime import Runtime
from espalier.parallel.tensor import ring_products
from espalier.tensor.ring_rewriting import _Round
from espalier.torch_private import allocator_settings, set_allocator_settings
from tests.sim.order import Asked, Entry, Waited, check
from tests.sim.plans import STEPS, alone, counted, trained
from tests.sim.transport import Shared

WAITS = {
    "engine/norm.py:LossScaler.update": "whether a float16 step is made decides what the host does next",
}
"""Where the host may wait for the device in a step, and why: the innermost function of the library's."""

OFFLOADED = {
    "engine/norm.py:scale_gradients": "the host's update is of clipped gradients: it needs their norm",
    "parallel/data/residency.py:OffloadStore.settle": "what went to the host is used there, or its room",
    "parallel/data/residency.py:OffloadStore.to_host": "the host's update reads what the device has made",
    "parallel/data/disk.py:Disk.write": "the disk's thread writes what the device has made",
}
"""The same of plans whose states are updated in the host's memory."""

MEASURED = {"device.py:synchronize": "a clock is read, before and after two of the first updates"}

ROUTED = {
    "parallel/experts.py:_Dispatch._sorted": "rows are sent in numbers that the host must know",
}

TIED = {"kind": "gpt2", "changes": {"layers": 4, "tied": True}}
SHORT = {"kind": "gpt2", "changes": {"layers": 2, "tied": True}}
SINGLE = {"dtype": torch.float32}
FLAT = {"changes": {"layers": 1}}  # where nothing hangs on what comes before a layer or after it
EIGHT = {**SINGLE, "changes": {"hidden": 32, "ffn": 64}}  # products of 8 bits have multiples of 16
AWAY = {"states": "host", "gradients": "host", "parameters": "host"}
ON_DISK = {**dict.fromkeys(AWAY, "disk"), "directory": ""}
LOW = {"precision": "bfloat16"}
ASYNCHRONOUS = {"sequence_parallel": True, "async_tensor_parallel": True}

WORD = 4
"""Bytes of the message by which two ranks meet."""

STEP = "tensor/optimizer_steps.py:_stepping"
"""What runs within ``optimizer.step()``."""

UNUSED = {
    "parallel/data/gradients.py:Gradients._used": "what has no gradient here is updated if others have one",
}
JUDGED = {
    "engine/engine.py:Engine._admits": "whether a step that leaps is made decides what the host does next",
}

# at most so often: for each layer, for each step, and for each step thrice, on both ranks, in two steps
MOST = {"experts": 2 * 2 * 2, "a plain mean": 2 * 2, "counted, judged": 2 * 2 * 3}

# name: the plan, what it trains (see plans.trained), further places where it may wait
Plans = dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]]

ONE: Plans = {
    "one": ({}, FLAT, {}),
    "made on the device": ({}, {"default": True, **FLAT}, {}),
    "autocast": ({"precision": "autocast-bfloat16"}, {**SINGLE, **FLAT}, {}),
    "float16": ({"precision": "float16"}, {**SINGLE, **FLAT}, {}),
    "states on the host": ({"offload": {"states": "host"}}, SINGLE, OFFLOADED),
    "masters on the host": ({"offload": {"states": "host"}, **LOW}, SINGLE, OFFLOADED),
    "updated by the device": ({"offload": {"states": "host", "update": "device"}}, SINGLE, OFFLOADED),
    "updated by both": ({"offload": {"states": "host", "update": "auto"}}, SINGLE, OFFLOADED | MEASURED),
    "half of them": ({"offload": {"states": {"place": "host", "ratio": 0.5}}}, SINGLE, OFFLOADED),
    "recompute": ({"recompute": "full", "recompute_inputs": "host"}, {}, {}),
    "dropout": ({}, {"changes": {"dropout": 0.1, "layers": 1}}, {}),
}
TWO: Plans = {
    **{f"zero {zero}": ({"data": 2, "zero": zero}, {}, {}) for zero in range(4)},
    "accumulate": ({"data": 2, "accumulate": 2}, {}, {}),
    "a plain mean": ({"data": 2, "accumulate": 2, "zero": 1}, {"kind": "regression"}, UNUSED),
    "counted, judged": (
        {"data": 2, "accumulate": 2},
        {"kind": "regression", "more": {"count": counted, "spikes": Spikes()}},
        JUDGED | UNUSED,
    ),
    "bfloat16": ({"data": 2, "zero": 3, **LOW}, SINGLE, {}),
    "autocast, zero 3": ({"data": 2, "zero": 3, "precision": "autocast-bfloat16"}, SINGLE, {}),
    "float8": ({"data": 2, "zero": 3, "precision": "float8"}, EIGHT, {}),
    "tensor": ({"tensor": 2}, {}, {}),
    "sequence": ({"tensor": 2, "sequence_parallel": True}, {}, {}),
    "asynchronous": ({"tensor": 2, **ASYNCHRONOUS}, {}, {}),
    "asynchronous, autocast": ({"tensor": 2, **ASYNCHRONOUS, "precision": "autocast-bfloat16"}, SINGLE, {}),
    "ring": ({"context": 2, "context_kind": "ring"}, FLAT, {}),
    "ulysses": ({"context": 2, "context_kind": "ulysses"}, FLAT, {}),
    "made on the device, zero 3": ({"data": 2, "zero": 3}, {"default": True}, {}),
    "1f1b, tied": ({"pipe": 2, "accumulate": 4}, TIED, {}),
    "gpipe": ({"pipe": 2, "accumulate": 4, "schedule": "gpipe"}, SHORT, {}),
    "zb-h1": ({"pipe": 2, "accumulate": 4, "schedule": "zb-h1"}, SHORT, {}),
    "interleaved, tied": (
        {"pipe": 2, "accumulate": 4, "schedule": "interleaved", "stages_per_rank": 2},
        TIED,
        {},
    ),
    "zbv, tied": ({"pipe": 2, "accumulate": 4, "schedule": "zbv", "stages_per_rank": 2}, TIED, {}),
    "remembering": ({"pipe": 2, "cuts": ("layers.1",)}, {"kind": "recurrent"}, {}),
    "all on the host": ({"data": 2, "zero": 3, **LOW, "offload": AWAY}, SINGLE, OFFLOADED),
    "all on disk": ({"data": 2, "zero": 3, "offload": ON_DISK}, SINGLE, OFFLOADED),
    "experts": ({"data": 2, "expert": 2}, {"kind": "moe"}, ROUTED),
}
FOUR: Plans = {
    "2d": ({"tensor": 4, "tensor_mode": "2d"}, FLAT, {}),
    "pipe and data": ({"pipe": 2, "data": 2, "zero": 2, "accumulate": 4}, SHORT, {}),
    "asynchronous, zero 3": ({"data": 2, "tensor": 2, "zero": 3, **ASYNCHRONOUS}, {}, {}),
    "data and tensor": ({"data": 2, "tensor": 2, "zero": 3}, {}, {}),
}
CASES = [
    pytest.param(ranks, name, *given, id=name, marks=pytest.mark.world(ranks))
    for ranks, plans in ((1, ONE), (2, TWO), (4, FOUR))
    for name, given in plans.items()
]
_WHOLE = ("all_reduce", "all_gather")
_APART = ("experts", "dropout")  # the loss is another: balanced over fewer tokens; other bits are drawn


@pytest.mark.parametrize(("ranks", "name", "plan", "case", "waits"), CASES)
def test_a_plan(
    on_sim: Callable[..., list[Any]],
    figures: list[str],
    tmp_path: Path,
    ranks: int,
    name: str,
    plan: dict[str, Any],
    case: dict[str, Any],
    waits: dict[str, str],
) -> None:
    runs = on_sim(ranks, trained, plan, case, str(tmp_path))
    told: Counter[tuple[str, str, str]] = sum((run.told for run in runs), Counter())
    known = WAITS | waits
    excused = {key: n for key, n in told.items() if key[0] == "sync" and key[2].split(" < ")[0] in known}
    faults = {key: n for key, n in told.items() if key not in excused}
    calls = check([run.calls for run in runs])
    kinds: Counter[str] = Counter()
    for (kind, _, _), n in faults.items():
        kinds[kind] += n
    shown = ", ".join(f"{kind} {kinds[kind]}" for kind in ("race", "host", "mixed", "freed", "sync"))
    figures.append(
        f"{name:28} {ranks} ranks: {shown}; waits with a reason {sum(excused.values())}; {calls} calls"
    )
    assert not faults, faults
    assert sum(excused.values()) <= MOST.get(name, math.inf)
    if name in ("tensor", "sequence"):
        # those of the norm, which other sums ride on, are asked for ahead
        assert all(waited_at_once(run.calls) <= STEPS for run in runs)
    losses, weights = alone(case)
    exact = case.get("dtype", torch.float64) is torch.float64
    assert runs[0].losses == [run.losses for run in runs][-1]
    if name in _APART:
        return
    assert runs[0].losses == pytest.approx(losses, abs=1e-9 if exact else 2e-2)
    if exact:
        worst = max(float((runs[0].weights[key] - x).abs().max()) for key, x in weights.items())
        assert worst < 1e-9


def waited_at_once(calls: list[Entry]) -> int:
    """Sums and gathers that have a stream of their own, though the program waits as soon as it has asked."""
    return sum(
        isinstance(call, Asked) and call.beside and call.kind in _WHOLE and then == Waited(call.number)
        for call, then in itertools.pairwise(calls)
    )


def test_places_where_it_waits_are_there() -> None:
    """Nothing stays excused that no longer is."""
    for key in WAITS | OFFLOADED | MEASURED | ROUTED | JUDGED | UNUSED:
        file, _, name = key.partition(":")
        source = Path("espalier", file).read_text()
        assert f"def {name.rpartition('.')[2]}(" in source, key


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [(torch.optim.AdamW, "aten::_fused_adamw_"), (torch.optim.SGD, "aten::_fused_sgd_")],
)
def test_an_update_is_one_kernel(
    on_sim: Callable[..., list[Any]], figures: list[str], tmp_path: Path, optimizer: Any, named: str
) -> None:
    """Not a loop over parameters, where nobody said so."""
    (run,) = on_sim(1, trained, {}, {"optimizer": optimizer, "kernels": True}, str(tmp_path))
    kernels = {what: n for (kind, what, where), n in run.told.items() if kind == "kernel" and STEP in where}
    figures.append(f"{optimizer.__name__:28} 1 rank: {sum(kernels.values()) / 2:g} kernels an update")
    # in two steps; counts of steps are one call on a list, which this device takes apart
    assert {what: n for what, n in kernels.items() if what != "aten::add"} == {named: 2}


def brought(shared: Shared, rank: int, world: int) -> tuple[int, int, set[int], list[set[int]]]:
    """What comes from the host: how often, how often the program's stream waits for it, and threads there.

    And the streams of copies to the host, and of those from it.
    """
    started, waits, threads, starting = 0, 0, set(), False
    streams: list[set[int]] = [set(), set()]
    copy = residency.copy_by
    program = torch.accelerator.current_stream()
    start, wait, kernel = Unsharded.start, residency.wait_for, torch._fused_adamw_

    def watched_start(g: Unsharded) -> None:
        nonlocal started, starting
        started += g.is_away and g.pending is None
        starting = True
        start(g)
        starting = False

    def watched_wait(event: Any, device: torch.device) -> None:
        nonlocal waits
        waits += event is not None and torch.accelerator.current_stream() == program
        wait(event, device)

    def watched_fill(event: Any, device: torch.device) -> None:
        nonlocal waits
        waits += event is not None and starting  # where it is used a wait is right
        wait(event, device)

    def watched_copy(stream: Any, pairs: Any, *given: Any) -> Any:
        if pairs:
            streams[not pairs[0][0].is_cpu].add(stream.stream_id)
        return copy(stream, pairs, *given)

    def watched_kernel(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if params[0].is_cpu:
            threads.add(torch.get_num_threads())
        return kernel(params, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unsharded, "start", watched_start)
        patch.setattr(residency, "wait_for", watched_wait)
        patch.setattr(unshard, "wait_for", watched_fill)
        patch.setattr(residency, "copy_by", watched_copy)
        patch.setattr(torch, "_fused_adamw_", watched_kernel)
        trained(shared, rank, world, {"offload": {"parameters": "host", "states": "host"}, **LOW}, SINGLE, "")
    return started, waits, threads, streams


def test_what_is_brought_keeps_no_kernel_waiting(on_sim: Callable[..., list[Any]]) -> None:
    """Copies and gathers are of a stream of their own; and the host updates with all its cores."""
    ((started, waits, threads, (down, up)),) = on_sim(1, brought)
    assert started >= 3 * 4 and waits == 0
    assert down and up and not down & up, "both ways at once"
    assert threads == {max(1, len(os.sched_getaffinity(0)))}


def hosted(shared: Shared, rank: int, world: int) -> tuple[Counter[str], int]:
    """Of blocks' inputs in the host's memory: copies each way beside the program, and those begun ahead."""
    ways: Counter[str] = Counter()
    ahead, copy, get = 0, recompute.copy_by, recompute._OnHost.get

    def watched_copy(stream: Any, pairs: Any, *given: Any) -> Any:
        assert stream is not None and stream != torch.accelerator.current_stream()
        ways["down" if pairs[0][0].is_cpu else "up"] += 1
        return copy(stream, pairs, *given)

    def watched_get(kept: Any) -> torch.Tensor:
        nonlocal ahead
        ahead += kept._coming is not None
        return get(kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "copy_by", watched_copy)
        patch.setattr(recompute._OnHost, "get", watched_get)
        case = {"changes": {"layers": 4}}
        trained(shared, rank, world, {"recompute": "full", "recompute_inputs": "host"}, case, "")
    return ways, ahead


def test_inputs_of_blocks_come_while_others_compute(on_sim: Callable[..., list[Any]]) -> None:
    """But for the last block's, which its backward pass wants at once."""
    assert on_sim(1, hosted) == [({"down": 4 * STEPS, "up": 4 * STEPS}, 3 * STEPS)]


ROUNDED = "pinned_max_round_threshold_mb:65536"


def pinned(shared: Shared, rank: int, world: int, chosen: bool) -> tuple[int, int]:
    """Of offload to the host: bytes of pinned memory that were asked for, at its most, and those taken."""
    set_allocator_settings(ROUNDED)
    if not chosen:  # as torch begins
        set_allocator_settings("pinned_use_background_threads:False")
    device._pin_no_more_than_is_used.cache_clear()
    gc.collect()
    shared.sim.c.sim_restart_pinned()
    case = {**SINGLE, "changes": {"hidden": 520}}
    trained(shared, rank, world, {"offload": {"states": "host"}, "chunk_megabytes": 2}, case, "")
    said = str(allocator_settings())
    assert said == ROUNDED if chosen else said.startswith("pinned_use_background_threads:False,pinned_max")
    return shared.sim.c.sim_most_pinned(), shared.sim.c.sim_most_taken()


@pytest.mark.skipif(allocator_settings() is None, reason="this torch always rounds")
def test_pinned_memory_is_what_is_used(on_sim: Callable[..., list[Any]], figures: list[str]) -> None:
    """And not the next power of two, unless somebody chose otherwise."""
    ((asked, taken),) = on_sim(1, pinned, False)
    ((_, rounded),) = on_sim(1, pinned, True)
    figures.append(f"states on the host           1 rank: {taken / asked:.2f} bytes pinned a byte used")
    figures.append(f"the same, rounded by torch   1 rank: {rounded / asked:.2f}")
    assert asked > 16 << 20
    assert taken < 1.1 * asked and rounded > 1.4 * asked


def pipelined(shared: Shared, rank: int, world: int, more: dict[str, Any]) -> tuple[str, int]:
    """Of updates on the host: copies begun (f) and updates (u), step by step, and copies that were late."""
    seen, late, inside = "", 0, False
    fetch, to_host, copy = OffloadStore.fetch, OffloadStore.to_host, OffloadStore.copy
    kernel, each = torch._fused_adamw_, OffloadedStep.each

    def watched_fetch(store: OffloadStore, tensors: Any, ready: Any) -> None:
        nonlocal seen
        seen += "f"
        fetch(store, tensors, ready)

    def watched_kernel(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += "u" if params[0].is_cpu else ""
        return kernel(params, *args, **kwargs)

    def watched_to_host(store: OffloadStore, tensors: Any, also: Any = None) -> Any:
        nonlocal inside
        inside = True
        try:
            return to_host(store, tensors, also)
        finally:
            inside = False

    def watched_copy(store: OffloadStore, into: Any, outof: Any, ready: Any = None) -> Any:
        nonlocal late
        late += inside and any(not t.is_cpu for t in outof)
        return copy(store, into, outof, ready)

    def watched_each(*given: Any, **more: Any) -> None:
        nonlocal seen
        seen += " "
        each(*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        for name, watched in (("fetch", watched_fetch), ("to_host", watched_to_host), ("copy", watched_copy)):
            patch.setattr(OffloadStore, name, watched)
        patch.setattr(OffloadedStep, "each", watched_each)
        patch.setattr(torch, "_fused_adamw_", watched_kernel)
        plan = {"offload": {"states": "host"}, "chunk_megabytes": 0.01, **more}
        trained(shared, rank, world, plan, SINGLE, "")
    return seen, late


@pytest.mark.parametrize("more", [{}, LOW], ids=["float32", "masters"])
def test_the_host_updates_while_copies_come_and_go(
    on_sim: Callable[..., list[Any]], figures: list[str], more: dict[str, Any]
) -> None:
    """What the next chunk's update reads is on its way while a chunk is updated; nothing is late."""
    ((seen, late),) = on_sim(1, pipelined, more)
    figures.append(f"states on the host           1 rank: {seen.split()[0]}: copies begun (f), updates (u)")
    chunks = seen.split()[0].count("u")
    assert chunks > 2 and late == 0
    assert seen.split() == ["ff" + "uf" * (chunks - 2) + "uu"] * STEPS


def messages(shared: Shared, rank: int, world: int) -> tuple[int, int, int]:
    """Of a pipeline: receives, those that come while this rank computes, sends that held up what follows."""
    begun: list[int] = []  # so much was asked for when each computation began
    compute, send, held = Runtime._compute, Runtime._send, 0

    def watched(runtime: Runtime, action: Any) -> None:
        begun.append(len(shared.log))
        compute(runtime, action)

    def watched_send(runtime: Runtime, action: Any) -> None:
        nonlocal held
        before = len(shared.log)
        send(runtime, action)
        held += any(isinstance(entry, Waited) for entry in shared.log[before:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "_compute", watched)
        patch.setattr(Runtime, "_send", watched_send)
        calls = trained(shared, rank, world, {"pipe": 2, "accumulate": 4}, TIED, "").calls
    waited = {call.number: i for i, call in enumerate(calls) if isinstance(call, Waited)}
    # but those of tied weights, which go in batches
    alone = [(i, call) for i, call in enumerate(calls) if isinstance(call, Asked) and call.batch is None]
    # and the words by which ranks meet, once a world
    receives = [(i, call.number) for i, call in alone if call.kind == "recv" and call.bytes > WORD]
    # the last computation that begins till it is waited for is that which wants it
    early = sum(sum(i < at <= waited[number] for at in begun) > 1 for i, number in receives)
    return len(receives), early, held


@pytest.mark.world(2)
def test_messages_come_and_go_while_stages_compute(
    on_sim: Callable[..., list[Any]], figures: list[str]
) -> None:
    """A message has a way of its own; all but a schedule's first are on it while something is computed."""
    found = on_sim(2, messages)
    for rank, (receives, early, held) in enumerate(found):
        figures.append(
            f"1f1b, rank {rank}                 {early} of {receives} receives under way while it computes"
        )
        assert receives == 4 * STEPS and held == 0
    assert [early for _, early, _ in found] == [4 * STEPS, 3 * STEPS]


def products(shared: Shared, rank: int, world: int, case: dict[str, Any]) -> tuple[int, int, int]:
    """Of asynchronous tensor parallelism: receives, and those that come while a product is computed.

    And how many messages of graphs were written anew.
    """
    begun: list[int] = []  # so much was asked for when each product began
    multiply, write, written = ring.multiply, _Round.write, 0

    def watched(*args: Any) -> torch.Tensor:
        begun.append(len(shared.log))
        return multiply(*args)

    def counted_write(spot: _Round) -> None:
        nonlocal written
        written += 1
        write(spot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Round, "write", counted_write)
        for module in (ring, ring_products):
            patch.setattr(module, "multiply", watched)
        calls = trained(shared, rank, world, {"tensor": world, **ASYNCHRONOUS}, case, "").calls
    waited = {call.number: i for i, call in enumerate(calls) if isinstance(call, Waited)}
    receives = [
        (i, call.number) for i, call in enumerate(calls) if isinstance(call, Asked) and call.kind == "recv"
    ]
    under_way = sum(any(i < at <= waited[number] for at in begun) for i, number in receives)
    return len(receives), under_way, written


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "more",
    [{}, {"default": True}, {"more": {"compile": "aot_eager"}}],
    ids=["", "made on the device", "compiled"],
)
def test_layers_multiply_while_sequences_travel(
    on_sim: Callable[..., list[Any]], figures: list[str], more: dict[str, Any]
) -> None:
    """Each piece is on its way while another is multiplied, and each sum while an addend is computed.

    Also where tensors are made on the device by default, which is a mode that records nothing; and in graphs.
    """
    layers, compiled = 2, "more" in more
    for receives, under_way, written in on_sim(2, products, {"changes": {"layers": layers}, **more}):
        figures.append(
            f"asynchronous{', compiled' * compiled:16} 2 ranks: {under_way} of {receives} receives under way"
        )
        # a block gathers twice and sums twice, forward and backward; so does, by its gradient, the head
        # (layers that are recorded, in a first step, don't)
        assert receives >= layers * 8 * (STEPS - compiled) and under_way == receives
        assert written == 8 * compiled  # blocks are alike: one program


def carried(shared: Shared, rank: int, world: int) -> dict[tuple[str, int], int]:
    """Of collectives along a dim: what, how many rows lie before it, and the kernels that copy."""
    mesh = espalier.Mesh.from_env({"tensor": world})
    found = {}
    for lead, features in ((1, 6), (3, 6), (3, 5)):
        # of what both ranks have, and this one's part of it
        whole = torch.arange(lead * 4.0 * features).view(lead, 4, features)
        part = whole[:, 2 * rank : 2 * rank + 2].contiguous()
        on, part_on = whole.to("sim"), part.to("sim")
        columns = slice(0, 3) if rank == 0 else slice(3, features)
        for name, call, wanted in (
            ("all_gather", partial(all_gather, part_on, mesh, 0, 1, 4), whole),
            ("reduce_scatter", partial(reduce_scatter, on, mesh, 0, 1), 2 * part),
            ("all_to_all", partial(all_to_all, part_on, mesh, 0, 2, 1, 4), whole[..., columns]),
            ("all_reduce", partial(all_reduce, on, mesh, 0), 2 * whole),
        ):
            shared.log.clear()
            with shared.sim.watched(kernels=True) as told:
                out = call()
            assert out.cpu().equal(wanted), name
            # what is waited for at once has no stream of its own
            beside = [call.beside for call in shared.log if isinstance(call, Asked) and call.kind in _WHOLE]
            assert beside == [False] * (name in _WHOLE), name
            if features == 6:
                found[name, lead] = sum(n for telling, n in told.items() if telling.kind == "kernel")
    return found


@pytest.mark.world(2)
def test_collectives_copy_no_more_than_they_must(on_sim: Callable[..., list[Any]]) -> None:
    """Nothing where pieces lie behind each other in memory, else everything once."""
    for found in on_sim(2, carried):
        assert found == {
            ("all_gather", 1): 0,
            ("reduce_scatter", 1): 0,
            ("all_gather", 3): 1,
            ("reduce_scatter", 3): 1,
            # before and behind it
            ("all_to_all", 1): 2,
            ("all_to_all", 3): 2,
            # which is summed in place
            ("all_reduce", 1): 1,
            ("all_reduce", 3): 1,
        }


@pytest.mark.world(2)
@pytest.mark.parametrize("zero", [2, 3])
def test_summed_gradients_are_where_they_arrive(
    on_sim: Callable[..., list[Any]], figures: list[str], tmp_path: Path, zero: int
) -> None:
    """A buffer of gradients is packed once; its sum is not copied again."""
    case, plan = {"kernels": True}, {"data": 2, "zero": zero, "chunk_megabytes": 0.05}
    for run in on_sim(2, trained, plan, case, str(tmp_path)):
        copies = sum(n for (kind, _, where), n in run.told.items() if kind == "kernel" and "Summing" in where)
        assert copies == 0
    figures.append(f"zero {zero}                       2 ranks: {copies} copies of summed gradients")


def normed(shared: Shared, rank: int, world: int) -> list[tuple[torch.dtype, float]]:
    """The dtypes in which norms of float32 and of float64 were added up, and a norm of many gradients."""
    seen: list[torch.dtype] = []
    there = norm.foreach_norms

    def watched(grads: list[torch.Tensor], ord: float, dtype: torch.dtype) -> Any:
        seen.append(dtype)
        return there(grads, ord, dtype=dtype)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "foreach_norms", watched)
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            grads = [torch.full((1000,), 0.5, dtype=dtype, device="sim") for _ in range(40)]
            value = norm.Norm(grads, espalier.Mesh.single(device_type="sim")).wait()
            found.append((seen.pop(), value.item()))
    return found


def test_a_norm_is_in_float32_but_of_float64(on_sim: Callable[..., list[Any]]) -> None:
    """Most devices have few units for float64."""
    (found,) = on_sim(1, normed)
    assert [dtype for dtype, _ in found] == [torch.float32, torch.float32, torch.float64]
    assert [value for _, value in found] == pytest.approx([100.0] * 3, rel=1e-6)
