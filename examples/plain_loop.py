"""A plain training loop on as many ranks as you like: one line lays the model out.

    python examples/plain_loop.py                            one process
    espalier run -n 4 examples/plain_loop.py                 data 4
    espalier run -n 4 examples/plain_loop.py --tensor 2      data 2 × tensor 2
    espalier run -n 4 examples/plain_loop.py --tensor 4      tensor 4

All four print the same losses.
"""

import argparse

import torch
from torch import nn

import espalier
from espalier.mesh.process import start


class Model(nn.Module):
    """Written for one device: nothing in here knows of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 32)
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)
        self.norm = nn.LayerNorm(32)
        self.out = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return nn.functional.mse_loss(self.out(self.norm(x)), y)


parser = argparse.ArgumentParser()
parser.add_argument("--tensor", type=int, default=1)
tensor = parser.parse_args().tensor

ranks = start().world_size  # join the world of `espalier run` or torchrun; alone: a world of one
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
engine = espalier.initialize(model, optimizer, {"data": ranks // tensor, "tensor": tensor})

for step in range(1, 201):
    x = torch.randn(256, 2)  # the global batch, equal on all ranks; each computes its rows
    y = x.sin().sum(-1, keepdim=True)
    loss = engine((x, y))
    engine.backward(loss)
    engine.step()
    if step % 50 == 0 and engine.mesh.rank == 0:
        print(f"step {step:3}  loss {loss.item():.5f}")
if engine.mesh.rank == 0:
    print(espalier.layout_of(model.up.weight), espalier.layout_of(model.down.weight), sep="\n")
