"""A model cut into stages, and a schedule by its name: torch's own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
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
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    rows = digits(640)
    example = rows.tensors[0][:4]
    pipe = pipeline(network(), mb_args=(example,), split_spec={"3": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1, momentum=0.9)
    means = []
    for images, labels in DataLoader(rows, batch_size=32):
        losses = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(images)
        elif rank == last:
            schedule.step(target=labels, losses=losses)
            means.append(torch.stack([x.detach() for x in losses]).mean().item())
        optimizer.step()
    dist.destroy_process_group()
    return means


if __name__ == "__main__":
    print(main())
