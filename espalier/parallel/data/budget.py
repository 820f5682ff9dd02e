"""What fits stays on the device: residency by a budget, as the first steps show.

Two steps run with all away that may be away, and the peak of the second is measured. What the budget leaves
above that peak is then filled: chunks of states, of gradients, of parameters, each in the order of their next
use, so that what is left away is what is needed furthest in the future (Fang et al. 2021, PatrickStar; the
memory manager Gemini of Colossal-AI).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm import collectives as door
from espalier.mesh import Mesh
from espalier.parallel.data.chunks import Chunk
from espalier.parallel.data.gathered import home_of, show_pieces
from espalier.parallel.data.streaming import Away, Streaming
from espalier.parallel.offload import Offload, Place
from espalier.tensor import plain
from espalier.tensor.caller import user_frame


class Budget:
    """Moves chunks so that the peak of the device's memory stays below a budget.

    Args:
        chunks: of each kind, in the order of their use.
        streaming: updates the chunks of which something is away.

    Attributes:
        is_settled: whether the last step that was measured stayed below the budget, with all in it that fits.
    """

    def __init__(
        self, offload: Offload, chunks: Mapping[str, Sequence[Chunk]], streaming: Streaming, mesh: Mesh
    ) -> None:
        assert offload.budget_gigabytes is not None
        self._bytes = offload.budget_gigabytes * 1e9
        self._chunks, self._streaming, self._mesh = chunks, streaming, mesh
        self._places: dict[str, Place] = {k: s.place for k, s in offload.shares.items() if s.ratio == "auto"}
        self._kept: list[tuple[Chunk, str]] = []
        self._seen = 0
        self._tried = False
        self.is_settled = False

    def fit(self, peak: int, optimizer: torch.optim.Optimizer) -> None:
        """After a step whose peak was so many bytes: fill what is free, or free what is too much.

        All ranks decide alike: one all-reduce along each axis finds the least room and the largest chunks.
        """
        self._seen += 1
        if self._seen == 1:  # only now is the order known in which parameters are gathered ahead
            return
        if not self._tried:
            choice = [(c, kind) for kind in self._places for c in self._chunks[kind] if kind in c.places]
        else:
            choice = self._kept[::-1]
        shelf = self._streaming.shelf
        sizes = [float(shelf.nbytes(f"{kind}-{c.number}")) for c, kind in choice]
        agreed = torch.tensor([peak - self._bytes, *sizes], dtype=torch.float64, device=self._mesh.device())
        for axis in range(self._mesh.ndim):
            agreed = door.all_reduce(agreed, self._mesh, axis, "max")
        if self._mesh.is_dry:  # a dry rank agrees with itself
            excess = peak - self._bytes
        else:
            excess, *sizes = agreed.tolist()
        self.is_settled = self._tried and excess <= 0
        if excess > 0 and not self._kept:
            self._tell(peak)
        full: set[str] = set()
        for (chunk, kind), size in zip(choice, sizes, strict=True):
            if not self._tried and excess + size > 0:
                full.add(kind)
            if not self._tried and kind not in full:
                self._keep(chunk, kind, optimizer)
                self._kept.append((chunk, kind))
                excess += size
            elif self._tried and excess > 0:
                self._evict(chunk, kind, optimizer)
                self._kept.remove((chunk, kind))
                excess -= size
        if not self._kept:
            self.is_settled = True
        self._tried = True
        self._streaming.away = [Away(c) for c in self._chunks["states"] if c.has_turn]

    def _tell(self, peak: int) -> None:
        """Say that the budget cannot be met: all is away that may be away."""
        here = [kind for kind, of in self._chunks.items() if any(kind not in c.places for c in of)]
        more = f" Let {' and '.join(here)} be off the device too." if here else ""
        away = " and ".join(self._places)
        warnings.warn(
            f"offload.budget_gigabytes = {self._bytes / 1e9:g} cannot be met: with all {away} away, a step "
            f"takes {peak / 1e9:.3g} GB of the device's memory at its peak on this rank. Training goes on."
            f"{more} What is left are activations (recompute, fewer rows or a larger accumulate, more "
            "ranks) and chunks under way (chunk_megabytes, prefetch_megabytes).",
            stacklevel=user_frame()[0],
        )

    def _keep(self, chunk: Chunk, kind: str, optimizer: torch.optim.Optimizer) -> None:
        shelf, key = self._streaming.shelf, f"{kind}-{chunk.number}"
        if kind == "parameters":
            (home,) = _own(shelf.take(key, home_of(chunk)))
            show_pieces(chunk, home)
            chunk.is_written = False
        elif kind == "states":
            away = Away(chunk)
            what, shown = away.states(optimizer)
            away.set(optimizer, what, _own(shelf.take(key, shown)))
            _move_numbers(chunk, optimizer, shelf.device)
        del chunk.places[kind]
        shelf.forget(key)

    def _evict(self, chunk: Chunk, kind: str, optimizer: torch.optim.Optimizer) -> None:
        shelf, place = self._streaming.shelf, self._places[kind]
        chunk.places[kind] = place
        if kind == "parameters":
            assert chunk.home is not None
            shelf.put(f"{kind}-{chunk.number}", [chunk.home], place, lambda x: show_pieces(chunk, x[0]))
        elif kind == "states":
            self._streaming.leave(optimizer, Away(chunk))
        shelf.settle()


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


__all__ = ["Budget"]
