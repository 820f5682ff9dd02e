"""Programs drawn by lot of more bricks (``tests/zoo/drawn_bricks.py``), on rows or sequences, with losses of
several kinds; and plans for them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo import drawn
from tests.zoo.cases import Batch, Case
from tests.zoo.drawn import CLASSES, IDS, ROWS, WIDTH
from tests.zoo.drawn_bricks import ALONG, BRICKS, Priced

Tensor = torch.Tensor
LENGTH = 4
LOSSES = ("plain", "smooth", "summed", "weighed", "classes", "focal", "regress", "contrast", "ignored")
# These count what they are a mean over otherwise than a loop that divides by the number of its micro-batches.
OF_WHOLE_BATCHES = ("summed", "weighed", "classes", "ignored")


class Wide(nn.Module):
    """Some bricks, one after the other or beside each other, some of them used again, and a loss."""

    def __init__(self, lot: random.Random) -> None:
        super().__init__()
        self.is_long = lot.random() < 0.4
        self.embed = nn.Embedding(IDS, WIDTH)
        known = BRICKS | (ALONG if self.is_long else drawn.BRICKS)
        names = [lot.choice(sorted(known)) for _ in range(lot.randint(2, 4))]
        if self.is_long and not set(names) & set(ALONG):
            names[0] = lot.choice(sorted(ALONG))
        self.blocks = nn.ModuleList(known[name](lot) for name in names)
        self.order = [*range(len(names)), *(lot.randrange(len(names)) for _ in range(lot.randint(0, 1)))]
        self.residual = [lot.random() < 0.5 for _ in self.order]
        self.names = [
            f"{name}.{block.how}" if hasattr(block, "how") else name
            for name, block in zip(names, self.blocks, strict=True)
        ]
        self.head = nn.Linear(WIDTH, IDS if (tied := lot.random() < 0.2) else CLASSES)
        if tied:
            self.head.weight = self.embed.weight
        self.loss = lot.choice(LOSSES)
        self.register_buffer("of_classes", torch.linspace(0.5, 2.0, self.head.out_features), persistent=False)

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        x = x + self.embed(ids)
        for i, beside in zip(self.order, self.residual, strict=True):
            x = x + self.blocks[i](x) if beside else self.blocks[i](x)
        if self.is_long:
            x = x.mean(1)
        loss = self.judged(self.head(x), y)
        for block in self.blocks:
            if isinstance(block, Priced):
                loss = loss + block.price
        return loss

    def judged(self, out: Tensor, y: Tensor) -> Tensor:
        """The loss of what it gives."""
        if self.loss == "smooth":
            return F.cross_entropy(out, y, label_smoothing=0.1)
        if self.loss == "summed":
            return F.cross_entropy(out, y, reduction="sum") / len(y)
        if self.loss == "weighed":
            weight = 1 + (y % 3).to(out.dtype)
            return (F.cross_entropy(out, y, reduction="none") * weight).sum() / weight.sum()
        if self.loss == "classes":
            return F.cross_entropy(out, y, weight=self.of_classes)  # type: ignore[arg-type]
        if self.loss == "ignored":
            return F.cross_entropy(out, torch.where(y == 0, -100, y), ignore_index=-100)
        if self.loss == "focal":
            p = out.softmax(-1).gather(1, y.unsqueeze(1)).squeeze(1)
            return (-((1 - p) ** 2) * p.log()).mean()
        if self.loss == "regress":
            return F.smooth_l1_loss(out.mean(-1), y.to(out.dtype) / 7)
        if self.loss == "contrast":
            one, other = F.normalize(out, dim=-1), F.normalize(out.roll(1, -1) + out, dim=-1)
            return F.cross_entropy(one @ other.t(), torch.arange(len(out)))
        return F.cross_entropy(out, y)


def case(seed: int) -> Case:
    """The program of a seed."""

    def build() -> nn.Module:
        return Wide(random.Random(f"wide {seed}"))

    def draw(model: nn.Module, generator: torch.Generator) -> Iterator[Batch]:
        shape = (ROWS, LENGTH) if model.is_long else (ROWS,)
        yield {
            "x": torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64),
            "ids": torch.randint(0, IDS, shape, generator=generator),
            "y": torch.randint(0, CLASSES, (ROWS,), generator=generator),
        }

    return Case(f"wide/{seed}", build, draw)


def plan(seed: int) -> dict[str, Any]:
    """A plan for it, of two ranks or four; checkpoints by hand are not drawn with a pipeline."""
    found, lot = drawn.plan(seed), random.Random(f"plan {seed}")
    model = case(seed).build()
    if "pipe" in found and any("again" in name for name in model.names):  # type: ignore[attr-defined, operator]
        pipe = found.pop("pipe")
        found["data"] = found.get("data", 1) * pipe
    # an engine weighs micro-batches by what their losses are means over, at the end of a step; in a pipeline
    # parameters' hooks see the gradients of a step
    hooked = {"hooked.activation"} | ({"hooked.parameter"} if "pipe" in found else set())
    if model.loss in OF_WHOLE_BATCHES or hooked & set(model.names):  # type: ignore[arg-type]
        found.pop("accumulate", None)
    if "pipe" in found:
        found["schedule"] = lot.choice(["1f1b", "1f1b", "gpipe", "zb-h1", "naive"])
    elif lot.random() < 0.25 and found["zero"]:
        found["offload"] = away(found["zero"], lot)
    return found


def away(zero: int, lot: random.Random) -> dict[str, str]:
    """What is off the device at a stage of ZeRO."""
    kinds = ["states", "gradients", "parameters"][:zero]
    return dict.fromkeys(lot.sample(kinds, lot.randint(1, len(kinds))), "host")
