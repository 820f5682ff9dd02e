"""FullyShardedDataParallel, with a policy for what is gathered together: torch's own."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
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
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    model = FSDP(network(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    rows = digits(640)
    loader = DataLoader(rows, batch_size=32, sampler=DistributedSampler(rows))
    losses = []
    for _ in range(2):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            model.clip_grad_norm_(0.5)
            optimizer.step()
            losses.append(loss.item())
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
    if dist.get_rank() == 0:
        losses += [state[name].double().norm().item() for name in ("1.weight", "3.bias")]
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    print(main())
