"""A module whose parameters are cut over a device mesh by a partition_fn: the same, above autograd."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from espalier import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)


def digits(rows: int) -> TensorDataset:
    """Handwritten digits at MNIST's shape: images [rows, 1, 28, 28] and labels [rows]."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images[:rows], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(F.interpolate(small, size=(28, 28)), torch.tensor(labels[:rows]))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def by_columns_then_rows(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """The first matrix is cut by its outputs, the second by its inputs."""
    cuts = {"1": {"weight": Shard(0), "bias": Shard(0)}, "3": {"weight": Shard(1), "bias": Replicate()}}
    for parameter, cut in cuts.get(name, {}).items():
        whole = getattr(module, parameter)
        setattr(module, parameter, nn.Parameter(distribute_tensor(whole.detach(), mesh, [cut])))


def entering(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)


def leaving(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    return output.redistribute(placements=[Replicate()]).to_local()


def distributed(mesh: DeviceMesh) -> nn.Module:
    return distribute_module(network(), mesh, by_columns_then_rows, entering, leaving)


def main() -> list[float]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    model = distributed(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    losses, saved = [], {}
    for step, (images, labels) in enumerate(DataLoader(digits(640), batch_size=32)):
        if step == 5:  # what was saved goes on in a model of its own
            model = distributed(mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
            model.load_state_dict(
                {name: distribute_tensor(x, mesh, cuts) for name, (x, cuts) in saved.items()}
            )
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 4:
            saved = {name: (x.full_tensor(), x.placements) for name, x in model.state_dict().items()}
    first = model.state_dict()["1.weight"]
    assert first.shape == (64, 784) and first.to_local().shape == (64 // mesh.size(), 784)
    turned = first.redistribute(placements=[Shard(1)])
    assert turned.to_local().shape == (64, 784 // mesh.size())
    assert torch.equal(turned.full_tensor(), first.full_tensor())
    losses += [x.full_tensor().double().norm().item() for x in model.state_dict().values()]
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    print(main())
