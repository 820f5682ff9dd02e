"""Matrices cut over ranks by hand, as Megatron-LM cuts them: with torch's own layers, cut by a plan."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import Linear as ColumnLinear
from torch.nn import Linear as RowLinear
from torch.utils.data import DataLoader, TensorDataset

from espalier import prepare


def digits(rows: int) -> TensorDataset:
    """Handwritten digits at MNIST's shape: images [rows, 1, 28, 28] and labels [rows]."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images[:rows], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(F.interpolate(small, size=(28, 28)), torch.tensor(labels[:rows]))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = ColumnLinear(784, 64)
        self.down = RowLinear(64, 32)
        self.out = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.up(images.flatten(1)))
        return self.out(F.relu(self.down(hidden)))


def main() -> list[float]:
    dist.init_process_group("gloo")
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    model, optimizer = prepare(model, optimizer, plan={"tensor": dist.get_world_size()})
    losses = []
    for images, labels in DataLoader(digits(640), batch_size=32):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    print(main())
