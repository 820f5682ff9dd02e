"""Weights of other formats: read into a model that is laid out, and written from it.

A load is a step of an optimizer that reads instead of computing: so its values go where an update puts them,
to masters and pieces, on the device or off it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.checkpoint.exporting import laid_out
from espalier.checkpoint.names import matched, tied
from espalier.checkpoint.pickles import FormatError
from espalier.checkpoint.sinks import Write, stream
from espalier.checkpoint.sources import Entry, Source, open_source
from espalier.comm.agreement import agree
from espalier.comm.collectives import reduce
from espalier.layout import local_box
from espalier.layout.regions import Box, overlap
from espalier.mesh import Mesh
from espalier.parallel.data.axis import DataAxis
from espalier.tensor import DTensor, layout_of, plain

Fill = Callable[[torch.Tensor], None]


class Reader(torch.optim.Optimizer):
    """Has the parameters of an optimizer, and its states; a step fills the parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], fill: Fill, states: Any) -> None:
        super().__init__(parameters, {})
        self.fill = fill
        if states is not None:
            self.state = states

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.fill(p)


def load_weights(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, data: DataAxis, path: str | Path
) -> None:
    """See :meth:`espalier.Engine.load_weights`."""
    source, names, error = None, {}, None
    try:
        source = open_source(path)
        names = matched(model, source)
    except FormatError as met:
        error = met
    _agree(error, data.mesh)
    assert source is not None
    state = model.state_dict(keep_vars=True)
    filling = _Filling(source, {id(state[name]): theirs for name, theirs in names.items()})
    trained = [m.p for chunk in data.chunks for m in chunk.members]
    with torch.no_grad():
        reader = Reader(trained, filling, None if optimizer is None else optimizer.state)
        data.update(reader, lambda reader: reader.step())
        by_reader = {id(p) for p in trained}
        for name in names:
            if id(state[name]) not in by_reader:  # frozen parameters, and buffers
                filling(state[name])
    _agree(filling.error, data.mesh)


def _agree(error: Exception | None, mesh: Mesh) -> None:
    agree(None if error is None else ValueError(str(error)), mesh, range(mesh.ndim))


class _Filling:
    """Reads what this rank holds of tensors; the first error is kept, so that all ranks go on together."""

    def __init__(self, source: Source, names: Mapping[int, tuple[str, ...]]) -> None:
        self._source, self._names = source, names
        self.error: Exception | None = None

    def __call__(self, x: torch.Tensor) -> None:
        if self.error is None:
            try:
                with raw():
                    self._fill(x, *self._names[id(x)])
            except FormatError as met:
                self.error = met

    def _fill(self, x: torch.Tensor, name: str, *others: str) -> None:
        box = None
        if isinstance(x, DTensor):
            layout = layout_of(x)
            if not layout.mesh.is_member:
                return
            box = local_box(layout)
        value = self._source.read(name, box)
        for other in others:
            if not torch.equal(self._source.read(other, box), value):
                raise FormatError(
                    f"{self._source.path}: {name} and {other} differ, and are one tensor in this model. "
                    "Build the model without the tie, or give another file."
                )
        plain(x.detach()).copy_(value)


def export(
    model: nn.Module, data: DataAxis, path: str | Path, form: str, dtype: torch.dtype | None, shard_bytes: int
) -> None:
    """See :meth:`espalier.Engine.export`."""
    mesh, path = data.mesh, Path(path)
    with torch.no_grad(), data.precise(), ExitStack() as stack:
        ties = tied(model)
        state = {
            name: x
            for name, x in model.state_dict(keep_vars=True).items()
            if isinstance(x, torch.Tensor) and name not in ties
        }
        entries = {
            name: Entry(tuple(x.shape), dtype if dtype and x.is_floating_point() else x.dtype)
            for name, x in state.items()
        }
        writing = _Writing()
        if mesh.rank == 0:
            with writing.careful():
                sink = laid_out(path, form, entries, ties, shard_bytes)
                stack.push(sink)
                writing.write = sink.write
        _agree(writing.error, mesh)
        stream(entries, lambda name, box: _on_first(state[name], box, mesh).to(entries[name].dtype), writing)
        _agree(writing.error, mesh)
        if mesh.rank == 0:
            with writing.careful():
                stack.close()
                if path.is_dir():
                    _write_config(model, entries, path)
        _agree(writing.error, mesh)


class _Writing:
    """Writes on the first rank; an error is kept, so that all ranks go on together."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.write: Write | None = None

    def __call__(self, name: str, start: int, piece: torch.Tensor) -> None:
        if self.write is not None and self.error is None:
            with self.careful():
                self.write(name, start, piece)

    @contextmanager
    def careful(self) -> Iterator[None]:
        """Keep the error that is met while this is open."""
        try:
            yield
        except (OSError, ValueError) as met:
            self.error = met


def _on_first(x: torch.Tensor, box: Box, mesh: Mesh) -> torch.Tensor:
    """A box of a tensor on the first rank; what the others get is undefined."""
    if not isinstance(x, DTensor):
        return x[box.slices]
    layout = layout_of(x)
    with raw():
        out = torch.zeros(box.sizes, dtype=x.dtype, device=mesh.device())
        home = layout.mesh
        if home.is_member and not any(home.coordinate[a] for a in set(range(home.ndim)) - set(layout.order)):
            own = local_box(layout)
            common = overlap(own, box)
            if common is not None:
                out[common.within(box)] = plain(x.detach())[common.within(own)]
        # each byte is zero but on one rank: their sum is exact
        wire = out.view(-1).view(torch.uint8)
        for axis in range(mesh.ndim):
            wire = reduce(wire, mesh, axis, 0)
        return wire.view(x.dtype).view(box.sizes)


def _write_config(model: Any, entries: Mapping[str, Entry], folder: Path) -> None:
    """What ``from_pretrained`` of Hugging Face's models wants beside the weights."""
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    floats = [entry.dtype for entry in entries.values() if entry.dtype.is_floating_point]
    config.dtype = str(floats[0] if floats else torch.float32).removeprefix("torch.")
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)


__all__ = ["Reader", "export", "load_weights"]
