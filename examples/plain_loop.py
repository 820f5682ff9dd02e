"""A plain training loop on as many ranks as you like: one line lays the model out.

    python examples/plain_loop.py                            one process
    espalier run -n 4 examples/plain_loop.py                 data 4
    espalier run -n 4 examples/plain_loop.py --tensor 2      data 2 × tensor 2
    espalier run -n 4 examples/plain_loop.py --tensor 4      tensor 4
    espalier run -n 4 examples/plain_loop.py --pipe 2        pipe 2 × data 2

All five print the same losses.
"""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F

import espalier


class Model(nn.Module):
    """Written for one device: nothing in here knows of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 32)
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)
        self.norm = nn.LayerNorm(32)
        self.out = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        x = x + self.down(F.gelu(self.up(x)))
        return self.out(self.norm(x))


parser = argparse.ArgumentParser()
parser.add_argument("--tensor", type=int, default=1)
parser.add_argument("--pipe", type=int, default=1)
given = parser.parse_args()

ranks = int(os.environ.get("WORLD_SIZE", "1"))  # as `espalier run` and torchrun say; alone: one
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
plan = espalier.Plan(data=ranks // (given.tensor * given.pipe), tensor=given.tensor, pipe=given.pipe)
engine = espalier.initialize(model, optimizer, plan, loss_fn=F.mse_loss)

for step in range(1, 201):
    x = torch.randn(256, 2)  # the global batch, equal on all ranks; each computes its rows
    y = x.sin().sum(-1, keepdim=True)
    loss = engine((x, y))  # F.mse_loss(model(x), y)
    engine.backward(loss)
    engine.step()
    if step % 50 == 0 and engine.mesh.rank == 0:
        print(f"step {step:3}  loss {loss.item():.5f}")
if engine.mesh.rank == 0:
    print(espalier.layout_of(model.up.weight), espalier.layout_of(model.down.weight), sep="\n")
