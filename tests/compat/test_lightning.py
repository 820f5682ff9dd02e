"""compat.lightning.EspalierStrategy against the Trainer of Lightning: one program, with other imports."""

from __future__ import annotations

import copy
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

needs = "needs Lightning: pip install --no-deps pytorch-lightning torchmetrics lightning-utilities"
pytest.importorskip("pytorch_lightning", reason=needs)

PROGRAMS = Path(__file__).parent.parent.parent / "examples" / "coming_from"


def run(name: str, folder: Path = PROGRAMS, **options: Any) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return runpy.run_path(str(folder / f"{name}.py"))["main"](**options)


def alone(rank: int, world: int) -> list[float]:
    return run("lightning_trainer", batch=32, devices=1, precision="64-true")


def programs(rank: int, world: int, right: list[float]) -> None:
    """All that is logged, in float64, of two ranks as of one: losses, a metric, files, what is predicted."""
    for plan in ({}, {"zero": 3}, {"zero": 1}, {"tensor": 2}):
        batch = 32 if "tensor" in plan else 16
        found = run("lightning_trainer_here", batch=batch, precision="64-true", plan=plan)
        assert found == pytest.approx(right, rel=1e-10, abs=1e-10), plan
    low = run("lightning_trainer_here", precision="bf16-mixed")
    assert low == pytest.approx(right, rel=0.1, abs=0.1) and low != right


@pytest.mark.world(2)
def test_a_program_with_another_import(ranks: Any) -> None:
    (right,) = ranks(1, alone)
    ranks(2, programs, right)


def of_the_package_lightning(rank: int, world: int, folder: str, right: list[float]) -> None:
    """Its own ``Trainer`` and ``LightningModule``, copies, take the strategy."""
    text = (PROGRAMS / "lightning_trainer_here.py").read_text("utf-8")
    text = text.replace("import pytorch_lightning as pl", "import lightning as pl")
    text = text.replace("from pytorch_lightning.", "from lightning.pytorch.")
    name = f"copies{rank}"
    Path(folder, f"{name}.py").write_text(text)
    found = run(name, Path(folder), precision="64-true", plan={"zero": 2})
    assert found == pytest.approx(right, rel=1e-10, abs=1e-10)


@pytest.mark.world(2)
def test_trainer_of_the_package_lightning(ranks: Any, tmp_path: Path) -> None:
    """After a change of one import."""
    pytest.importorskip("lightning", reason="needs lightning: pip install --no-deps lightning torchmetrics")
    (right,) = ranks(1, alone)
    ranks(2, of_the_package_lightning, str(tmp_path), right)


def test_the_two_files_differ_in_their_imports_alone() -> None:
    bodies = [
        (PROGRAMS / f"{name}.py").read_text("utf-8").partition("\n\n\n")[2]
        for name in ("lightning_trainer", "lightning_trainer_here")
    ]
    assert bodies[0] == bodies[1] != ""


def test_lightnings_own_launcher() -> None:
    """The Trainer starts the other rank itself."""
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    told = subprocess.run(
        [sys.executable, PROGRAMS / "lightning_trainer_here.py"],
        env={name: x for name, x in os.environ.items() if name not in left_out},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("[") == 2 and len(told.stdout.split(",")) > 30, told.stdout


def _models(world: int) -> tuple[type, type, type]:
    """One that measures and logs, one with a batch norm, one that asks its Trainer."""
    import pytorch_lightning as pl
    from torchmetrics import MeanMetric, MeanSquaredError, SumMetric

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1, dtype=torch.float64)
            self.rows, self.seen = SumMetric(), MeanMetric()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

        def training_step(self, x: torch.Tensor, batch_idx: int) -> Any:
            y = self(x)
            self.log("sum", y.sum(), sync_dist=True, reduce_fx="sum", on_epoch=True, on_step=False)
            self.rows(torch.ones(x.shape[0]))
            parts, whole = self.all_gather(y, sync_grads=True), y.full_tensor()  # type: ignore[attr-defined]
            assert torch.equal(parts.full_tensor(), whole.view(world, -1, 1)) and parts.requires_grad
            assert self.all_gather(y.sum()).tolist() == pytest.approx([whole.sum().item()] * world)
            return {"loss": y.mean(), "y": y.detach()}

        def on_train_batch_end(self, outputs: Any, x: torch.Tensor, batch_idx: int) -> None:
            assert type(outputs["y"]) is torch.Tensor and len(outputs["y"]) == len(x)
            self.seen(x[:, 0])

        def on_train_epoch_end(self) -> None:
            self.told = float(self.rows.compute()), float(self.seen.compute())

        def log(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            """Of its own, as pytorch-forecasting's."""
            super().log(*args, **kwargs)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    class Normed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()  # type: ignore

        def training_step(self, x: torch.Tensor, batch_idx: int) -> Any:
            return self(x).square().mean()

        def on_train_batch_end(self, *args: Any) -> None: ...

        def on_train_epoch_end(self) -> None: ...

    class Asking(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()  # type: ignore
            self.error = MeanSquaredError().set_dtype(torch.float64)

        def training_step(self, x: torch.Tensor, batch_idx: int) -> Any:
            self.trainer.asked = getattr(self.trainer, "asked", 0) + 1  # type: ignore[attr-defined]
            return self.error(self(x), x) * self.trainer.max_epochs  # type: ignore[operator]

    return Model, Normed, Asking


def edges(rank: int, world: int) -> None:
    """Metrics outside of steps, values that are logged, what is refused, a model that goes on."""
    import pytorch_lightning as pl

    from espalier.compat.lightning import EspalierStrategy

    Model, Normed, Asking = _models(world)
    rows = torch.arange(20.0, dtype=torch.float64).view(10, 2)
    loader = torch.utils.data.DataLoader(rows, batch_size=5)  # type: ignore[arg-type]

    def trainer(plan: Any = None, **options: Any) -> Any:
        quiet = dict.fromkeys(
            ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
        )
        return pl.Trainer(
            accelerator="cpu",
            devices=world,
            max_epochs=1,
            strategy=EspalierStrategy(plan),
            **quiet,
            **options,
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, first = Model(), trainer()
        weight = model.layer.weight.detach().clone()
        with pytest.raises(RuntimeError, match="no engine yet"):
            _ = first.strategy.engine
        first.fit(model, loader)
        right = (nn.functional.linear(rows, weight, model.layer.bias.full_tensor() + 0.5)).sum()
        assert float(first.callback_metrics["sum"]) == pytest.approx(float(right))
        assert model.told == (10.0, float(rows[:, 0].mean()))
        engine = first.strategy.engine
        assert torch.allclose(engine.state_dict()["layer.weight"], weight - 0.5 * rows.mean(0))
        again = trainer()
        again.fit(model, loader)
        assert again.strategy.engine is engine and engine.steps == 2
        assert torch.allclose(engine.state_dict()["layer.weight"], weight - rows.mean(0))
        with pytest.raises(ValueError, match=r"lies by the plan .*expected the same"):
            trainer({"zero": 3}).fit(model, loader)
        normed = Normed()
        plain = copy.deepcopy(normed.layer)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
        for _ in range(3):
            plain(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        last = trainer({"zero": 2}, sync_batchnorm=True)
        last.fit_loop.max_epochs = 3
        last.fit(normed, loader)
        for name, x in last.strategy.engine.state_dict().items():
            assert torch.allclose(x, plain.state_dict()[name.removeprefix("layer.")], rtol=0, atol=1e-12), (
                name
            )
        asking = Asking()  # and its loss is a metric
        plain = copy.deepcopy(asking.layer)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
        for part in rows.split(5):
            nn.functional.mse_loss(plain(part), part).backward()
            optimizer.step()
            optimizer.zero_grad()
        last = trainer({"tensor": world}, use_distributed_sampler=False)
        last.fit(asking, loader)
        assert last.asked == 2 and asking.layer[0].weight.placements[1].is_shard()
        for name, x in last.strategy.engine.state_dict().items():
            torch.testing.assert_close(x, plain.state_dict()[name.removeprefix("layer.")])
        uneven = torch.utils.data.DataLoader(rows[:9], batch_size=4)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"would read \[2, 1\] batches"):
            trainer().predict(model, uneven)
        for plan, made, match in (
            ({"pipe": 2}, Model(), r"plan\.pipe"),
            ({"accumulate": 2}, Model(), "accumulate_grad_batches"),
        ):
            with pytest.raises(ValueError, match=match):
                trainer(plan).fit(made, loader)
    with pytest.raises(ValueError, match="find_unused_parameters"):
        EspalierStrategy(find_unused_parameters=True)


def _stepping_by_hand() -> Any:
    """A GAN: two optimizers, one of which steps every other time, and a schedule; its forward takes other
    columns than its batches have."""
    import pytorch_lightning as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(0)
            norm = nn.BatchNorm1d(6)
            self.made = nn.Sequential(nn.Linear(3, 6), norm, nn.Tanh(), nn.Linear(6, 4)).double()
            self.judge = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
            self.scale = nn.Parameter(torch.ones(4).double())
            self.example_input_array = torch.zeros(2, 3).double()
            self.told: list[float] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.made(x) * self.scale  # type: ignore[no-any-return]

        def training_step(self, x: torch.Tensor, batch_idx: int) -> Any:
            of_made, of_judge = self.optimizers()  # type: ignore[misc, attr-defined]
            self.toggle_optimizer(of_made)
            loss = -self.judge(self(x[:, 1:])).square().mean()
            of_made.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(of_made, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            of_made.step()
            self.untoggle_optimizer(of_made)
            other = (self.judge(x).square() - self.judge(self(x[:, 1:]).detach())).mean()
            self.manual_backward(other / 2)
            if batch_idx % 2:
                of_judge.step()
                of_judge.zero_grad()
            self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
            self.log_dict({"made": loss, "judge": other})
            return {"x": x, "loss": loss}

        def on_train_batch_end(self, outputs: Any, x: torch.Tensor, batch_idx: int) -> None:
            assert type(outputs["x"]) is torch.Tensor and torch.equal(outputs["x"], x)
            logged = self.trainer.callback_metrics
            self.told += [float(logged["made"]), float(logged["judge"]), float(outputs["loss"])]

        def configure_optimizers(self) -> Any:
            of_made = torch.optim.Adam([*self.made.parameters(), self.scale], lr=0.01)
            of_judge = torch.optim.SGD(self.judge.parameters(), lr=0.1)
            return [of_made, of_judge], [torch.optim.lr_scheduler.ExponentialLR(of_made, 0.9)]

    return Model()


def by_hand(rank: int, world: int, right: list[torch.Tensor] | None) -> list[torch.Tensor]:
    import pytorch_lightning as pl

    from espalier.compat.lightning import EspalierStrategy

    rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    found: list[torch.Tensor] = []
    plans: tuple[Any, ...] = ({}, {"zero": 3}, {"tensor": 2}, {"tensor": 2})
    for i, plan in enumerate(plans if right else (None,)):
        own = 8 if plan is None or "tensor" in plan else 4
        sampler: Any = None
        if own == 4:
            sampler = torch.utils.data.DistributedSampler(rows, world, rank, shuffle=False)  # type: ignore[arg-type]
        loader = torch.utils.data.DataLoader(rows, own, sampler=sampler)  # type: ignore[arg-type]
        strategy = "auto" if plan is None else EspalierStrategy(plan)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=world,
                strategy=strategy,
                max_epochs=2,
                enable_checkpointing=False,
                use_distributed_sampler=False,
                **quiet,  # type: ignore[arg-type]
            )
            model = _stepping_by_hand()
            if i == 3:
                model.example_input_array = None
            trainer.fit(model, loader)
        assert any("Set self.example_input_array" in str(x.message) for x in told) == (i == 3)
        state = model.state_dict() if plan is None else trainer.strategy.engine.state_dict()  # type: ignore
        found = [torch.tensor(model.told).double(), *(x.double() for x in state.values())]
        assert vars(model).keys().isdisjoint(("optimizers", "manual_backward", "forward"))
        for a, b in zip(right or found, found, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-9), plan
        if i > 1:
            assert model.made[0].weight.placements[1].is_shard() == (i == 2)
    return found


@pytest.mark.world(2)
def test_steps_by_hand(ranks: Any) -> None:
    """``automatic_optimization = False``: as the plain Trainer on one process."""
    (right,) = ranks(1, by_hand, None)
    ranks(2, by_hand, right)


@pytest.mark.world(2)
def test_edges(ranks: Any) -> None:
    """On two ranks."""
    ranks(2, edges)
