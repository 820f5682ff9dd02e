"""A process for each device, its rows from a DistributedSampler: the same on an engine."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from espalier.compat.torch import DistributedDataParallel as DDP


def digits(rows: int) -> TensorDataset:
    """Handwritten digits at MNIST's shape: images [rows, 1, 28, 28] and labels [rows]."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images[:rows], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(F.interpolate(small, size=(28, 28)), torch.tensor(labels[:rows]))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def train(rank: int, world: int) -> list[float]:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    model = DDP(network(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    rows = digits(640)
    sampler = DistributedSampler(rows, num_replicas=world, rank=rank)
    loader = DataLoader(rows, batch_size=32, sampler=sampler)
    losses = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for i, (images, labels) in enumerate(loader):
            if i % 2 == 0:
                with model.no_sync():
                    F.cross_entropy(model(images), labels).backward()
                continue
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        schedule.step()
    losses.append(sum(x.double().norm().item() for x in model.state_dict().values()))
    assert next(iter(model.state_dict())) == "module.1.weight"
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2)
