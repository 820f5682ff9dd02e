"""Models of several heads, drawn by lot, that take and give containers of several kinds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.drawn import BRICKS as FIRST
from tests.zoo.drawn_bricks import ALONG, WIDTH
from tests.zoo.drawn_bricks import BRICKS as MORE
from tests.zoo.drawn_loops import LEFT_OUT

Tensor = torch.Tensor
CLASSES, IDS = 5, 11


@dataclass
class Given:
    """What a model takes, in one object."""

    x: Tensor
    mask: Tensor | None = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Gives:
    """What a model gives, in one object."""

    logits: Tensor
    value: Tensor
    hidden: Tensor | None = None


class Named(NamedTuple):
    """The same as a tuple."""

    logits: Tensor
    value: Tensor
    hidden: Tensor | None = None


class Image(nn.Module):
    """A stem of convolutions: what it gives is a row."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.one = nn.Conv2d(2, 8, 3, padding=1)
        self.norm: nn.Module = {"batch": nn.BatchNorm2d(8), "group": nn.GroupNorm(2, 8)}.get(
            how, nn.Identity()
        )
        self.two = nn.Conv2d(
            8, WIDTH, 3, stride=2, padding=1, groups=2 if how == "grouped" else 1, bias=how != "bare"
        )
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2) if how == "up" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = (
            F.max_pool2d(F.gelu(self.norm(self.one(x))), 2)
            if self.how != "mean"
            else F.avg_pool2d(self.one(x), 2)
        )
        h = self.up(torch.tanh(self.two(h)))
        if self.how == "up":
            h = F.interpolate(h, scale_factor=0.5, mode="bilinear")
        return F.adaptive_avg_pool2d(h, 1).flatten(1)


class Net(nn.Module):
    """A stem, bricks, and two heads."""

    def __init__(self, lot: random.Random) -> None:
        super().__init__()
        self.kind = lot.choice(["rows", "rows", "long", "ids", "image"])
        self.takes = lot.choice(["plain", "keys", "dict", "nested", "data"])
        self.gives = lot.choice(["tuple", "dict", "data", "named", "nested"])
        self.is_long = self.kind in ("long", "ids")
        self.stem: nn.Module = nn.Identity()
        if self.kind == "ids":
            of = lot.choice(["plain", "padded", "bounded"])
            self.stem = nn.Embedding(
                IDS,
                WIDTH,
                padding_idx=0 if of == "padded" else None,
                max_norm=2.0 if of == "bounded" else None,
            )
        elif self.kind == "image":
            self.stem = Image(lot.choice(["batch", "group", "plain", "grouped", "up", "bare", "mean"]))
        known = {**FIRST, **MORE} | (ALONG if self.is_long else {})
        known = {name: brick for name, brick in known.items() if name not in LEFT_OUT}
        names = [lot.choice(["plain", *sorted(known)]) for _ in range(lot.randint(1, 2))]
        if self.is_long:
            names[0] = lot.choice(sorted(ALONG))
        made = [known[name](lot) if name in known else nn.Linear(WIDTH, WIDTH) for name in names]
        self.blocks = nn.ModuleList(made)
        self.names = [self.kind, self.takes, self.gives] + [
            f"{n}.{m.how}" if hasattr(m, "how") else n for n, m in zip(names, made, strict=True)
        ]
        self.norm = nn.LayerNorm(WIDTH)
        self.pool = lot.choice(["mean", "last", "masked"])
        tied = self.kind == "ids" and lot.random() < 0.4
        self.head, self.value = nn.Linear(WIDTH, IDS if tied else CLASSES, bias=not tied), nn.Linear(WIDTH, 1)
        if tied:
            self.head.weight = self.stem.weight  # type: ignore[assignment]
        self.register_buffer("seen", torch.zeros(()), persistent=lot.random() < 0.7)

    def forward(self, x: Any, mask: Tensor | None = None, **more: Any) -> Any:
        if isinstance(x, dict):
            x, mask = x["x"], x.get("mask")
        elif isinstance(x, tuple):
            x, (mask, _) = x
        elif isinstance(x, Given):
            x, mask = x.x, x.mask
        h = self.stem(x)
        for block in self.blocks:
            h = h + block(h)
        if self.training:
            self.seen += 1
        if self.is_long:
            if self.pool == "mean":
                h = h.mean(1)
            elif self.pool == "last" or mask is None:
                h = h[:, -1]
            else:
                h = (h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        h = self.norm(h)
        logits, value = self.head(h)[:, :CLASSES], self.value(h).squeeze(-1)
        if self.gives == "dict":
            return {"logits": logits, "value": value, "hidden": h, "none": None, "text": "t"}
        if self.gives == "data":
            return Gives(logits, value, h)
        if self.gives == "named":
            return Named(logits, value, h)
        if self.gives == "nested":
            return {"out": [logits, (value, None)], "hidden": {"last": h, "n": 3}}
        return logits, value, h


def parts_of(out: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, value and hidden of what a model gives."""
    if isinstance(out, dict):
        if "out" in out:
            return out["out"][0], out["out"][1][0], out["hidden"]["last"]
        return out["logits"], out["value"], out["hidden"]
    if isinstance(out, Gives):
        return out.logits, out.value, out.hidden  # type: ignore[return-value]
    return out[0], out[1], out[2]


class Weighing(nn.Module):
    """A loss of two, whose weights are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.zeros(2))
        self.centers = nn.Parameter(torch.linspace(-1, 1, CLASSES * WIDTH).view(CLASSES, WIDTH))

    def forward(self, one: Tensor, other: Tensor, hidden: Tensor, y: Tensor) -> Tensor:
        s = self.scales
        far = (hidden - self.centers[y]).square().sum(-1).mean()
        return (-s[0]).exp() * one + (-s[1]).exp() * other + s.sum() + 0.01 * far
