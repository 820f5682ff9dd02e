"""Loops drawn by lot, around models drawn by lot, under plans drawn by lot, against one process in float64.

Each seed draws all three (``tests/zoo/drawn_loops.py``; ``drawn_scenes.py``, whose scenes may go on under a
second plan; ``drawn_mixes.py``, with more in models, and in plans of two or four ranks; ``drawn_courses.py``,
with more of what people do in whole trainings): every number that the loop gives is that of plain torch, or
the plan is refused with words that say what to do. Journeys (``drawn_journeys.py``) are saved on the way, and
go on under another plan, on another number of ranks.
``ESPALIER_SWEEP=300`` in the environment draws 300 more.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import espalier
from tests.asked import ASKED
from tests.pool import RankError
from tests.ranks.habits import TOLERANCE, as_it_is
from tests.zoo import drawn_courses, drawn_journeys, drawn_mixes
from tests.zoo.drawn_courses import Course
from tests.zoo.drawn_journeys import Journey, is_exact
from tests.zoo.drawn_loops import Loop, plan
from tests.zoo.drawn_mixes import Mix
from tests.zoo.drawn_scenes import Scene, plans
from tests.zoo.train import LOOSEST, MARGIN, TrialError, Verdict, apart, refusal_or_failure

FOUND = (32, 39, 595)  # ended otherwise once
FOUND_SCENES = (7, 29, 53, 88, 103, 70953)
FOUND_MIXES = (71057, 73025)
COURSES = (90113, 90132, 90382, 90440)
SEEDS = [("loop", seed) for seed in (*range(4), *FOUND, *range(2000, 2000 + ASKED))]
SEEDS += [("scene", seed) for seed in (*FOUND_SCENES, *range(2000, 2000 + ASKED))]
SEEDS += [("mix", seed) for seed in (*FOUND_MIXES, *range(2000, 2000 + ASKED))]
SEEDS += [("course", seed) for seed in (*COURSES, *range(2000, 2000 + ASKED))]
JOURNEYS = (315,)


def flat(values: list[Any]) -> torch.Tensor:
    """All numbers, none of which is far greater than one."""
    return torch.cat([espalier.full_tensor(torch.as_tensor(v)).detach().double().flatten() for v in values])


def laid(plan: dict[str, Any]) -> Callable[..., Any]:
    """By a plan, and perhaps compiled."""
    axes = {key: value for key, value in plan.items() if key != "compile"}
    return partial(espalier.prepare, plan=axes, compile=plan.get("compile", False))


def world_of(plan: dict[str, Any]) -> int:
    """How many ranks a plan has."""
    return espalier.Plan(**{key: value for key, value in plan.items() if key != "compile"}).world_size


def drawn(group: str, seed: int) -> tuple[Callable[..., list[Any]], list[dict[str, Any]], str]:
    """What runs, given ways to lay models out, the plans for these, and what it is said to do."""
    if group == "scene":
        scene = Scene(seed)
        return scene.run, plans(seed), f"{scene.said} {scene.net().names}"
    if group in ("mix", "course"):
        kind, under = {"mix": (Mix, drawn_mixes.plans), "course": (Course, drawn_courses.plans)}[group]
        mix = kind(seed)
        return mix.run, under(seed), f"{mix.said} {mix.net().names}"
    loop = Loop(seed)
    return lambda lays, *args, **named: loop.run(lays[0], *args, **named), [plan(seed)], loop.said


def compared(rank: int, world: int, group: str, seed: int, folder: str) -> Verdict:
    """The loop on plain torch and by plans.

    Raises:
        TrialError: it ended with an error.
    """
    (run, under, _), before = drawn(group, seed), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                right = flat(run([as_it_is] * 2))
                rounding = apart(flat(run([as_it_is] * 2, off=1e-15)), right)
            except Exception as error:
                return Verdict("unfit", f"{type(error).__name__}: {error}"[:300])
            if not (rounding < LOOSEST and math.isfinite(right.abs().max())):
                return Verdict("unfit", f"a change of 1e-15 of its parameters makes one of {rounding:.1e}")
            try:
                found = flat(run([laid(one) for one in under], folder))
            except Exception as error:
                raise TrialError(refusal_or_failure(error)) from None
    finally:
        torch.set_default_dtype(before)
    if (gap := apart(found, right)) < max(TOLERANCE, MARGIN * rounding):
        return Verdict("exact")
    at = (
        int((found - right).abs().nan_to_num(nan=math.inf).gt(TOLERANCE).nonzero()[0])
        if len(found) == len(right)
        else -1
    )
    return Verdict("wrong", f"apart by {gap:.1e}, at first in number {at}")


@pytest.mark.world(4)
@pytest.mark.parametrize(("group", "seed"), SEEDS)
def test_a_drawn_loop(ranks: Any, group: str, seed: int, tmp_path: Path) -> None:
    _, under, does = drawn(group, seed)
    try:
        found = ranks(world_of(under[0]), compared, group, seed, str(tmp_path), timeout=240.0)[0]
    except RankError as error:
        if not isinstance(error.original, TrialError):
            raise
        found = error.original.verdict
    said = f"{does} under {under}: {found}"
    assert found.end in ("exact", "refused", "unfit"), said
    if found.end == "refused":
        assert found.says_what_to_do, said
    if found.end != "exact":
        pytest.skip(said)


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """With this for the default, and without warnings."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


def alone(rank: int, world: int, seed: int, folder: str) -> tuple[Verdict, float]:
    """The whole journey on one process, whose numbers go into the folder; and how far rounding leads.

    Low precision is an engine's, as plain torch has none of a plan's.
    """
    low = Journey(seed).precision
    lay = partial(espalier.prepare, plan={"precision": low} if "float" in low else {}) if low else as_it_is
    with computing_in(Journey(seed).dtype):
        try:
            right = flat(Journey(seed).run([lay] * 2, f"{folder}/right"))
            off = flat(Journey(seed).run([lay] * 2, f"{folder}/off", off=2e-3 if low else 1e-15))
        except Exception as error:
            return Verdict("unfit", f"{type(error).__name__}: {error}"[:300]), 0.0
    rounding = apart(off, right)
    if not (rounding < (0.1 if low else LOOSEST) and math.isfinite(right.abs().max())):
        return Verdict("unfit", f"other rounding makes one of {rounding:.1e}"), 0.0
    torch.save(right, f"{folder}/alone.pt")
    return Verdict("exact"), rounding


def walked(rank: int, world: int, seed: int, number: int, folder: str) -> torch.Tensor:
    """The numbers of one leg, on these ranks.

    Raises:
        TrialError: it ended with an error.
    """
    journey = Journey(seed)
    with computing_in(journey.dtype):
        try:
            lays = [laid(one) for one in drawn_journeys.plans(seed)[number]]
            return flat([torch.zeros(0), *journey.leg(number, lays, folder, rank)])
        except Exception as error:
            raise TrialError(refusal_or_failure(error)) from None


def journeyed(ranks: Any, seed: int, folder: str) -> Verdict:
    """How a journey ended."""
    under, low = drawn_journeys.plans(seed), Journey(seed).precision
    verdict, rounding = ranks(1, alone, seed, folder, timeout=240.0)[0]
    if verdict.end == "unfit":
        return verdict  # type: ignore[no-any-return]
    right, found = torch.load(f"{folder}/alone.pt"), []
    for number, two in enumerate(under):
        try:
            found.append(ranks(world_of(two[0]), walked, seed, number, folder, timeout=240.0)[0])
        except RankError as error:
            if not isinstance(error.original, TrialError):
                raise
            return error.original.verdict
    near = max(TOLERANCE, MARGIN * rounding)
    if low:
        near = 1e-6 if all(is_exact(one) for two in under for one in two) else 8 * rounding + 0.02
    gap = apart(numbers := torch.cat(found), right)
    if gap < near:
        return Verdict("exact")
    wrong = (numbers - right).abs().nan_to_num(nan=math.inf).gt(near) if len(numbers) == len(right) else None
    at = -1 if wrong is None or not wrong.any() else int(wrong.nonzero()[0])
    return Verdict("wrong", f"apart by {gap:.1e}, at first in number {at} of {[len(x) for x in found]}")


@pytest.mark.world(4)
@pytest.mark.parametrize("seed", (*JOURNEYS, *range(2000, 2000 + ASKED)))
def test_a_drawn_journey(ranks: Any, seed: int, tmp_path: Path) -> None:
    found = journeyed(ranks, seed, str(tmp_path))
    said = f"{Journey(seed).said} {Journey(seed).net().names} under {drawn_journeys.plans(seed)}: {found}"
    assert found.end in ("exact", "refused", "unfit"), said
    if found.end == "refused":
        assert found.says_what_to_do, said
    if found.end != "exact":
        pytest.skip(said)
