"""fully_shard on each layer and on the model: torch's own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


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
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    rows = digits(640)
    loader = DataLoader(rows, batch_size=8, sampler=DistributedSampler(rows))
    losses = []
    for i, (images, labels) in enumerate(loader):
        model.set_requires_gradient_sync(i % 2 == 1)
        loss = F.cross_entropy(model(images), labels)
        (loss / 2).backward()
        losses.append(loss.item())
        if i % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    losses += [x.full_tensor().double().norm().item() for x in model.state_dict().values()]
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    print(main())
