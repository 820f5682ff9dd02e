"""DeepSpeed's ZeRO 1 and 2 in float16, as a file in JSON says; images come in float32."""

import json
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def digits(rows: int) -> TensorDataset:
    """Handwritten digits at MNIST's shape: images [rows, 1, 28, 28] and labels [rows]."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images[:rows], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(F.interpolate(small, size=(28, 28)), torch.tensor(labels[:rows]))


def network() -> nn.Module:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(8 * 14 * 14, 10))


def main(stage: int = 1) -> list[float]:
    config = json.loads(Path(__file__).with_name("deepspeed_zero.json").read_text("utf-8"))
    config["zero_optimization"]["stage"] = stage
    deepspeed.init_distributed("gloo")
    model = network()
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    rows = digits(640)
    sampler = DistributedSampler(rows, num_replicas=engine.world_size, rank=engine.global_rank)
    loader = DataLoader(rows, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    criterion = nn.CrossEntropyLoss()
    losses = []
    engine.train()
    for _ in range(2):
        for images, labels in loader:
            images, labels = images.to(engine.device), labels.to(engine.device)
            optimizer.zero_grad()
            loss = criterion(engine(images), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main())
