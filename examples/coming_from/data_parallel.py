"""A loop around nn.DataParallel: torch's own."""

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


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> list[float]:
    model = nn.DataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(digits(640), batch_size=64, shuffle=True)
    losses = []
    for _ in range(2):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        images, labels = digits(128).tensors
        losses.append((model(images).argmax(1) == labels).float().mean().item())
    return losses


if __name__ == "__main__":
    print(main())
