"""What scripts save of models and optimizers is as on one process under every plan: whole, plain."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import espalier
from espalier.compat.torch import fully_shard

PLANS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"data": 2, "zero": 1},
        {"data": 2, "zero": 2, "chunk_megabytes": 0.0001},
        {"data": 2, "zero": 3, "offload": {"states": "host", "parameters": "host"}},
        {"tensor": 2},
        {"pipe": 2},
    ],
    4: [{"data": 2, "pipe": 2, "zero": 1}],
}


class Named(torch.optim.SGD):
    """Has a state of no parameter, too."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.state["all"]["rate"] = self.param_groups[0]["lr"]


def made(kind: str = "AdamW") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 4)).double()
    if kind == "Named":
        return net, Named(net.parameters(), 0.1, momentum=0.9)
    flat = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": flat, "weight_decay": 0.0}, {"params": [p for p in net.parameters() if p.ndim > 1]}]
    return net, torch.optim.AdamW(groups, 0.01, amsgrad=True)


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(8, 6, generator=draw, dtype=torch.float64).to(next(net.parameters()).dtype)
        loss = F.cross_entropy(net(x), torch.randint(0, 4, (8,), generator=draw))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def states_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()})


def load(held: Any, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net.load_state_dict(held["model"])
    optimizer.load_state_dict(copy.deepcopy(held["optimizer"]))


def same(found: Any, expected: Any, tolerance: float) -> None:
    assert type(found) is type(expected)
    if isinstance(found, torch.Tensor):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    elif isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key, x in found.items():
            same(x, expected[key], tolerance)
    elif isinstance(found, list):
        for x, y in zip(found, expected, strict=True):
            same(x, y, tolerance)
    else:
        assert found == expected


def written(rank: int, world: int, folder: Path, kind: str) -> None:
    net, optimizer = made(kind)
    trained(net, optimizer, range(2))
    expected = states_of(net, optimizer)
    for number, plan in enumerate(PLANS[world]):
        net, optimizer = espalier.prepare(*made(kind), plan=plan)
        trained(net, optimizer, range(2))
        states = states_of(net, optimizer)
        same(dict(states["model"]), dict(expected["model"]), 1e-12)
        same(states["optimizer"], expected["optimizer"], 1e-12)
        if rank == 0:
            torch.save(states, folder / f"{world}-{number}.pt")


def read(rank: int, world: int, paths: list[Path], kind: str) -> None:
    expected = trained(*made(kind), range(4))[2:]
    for number, path in enumerate(paths):
        plan = PLANS[world][number % len(PLANS[world])]
        held = torch.load(path, weights_only=True)
        plain = made(kind)
        load(held, *plain)
        net, optimizer = espalier.prepare(*made(kind), plan=plan)
        load(held, net, optimizer)
        for loaded in ((net, optimizer), espalier.prepare(*plain, plan=plan)):
            assert trained(*loaded, range(2, 4)) == pytest.approx(expected, abs=1e-12), (path, plan)


@pytest.mark.parametrize("kind", ["AdamW", "Named"])
def test_any_plan_and_one_process_go_on_with_what_any_other_wrote(
    ranks: Any, tmp_path: Path, kind: str
) -> None:
    for world in PLANS:
        ranks(world, written, tmp_path, kind)
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == sum(map(len, PLANS.values()))
    expected = trained(*made(kind), range(4))[2:]
    for path in paths:
        net, optimizer = made(kind)
        load(torch.load(path, weights_only=True), net, optimizer)
        assert trained(net, optimizer, range(2, 4)) == pytest.approx(expected, abs=1e-12), path
    ranks(2, read, paths[::-1], kind)
    ranks(4, read, paths[:2], kind)


def in_parts(rank: int, world: int) -> None:
    """What torch's helpers and ``fully_shard`` have is in parts, and nothing is sent for it."""
    net, optimizer = espalier.prepare(*made(), plan={"data": 2, "zero": 3})
    trained(net, optimizer, range(2))
    with espalier.ledger(net.engine.mesh) as book:
        state = get_optimizer_state_dict(net.engine.module, optimizer)
    assert not book.entries
    kept = state["state"]["0.weight"]["exp_avg"]
    assert isinstance(kept, espalier.DTensor) and kept.to_local().numel() * world == kept.numel()
    again = espalier.prepare(*made(), plan={"data": 2, "zero": 3})
    again[0].load_state_dict(net.state_dict())
    set_optimizer_state_dict(again[0].engine.module, again[1], copy.deepcopy(state))
    assert trained(*again, range(2, 4)) == trained(net, optimizer, range(2, 4))
    net, optimizer = made()
    fully_shard(net)
    trained(net, optimizer, range(2))
    for x in (net.state_dict()["0.weight"], optimizer.state_dict()["state"][3]["exp_avg"]):
        assert isinstance(x, espalier.DTensor)


@pytest.mark.filterwarnings("ignore:All ranks gave the model the very same rows")
def test_helpers_for_state_dicts_have_parts(ranks: Any) -> None:
    ranks(2, in_parts)


def in_16_bits(rank: int, world: int, plan: dict[str, Any], kind: Any) -> None:
    """States are loaded as they were, though parameters show less of themselves."""

    def begun() -> Any:
        net = made()[0].float()
        return espalier.prepare(net, kind(net.parameters(), 0.01), plan={**plan, "precision": "bfloat16"})

    net, optimizer = begun()
    trained(net, optimizer, range(2))
    held = states_of(net, optimizer)
    dtypes = {x.dtype for own in held["optimizer"]["state"].values() for x in own.values()}
    assert dtypes == {torch.float32}
    others, other = begun()
    load(held, others, other)
    same(dict(others.state_dict()), dict(held["model"]), 0)
    same(other.state_dict(), held["optimizer"], 0)
    assert trained(others, other, range(2, 4)) == trained(net, optimizer, range(2, 4))
    same(other.state_dict(), optimizer.state_dict(), 0)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize(
    "plan", [{"data": 2, "zero": 1}, {"data": 2, "zero": 3}, {"tensor": 2}, {"pipe": 2}], ids=str
)
def test_states_in_float32_are_loaded_in_it(ranks: Any, plan: dict[str, Any], kind: Any) -> None:
    ranks(2, in_16_bits, plan, kind)


def of_data_parallelism(rank: int, world: int, path: Path) -> None:
    """A parameter as it is, too: each rank has all of it."""
    net, optimizer = espalier.prepare(*made(), plan={"data": world})
    trained(net, optimizer, range(2))
    states = {**states_of(net, optimizer), "p": next(net.parameters())}
    if rank == 0:
        torch.save(states, path)


def test_whole_parameters_are_read_where_there_is_no_such_mesh(ranks: Any, tmp_path: Path) -> None:
    ranks(2, of_data_parallelism, tmp_path / "all.pt")
    held = torch.load(tmp_path / "all.pt", weights_only=True)["p"]
    assert type(held) is nn.Parameter and held.requires_grad


def of_parts(rank: int, world: int) -> None:
    """What would hold one rank's parts is told of; what holds all is not, nor are copies."""
    for plan, is_cut in (
        ({"data": 2}, False),
        ({"data": 2, "zero": 3}, True),
        ({"tensor": 2}, True),
        ({"pipe": 2}, True),
    ):
        net, optimizer = espalier.prepare(*made(), plan=plan)
        trained(net, optimizer, range(1))
        pickle.dumps((net.state_dict(), optimizer.state_dict()))
        held = net.module.state_dict()
        assert {*map(type, map(copy.copy, held.values()))} == {espalier.DTensor}
        with (
            pytest.warns(UserWarning, match=r"keeps this rank's part(.|\n)*on all ranks")
            if is_cut
            else nullcontext()
        ):
            pickle.dumps(held)


def test_files_of_parts_are_told_of(ranks: Any) -> None:
    ranks(2, of_parts)


def written_to(rank: int, world: int) -> None:
    """What is written to a state dict, which holds copies, is told of; not what is loaded then."""
    told = pytest.warns(UserWarning, match=r"0\.weight, 0\.bias, 2\.weight, \.\.\.\), and these are copies")
    for plan in ({"data": 2}, {"data": 2, "zero": 3}, {"tensor": 2}, {"pipe": 2}):
        net, optimizer = espalier.prepare(*made(), plan=plan)
        trained(net, optimizer, range(1))
        for x in net.state_dict().values():
            x.view(-1).mul_(2)
        with told:
            trained(net, optimizer, range(1, 2))
        states = net.state_dict()
        for x in states.values():
            x.fill_(0.5)
        net.load_state_dict(states)
        trained(net, optimizer, range(2, 3))
        held = net.state_dict()
        assert all((x - 0.5).abs().max() < 0.02 for x in held.values())
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(2)
        trained(net, optimizer, range(3, 4))


def test_what_is_written_to_state_dicts_is_told_of(ranks: Any) -> None:
    ranks(2, written_to)


def gradients_of_a_file(rank: int, world: int) -> None:
    """A script that goes on in the midst of an accumulation gives parameters the gradients that it kept."""

    def passed(net: nn.Module, steps: range) -> list[float]:
        losses = []
        for step in steps:
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            loss = F.cross_entropy(net(x), torch.arange(8) % 4)
            loss.backward()
            losses.append(loss.item())
        return losses

    net, optimizer = made()
    passed(net, range(2))
    kept = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    passed(net, range(2, 4))
    optimizer.step()
    expected = passed(net, range(4, 5))
    plans = PLANS[world] if world > 2 else [{"data": 2}, *PLANS[world]]
    for plan in plans:
        for is_before in (True, False):
            net, optimizer = made()
            if not is_before:
                net, optimizer = espalier.prepare(net, optimizer, plan=plan)
            for name, p in net.named_parameters():
                p.grad = kept[name].clone()
            if is_before:
                net, optimizer = espalier.prepare(net, optimizer, plan=plan)
            passed(net, range(2, 4))
            optimizer.step()
            assert passed(net, range(4, 5)) == pytest.approx(expected, abs=1e-12), (plan, is_before)


@pytest.mark.parametrize("world", PLANS)
def test_gradients_that_a_script_has_kept_are_gone_on_from(ranks: Any, world: int) -> None:
    ranks(world, gradients_of_a_file)


class Config:
    """As transformers has it: a save notes two things in it."""

    def __init__(self) -> None:
        self.scale, self.dtype, self.architectures = 0.5, None, None

    def save_pretrained(self, folder: Path) -> None:
        self.dtype, self.architectures = "float64", ["Gated"]  # type: ignore[assignment]


class Gated(nn.Module):
    """Asks for values of its batch, if ``reads``."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.blocks, self.config, self.reads = made()[0], Config(), reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads and (x > 9).any():
            x = x.clamp(max=9)
        out: torch.Tensor = self.blocks(x) * self.config.scale
        return out


def saved_by_the_first(rank: int, world: int) -> None:
    """The first rank alone has other attributes then, and the ranks go on together."""
    for reads in (True, False):
        net: Any = Gated(reads)
        expected = trained(net, torch.optim.AdamW(net.parameters(), 0.01), range(4))
        net = Gated(reads)
        net, optimizer = espalier.prepare(
            net, torch.optim.AdamW(net.parameters(), 0.01), plan={"data": 2, "pipe": 2, "zero": 1}
        )
        found = trained(net, optimizer, range(2))
        if rank == 0:
            net.config.save_pretrained("nowhere")
            if not reads:
                net.best = found[-1]
        found += trained(net, optimizer, range(2, 3))
        net.config.scale = 0.25  # of all ranks: another model
        assert trained(net, optimizer, range(3, 4)) != pytest.approx(expected[3:], abs=1e-3)
        assert found == pytest.approx(expected[:3], abs=1e-12)


def test_one_rank_that_has_saved_the_model_goes_on_with_the_others(ranks: Any) -> None:
    ranks(4, saved_by_the_first)
