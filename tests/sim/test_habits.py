"""What programs do around a prepared model (tests/ranks/test_habits.py), on the simulated device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import espalier
from tests.ranks import habits as loops
from tests.ranks import habits_of_functions, habits_of_optimizers
from tests.ranks import test_habits as habits
from tests.ranks.habits import TOLERANCE, as_it_is, numbers
from tests.sim.device import Telling
from tests.sim.order import Entry, check
from tests.sim.test_plans import OFFLOADED, UNUSED
from tests.sim.transport import Shared

ASKED = ("tensor/dtensor.py:DTensor.item", "engine/awaited.py:Awaited.item")
"""By these a program asks for a value itself."""

WAITS = {
    **OFFLOADED,
    **UNUSED,
    "parallel/data/unshard.py:Unsharded._keep": "whether what is put in a parameter's place is another value",
    "tensor/rules/pointwise.py:foreach": "AveragedModel gives a factor as a tensor; torch wants its value",
    "parallel/data/zero.py:ZeroState.precise": "what state_dict() asks for may be off the device",
    "parallel/data/offloaded_step.py:_read_by_host": "the host's update reads a rate that is a tensor",
    "engine/update.py:_hooked": "a program's hook of a step asks for a norm",
    "tensor/draws.py:equal": "a copy of a model in stages is looked at when it is first called",
}

AVERAGING = ("recomputed_drawn_and_averaged", "averages_of_weights", "norms_that_are_synchronized")
"""These have a BatchNorm(momentum=None), as update_bn makes it, which asks how many batches it has seen."""

# this device has no sparse and no complex tensors; what torch compiles has a test of its own, what is
# gathered is warned of; programs that look before their first step, or call twice in it, wait in the next,
# too, and in no other; one that goes new ways later waits then
PROGRAMS = [
    program
    for program in habits.PROGRAMS
    if program
    not in (
        habits.adjoint_methods,
        habits.objects_and_other_paths,
        habits.complex_weights,
        habits.derivatives_of_inputs,
        habits.modules_around,
        habits.optimizers_that_ask_for_a_class,
        habits.sparse_graphs,
        habits.losses_of_torchscript,
        habits.functions_that_torch_compiles,
        habits.functions_of_ones_own_in_losses,
        habits.tables_of_the_programs,
        habits.fused_optimizers_made_later,
        habits.gradients_dropped_by_hand,
        habits.statistics_in_the_order_of_calls,
        *habits.ON_DEVICE,
    )
]
AWAY: dict[str, Any] = {"offload": {"states": "host"}}
ALL_AWAY = {"offload": dict.fromkeys(("states", "gradients", "parameters"), "host"), "recompute": "selective"}
CUT_AWAY = {"data": 2, "zero": 3, "offload": {"states": "host", "parameters": "host"}}
# the last keeps a copy of the model, which lies where its parameters do
OF_DATA = (*habits.OF_DATA, habits.norms_that_are_synchronized)
NOT_AWAY: dict[int, tuple[Any, ...]] = {
    # a graph of parameters that has not gone back yet has them as they are until these move
    id(ALL_AWAY): (*OF_DATA, habits.penalties_by_themselves),
    # a layer that is added later, with an optimizer of its own, has its gradients elsewhere
    id(CUT_AWAY): (*OF_DATA, habits.penalties_by_themselves, habits.changes_of_the_model),
}


class Told(NamedTuple):
    """Of one rank and program.

    Attributes:
        apart: the largest difference from plain torch on the CPU.
        faults: races, accesses of the host, mixed devices, early frees; waits but those of the first step.
        calls: what the rank asked its communicators for.
    """

    apart: float
    faults: Counter[Telling]
    calls: list[Entry]


def tried(shared: Shared, rank: int, world: int, plan: dict[str, Any], names: list[str]) -> dict[str, Told]:
    """Each program by plain torch on the CPU, and by a plan on the device, where it makes its tensors."""
    here = torch.device("sim", torch.accelerator.current_device_index())
    before, batch = torch.get_default_dtype(), habits.batch
    torch.set_default_dtype(torch.float64)
    found = {}
    try:
        for name in names:
            program = getattr(habits, name)
            torch.manual_seed(0)
            expected = numbers(program(as_it_is))
            steps: list[int] = []

            def watched_batch(step: int, steps: list[int] = steps) -> Any:
                if step and not any(steps):  # the first step has ended
                    _forget_waits(told)
                steps.append(step)
                with shared.sim.watched(), torch.device("cpu"):
                    return tuple(x.to(here) for x in batch(step))

            shared.log.clear()
            torch.manual_seed(0)
            with pytest.MonkeyPatch.context() as patch, torch.device("sim"), shared.sim.watched() as told:
                for module in (habits, habits_of_functions, habits_of_optimizers, loops):  # each has it
                    patch.setattr(module, "batch", watched_batch)
                out = program(partial(espalier.prepare, plan=plan))
            calls = list(shared.log)
            if not any(steps):
                _forget_waits(told)
            given = numbers([espalier.full_tensor(torch.as_tensor(v)).detach().cpu() for v in out])
            faults = Counter({one: n for one, n in told.items() if not _is_excused(one, name)})
            found[name] = Told(float((given - expected).abs().max()), faults, calls)
    finally:
        torch.set_default_dtype(before)
    return found


def _forget_waits(told: Counter[Telling]) -> None:
    for one in [one for one in told if one.kind == "sync"]:
        del told[one]


def _is_excused(one: Telling, program: str) -> bool:
    if one.kind != "sync":
        return False
    inner = one.where.split(" < ")[0]
    is_known = inner in WAITS or "/" not in inner or one.where.startswith(ASKED)
    # its model draws on the CPU
    draws = program == AVERAGING[0] and one.what == "copy from the host"
    draws = draws and inner.startswith(("parallel/pipeline/arguments.py", "parallel/pipeline/programs.py"))
    # states that the program has made of some that are kept on the host
    taken_over = program == "rows_that_come_later" and one.what == "copy from the host"
    # torch itself asks for a rate that its fused kernels do not read
    is_step = inner.startswith("tensor/optimizer_steps.py:_stepping")
    wide_rate = program == "rates_and_metrics_as_tensors" and is_step
    return is_known or draws or taken_over or wide_rate or (one.what == "item" and program in AVERAGING)


@pytest.mark.filterwarnings("ignore:The tensor-parallel layouts of")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
@pytest.mark.filterwarnings("ignore:torch.vmap or a transform of torch.func is given DTensors")
@pytest.mark.filterwarnings("ignore:A transform of torch.func in a block that is computed again")
@pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
@pytest.mark.parametrize(
    ("world", "plan"),
    [
        pytest.param(world, plan, id=str(plan), marks=pytest.mark.world(world))
        for world, plan in (
            (1, AWAY),
            (1, ALL_AWAY),
            (2, CUT_AWAY),
            (2, {"data": 2, "zero": 1}),
            (2, {"pipe": 2}),
        )
    ],
)
def test_habits(
    on_sim: Callable[..., list[Any]], figures: list[str], world: int, plan: dict[str, Any]
) -> None:
    """As on one process: no race, no access of the host, no call of two devices, no wait unasked for."""
    programs = [x for x in PROGRAMS if "pipe" not in plan or x in habits.STAGED]
    names = [x.__name__ for x in programs if x not in NOT_AWAY.get(id(plan), ())]
    told = on_sim(world, tried, plan, names)
    for name in names:
        ranks = [of[name] for of in told]
        faults = sum((of.faults for of in ranks), Counter[Telling]())
        assert not faults, (name, faults)
        apart = max(of.apart for of in ranks)
        assert apart < TOLERANCE, f"{name}: {apart}"
        check([of.calls for of in ranks])
    figures.append(f"{len(names)} habits, {plan}  {world} ranks: no fault")
