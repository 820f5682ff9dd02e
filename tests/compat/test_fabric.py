"""compat.fabric.EspalierStrategy against Fabric's own: one program, with other imports, under plans."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import types
import warnings
from abc import ABC
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

needs = "needs Lightning Fabric: pip install --no-deps lightning-fabric lightning-utilities"
pytest.importorskip("lightning_fabric", reason=needs)

PROGRAMS = Path(__file__).parent.parent.parent / "examples" / "coming_from"
TOLERANCE = 1e-6  # float32


def run(name: str, **options: Any) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return runpy.run_path(str(PROGRAMS / f"{name}.py"))["main"](**options)


def theirs(rank: int, world: int, batch: int) -> list[float]:
    return run("fabric", batch=batch, devices=world)


def close(expected: list[float], found: list[float], what: Any, tolerance: float = TOLERANCE) -> None:
    assert len(expected) == len(found), (what, expected, found)
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert abs(a - b) < tolerance * max(1.0, abs(a)), (what, i, a, b)


def programs(rank: int, world: int, alone: list[float]) -> None:
    expected = run("fabric")
    for options in ({}, {"plan": {"data": 2, "zero": 3}}):
        close(expected, run("fabric_here", **options), options)
    for plan in ({"tensor": 2}, {"pipe": 2}, {"pipe": 2, "accumulate": 2}):
        close(alone, run("fabric_here", batch=32, plan=plan), plan)
    close(run("fabric", precision="bf16-mixed"), run("fabric_here", precision="bf16-mixed"), "bf16", 0.02)
    exact = run("fabric", precision="64-true")
    close(exact, run("fabric_here", precision="64-true", plan={"data": 2, "zero": 2}), "float64", 1e-12)


def of_the_package_lightning(rank: int, world: int, folder: str) -> None:
    """Its own ``Fabric``, a copy of Fabric's, takes the strategy: the same numbers."""
    text = (PROGRAMS / "fabric_here.py").read_text("utf-8")
    program = Path(folder) / f"copies{rank}.py"
    program.write_text(text.replace("from lightning_fabric import", "from lightning.fabric import"))
    for options in ({"plan": {"data": 2, "zero": 3}}, {"precision": "bf16-mixed"}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = runpy.run_path(str(program))["main"](**options)
        assert found == run("fabric_here", **options)


def shared(rank: int, world: int) -> None:
    """Ranks that share a batch count once; what is refused."""
    from lightning_fabric import Fabric

    from espalier.compat.fabric import DDPStrategy, EspalierStrategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=EspalierStrategy({"tensor": 2}))
    fabric.launch()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed.nn.functional.all_gather is deprecated")
        assert fabric.all_gather(torch.tensor([7.0])).tolist() == [[7.0]]
    assert fabric.all_reduce(torch.tensor(3), reduce_op="sum").item() == 3
    assert fabric.all_reduce(torch.tensor(3.0), reduce_op="mean").item() == 3.0
    assert fabric.strategy.reduce_boolean_decision(rank == 0, all=False)
    assert not fabric.strategy.reduce_boolean_decision(rank == 0)
    net = nn.Linear(4, 2)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    fabric.backward(model(torch.ones(3, 4)).sum())
    fabric.clip_gradients(model, optimizer, clip_val=0.5)
    optimizer.step()
    engine = fabric.strategy.engine_of(model)
    assert engine.module is net and engine.plan.axes["tensor"] == 2
    assert model.state_dict()["weight"].shape == (2, 4)
    schedule.step()
    with tempfile.TemporaryDirectory() as folder:  # a schedule in a dict, as their trainer has it
        file = Path(fabric.broadcast(folder), "a.ckpt")
        fabric.save(file, {"schedule": {"scheduler": schedule, "interval": "step"}, "beside": [model, 3]})
        fabric.barrier()
        read = torch.load(file, weights_only=False)
        fabric.barrier()
    weight, plain = engine.state_dict()["weight"], read["schedule"]["scheduler"].optimizer
    (written, _), (state, _) = plain.param_groups[0]["params"], plain.state.values()
    assert type(plain) is torch.optim.SGD and type(written) is nn.Parameter and written.equal(weight)
    assert state["momentum_buffer"].equal(torch.full((2, 4), 0.5)) and plain.param_groups[0]["lr"] == 0.05
    assert type(read["beside"][0]) is nn.Linear and read["beside"][0].weight.equal(weight)
    apart = nn.Linear(4, 2)
    before = apart.weight.detach().clone()
    wrapped = fabric.setup_module(apart)
    step = fabric.setup_optimizers(torch.optim.SGD(apart.parameters(), 0.1)).step
    fabric.backward(wrapped(torch.ones(3, 4)).sum())
    step()
    torch.testing.assert_close(fabric.strategy.engine_of(wrapped).state_dict()["weight"], before - 0.3)
    for method in ("popen", "spawn"):
        assert EspalierStrategy(start_method=method)._start_method == method
    strategy = DDPStrategy(find_unused_parameters=True, static_graph=True, bucket_cap_mb=3)
    Fabric(accelerator="cpu", devices=2, strategy=strategy).launch()
    assert (strategy.plan.data, strategy.plan.chunk_megabytes) == (2, 3.0)
    with pytest.raises(ValueError, match="process_group"):
        DDPStrategy(process_group=None)
    with pytest.raises(ValueError, match="find_unused_parameters"):
        EspalierStrategy(find_unused_parameters=True)
    with pytest.raises(ValueError, match=r"plan.accumulate"):
        strategy = EspalierStrategy({"data": 2, "accumulate": 2})
        Fabric(accelerator="cpu", devices=2, strategy=strategy).launch()


class Stepping(nn.Module):
    """A ``LightningModule`` by its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        x, y = batch
        out = self(x)
        return {"loss": nn.functional.cross_entropy(out, y), "right": (out.argmax(1) == y).sum()}

    def best(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        """Of x's rows, beside what has no rows."""
        return past + self(x).max(1).values.detach()


def stepped(fabric: Any, n: int = 1) -> list[torch.Tensor]:
    """A loop of Fabric's: the model is built without memory, and its optimizer made once it is set up."""
    with fabric.init_module(empty_init=True):
        net = Stepping()
    model = fabric.setup(net)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(p.numel()).sin().view(p.shape) / 3)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
    model.mark_forward_method("best")
    rows = torch.utils.data.TensorDataset(torch.arange(96.0).view(16, 6).cos(), torch.arange(16) % 4)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=8 // n))
    out = []
    for i, batch in enumerate(loader):
        found = model.training_step(batch, batch_idx=i)
        fabric.backward(found["loss"])
        optimizer.step()
        optimizer.zero_grad()
        out.append(fabric.all_reduce(found["loss"].detach()).clone())
    out.append(model.best(torch.ones(3, 6), torch.ones(2, 3)))
    return [*out, model(torch.ones(2, 6)).detach()]


def by_methods(rank: int, world: int) -> None:
    """``model.training_step(...)``, and methods that are marked, go through the engine."""
    from lightning_fabric import Fabric

    from espalier.compat.fabric import EspalierStrategy

    alone = Fabric(accelerator="cpu", devices=1)
    alone.launch()
    expected = stepped(alone)
    for plan in ({"data": 2, "zero": 3}, {"tensor": 2}, {"pipe": 2}):
        fabric = Fabric(accelerator="cpu", devices=2, strategy=EspalierStrategy(plan))
        fabric.launch()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [torch.as_tensor(x) for x in stepped(fabric, plan.get("data", 1))]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, msg=f"{plan}: {a} and {b}")


def test_methods_of_a_model(ranks: Any) -> None:
    ranks(2, by_methods)


def test_a_program_with_another_import(ranks: Any) -> None:
    (alone,) = ranks(1, theirs, 32)
    ranks(2, programs, alone)


def test_ranks_that_share_a_batch(ranks: Any) -> None:
    ranks(2, shared)


def test_fabrics_own_launcher() -> None:
    """It starts the other ranks itself: no RANK in the environment."""
    environment = {
        name: x for name, x in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    told = subprocess.run(
        [sys.executable, PROGRAMS / "fabric_here.py"], env=environment, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("of 58 right") == 1, told.stdout


def test_the_two_files_differ_in_their_imports_alone() -> None:
    bodies = [
        (PROGRAMS / f"{name}.py").read_text("utf-8").partition("\n\n\n")[2]
        for name in ("fabric", "fabric_here")
    ]
    assert bodies[0] == bodies[1] != ""


@pytest.mark.world(2)
def test_fabric_of_the_package_lightning(ranks: Any, tmp_path: Path) -> None:
    """Without a change of its import."""
    pytest.importorskip("lightning", reason="needs lightning: pip install --no-deps lightning torchmetrics")
    ranks(2, of_the_package_lightning, str(tmp_path))


def test_classes_of_the_package_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy is one of those that the package's copies know, once they are there."""
    from espalier.compat.fabric import EspalierStrategy

    class Copy(ABC):  # noqa: B024  # as theirs
        """As ``lightning.fabric.strategies.DDPStrategy``."""

    copies = types.ModuleType("lightning.fabric.strategies")
    vars(copies)["DDPStrategy"] = Copy
    monkeypatch.setitem(sys.modules, copies.__name__, copies)
    assert isinstance(EspalierStrategy(), Copy)
