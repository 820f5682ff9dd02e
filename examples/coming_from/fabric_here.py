"""Lightning Fabric on a plan: the same on engines."""

import os
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from espalier.compat.fabric import EspalierStrategy as Strategy


def digits(first: int, last: int) -> TensorDataset:
    """Handwritten digits at MNIST's shape: images [rows, 1, 28, 28] and labels [rows]."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images[first:last], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(F.interpolate(small, size=(28, 28)), torch.tensor(labels[first:last]))


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def main(batch: int = 16, devices: int = 2, precision: Any = None, **options: Any) -> list[float]:
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=Strategy(**options), precision=precision)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    with fabric.init_module():
        model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    rows, held_out = fabric.setup_dataloaders(
        DataLoader(digits(0, 192), batch_size=batch, shuffle=True),
        DataLoader(digits(192, 250), batch_size=batch),
    )
    saved = os.path.join(fabric.broadcast(tempfile.mkdtemp()), "state.ckpt")
    numbers = []
    for epoch in range(7):
        model.train()
        for i, (images, labels) in enumerate(rows):
            is_accumulating = i % 2 == 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = F.cross_entropy(model(images), labels)
                fabric.backward(loss / 2)
            numbers.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
            if not is_accumulating:
                numbers.append(float(fabric.clip_gradients(model, optimizer, max_norm=1.0)))
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        model.eval()
        right = seen = torch.tensor(0)
        for images, labels in held_out:
            with torch.no_grad():
                found = model(images).argmax(-1)
            right, seen = right + (found == labels).sum(), seen + len(labels)
        right, seen = fabric.all_reduce((right, seen), reduce_op="sum")
        assert seen == 58, seen
        numbers += [float(right / seen), schedule.get_last_lr()[0]]
        if epoch == 0:
            fabric.save(saved, {"model": model, "optimizer": optimizer, "epoch": epoch})
        elif epoch == 1:
            rest = fabric.load(saved, {"model": model, "optimizer": optimizer})
            assert rest == {"epoch": 0}
    fabric.save(saved, {"model": model})
    state = fabric.load(saved)["model"]
    assert next(iter(state)) == "1.weight" and state["1.weight"].shape == (64, 784)
    numbers.append(sum(x.double().norm().item() for x in state.values()))
    fabric.print(f"{right} of {seen} right")
    return numbers


if __name__ == "__main__":
    main()
