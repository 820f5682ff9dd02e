"""What fits stays on the device: residency by a budget, as the steps show.

Two steps run with all away that may be away, and the peak of the second is measured. What the budget
leaves above that peak is then filled: chunks of states, of gradients, of parameters, each in the order of
their next use, so that what is left away is what is needed furthest in the future (Fang et al. 2021,
PatrickStar; the memory manager Gemini of Colossal-AI). From then on chunks go away when a step needs more,
and come back when steps have needed less for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from espalier.comm import collectives
from espalier.comm.control import numbers_of_all
from espalier.device import room
from espalier.mesh import Mesh
from espalier.parallel.data.chunks import Chunk
from espalier.parallel.data.offloaded_step import OffloadedChunk, OffloadedStep
from espalier.parallel.data.unshard import home_of, show_pieces
from espalier.parallel.plan import Offload, Place
from espalier.tensor import plain
from espalier.tensor.observers import tell
from espalier.torch_private import raw

_SHARE = 0.9  # of a device's memory
_SLACK = 0.05  # of the budget: what is still free after chunks came back
_PATIENCE = 8  # steps with room, one after the other, before chunks come back
_MOST_PATIENCE = 1024


class Budget:
    """Moves chunks so that the peak of the device's memory stays below a budget.

    A chunk goes away after the first step that needs more. Chunks come back after so many steps as
    ``patience`` that all had room for them, with some to spare; when they had to go again, patience doubles,
    so batches that are long and short in turn do not send the same chunks to and fro.

    Args:
        chunks: of each kind, in the order of their use.
        offloaded_step: updates the chunks of which something is away.

    Attributes:
        is_settled: whether the last step that was measured stayed below the budget, with all in it that fits.
        patience: steps.
    """

    def __init__(
        self,
        offload: Offload,
        chunks: Mapping[str, Sequence[Chunk]],
        offloaded_step: OffloadedStep,
        mesh: Mesh,
    ) -> None:
        self._bytes = _budget(offload, mesh.device())
        self._chunks, self._offloaded_step, self._mesh = chunks, offloaded_step, mesh
        self._places: dict[str, Place] = {k: s.place for k, s in offload.shares.items() if s.ratio == "auto"}
        # all that may be away, in the order in which it is kept on the device
        self._order = [(c, kind) for kind in self._places for c in chunks[kind] if kind in c.places]
        self._seen = 0
        self._is_filled = False
        self.is_settled = False
        self.patience = _PATIENCE
        self._excesses = deque[int]()  # of the last steps, on the rank that had most; some is spared
        self._came_back = False
        self._sizes: dict[str, float] = {}  # bytes of chunks, on the rank that has most of them

    def fit(self, peak: int, optimizer: torch.optim.Optimizer) -> None:
        """After a step whose peak was so many bytes: fill what is free, or free what is too much.

        All ranks decide alike: one all-reduce along each axis finds the least room and the largest chunks.
        """
        self._seen += 1
        if self._seen == 1:  # only now is the order known in which parameters are gathered ahead
            return
        returns = self.is_settled and len(self._excesses) == self.patience
        fills = returns or not self._is_filled
        choice = self._away() if fills else self._kept()[::-1]
        excess = self._agree(max(self._excesses) if returns else peak - self._bytes, choice)
        if excess > 0 and not self._kept():
            self._tell(peak)
        self.is_settled = returns or (self._is_filled and (excess <= 0 or not self._kept()))
        full: set[str] = set()
        for chunk, kind in choice:
            size = self._sizes[_key(chunk, kind)]
            if fills and excess + size > 0:
                full.add(kind)
            if fills and kind not in full:
                self._keep(chunk, kind, optimizer)
                self._came_back = returns
                excess += size
            elif not fills and excess > 0:
                self._evict(chunk, kind, optimizer)
                excess -= size
        if not self._is_filled and not self._kept():
            self.is_settled = True
        self._is_filled = True
        self._excesses.clear()
        self._offloaded_step.away = [OffloadedChunk(c) for c in self._chunks["states"] if c.has_turn]

    def _agree(self, excess: float, choice: Sequence[tuple[Chunk, str]]) -> float:
        """The excess on the rank that has most; and the sizes of chunks on those that have most of them."""
        store, keys = self._offloaded_step.store, [_key(*one) for one in choice]
        # what is on the device has the size that it had off it
        sizes = [float(store.nbytes(key) or self._sizes.get(key, 0)) for key in keys]
        agreed = torch.tensor([excess, *sizes], dtype=torch.float64, device=self._mesh.device())
        for axis in range(self._mesh.ndim):
            agreed = collectives.all_reduce(agreed, self._mesh, axis, "max")
        if not self._mesh.is_dry:  # a dry rank agrees with itself
            excess, *sizes = agreed.tolist()
        self._sizes.update(zip(keys, sizes, strict=True))
        return excess

    def is_to_change(self, peak: int) -> bool:
        """Whether a step shows, once it is settled what lies where, that this is to change.

        Some rank's step needed more after all (a longer batch, say), or the last ones left room for more on
        all of them. All ranks ask at once, and are told the same.
        """
        over = [int(peak - self._bytes), int(peak - (1 - _SLACK) * self._bytes)]
        excess, excess_with_slack = map(max, zip(*numbers_of_all(over, self._mesh), strict=True))
        if excess > 0:
            if self._came_back:
                self.patience = min(2 * self.patience, _MOST_PATIENCE)
            self._came_back = False
            self._excesses.clear()
            return bool(self._kept())
        self._excesses.append(excess_with_slack)
        if len(self._excesses) > self.patience:
            self._excesses.popleft()
        following = {kind: self._sizes[_key(chunk, kind)] for chunk, kind in reversed(self._away())}
        if len(self._excesses) < self.patience or not following:
            return False
        return max(self._excesses) + min(following.values()) <= 0

    def _kept(self) -> list[tuple[Chunk, str]]:
        return [(chunk, kind) for chunk, kind in self._order if kind not in chunk.places]

    def _away(self) -> list[tuple[Chunk, str]]:
        return [(chunk, kind) for chunk, kind in self._order if kind in chunk.places]

    def _tell(self, peak: int) -> None:
        """Say that the budget cannot be met: all is away that may be away."""
        here = [kind for kind, of in self._chunks.items() if any(kind not in c.places for c in of)]
        more = f" Let {' and '.join(here)} be off the device too." if here else ""
        away = " and ".join(self._places)
        tell(
            f"offload.budget_gigabytes = {self._bytes / 1e9:.4g} cannot be met: with all {away} away, a step "
            f"takes {peak / 1e9:.3g} GB of the device's memory at its peak on this rank. Training goes on."
            f"{more} What is left are activations (recompute, fewer rows or a larger accumulate, more "
            "ranks) and chunks under way (chunk_megabytes, prefetch_megabytes)."
        )

    def _keep(self, chunk: Chunk, kind: str, optimizer: torch.optim.Optimizer) -> None:
        store, key = self._offloaded_step.store, _key(chunk, kind)
        if kind == "parameters":
            (home,) = _own(store.take(key, home_of(chunk)))
            show_pieces(chunk, home)
            chunk.is_written = False
        elif kind == "states":
            away = OffloadedChunk(chunk)
            what, shown = away.states(optimizer.state)
            away.set(optimizer.state, what, _own(store.take(key, shown)))
            _move_numbers(chunk, optimizer, store.device)
        del chunk.places[kind]
        store.forget(key)

    def _evict(self, chunk: Chunk, kind: str, optimizer: torch.optim.Optimizer) -> None:
        store, place = self._offloaded_step.store, self._places[kind]
        chunk.places[kind] = place
        if kind == "parameters":
            assert chunk.home is not None
            store.put(_key(chunk, kind), [chunk.home], place, lambda x: show_pieces(chunk, x[0]))
        elif kind == "states":
            self._offloaded_step.leave(optimizer.state, OffloadedChunk(chunk))
        store.settle()


def _budget(offload: Offload, device: torch.device) -> float:
    """The bytes that a plan allows, or nine tenths of what the device has.

    The rest is for what its allocator cannot use, as pieces are too small, and for the libraries' own.

    Raises:
        ValueError: neither is known.
    """
    if offload.budget_gigabytes is not None:
        return offload.budget_gigabytes * 1e9
    there = room(device)
    if there is None:
        raise ValueError(
            'Plan(offload=...): a ratio is "auto", and how much memory is free cannot be asked of a device '
            f"of type {device.type!r}: give budget_gigabytes = ..."
        )
    return _SHARE * there


def _key(chunk: Chunk, kind: str) -> str:
    """That of a chunk's tensors of a kind in the store."""
    return f"{kind}-{chunk.number}"


def _own(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """On a CPU what stands for the device's memory, and not what stands for the host's."""
    return [t.clone() if t.device.type == "cpu" else t for t in tensors]


def _move_numbers(chunk: Chunk, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Fused and capturable kernels for the device want the count of steps there."""
    members = {id(m.p) for m in chunk.members}
    with raw():
        for group in optimizer.param_groups:
            if not (group.get("fused") or group.get("capturable")):
                continue
            for p in group["params"]:
                for name, x in optimizer.state.get(p, {}).items() if id(p) in members else ():
                    if isinstance(x, torch.Tensor) and not x.ndim:
                        optimizer.state[p][name] = plain(x).to(device)
