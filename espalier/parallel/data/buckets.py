"""Gradients over the data axis: flat buffers, each reduced as soon as it is full.

The parameters are *varied* along the axis (see ``espalier.layout``): backward leaves their
gradients Partial, and this reducer finishes them. Buckets fill in the reverse of the order in
which the parameters were registered, about the order in which gradients come, and are sent in that
fixed order, so that all ranks agree (Li et al. 2020, PyTorch Distributed).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm import Pending
from espalier.comm import collectives as door
from espalier.layout import Layout, gradient_layout
from espalier.layout.layout import R
from espalier.mesh import Mesh
from espalier.tensor import DTensor, plain, stamp

_grad: Any = torch.Tensor.grad


class _Bucket:
    """A flat buffer, its parameters' views of it, and one flag each: has it a gradient anywhere?"""

    def __init__(self, parameters: list[DTensor]) -> None:
        self.parameters = parameters
        sizes = [p._layout.local_shape.numel() for p in parameters]  # type: ignore[attr-defined]
        with raw():
            self.flat = plain(parameters[0].detach()).new_zeros(sum(sizes) + len(parameters))
        self.flags = self.flat[sum(sizes) :]
        self.views = [
            piece.view(p._layout.local_shape)
            for piece, p in zip(self.flat[: sum(sizes)].split(sizes), parameters, strict=True)
        ]
        self.missing = set(range(len(parameters)))
        self.pending: Pending | None = None


class GradientBuckets:
    """Reduces the gradients of parameters that are varied along one axis.

    Args:
        parameters: DTensors that need gradients.
        axis: the mesh axis.
        megabytes: size at which a bucket is closed; the first is a tenth, to start early.
    """

    def __init__(self, parameters: Sequence[DTensor], mesh: Mesh, axis: int, megabytes: float) -> None:
        self.mesh, self.axis = mesh, axis
        self.active = True
        self.reduced = False
        # along an axis of size 1 there is nothing to reduce
        groups = _grouped(parameters, megabytes) if mesh.shape[axis] > 1 else []
        self.buckets = [_Bucket(group) for group in groups]
        self._next = 0
        self._place: dict[int, tuple[_Bucket, int]] = {}
        for bucket in self.buckets:
            for i, p in enumerate(bucket.parameters):
                self._place[id(p)] = (bucket, i)
                p.register_post_accumulate_grad_hook(self._ready)

    def begin(self) -> None:
        """Before a backward pass. Gradients reduced by an earlier one become addends again."""
        if self.reduced:
            for bucket in self.buckets:
                for p in bucket.parameters:
                    grad = p.grad
                    if grad is not None:
                        with raw():
                            own = plain(grad)
                            if self.mesh.coordinate[self.axis]:
                                own.zero_()
                            _grad.__set__(p, stamp(own, gradient_layout(p._layout)))
        self.reduced = False
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))
            bucket.pending = None

    def _ready(self, parameter: torch.Tensor) -> None:
        if not self.active:
            return
        bucket, i = self._place[id(parameter)]
        if i not in bucket.missing:
            return
        with raw():
            grad = _grad.__get__(parameter)
            view = bucket.views[i]
            if grad.data_ptr() != view.data_ptr() or self.mesh.is_dry:
                view.copy_(grad)
        bucket.missing.discard(i)
        self._send_full_ones()

    def _send_full_ones(self) -> None:
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._send(self.buckets[self._next])

    def _send(self, bucket: _Bucket) -> None:
        bucket.flags.fill_(1)
        for i in bucket.missing:
            bucket.views[i].zero_()
            bucket.flags[i] = 0
        bucket.pending = door.all_reduce_(bucket.flat, self.mesh, self.axis)
        self._next += 1

    def finish(self) -> None:
        """Wait until every gradient is the sum over the axis.

        A parameter that no rank used keeps ``grad = None``; one that some rank used has it on all.
        """
        if self.reduced:
            return
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            self._gather_late(bucket)
            self._send(bucket)
        for bucket in self.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            used = bucket.flags.tolist() if bucket.missing and not self.mesh.is_dry else None
            for i, p in enumerate(bucket.parameters):
                with raw():
                    if used is not None and not used[i]:
                        continue
                    done = stamp(bucket.views[i].view_as(bucket.views[i]), _finished(p._layout, self.axis))
                    _grad.__set__(p, done)
        self.reduced = True

    def _gather_late(self, bucket: _Bucket) -> None:
        """Gradients that accumulated while reduction was off, of parameters unused since."""
        for i in list(bucket.missing):
            grad: Any = bucket.parameters[i].grad
            if grad is not None:
                with raw():
                    if plain(grad).data_ptr() != bucket.views[i].data_ptr():
                        bucket.views[i].copy_(plain(grad))
                bucket.missing.discard(i)


def _finished(layout: Layout, axis: int) -> Layout:
    return gradient_layout(layout).with_axis(axis, R)


def _grouped(parameters: Sequence[DTensor], megabytes: float) -> list[list[DTensor]]:
    groups: list[list[DTensor]] = []
    limit, filled = megabytes * 1e5, 0.0
    for p in reversed(parameters):
        alike = groups and groups[-1][0].dtype == p.dtype and groups[-1][0].device == p.device
        size = p._layout.local_shape.numel() * p.element_size()  # type: ignore[attr-defined]
        if not alike or filled + size > limit:
            limit = megabytes * (1e6 if groups else 1e5)
            groups.append([])
            filled = 0.0
        groups[-1].append(p)
        filled += size
    return groups
