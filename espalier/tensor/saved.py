"""What the backward pass keeps (design, section 3.3).

A gathered tensor is never saved for backward when its shard will do: while an operation runs on
gathered inputs, each that autograd saves is replaced by its shard, and gathered again on demand.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from espalier.comm.moves import carry_out
from espalier.layout import Layout


class _Regathered:
    """A shard from which the gathered tensor can be had again; views of it are restored too."""

    def __init__(self, shard: torch.Tensor, src: Layout, dst: Layout) -> None:
        self.shard, self.src, self.dst = shard.detach().as_subclass(torch.Tensor), src, dst
        self._alive: Any = None

    def get(self) -> torch.Tensor:
        known = self._alive() if self._alive is not None else None
        if known is None:
            known = carry_out(self.shard, self.src, self.dst)
            self._alive = weakref.ref(known)
        return known  # type: ignore[no-any-return]


class _View:
    def __init__(self, source: _Regathered, seen: torch.Tensor) -> None:
        self.source = source
        self.geometry = (seen.shape, seen.stride(), seen.storage_offset())

    def get(self) -> torch.Tensor:
        shape, stride, offset = self.geometry
        return self.source.get().as_strided(shape, stride, offset)


def saving_shards(
    gathered: list[tuple[torch.Tensor, torch.Tensor, Layout, Layout]],
) -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which autograd saves shards in place of gathered tensors.

    Args:
        gathered: (shard, gathered tensor, layout of the shard, layout of the gathered tensor).
    """
    sources = {
        full.untyped_storage()._cdata: _Regathered(shard, src, dst) for shard, full, src, dst in gathered
    }

    def pack(x: torch.Tensor) -> torch.Tensor | _View:
        source = sources.get(x.untyped_storage()._cdata)
        return x if source is None else _View(source, x)

    unpack: Callable[[Any], torch.Tensor] = lambda x: x.get() if isinstance(x, _View) else x  # noqa: E731
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
