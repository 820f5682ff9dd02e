"""Plans drawn by lot, against one process in float64: no mix of forms of parallelism gives other numbers.

Each draw trains two steps under one plan, saves, loads under another, trains two more, evaluates and
predicts, and compares the ledger of a step with that of a dry run. ``ESPALIER_SWEEP=1`` in the environment
draws 40, a larger number so many.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import espalier
from tests.asked import ASKED
from tests.ranks.test_engine import batch
from tests.ranks.test_pipeline import TOLERANCE, labels, mean_loss, model

HERE = (1, 2, 12)  # what is drawn without it: of them the last has stages, and parameters that are frozen
DRAWS = range(ASKED if ASKED > 1 else 40) if ASKED else HERE
Plan = dict[str, Any]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "foreach": lambda groups: torch.optim.Adam(groups, lr=1e-2, weight_decay=0.1, foreach=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
}


class Draw(NamedTuple):
    """A model, the rows of its batches, and two plans that train it one after the other."""

    world: int
    kind: str
    changes: dict[str, Any]
    rows: int
    optimizer: str
    frozen: bool
    plans: tuple[Plan, Plan]

    def model(self) -> nn.Module:
        """With the same values each time."""
        net = model(self.kind, **self.changes)
        if self.frozen:
            for name, p in net.named_parameters():
                p.requires_grad_("blocks.0" not in name and "embed" not in name)
        return net

    def optimizer_of(self, net: nn.Module) -> torch.optim.Optimizer:
        """With decay for matrices alone."""
        trained = [p for p in net.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
        return OPTIMIZERS[self.optimizer]([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])

    @property
    def count(self) -> Any:
        """The balance loss of experts is one of micro-batches: they are not weighed by their labels alone."""
        return labels if self.kind == "moe" else None


def drawn(seed: int) -> Draw:
    """The draw of a number."""
    lot = random.Random(seed)
    kind = lot.choice(["gpt", "gpt", "gpt2", "gpt2", "moe"])
    changes: dict[str, Any] = {"layers": lot.choice([2, 3, 4])}
    if kind == "gpt2":
        changes["tied"] = lot.random() < 0.5
    if kind == "gpt" and lot.random() < 0.3:
        changes |= {"hidden": 20, "heads": 5, "kv_heads": 5}
    world = lot.choice([2, 4, 4, 4, 8])
    first, second = (drawn_plan(lot, world, kind, changes["layers"]) for _ in range(2))
    rows, optimizer = lot.choice([5, 8, 9]), lot.choice(sorted(OPTIMIZERS))
    return Draw(world, kind, changes, rows, optimizer, lot.random() < 0.2, (first, second))


def drawn_plan(lot: random.Random, world: int, kind: str, layers: int) -> Plan:
    """A plan of so many ranks. Few such are refused."""
    sizes = dict.fromkeys(["data", "replicate", "tensor", "pipe", "context"], 1)
    while world > 1:
        axis = lot.choice(["data", "data", "replicate", "tensor", "tensor", "pipe", "pipe", "context"])
        if axis != "pipe" or sizes[axis] * 2 <= layers:
            sizes[axis] *= 2
            world //= 2
    plan: Plan = {axis: size for axis, size in sizes.items() if size > 1}
    plan |= {"zero": lot.choice([1, 2, 3] if sizes["replicate"] > 1 else [0, 1, 2, 3])}
    plan["accumulate"] = lot.choice([1, 2, 3])
    plan["recompute"] = lot.choice(["none", "none", "full", "selective"])
    modes: dict[int, list[Plan]] = {
        2: [{}],
        4: [{}, {"tensor_mode": "2d"}],
        8: [{}, {"tensor_mode": "3d"}, {"tensor_mode": "2.5d", "depth": 2}],
    }
    mode = lot.choice(modes.get(sizes["tensor"], [{}]))
    plan |= mode
    if sizes["tensor"] > 1 and not mode:
        plan["sequence_parallel"] = lot.choice([False, True, "auto"])
    if sizes["context"] > 1:
        plan["context_kind"] = lot.choice(["auto", "ring", "ulysses", "gather"])
    if kind == "moe" and sizes["data"] > 1:
        plan["expert"] = lot.choice([1, sizes["data"]])
    if sizes["pipe"] > 1:
        plan["schedule"] = lot.choice(["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
        plan["accumulate"] = lot.choice([sizes["pipe"], sizes["pipe"] + 1, 2 * sizes["pipe"]])
        if plan["schedule"] in ("interleaved", "zbv"):
            plan["stages_per_rank"] = 2
    if plan["recompute"] != "none":
        plan["recompute_inputs"] = lot.choice(["whole", "sharded", "host"])
    least = {"states": 0, "gradients": 1, "parameters": 3}
    off = [name for name, stage in least.items() if plan["zero"] >= stage and lot.random() < 0.4]
    plan["offload"] = {name: lot.choice(["device", "host", "disk"]) for name in off}
    plan["chunk_megabytes"] = lot.choice([25.0, 0.02, 0.002])
    plan["prefetch_megabytes"] = lot.choice([50.0, 0.0, 0.01])
    if plan.get("sequence_parallel"):
        plan["async_tensor_parallel"] = plan["chunk_megabytes"] < 1  # as the lot has fallen
    return plan


def follows(engine: espalier.Engine, draw: Draw, plain: nn.Module, theirs: Any, steps: range) -> None:
    """Both train: the same losses, norms and parameters."""
    for step in steps:
        parts = engine.cut(batch(draw.rows, step))
        loss = mean_loss(plain, parts if draw.kind == "moe" else [batch(draw.rows, step)])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
        engine.accumulate(parts)
        assert engine.step() and engine.loss is not None and engine.grad_norm is not None
        assert abs(engine.loss.item() - loss.item()) < TOLERANCE, step
        assert abs(engine.grad_norm.item() - norm.item()) < TOLERANCE, step
    state = engine.full_state_dict()
    for name, value in plain.state_dict().items():
        assert (state[name] - value).abs().max() < TOLERANCE, name


def trains(rank: int, world: int, draw: Draw, folder: Path) -> str:
    """Why the plans are refused, if they are."""
    warnings.filterwarnings("ignore", "A global batch of")  # some ranks have nothing to do
    warnings.filterwarnings("ignore", ".* cannot be met")  # a tiny budget: all goes away
    plain = draw.model()
    theirs = draw.optimizer_of(plain)
    for number, plan in enumerate(draw.plans):
        if "disk" in plan["offload"].values():
            plan = {**plan, "offload": {**plan["offload"], "directory": str(folder)}}
        net = draw.model()
        given: dict[str, Any] = {"max_grad_norm": 0.5, "count": draw.count}
        try:
            engine = espalier.initialize(net, draw.optimizer_of(net), plan, **given)
            engine.lay_out(engine.cut(batch(draw.rows))[0])
        except ValueError as error:
            return f"{plan}: {error}"
        if number:
            engine.load(folder / "saved")
        follows(engine, draw, plain, theirs, range(2 * number, 2 * number + 2))
        if not number:
            engine.save(folder / "saved")
    parts = [batch(5, 8), batch(4, 9)]
    with torch.no_grad():
        assert abs(engine.evaluate(parts).item() - mean_loss(plain, parts).item()) < TOLERANCE
        ids = {"input_ids": parts[1]["input_ids"]}
        assert (engine.predict(ids).logits - plain(**ids).logits).abs().max() < TOLERANCE
    before = engine.carried()
    with espalier.ledger(engine.mesh) as book:
        engine.train_step(batch(draw.rows))
    carried = engine.carried() - before
    if rank == world - 1 and draw.kind != "moe":  # where tokens go to experts a dry run cannot know
        with torch.device("meta"):  # not taken there, which would untie what is tied
            twin = draw.model()
        data = {k: torch.empty_like(v, device="meta") for k, v in batch(draw.rows).items()}
        given |= {"optimizer": draw.optimizer_of(twin), "coordinate": engine.mesh.coordinate}
        told = espalier.dry_run(twin, plan, data, **given)
        assert book.entries == told.ledger.entries
        assert carried == told.carried, "what goes to the host and to disk"
    return ""


@pytest.mark.world(8)
@pytest.mark.parametrize("seed", DRAWS)
def test_a_drawn_plan(ranks: Any, seed: int, tmp_path: Path) -> None:
    draw = drawn(seed)
    refused = "; ".join({*ranks(draw.world, trains, draw, tmp_path, timeout=240.0)})
    if refused:
        pytest.skip(refused)
