"""Courses drawn by lot: whole trainings, with what people do between the first step and the last.

They are scenes (``drawn_scenes.py``) of nets with mixes' bricks (``drawn_mixes.py``) and of texts with caches
of keys and values, trained by more optimizers, schedules, ways and acts (``drawn_turns.py``). States of
optimizers and random numbers are compared, too.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo import drawn_mixes, drawn_turns
from tests.zoo.drawn_acts import ACTS, LOSSES, WAYS
from tests.zoo.drawn_bricks import WIDTH
from tests.zoo.drawn_loops import OF_BATCHES
from tests.zoo.drawn_mixes import Mix, Mixed
from tests.zoo.drawn_nets import CLASSES, IDS
from tests.zoo.drawn_scenes import GROUPS, LENGTH

Tensor = torch.Tensor
Past = tuple[Tensor, Tensor]
MORE_OF_BATCHES = ("owned.added", "packed.packed")


class Recalling(nn.Module):
    """Causal attention, and a cache of its keys and values: given and given back, or kept on the module."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norm = how, nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.past: Past | None = None
        self.at = 0
        if how == "buffer":
            for name in ("keys", "values"):
                self.register_buffer(name, torch.zeros(12, 2, 2 * LENGTH, 4), persistent=False)

    def forward(self, x: Tensor, past: Past | None = None, keep: bool = False) -> tuple[Tensor, Past]:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        if keep and self.how == "buffer":
            rows, at = len(x), self.at
            self.at = at + x.shape[1]
            self.keys[:rows, :, at : self.at] = k  # type: ignore[index, operator]
            self.values[:rows, :, at : self.at] = v  # type: ignore[index, operator]
            k, v = self.keys[:rows, :, : self.at], self.values[:rows, :, : self.at]  # type: ignore[index]
        elif keep:
            past = self.past if self.how == "attribute" else past
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            self.past = (k, v) if self.how == "attribute" else None
        y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return self.out(y.transpose(1, 2).flatten(-2)), (k, v)

    def forget(self) -> None:
        """Begin anew."""
        self.past, self.at = None, 0


class Text(nn.Module):
    """A small language model, which goes on from a cache where one is asked for; heads as a net has them."""

    kind, takes, is_long = "ids", "plain", True

    def __init__(self, lot: random.Random) -> None:
        super().__init__()
        self.how = lot.choice(["given", "attribute", "buffer"])
        self.stem, self.places = nn.Embedding(IDS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Recalling(self.how) for _ in range(2))
        self.lines = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(2)
        )
        self.norm, self.head, self.value = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, IDS), nn.Linear(WIDTH, 1)
        self.register_buffer("seen", torch.zeros(()))
        if lot.random() < 0.5:
            self.head.weight = self.stem.weight
        self.names = [f"text.{self.how}"]

    def forward(self, x: Tensor, mask: Tensor | None = None, past: Any = None, keep: bool = False) -> Any:
        at = past[0][0].shape[2] if past is not None else self.blocks[0].at  # type: ignore[union-attr]
        if self.how == "attribute" and keep and self.blocks[0].past is not None:  # type: ignore[union-attr]
            at = self.blocks[0].past[0].shape[2]  # type: ignore[union-attr, index]
        h = self.stem(x) + self.places(torch.arange(at, at + x.shape[1]))
        kept = []
        for i, (block, line) in enumerate(zip(self.blocks, self.lines, strict=True)):
            y, held = block(h, None if past is None else past[i], keep)
            h = h + y
            h = h + line(h)
            kept.append(held)
        h = self.norm(h)
        last = h[:, -1]
        return self.head(last)[:, :CLASSES], self.value(last).squeeze(-1), last, kept if keep else None


class Studied(Mixed):
    """A mixed net, whose table may ask for sparse gradients, and whose head may have an older norm."""

    def __init__(self, lot: random.Random) -> None:
        super().__init__(lot)
        if self.kind == "ids" and self.stem.max_norm is None and self.head.weight is not self.stem.weight:
            self.stem.sparse = lot.random() < 0.4  # type: ignore[assignment]
            self.names += ["sparse"] if self.stem.sparse else []
        if lot.random() < 0.08:
            nn.utils.spectral_norm(self.value)
            self.names.append("old norm")
        if lot.random() < 0.04:
            self.blocks[-1].compile(backend="aot_eager")
            self.names.append("compiled")


class Course(Mix):
    """One that a seed draws."""

    group = "course"

    def __init__(self, seed: int) -> None:
        lot = random.Random(f"{self.group} {seed}")

        def of(new: dict[str, Any], old: dict[str, Any], share: float = 0.65) -> str:
            return lot.choice(sorted(new if lot.random() < share else old))

        self.seed = seed
        self.optimizers = drawn_turns.OPTIMIZERS | self.optimizers
        self.schedules = drawn_turns.SCHEDULES | self.schedules
        self.optimizer = of(drawn_turns.OPTIMIZERS, Mix.optimizers, 0.5)
        self.schedule = of(drawn_turns.SCHEDULES, Mix.schedules, 0.5)
        self.groups = lot.choice(GROUPS)
        self.ways, self.way = WAYS | drawn_turns.WAYS, of(drawn_turns.WAYS, WAYS)
        self.losses = [of(drawn_turns.LOSSES, LOSSES, 0.5) for _ in range(2)]
        self.kinds_of_losses, self.kinds_of_acts = LOSSES | drawn_turns.LOSSES, ACTS | drawn_turns.ACTS
        if self.optimizer.startswith("lbfgs"):
            self.groups, self.way = "one", "closure"
        self.acts = [[of(drawn_turns.ACTS, ACTS) for _ in range(lot.choice([0, 1, 1, 2]))] for _ in range(5)]
        self.rows = [lot.choice([8, 8, 8, 4, 12, 6]) for _ in range(5)]
        self.says()

    def net(self) -> Any:
        torch.manual_seed(1)
        random.seed(1)
        lot = random.Random(f"{self.group} {self.seed} net")
        return (Text(lot) if lot.random() < 0.2 else Studied(lot)).double()

    def ends(self) -> list[Any]:
        found = super().ends()
        for optimizer in self.optims:
            state = optimizer.state_dict()
            for number in sorted(state["state"]):
                held = state["state"][number]
                found += [held[n] for n in sorted(held) if isinstance(held[n], torch.Tensor)]
            found += [float(group["lr"]) for group in state["param_groups"]]
        return [*found, torch.rand(2), random.random()]


def plans(seed: int) -> list[dict[str, Any]]:
    """Two plans of the same number of ranks, as a mix's; micro-batches, and grids upon each other, too."""
    course = Course(seed)
    net, lot = course.net(), random.Random(f"plans of course {seed}")
    found = drawn_mixes.plans_of(lot, net)
    of_batches = any(name.startswith(of) for name in net.names for of in (*OF_BATCHES, *MORE_OF_BATCHES))
    for plan in found:
        if course.way == "micro" or ("pipe" in plan and not of_batches and lot.random() < 0.3):
            plan["accumulate"] = 2
        if plan.get("tensor") == 4 and lot.random() < 0.4:
            plan |= {"tensor_mode": "2.5d", "depth": 2, "sequence_parallel": False}
            plan["async_tensor_parallel"] = False
    return found
