"""How one call of attention over a cut sequence goes: who has which rows, and what they draw."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from espalier.comm.spans import Spans
from espalier.layout import Layout, local_box
from espalier.mesh import Mesh
from espalier.tensor.random import Key, uniform_at
from espalier.tensor.rules import blocks


@dataclass(frozen=True)
class Way:
    """How one call goes.

    Attributes:
        axis: along which queries or keys travel; None: all keys are here.
        queries: the rows that this rank has.
        keys: those that each rank of the axis has.
        weights: the layout of the scores [..., h, s, t], whose last two dims are taken from the spans.
        scale: of the scores.
        causal: row i sees the keys up to i.
        dropout: probability that a weight is dropped.
        helping: causal, of queries that lie as the keys do: ranks take work off each other.
    """

    mesh: Mesh
    axis: int | None
    queries: Spans
    keys: tuple[Spans, ...]
    weights: Layout
    scale: float
    causal: bool
    dropout: float
    helping: bool = False

    @property
    def here(self) -> int:
        """This rank's place on the axis."""
        return 0 if self.axis is None else self.mesh.coordinate[self.axis]


def size_of(spans: Spans) -> int:
    """Number of rows."""
    return sum(max(end - start, 0) for start, end in spans)


def numbers(spans: Spans, device: torch.device) -> torch.Tensor:
    """The global numbers of rows."""
    parts = [torch.arange(start, end, device=device) for start, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def keep(way: Way, queries: Spans, keys: Spans, key: Key, like: torch.Tensor) -> torch.Tensor:
    """What the weights are multiplied by, a value for each global element."""
    box, device = local_box(way.weights), like.device
    indices = [
        torch.arange(o, o + n, device=device) for o, n in zip(box.offsets[:-2], box.sizes[:-2], strict=True)
    ]
    indices += [numbers(queries, device), numbers(keys, device)]
    index = torch.zeros((), dtype=torch.int64, device=device)
    for d, (along, step) in enumerate(zip(indices, way.weights.stride, strict=True)):
        index = index + (along * step).view([-1 if i == d else 1 for i in range(len(indices))])
    kept = uniform_at(index.contiguous(), key, torch.float32) >= way.dropout
    scale = 0.0 if way.dropout == 1 else 1 / (1 - way.dropout)
    return (kept.to(blocks.wide(like.dtype)) * scale).reshape(like.shape[0], like.shape[1], *kept.shape[-2:])


def nothing(q: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of no keys."""
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)
    return out, torch.full(q.shape[:-1], -math.inf, dtype=dtype, device=q.device)
