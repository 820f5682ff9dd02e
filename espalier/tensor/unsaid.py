"""Gradients of what leaves the type without a word on them: taken as replicated, and compared.

Outside of the type nobody knows whether the ranks go on to compute the same from a replicated value or
different things. ``to_local()`` and ``full_tensor()`` take it, as torch does, that they compute the same, so
that each rank's gradient is the whole one. When such a gradient flows, it is written down in a few numbers;
at the end of the backward pass the ranks compare these, in one message beside the traffic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm.side import Absent, Side, named
from espalier.comm.traced import recording
from espalier.layout import Layout, Partial, Shard, gradient_layout
from espalier.mesh import Mesh
from espalier.tensor.caller import site, user_frame
from espalier.tensor.compare import lines

_LIMIT = 1800.0  # seconds to wait for the others, as torch's own groups do
_NUMBERS = 8  # of a sketch
_WIDTH = 1024
_PASSES = 8  # backward passes, one within the other, whose gradients are kept


class _Flown(NamedTuple):
    """A gradient: of which call, where, of what, and its sketch."""

    call: str
    where: str
    layout: Layout
    dtype: torch.dtype
    sketch: torch.Tensor

    @property
    def key(self) -> str:
        """What is the same on all ranks."""
        return f"{self.call} ({self.where}) of {self.layout!r} {self.dtype}".replace("torch.", "")


class Comparing:
    """What the ranks of a mesh, of axes along which something is replicated, have to compare."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.flown: dict[int, list[_Flown]] = {}
        self._side: Side | None = None

    def compare(self, flown: Sequence[_Flown]) -> None:
        """Compare the gradients of a backward pass; every rank of the mesh does.

        Raises:
            ValueError: on every rank, if one differs, or did not come to all.
        """
        values = torch.stack([g.sketch for g in flown]).tolist()  # one wait for the device
        counts: dict[str, int] = {}
        mine = []
        for g, numbers in zip(flown, values, strict=True):
            counts[g.key] = counts.get(g.key, 0) + 1
            mine.append((g.key, counts[g.key], numbers))
        doing = f"the gradient of {flown[0].call} ({flown[0].where})"
        try:
            if self._side is None:
                self._side = Side(self.mesh, _LIMIT, doing)
            told = [json.loads(m) for m in self._side.exchange(json.dumps(mine).encode(), doing)]
        except Absent as absent:
            late = [self.mesh.ranks[i] for i, (n, _) in enumerate(absent.seen) if n < absent.number]
            raise ValueError(
                f"{doing} flows on this rank, but {named(late)} did not come to compare it ({absent}). "
                f"{_remedy(flown[0], self.mesh.names)}"
            ) from None
        found = [{(key, number): numbers for key, number, numbers in one} for one in told]
        for key, number in sorted({each for one in found for each in one}):
            of = [one.get((key, number)) for one in found]
            unlike = [i for i, numbers in enumerate(of) if not _alike(numbers, of[0], key)]
            if unlike:
                mine_here = next((g for g in flown if g.key == key), flown[0])
                raise ValueError(self._told(key, of, unlike, mine_here))

    def _told(self, key: str, of: Sequence[Any], unlike: Sequence[int], here: _Flown) -> str:
        ranks = self.mesh.ranks
        split = {
            self.mesh.names[a]
            for a, line in lines(self.mesh) for i in line if not _alike(of[i], of[line[0]], key)
        }  # fmt: skip
        absent = [ranks[i] for i, numbers in enumerate(of) if numbers is None]
        what = (
            f"flows on {named([r for r in ranks if r not in absent])}, but not on {named(absent)}"
            if absent
            else f"differs on {named([ranks[i] for i in unlike])} from that on rank {ranks[0]}"
        )
        call, _, form = key.rpartition(" of ")
        return (
            f"The gradient of {call}, of {form}, {what}. Nothing was said of it, so each rank's was taken as "
            f"the whole one; but the ranks compute different things. {_remedy(here, split)}"
        )


def compared(out: torch.Tensor, layout: Layout, axes: Sequence[int], call: str) -> torch.Tensor:
    """``out``, an alias of which nobody holds more, whose gradient will be compared along the axes.

    Args:
        layout: of the gradient's value, for words.
        call: what the user called.

    Raises:
        ValueError: a program is being recorded to be compiled, in which nothing can hang on values.
    """
    mesh = layout.mesh
    names = tuple(mesh.names[a] for a in axes)
    if recording():
        raise ValueError(
            f"{call}() of a tensor that is replicated along {', '.join(names)} and needs a gradient, in a "
            f"compiled region: say what its gradients will be. grad_placements=[Replicate(), ...] if every "
            "rank computes the same from it, Partial() on axes where they compute different things."
        )
    node = out.grad_fn
    if mesh.is_dry or node is None:
        return out
    part = mesh if len(names) == mesh.ndim else mesh[names]
    if part.comparing is None:
        part.comparing = Comparing(part)
    comparing: Comparing = part.comparing
    where = site(user_frame()[1])
    dtype = out.dtype

    def note(grads: tuple[torch.Tensor | None, ...]) -> None:
        if grads[0] is None:
            return
        task = torch._C._current_graph_task_id()
        with raw(), torch.no_grad():
            flown = comparing.flown.get(task)
            if flown is None:
                # what an error left behind goes
                for old in sorted(comparing.flown)[: -_PASSES or None]:
                    del comparing.flown[old]
                flown = comparing.flown[task] = []
                torch.autograd.Variable._execution_engine.queue_callback(lambda: _compare_all(task))
            flown.append(_Flown(call, where, layout, dtype, _sketch(grads[0])))

    node.register_prehook(note)
    return out


def _compare_all(task: int) -> None:
    """At the end of a backward pass: the first that is called does it for all meshes, in one order."""
    with raw(), torch.no_grad():
        waiting = [m.comparing for m in Mesh.known if m.comparing is not None and task in m.comparing.flown]
        for comparing in sorted(waiting, key=lambda c: (c.mesh.names, c.mesh.shape, c.mesh.ranks)):
            comparing.compare(comparing.flown.pop(task))


def _sketch(grad: torch.Tensor) -> torch.Tensor:
    """A gradient in a few numbers: its length, and products with random vectors.

    The products of two gradients differ by the length of their difference, more or less, wherever it lies.
    """
    x = grad.detach().as_subclass(torch.Tensor)
    x = x.to_dense() if x.layout is not torch.strided else x
    x = torch.view_as_real(x) if x.is_complex() else x
    x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32).reshape(-1)
    n = x.numel()
    width = min(_WIDTH, max(n, 1))
    full = n // width
    generator = torch.Generator().manual_seed(n)
    sides = torch.randn(_NUMBERS, width + full + 1, generator=generator, dtype=torch.float64).to(x)
    across, along = sides[:, :width], sides[:, width:]
    products = ((x[: full * width].view(full, width) @ across.T) * along[:, :full].T).sum(0)
    products += across[:, : n - full * width] @ x[full * width :] * along[:, full]
    length = torch.linalg.vector_norm(x)
    return torch.cat([length.view(1), products]).to(torch.float64 if x.device.type != "mps" else x.dtype)


def _alike(a: Sequence[float] | None, b: Sequence[float] | None, key: str) -> bool:
    """Whether two sketches are of one gradient, but for rounding."""
    if a is None or b is None:
        return a is b
    if not all(map(math.isfinite, (*a, *b))):
        return [math.isfinite(x) for x in a] == [math.isfinite(x) for x in b]
    dtype = getattr(torch, key.rpartition(" ")[2])
    eps = torch.finfo(dtype).eps
    allowed = max(math.sqrt(eps), 4 * eps) if eps < 1e-4 else 4 * eps
    rms = math.sqrt(sum((x - y) ** 2 for x, y in zip(a[1:], b[1:], strict=True)) / _NUMBERS)
    return rms <= allowed * max(a[0], b[0])


def _remedy(of: _Flown, axes: Collection[str]) -> str:
    grads = gradient_layout(of.layout).placements
    said = [Partial() if name in axes else p for name, p in zip(of.layout.mesh.names, grads, strict=True)]
    words = ", ".join(f"{type(p).__name__}({p.dim if isinstance(p, Shard) else ''})" for p in said)
    return (
        f"Say so: {of.call}(grad_placements=[{words}]) adds the ranks' gradients up; or let all ranks "
        "compute the same from it."
    )
