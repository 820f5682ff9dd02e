"""Matrices cut over ranks by hand, as Megatron-LM cuts them: with torch.distributed."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Entering(torch.autograd.Function):
    """What every rank computes with: its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Leaving(torch.autograd.Function):
    """The sum of what the ranks have computed: its gradient is each one's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class ColumnLinear(nn.Module):
    """A part of the outputs on each rank."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        whole, here = nn.Linear(inputs, outputs), dist.get_rank()
        self.weight = nn.Parameter(whole.weight.detach().chunk(dist.get_world_size())[here].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(dist.get_world_size())[here].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(Entering.apply(x), self.weight, self.bias)


class RowLinear(nn.Module):
    """A part of the inputs on each rank."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        whole, here = nn.Linear(inputs, outputs), dist.get_rank()
        self.weight = nn.Parameter(whole.weight.detach().chunk(dist.get_world_size(), 1)[here].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Leaving.apply(F.linear(x, self.weight)) + self.bias


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
