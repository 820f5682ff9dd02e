"""A Sequential in two parts on two devices, as torch.distributed.pipeline.sync had it."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from espalier.compat.torch import Pipe


def digits(rows: int) -> TensorDataset:
    """Handwritten digits at MNIST's shape: images [rows, 1, 28, 28] and labels [rows]."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images[:rows], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(F.interpolate(small, size=(28, 28)), torch.tensor(labels[:rows]))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> list[float]:
    layers = network()
    parts = nn.Sequential(nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:]))
    model = Pipe(parts, chunks=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    losses = []
    for images, labels in DataLoader(digits(640), batch_size=32):
        optimizer.zero_grad()
        output = model(images).local_value()
        loss = criterion(output, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        images, labels = digits(128).tensors
        losses.append((model(images).local_value().argmax(1) == labels).float().mean().item())
    return losses


if __name__ == "__main__":
    print(main())
