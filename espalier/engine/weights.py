"""Weights of other formats: read into a model that is laid out, and written from it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.checkpoint.exporting import laid_out, root_of
from espalier.checkpoint.names import Foreign, tied
from espalier.checkpoint.pickles import FormatError
from espalier.checkpoint.reading import open_any
from espalier.checkpoint.sinks import Write, stream
from espalier.checkpoint.sources import Entry
from espalier.comm.collectives import reduce
from espalier.comm.words import words_of_all
from espalier.engine.state import Loading, agreed, set_options
from espalier.layout import local_box
from espalier.layout.regions import Box, overlap
from espalier.mesh import Mesh
from espalier.parallel.data.axis import DataAxis
from espalier.tensor import DTensor, layout_of, plain


def load_weights(engine: Any, data: DataAxis, path: str | Path, optimizer: bool) -> None:
    """See :meth:`espalier.Engine.load_weights`."""
    found, error = None, None
    try:
        found = Foreign(open_any(path), engine.module, engine.optimizer if optimizer else None)
    except FormatError as met:
        error = met
    agreed(error, engine.mesh, ValueError)
    assert found is not None
    loading = Loading(found, engine.module, engine.optimizer if optimizer else None)
    loading.run(data, engine.optimizer)
    agreed(loading.error, engine.mesh, ValueError)
    if optimizer:
        set_options(engine.optimizer, engine.module, found.values["optimizer"]["groups"])


def export(
    engine: Any,
    data: DataAxis,
    path: str | Path,
    form: str,
    dtype: torch.dtype | None,
    shard_bytes: int,
    metadata: Mapping[str, str] | None,
) -> None:
    """See :meth:`espalier.Engine.export`."""
    mesh, model, path = engine.mesh, engine.module, Path(path)
    if form == "safetensors" and path.suffix == ".safetensors":
        form = "file"
    with torch.no_grad(), data.precise(), ExitStack() as stack:
        root, ties = root_of(form), {} if form == "file" else tied(model)
        state = {
            f"{root}{name}": x if isinstance(x, DTensor) else engine._everywhere(name, x)
            for name, x in model.state_dict(keep_vars=True).items()
            if isinstance(x, torch.Tensor) and name not in ties
        }
        dtypes = _dtypes(state, mesh)
        ties = {f"{root}{name}": f"{root}{of}" for name, of in ties.items()}
        entries = {name: Entry(tuple(x.shape), dtypes[name]).cast(dtype) for name, x in state.items()}
        writing = _Writing()
        if mesh.rank == 0:
            with writing.careful():
                sink = laid_out(path, form, entries, ties, shard_bytes, metadata)
                stack.push(sink)
                writing.write = sink.write
        agreed(writing.error, mesh, ValueError)

        first_names = {id(p): name for name, p in model.named_parameters()}

        def read(name: str, box: Box) -> torch.Tensor:
            x = state[name]
            gives = engine._saves(first_names.get(id(x), name))
            return _on_first(x, box, dtypes[name], mesh, gives).to(entries[name].dtype)

        stream(entries, read, writing)
        agreed(writing.error, mesh, ValueError)
        if mesh.rank == 0:
            with writing.careful():
                stack.close()
                if form == "safetensors":
                    _write_config(model, entries, path)
        agreed(writing.error, mesh, ValueError)


class _Writing:
    """Writes on the first rank; an error is kept, so that all ranks go on together."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.write: Write | None = None

    def __call__(self, name: str, start: int, box: Box, piece: torch.Tensor) -> None:
        if self.write is not None and self.error is None:
            with self.careful():
                self.write(name, start, box, piece)

    @contextmanager
    def careful(self) -> Iterator[None]:
        """Keep the error that is met while this is open."""
        try:
            yield
        except (OSError, ValueError) as met:
            self.error = met


def _dtypes(state: Mapping[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.dtype]:
    """Those of tensors on the ranks that hold them: others do not know of masters."""
    held = {n: x.dtype for n, x in state.items() if not isinstance(x, DTensor) or layout_of(x).mesh.is_member}
    return {name: dtype for told in words_of_all(held, mesh) for name, dtype in told.items()}


def _on_first(x: torch.Tensor, box: Box, dtype: torch.dtype, mesh: Mesh, gives: bool) -> torch.Tensor:
    """A box of a tensor on the first rank; what the others get is undefined.

    Args:
        gives: whether it is this rank's stage that counts the tensor.
    """
    if not isinstance(x, DTensor):
        return x[box.slices]
    layout = layout_of(x)
    with raw():
        out = torch.zeros(box.sizes, dtype=dtype, device=mesh.device())
        home = layout.mesh
        copies = set(range(home.ndim)) - set(layout.order)
        if gives and home.is_member and not any(home.coordinate[a] for a in copies):
            own = local_box(layout)
            common = overlap(own, box)
            if common is not None:
                out[common.within(box)] = plain(x.detach())[common.within(own)]
        # each byte is zero but on one rank: their sum is exact
        wire = out.view(-1).view(torch.uint8)
        for axis in range(mesh.ndim):
            wire = reduce(wire, mesh, axis, 0)
        return wire.view(dtype).view(box.sizes)


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


__all__ = ["export", "load_weights"]
