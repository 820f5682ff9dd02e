"""A model whose layers lie on devices by hand: one process."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def digits(rows: int) -> TensorDataset:
    """Handwritten digits at MNIST's shape: images [rows, 1, 28, 28] and labels [rows]."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images[:rows], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(F.interpolate(small, size=(28, 28)), torch.tensor(labels[:rows]))


class Layerwise(nn.Module):
    """Each part on a device of its own; what is between them travels."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.devices = devices
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU()).to(devices[0])
        self.second = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(devices[1])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.first(images.to(self.devices[0]))
        return self.second(hidden.to(self.devices[1]))


def devices() -> list[torch.device]:
    """Two, or the CPU twice."""
    if torch.cuda.device_count() < 2:
        return [torch.device("cpu")] * 2
    return [torch.device("cuda", 0), torch.device("cuda", 1)]


def main() -> list[float]:
    model = Layerwise(devices())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    losses = []
    for images, labels in DataLoader(digits(640), batch_size=32):
        optimizer.zero_grad()
        output = model(images)
        loss = criterion(output, labels.to(output.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        images, labels = digits(128).tensors
        losses.append((model(images).argmax(1).cpu() == labels).float().mean().item())
    return losses


if __name__ == "__main__":
    print(main())
