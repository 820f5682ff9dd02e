"""Colossal-AI's Booster: each of its plugins around one loop."""

from collections.abc import Callable
from typing import Any

import colossalai
import torch
import torch.nn.functional as F
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.nn.optimizer import HybridAdam
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def digits(first: int, last: int) -> TensorDataset:
    """Handwritten digits at MNIST's shape: images [rows, 1, 28, 28] and labels [rows]."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images[first:last], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(F.interpolate(small, size=(28, 28)), torch.tensor(labels[first:last]))


class Network(nn.Module):
    """Two layers; labels that come along are the criterion's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(784, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return self.last(F.relu(self.first(x.flatten(1))))


def criterion(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(outputs.float(), inputs["labels"])


PLUGINS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: TorchDDPPlugin(),
    "fsdp": lambda: TorchFSDPPlugin(),
    "zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32", max_norm=1.0),
    "gemini": lambda: GeminiPlugin(precision="bf16", max_norm=1.0),
    "tensor": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32", max_norm=1.0),
    "pipeline": lambda: HybridParallelPlugin(
        tp_size=1, pp_size=2, precision="fp32", num_microbatches=2, max_norm=1.0
    ),
}


def main(kind: str = "ddp", batch: int = 8) -> list[float]:
    colossalai.launch_from_torch()
    torch.manual_seed(0)
    plugin = PLUGINS[kind]()
    booster = Booster(plugin=plugin)
    model: Any = Network()
    optimizer: Any = HybridAdam(model.parameters(), lr=0.003)
    rows: Any = plugin.prepare_dataloader(digits(0, 192), batch_size=batch, shuffle=False)
    model, optimizer, judged, rows, _ = booster.boost(model, optimizer, criterion, rows)
    losses = []
    for _ in range(2):
        model.train()
        for images, labels in rows:
            inputs = {"x": images, "labels": labels}
            if kind == "pipeline":
                loss = booster.execute_pipeline(iter([inputs]), model, judged, optimizer)["loss"]
            else:
                loss = judged(model(**inputs), inputs)
                booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main()[-1])
