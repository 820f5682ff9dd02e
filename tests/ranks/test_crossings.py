"""Moves to other meshes: other axes, other ranks, overlapping or not; values, gradients, ledgers, training.

The reference is that of ``test_moves``: what must arrive follows from the layouts alone.
"""

from __future__ import annotations

import random
import traceback
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import espalier
from espalier import DTensor, Layout, Mesh, Replicate, Shard
from espalier.comm import move
from tests.asked import ASKED
from tests.ranks.test_moves import Case, Locals, Sizes, differentiated, specs, spread, whole

Plot = tuple[dict[str, int], tuple[int, ...]]  # axes and ranks


class Pair(NamedTuple):
    src: Plot
    dst: Plot
    cases: list[Case]


WORLD = 4
PLOTS: list[tuple[Plot, Plot]] = [
    (({"a": 4}, (0, 1, 2, 3)), ({"a": 2, "b": 2}, (0, 1, 2, 3))),  # other axes
    (({"a": 2, "b": 2}, (0, 1, 2, 3)), ({"x": 2, "y": 2}, (3, 1, 0, 2))),  # another order of ranks
    (({"a": 2, "b": 2}, (0, 1, 2, 3)), ({"x": 2, "y": 2}, (0, 1, 2, 3))),  # other names alone
    (({"a": 4}, (0, 1, 2, 3)), ({"b": 2}, (2, 1))),  # a part of it
    (({"a": 2}, (0, 3)), ({"b": 2}, (1, 2))),  # nothing in common
    (({"a": 2, "b": 1}, (0, 1)), ({"b": 3}, (3, 1, 2))),  # one in common, one in neither
    (({"a": 1}, (2,)), ({"a": 2, "b": 2}, (0, 1, 2, 3))),
    (({"a": 3}, (0, 1, 2)), ({"a": 1, "b": 1}, (3,))),
    (({"a": 1}, (1,)), ({"a": 1}, (2,))),
]
SHAPES: list[Sizes] = [(4, 6), (5, 7), (1, 2), (3,), (0, 3), ()]


def sampled(src: Plot, dst: Plot, seed: int, each: int) -> list[Case]:
    chance = random.Random(seed)
    states = ("R", "D", "sum", "avg")
    cases = []
    for shape in SHAPES:
        a, b = (specs(len(plot[0]), len(shape), states) for plot in (src, dst))
        cases += [Case(chance.choice(a), chance.choice(b), shape, 100 * seed + i) for i in range(each)]
    return cases


def laid_out(case: Case, sizes: Sizes, goal: Sizes) -> tuple[dict[str, np.ndarray], dict[str, Locals]]:
    chance = np.random.default_rng(case.seed)
    specs_of = {
        "x": (case.src, sizes),
        "cotangent": (case.dst.gradient, goal),
        "second": (case.src.gradient.gradient, sizes),
    }
    values = {k: chance.integers(1, 50, case.shape).astype(np.float64) for k in specs_of}
    return values, {k: spread(values[k], *specs_of[k], chance) for k in specs_of}


def run_case(case: Case, src: Mesh, dst: Mesh) -> tuple[dict[str, Any], list[str]]:
    a, b = case.src.on(src, case.shape), case.dst.on(dst, case.shape)
    _, held = laid_out(case, src.shape, dst.shape)

    def part(name: str, layout: Layout) -> torch.Tensor:
        mesh = layout.mesh
        if not mesh.is_member:
            return torch.empty(layout.local_shape, dtype=torch.float64, device="meta")
        return torch.tensor(held[name][mesh.coordinate])

    with espalier.ledger(src) as book, espalier.ledger(dst) as other:
        found = differentiated(a, b, part("x", a), part("cotangent", b), part("second", a))
    wrong = []
    plain = move(part("x", a), a, b)
    if dst.is_member and not torch.equal(plain, found[0]):
        wrong.append("with and without gradient differ")
    for x, layout in zip(found, (b, a, b), strict=True):
        if x.shape != layout.local_shape or (x.device.type == "meta") == layout.mesh.is_member:
            wrong.append(f"{x.shape} on {x.device} is not {layout}")
    here = src.world_rank
    twins = [
        Mesh.dry(dict(zip(m.names, m.shape, strict=True)), ranks=m.ranks, world_rank=here) for m in (src, dst)
    ]
    c, d = case.src.on(twins[0], case.shape), case.dst.on(twins[1], case.shape)
    with espalier.ledger(twins[0]) as guess, espalier.ledger(twins[1]) as other_guess:
        parts = [torch.empty(lay.local_shape, dtype=torch.float64, device="meta") for lay in (c, d, c)]
        dry = differentiated(c, d, *parts)
    if (guess, other_guess) != (book, other) or [x.shape for x in dry] != [x.shape for x in found]:
        wrong.append(f"ledgers {book.entries}, {other.entries}; dry {guess.entries}, {other_guess.entries}")
    meshes = (dst, src, dst)
    kept = {k: x.numpy() for k, x, m in zip(("y", "gx", "gg"), found, meshes, strict=True) if m.is_member}
    return kept, wrong


def run_pairs(rank: int, world: int, pairs: list[Pair]) -> Any:
    results = []
    for pair in pairs:
        src, dst = (Mesh.from_env(axes, ranks=ranks) for axes, ranks in (pair.src, pair.dst))
        for case in pair.cases:
            try:
                results.append(run_case(case, src, dst))
            except Exception:
                results.append(({}, [traceback.format_exc()]))
    return results


def placed(plot: Plot) -> dict[int, tuple[int, ...]]:
    """The coordinate of each rank."""
    sizes = tuple(plot[0].values())
    return dict(zip(plot[1], np.ndindex(*sizes), strict=True))


def test_across_meshes(ranks: Any) -> None:
    pairs = []
    there, back = (7, 4) if ASKED else (4, 2)  # of each shape
    for i, (a, b) in enumerate(PLOTS):
        pairs += [Pair(a, b, sampled(a, b, i, there)), Pair(b, a, sampled(b, a, 50 + i, back))]
    answers = ranks(WORLD, run_pairs, pairs)
    failures, at = [], 0
    for pair in pairs:
        sizes, goal = (tuple(p[0].values()) for p in (pair.src, pair.dst))
        for case in pair.cases:
            values, _ = laid_out(case, sizes, goal)
            factor = case.dst.averaged(goal) / case.src.averaged(sizes)
            expected = {
                "y": (case.dst, pair.dst, values["x"]),
                "gx": (case.src.gradient, pair.src, values["cotangent"] * factor),
                "gg": (case.dst.gradient.gradient, pair.dst, values["second"] * factor),
            }
            told = [f"rank {r}: {text}" for r in range(WORLD) for text in answers[r][at][1]]
            for name, (spec, plot, value) in expected.items() if not told else ():
                held = {where: answers[r][at][0][name] for r, where in placed(plot).items()}
                try:
                    got = whole(held, spec, tuple(plot[0].values()))
                    np.testing.assert_allclose(got, value, atol=1e-10)
                except AssertionError as error:
                    told.append(f"{name}: {error}")
            failures += [f"{pair.src} -> {pair.dst}, {case}: {text}" for text in told]
            at += 1
    assert not failures, f"{len(failures)} failures in {at} cases:\n" + "\n".join(failures[:6])


# --- training two models on two meshes ---------------------------------------------------------------------


def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    encoder = torch.nn.Sequential(
        torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.LayerNorm(10), torch.nn.Linear(10, 5)
    )
    decoder = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    return encoder.double(), decoder.double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (8,), generator=generator)


def laid(module: torch.nn.Module, mesh: Mesh, cut: bool) -> torch.nn.Module:
    """The module on a mesh, its first weight and bias cut along the last axis."""
    for name, p in list(module.named_parameters()):
        owner, _, own = name.rpartition(".")
        places: list[Any] = [Replicate()] * (mesh.ndim - 1)
        places.append(Shard(0) if cut and owner == "0" else Replicate())
        setattr(module.get_submodule(owner), own, espalier.distribute_tensor(p, mesh, places))
    return module


def one_process(steps: int) -> tuple[list[float], list[torch.Tensor]]:
    encoder, decoder = models()
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer, losses = torch.optim.AdamW(parameters, lr=0.05), []
    for step in range(steps):
        x, y = batch(step)
        loss = F.cross_entropy(decoder(encoder(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in parameters]


def two_meshes(rank: int, world: int, plots: tuple[Plot, Plot], one_optimizer: bool) -> None:
    first, second = (Mesh.from_env(axes, ranks=ranks) for axes, ranks in plots)
    everywhere = Mesh.from_env({"all": world})
    encoder, decoder = models()
    laid(encoder, first, True), laid(decoder, second, second.ndim > 1)
    groups = [list(encoder.parameters()), list(decoder.parameters())]
    if one_optimizer:
        optimizers = [torch.optim.AdamW([*groups[0], *groups[1]], lr=0.05)]
    else:
        optimizers = [torch.optim.AdamW(group, lr=0.05) for group in groups]
    losses, wanted = one_process(3)
    for step, right in enumerate(losses):
        x, y = batch(step)
        data = espalier.distribute_tensor(x, first, [Shard(0)] + [Replicate()] * (first.ndim - 1))
        hidden = encoder(data)
        hidden = hidden.redistribute(second, [Shard(0)] + [Replicate()] * (second.ndim - 1))
        # the targets are plain, the same on all ranks, of the mesh and outside
        loss = F.cross_entropy(decoder(hidden), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        shown = loss.detach().redistribute(everywhere, [Replicate()])
        assert abs(shown.item() - right) < 1e-12
        if not second.is_member:
            with pytest.raises(ValueError, match=r"this is rank \d"):
                loss.item()
    if not first.is_member:
        with pytest.raises(ValueError, match=r"this is rank \d"):
            torch.zeros(10, 6, dtype=torch.float64).add_(encoder[0].weight.detach())  # type: ignore[operator]
    for p, right in zip((p for group in groups for p in group), wanted, strict=True):
        assert isinstance(p, DTensor) and isinstance(p, torch.nn.Parameter)
        if p.device_mesh.is_member:
            torch.testing.assert_close(p.full_tensor().detach(), right, rtol=1e-10, atol=1e-11)
        else:
            assert p.is_meta and p.shape == right.shape and p.grad is not None


APART: tuple[Plot, Plot] = (({"a": 2}, (0, 1)), ({"b": 2}, (2, 3)))
OVERLAP: tuple[Plot, Plot] = (({"a": 3}, (2, 0, 1)), ({"b": 2, "c": 2}, (0, 1, 3, 2)))


@pytest.mark.parametrize("plots", [APART, OVERLAP], ids=["apart", "overlapping"])
def test_two_models_train_on_two_meshes(ranks: Any, plots: tuple[Plot, Plot]) -> None:
    ranks(WORLD, two_meshes, plots, plots is APART)
