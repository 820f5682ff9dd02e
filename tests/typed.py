"""What a type checker sees of the package: not run, but checked by ``make lint``.

Each ``type: ignore`` stands where a checker is to complain: one that is not needed is an error.
"""

from typing import assert_type

import torch
from torch import nn

import espalier

model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
plan = espalier.Plan(
    data=2, zero=3, precision="bfloat16", offload={"states": "host"}, recompute={"*": "full"}
)
engine = espalier.initialize(model, optimizer, plan, loss_fn=nn.functional.mse_loss)
assert_type(engine, espalier.Engine)
assert_type(engine.train_step((torch.ones(2, 4), torch.ones(2, 4))), torch.Tensor)

espalier.Plan(tensro=2)  # type: ignore[call-arg]
espalier.Plan(gradients="in_place")  # type: ignore[arg-type]
espalier.Plan(data="two")  # type: ignore[arg-type]
espalier.initialise(model)  # type: ignore[attr-defined]
engine.trainstep  # type: ignore[attr-defined]  # noqa: B018
