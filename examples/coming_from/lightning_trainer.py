"""Lightning's Trainer: steps, logs, metrics, a schedule, checkpoints; on several processes by a strategy."""

import os
import tempfile
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy as Strategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


def digits(first: int, last: int, dtype: torch.dtype) -> TensorDataset:
    """Handwritten digits at MNIST's shape: images [rows, 1, 28, 28] and labels [rows]."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images[first:last], dtype=dtype).view(-1, 1, 8, 8) / 16
    return TensorDataset(F.interpolate(small, size=(28, 28)), torch.tensor(labels[first:last]))


class Digits(pl.LightningModule):
    """A network with its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images: torch.Tensor) -> Any:
        return self.net(images)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        found = self.net(images)
        self.accuracy(found, labels)
        self.log("right", self.accuracy)
        self.log_dict({"held_out": F.cross_entropy(found, labels)}, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.003)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)]


class Numbers(Callback):
    """What is logged."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.found.append(float(trainer.callback_metrics["loss_step"]))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        told = trainer.callback_metrics
        self.found += [float(told[name]) for name in ("loss_epoch", "right", "held_out")]


def main(batch: int = 16, devices: int = 2, precision: Any = None, **options: Any) -> list[float]:
    """Train two epochs, go on from a file for a third, test and predict."""
    dtype = torch.float64 if precision == "64-true" else torch.float32
    rows = DataLoader(digits(0, 192, dtype), batch_size=batch)
    held_out = DataLoader(digits(192, 250, dtype), batch_size=batch)
    numbers, folder = Numbers(), tempfile.mkdtemp()

    def trainer(epochs: int) -> Any:
        return pl.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=Strategy(**options),
            precision=precision,
            max_epochs=epochs,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            callbacks=[numbers, ModelCheckpoint(folder, monitor="held_out")],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    pl.seed_everything(0, verbose=False)
    first = trainer(2)
    first.fit(Digits(), rows, held_out)
    saved = first.strategy.broadcast(os.path.join(folder, "last.ckpt"))
    first.save_checkpoint(saved)

    last = trainer(3)
    with last.init_module():
        model = Digits()
    last.fit(model, rows, held_out, ckpt_path=saved)
    again = trainer(1)
    again.fit(model, rows, held_out)
    (told,) = last.test(model, held_out, verbose=False)
    found = last.predict(model, held_out)
    numbers.found += [
        told["right"],
        told["held_out"],
        float(last.strategy.reduce(found[0].sum(), reduce_op="sum")),
    ]
    best = last.strategy.broadcast(last.checkpoint_callback.best_model_path)
    state = torch.load(best, weights_only=False)
    numbers.found.append(sum(x.double().norm().item() for x in state["state_dict"].values()))
    return numbers.found


if __name__ == "__main__":
    print(main())
