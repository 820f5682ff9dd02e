"""Colossal-AI's first interface: a configuration, its engine, and the Trainer with its hooks."""

from typing import Any

import colossalai
import torch
import torch.nn.functional as F
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import LinearWarmupLR
from colossalai.nn.metric import Accuracy
from colossalai.nn.optimizer import HybridAdam
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_dataloader
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

CONFIG: dict[str, Any] = {
    "BATCH_SIZE": 16,
    "NUM_EPOCHS": 2,
    "NUM_MICRO_BATCHES": 2,
    "LOG_PATH": "colossal",
    "clip_grad_norm": 1.0,
    "parallel": {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}},
}


def digits(first: int, last: int) -> TensorDataset:
    """Handwritten digits at MNIST's shape: images [rows, 1, 28, 28] and labels [rows]."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images[first:last], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(F.interpolate(small, size=(28, 28)), torch.tensor(labels[first:last]))


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 10))


class Losses(hooks.BaseHook):
    """Keeps the loss of each batch."""

    def __init__(self) -> None:
        super().__init__(priority=5)
        self.losses: list[float] = []

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self.losses.append(float(loss))


def main(config: dict[str, Any] = CONFIG) -> tuple[list[float], dict[str, Any]]:
    colossalai.launch_from_torch(config=config)
    logger, timer, kept = get_dist_logger(), MultiTimer(), Losses()
    torch.manual_seed(0)
    model = network()
    optimizer = HybridAdam(model.parameters(), lr=0.01)
    schedule = LinearWarmupLR(optimizer, total_steps=10, warmup_steps=2)
    train, test = (
        get_dataloader(rows, shuffle=False, batch_size=gpc.config.BATCH_SIZE)
        for rows in (digits(0, 160), digits(160, 192))
    )
    engine, train, test, _ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), train, test)
    trainer = Trainer(engine=engine, timer=timer, logger=logger)
    trainer.fit(
        train_dataloader=train,
        epochs=gpc.config.NUM_EPOCHS,
        test_dataloader=test,
        test_interval=1,
        hooks=[
            kept,
            hooks.LossHook(),
            hooks.AccuracyHook(accuracy_func=Accuracy()),
            hooks.LRSchedulerHook(lr_scheduler=schedule, by_epoch=True),
            hooks.ThroughputHook(),
            hooks.LogMetricByStepHook(),
            hooks.LogMetricByEpochHook(logger),
            hooks.LogTimingByEpochHook(timer, logger),
            hooks.LogMemoryByEpochHook(logger),
            hooks.TensorboardHook(log_dir=gpc.config.LOG_PATH),
            hooks.SaveCheckpointHook(checkpoint_dir=f"{gpc.config.LOG_PATH}/saved"),
        ],
        display_progress=True,
    )
    return kept.losses, trainer.states["metrics"]


if __name__ == "__main__":
    print(main()[0][-1])
