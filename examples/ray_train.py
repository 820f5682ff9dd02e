"""Ray Train starts the ranks, one a worker, and starts them again; Espalier lays the model on them.

    python examples/ray_train.py --workers 4 --tensor 2 --out /shared/runs/mine

``--out`` is a folder that all machines of the Ray cluster see. Kill a worker, and it goes on.
"""

import argparse
from pathlib import Path

import torch
from ray import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.nn import functional as F

import espalier


class Model(nn.Module):
    """Written for one device."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch, equal on all ranks; each computes its rows."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return x, x.sin()


def on_each_worker(config: dict) -> None:
    """The ranks have met when Ray calls this; `initialize` takes their world as it is."""
    out = Path(config["out"])
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = espalier.initialize(model, optimizer, config["plan"], loss_fn=F.mse_loss)
    if any(out.glob("checkpoints/step-*")):  # workers were started again: on as many ranks as there are now
        engine.load(out / "checkpoints")
    with espalier.RunLog(out, engine, steps=config["steps"], every=1, after=engine.steps) as log:
        while engine.steps < config["steps"]:
            loss = engine.train_step(batch(engine.steps))
            log.step(loss)
            if engine.steps % config["every"] == 0:  # not each step: a report waits for Ray's next look, 2 s
                train.report({"step": engine.steps, "loss": loss.item()})
                engine.save(out / "checkpoints", keep=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--out", default="runs/ray")
    arguments = parser.parse_args()
    out, tensor = Path(arguments.out).resolve(), arguments.tensor
    plan = {"data": arguments.workers // tensor, "tensor": tensor, "zero": 2}
    TorchTrainer(
        on_each_worker,
        train_loop_config={"out": str(out), "plan": plan, "steps": 200, "every": 50},
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpu),
        # Ray's own choice for GPUs is NCCL alone: what ranks say to each other would go through them, too
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if arguments.gpu else "gloo"),
        run_config=RunConfig(name="ray", storage_path=str(out), failure_config=FailureConfig(max_failures=3)),
    ).fit()
    print(f"{out}/report.html")
