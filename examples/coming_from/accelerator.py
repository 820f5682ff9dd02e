"""accelerate's Accelerator: prepare, accumulate, clip, measure, save and go on."""

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def digits(first: int, last: int) -> TensorDataset:
    """Handwritten digits at MNIST's shape: images [rows, 1, 28, 28] and labels [rows]."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images[first:last], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(F.interpolate(small, size=(28, 28)), torch.tensor(labels[first:last]))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def main(batch: int = 16, epochs: int = 7, **options: Any) -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, **options)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    rows = DataLoader(digits(0, 192), batch_size=batch, shuffle=True)
    held_out = DataLoader(digits(192, 250), batch_size=batch)
    model, optimizer, rows, held_out, schedule = accelerator.prepare(
        model, optimizer, rows, held_out, schedule
    )
    folder = [tempfile.mkdtemp()]
    broadcast_object_list(folder)
    numbers = []
    for epoch in range(epochs):
        torch.manual_seed(epoch)
        model.train()
        for images, labels in rows:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    numbers.append(float(norm))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            numbers.append(accelerator.reduce(loss.detach(), "mean").item())
        model.eval()
        right = seen = 0
        for images, labels in held_out:
            with torch.no_grad():
                found = model(images).argmax(-1)
            found, labels = accelerator.gather_for_metrics((found, labels))
            right, seen = right + int((found == labels).sum()), seen + len(labels)
        assert seen == 58, seen
        numbers += [right / seen, schedule.get_last_lr()[0]]
        if epoch == 0:
            accelerator.save_state(folder[0])
            accelerator.wait_for_everyone()
        elif epoch == 1:
            accelerator.load_state(folder[0])
    state = accelerator.get_state_dict(model)
    assert next(iter(state)) == "1.weight" and state["1.weight"].shape == (64, 784)
    numbers.append(sum(x.double().norm().item() for x in state.values()))
    accelerator.save_model(model, folder[0])
    accelerator.print(f"{right} of {seen} right")
    return numbers


if __name__ == "__main__":
    main()
