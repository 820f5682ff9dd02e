"""What a type checker sees of the package: not run, but checked by ``make lint`` and `pure/test_editors.py`.

Each ``type: ignore`` stands where a checker is to complain: one that is not needed is an error.
"""

from typing import assert_type

import torch
from torch import nn
from torch.nn import functional as F

import espalier
from espalier import DTensor, Layout, Mesh, Plan, Replicate, Shard
from espalier.compat import deepspeed
from espalier.compat.accelerate import Accelerator
from espalier.compat.fabric import EspalierStrategy
from espalier.compat.torch import DistributedDataParallel
from espalier.compat.transformers import Trainer
from espalier.models import build

model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters())
x = torch.ones(2, 4)

# ---- plans and engines

plan = espalier.Plan(
    data=2, zero=3, precision="bfloat16", offload={"states": "host"}, recompute={"*": "full"}
)
engine = espalier.initialize(model, optimizer, plan, loss_fn=F.mse_loss)
assert_type(engine, espalier.Engine)
assert_type(engine.train_step((x, x)), torch.Tensor)
loss = engine((x, x))
engine.backward(loss)
engine.step()
engine.save("run/checkpoints")
engine.load("run/checkpoints", model_only=True)
engine.export("weights")
print(engine.ledger().by_axis(), engine.memory(), engine.mesh.rank, engine.steps, engine.predict(x))
espalier.initialize(model, optimizer, {"data": 2}, faults=espalier.Faults(limit=5), spikes=espalier.Spikes())
with espalier.RunLog("runs/mine", engine, steps=20, tokens=16, every=10, track="tensorboard") as log:
    log.step(engine.train_step((x, x)))

espalier.Plan(tensro=2)  # type: ignore[call-arg]
espalier.Plan(gradients="in_place")  # type: ignore[arg-type]
espalier.Plan(data="two")  # type: ignore[arg-type]
espalier.initialise(model)  # type: ignore[attr-defined]
engine.trainstep  # type: ignore[attr-defined]  # noqa: B018

# ---- a plain loop

prepared, prepared_optimizer = espalier.prepare(model, optimizer, plan={"data": 2})
prepared_optimizer.zero_grad()
F.mse_loss(prepared(x), x).backward()
prepared_optimizer.step()

# ---- tensors

mesh = Mesh.from_env({"data": 2, "tensor": 2})
devices = espalier.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
weight = espalier.randn(4, 6, device_mesh=mesh, placements=[Replicate(), Shard(0)], requires_grad=True)
assert_type(weight, DTensor)
assert_type(espalier.distribute_tensor(x, devices, [Shard(0), Replicate()]), DTensor)
assert_type(DTensor.from_local(x, devices, [Shard(0), Replicate()]), DTensor)
assert_type(weight.redistribute(placements=[Replicate(), Replicate()]), DTensor)
assert_type(weight.full_tensor(), torch.Tensor)
assert_type(weight.to_local(), torch.Tensor)
assert_type(espalier.layout_of(weight), Layout)
with espalier.ledger(mesh) as book, espalier.strict():
    F.linear(x, weight).square().sum().backward()
print(book.by_axis(), weight.placements, weight.device_mesh)
styles = {"0": espalier.ColwiseParallel(), "2": espalier.RowwiseParallel()}
espalier.parallelize_module(model, devices["tensor"], styles)
added = espalier.local_map(torch.neg, out_placements=[Shard(0)], device_mesh=devices)
weight.redistribute(placment=[Shard(0)])  # type: ignore[call-arg]

# ---- looking ahead

report = espalier.dry_run(model, Plan(data=64), (x, x), optimizer=optimizer)
assert_type(report, espalier.DryReport)
print(report.peak_bytes, report.ledger.by_axis(), report.flops, report.parameters)
assert_type(Plan.auto(model, (x, x), "h100-sxm", loss_fn=F.mse_loss, optimizer=optimizer, ranks=8), Plan)
espalier.dry_run(model, Plan(precision=torch.bfloat16), (x, x), loss_fn=F.mse_loss, optimizer=[optimizer])
Plan.auto(model, (x, x), "h100-sxm", optimiser=optimizer, ranks="8")  # type: ignore[arg-type]
espalier.explain_layouts(model, Plan(tensor=2), (x, x))


def ranked(mesh: Mesh) -> int:
    """What each rank runs."""
    return mesh.rank


espalier.spawn(ranked, {"data": 2})

# ---- the interfaces that people come from

Trainer(model, plan={"data": 2, "zero": 3}).train()
Accelerator(gradient_accumulation_steps=2, plan={"data": 2})
EspalierStrategy({"data": 2, "zero": 3})
DistributedDataParallel(model)
their_engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 8})
build("gpt", {"vocab_size": 64})
