"""What an engine is at a step: as a tree of tensors and values, to save and to load."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.checkpoint import Checkpoint, CheckpointError, Index, Lying, checkpoints, encode
from espalier.checkpoint.folder import INDEX
from espalier.checkpoint.pickles import FormatError
from espalier.checkpoint.saver import index_of
from espalier.checkpoint.sources import Source
from espalier.comm.agreement import agree
from espalier.comm.words import words_of_all
from espalier.engine.conflicts import conflicts, is_value, raise_conflicts, state_tensors, states_of
from espalier.engine.loader import restore_loaders
from espalier.layout import Layout, Shard, local_box
from espalier.layout.regions import Box
from espalier.mesh import Mesh
from espalier.parallel.data.axis import DataAxis
from espalier.tensor import DTensor, plain, stamp
from espalier.tensor.seeding import state_of_keys

_RANDOM, _STREAMS = "random.torch", "random.device"  # the latter has a row for each rank

Fill = Callable[[torch.Tensor], None]


def tree_of(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    mesh: Mesh,
    saves: Callable[[str], bool] = lambda name: True,
) -> dict[str, Lying]:
    """The tensors of a model and its optimizer by name, as they lie; each tensor once.

    Args:
        saves: whether a parameter is to be in it.
    """
    tree: dict[str, Lying] = {}
    for name, x in tensors_of(module).items():
        if not isinstance(x, DTensor):
            tree[f"model.{name}"] = _lying(x, _mesh_of(module, name, mesh))
        elif saves(name):
            tree[f"model.{name}"] = _lying(x, mesh, steady=isinstance(x, nn.Parameter))
    if optimizer is not None:
        for name, p in module.named_parameters():
            for key, x in optimizer.state.get(p, {}).items():
                if isinstance(x, torch.Tensor) and saves(name):
                    tree[f"optimizer.state.{name}.{key}"] = _lying(x, _layout(p).mesh, steady=x.ndim > 0)
    return tree


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A model's own parameters and buffers that its state dict has, each under its first name."""
    found: dict[str, torch.Tensor] = {}
    seen = set()
    for name, x in state_tensors(module).items():
        if id(x) not in seen:
            seen.add(id(x))
            found[name] = x
    return found


def aliases_of(module: nn.Module) -> dict[str, str]:
    """Further names of tensors, and their first."""
    first: dict[int, str] = {}
    found = {}
    for name, x in state_tensors(module).items():
        known = first.setdefault(id(x), name)
        if known != name:
            found[f"model.{name}"] = f"model.{known}"
    return found


def groups_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups: names of parameters, and options."""
    names = {id(p): name for name, p in module.named_parameters()}
    return [
        {
            "names": [names[id(p)] for p in group["params"]],
            "options": {key: value for key, value in group.items() if key not in ("params", "param_names")},
        }
        for group in optimizer.param_groups
    ]


def index_and_tree(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    mesh: Mesh,
    values: Mapping[str, Any],
    extra: Mapping[str, Any],
    saves: Callable[[str], bool],
) -> tuple[Index, dict[str, Lying]]:
    """All that a checkpoint is to hold.

    Raises:
        ValueError: there is something among it that cannot be saved.
    """
    tree = tree_of(module, optimizer, mesh, saves)

    def take(at: str, x: torch.Tensor) -> str:
        tree[at] = _lying(x, mesh)
        return at

    said = dict(values)
    said["extra"] = {k: x.state_dict() if hasattr(x, "state_dict") else x for k, x in extra.items()}
    said["model"] = {n: x for n, x in module.state_dict(keep_vars=True).items() if is_value(n)}
    if optimizer is not None:
        said["optimizer"] = {
            "class": type(optimizer).__name__,
            "groups": groups_of(module, optimizer),
            "states": {
                name: {k: x for k, x in optimizer.state.get(p, {}).items() if not isinstance(x, torch.Tensor)}
                for name, p in module.named_parameters()
            },
        }
    encoded = {key: encode(value, key, take) for key, value in said.items()}
    take(_RANDOM, state_of_keys(mesh))
    if (stream := device_stream(mesh)) is not None:
        row = stream.get()[None].cpu()
        lies = Layout(mesh, [Shard(0)] * mesh.ndim, (mesh.size(), row.shape[1]))
        tree[_STREAMS] = Lying(row, lies)
    index = Index(values=encoded, aliases=aliases_of(module), tensors=index_of(tree))
    return index, tree


class Stream(NamedTuple):
    """What gets and what sets the state of a generator, bytes in the host's memory."""

    get: Callable[[], torch.Tensor]
    set: Callable[[torch.Tensor], None]


def device_stream(mesh: Mesh) -> Stream | None:
    """That of this rank's device; None on a CPU, whose stream is torch's own."""
    if mesh.device_type == "cpu":
        return None
    module, device = torch.get_device_module(mesh.device_type), mesh.device()
    return Stream(lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device))


def candidates(directory: str | os.PathLike[str], mesh: Mesh) -> list[Path]:
    """The checkpoint that a folder is, or those that it has, newest first (a collective).

    Raises:
        CheckpointError: on all ranks, if there is none.
    """
    paths: list[Path] = []
    if mesh.rank == 0:
        path = Path(directory)
        if path.is_dir() and not (path / INDEX).exists():
            paths = checkpoints(path)
        elif path.exists():
            paths = [path]
    paths = words_of_all(paths, mesh)[0]
    if not paths:
        raise CheckpointError(
            f"There is no checkpoint in {directory}. Name a folder that engine.save wrote to."
        )
    return paths


def opened(path: Path, mesh: Mesh) -> Checkpoint:
    """A checkpoint (a collective).

    Raises:
        CheckpointError: on all ranks, if one of them cannot read it.
    """
    error: Exception | None = None
    try:
        checkpoint = Checkpoint(path)
    except CheckpointError as met:
        error = met
    agreed(error, mesh)
    return checkpoint


def agreed(error: Exception | None, mesh: Mesh, kind: type[Exception] = CheckpointError) -> None:
    """Raise on all ranks, as an error of one kind, what one of them has met (a collective)."""
    met = None if error is None else kind(str(error))
    if met is not None:
        met.__cause__ = error
    agree(met, mesh, range(mesh.ndim))


def restore(
    engine: Any, checkpoint: Checkpoint, data: DataAxis, extra: Mapping[str, Any], model_only: bool
) -> dict[str, Any]:
    """Take a checkpoint over; gives what was saved beside the engine's own.

    Raises:
        ValueError: model, optimizer and checkpoint don't fit together: then nothing was changed.
        CheckpointError: on all ranks, if one of them met a damaged file.
    """
    module, mesh = engine.module, engine.mesh
    optimizer = None if model_only else engine.optimizer
    values = checkpoint.values
    lines = conflicts(checkpoint, module, optimizer)
    lines += [f"it has no {name!r}" for name in extra if name not in values["extra"]]
    positions = () if model_only else zip(engine._loaders, values.get("loaders") or (), strict=False)
    lines += [line for loader, state in positions for line in loader.differences(state)]
    raise_conflicts(checkpoint, lines)
    loading = Loading(checkpoint, module, optimizer)
    loading.run(data, engine.optimizer)
    for name, value in values["model"].items():
        module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
    random = torch.get_rng_state()
    loading.read(_RANDOM, random, Layout.replicated(mesh, tuple(random.shape)))
    stream, row = device_stream(mesh), None
    if stream is not None and _STREAMS in checkpoint.entries:
        rows, n = checkpoint.entries[_STREAMS].shape
        row = torch.empty(1, n, dtype=torch.uint8)
        loading.take(_STREAMS, row, Box((mesh.rank % rows, 0), (1, n)))
    agreed(loading.error, mesh)
    if not model_only:
        torch.set_rng_state(random)
        if stream is not None and row is not None and row[0].shape == stream.get().shape:
            stream.set(row[0])
        engine.steps = values["steps"]
        if engine.scaler is not None and values["scaler"] is not None:
            engine.scaler.load_state_dict(values["scaler"])
        if optimizer is not None:
            set_options(optimizer, module, values["optimizer"]["groups"])
        restore_loaders(engine._loaders, values.get("loaders"))
    for name, thing in extra.items():
        thing.load_state_dict(values["extra"][name])
    return dict(values["extra"])


class _Reader(torch.optim.Optimizer):
    """Has the parameters of an optimizer, and its states; a step fills the parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], fill: Fill, states: Any) -> None:
        super().__init__([{"params": [*parameters]}], {})  # as a group there may be none: all may be frozen
        self.fill = fill
        if states is not None:
            self.state = states

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.fill(p)


class Loading:
    """Fills parameters and states from a checkpoint. Errors are kept: others wait in collectives.

    A load is a step of an optimizer that reads instead of computing: so its values go where an update puts
    them, to masters and pieces, on the device or off it.

    Args:
        checkpoint: has ``model.NAME`` and ``optimizer.state.NAME.KEY``, and the value ``optimizer``.
        optimizer: whose states are to be filled, too.
    """

    def __init__(
        self, checkpoint: Source, module: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._checkpoint, self._module, self._optimizer = checkpoint, module, optimizer
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._states = {} if optimizer is None else states_of(checkpoint)
        self._others = {} if optimizer is None else checkpoint.values["optimizer"]["states"]
        self.error: Exception | None = None

    def run(self, data: DataAxis, optimizer: torch.optim.Optimizer | None) -> None:
        """Fill all (a collective)."""
        trained = [m.p for chunk in data.chunks for m in chunk.members]
        with torch.no_grad():
            states = None if optimizer is None else optimizer.state
            data.update(_Reader(trained, self.fill, states), lambda reader: reader.step())
            filled = {id(p) for p in trained}
            for name, x in tensors_of(self._module).items():
                if isinstance(x, DTensor) and id(x) not in filled:  # it is frozen
                    self.fill(x)
                elif not isinstance(x, DTensor):
                    self.read(f"model.{name}", x.detach(), Layout.replicated(data.mesh, tuple(x.shape)))

    def fill(self, p: torch.Tensor) -> None:
        """A parameter, and its states."""
        layout = _layout(p)
        if not layout.mesh.is_member:
            return
        with raw():
            name, here = self._names[id(p)], plain(p.detach())
            self.read(f"model.{name}", here, layout)
            if self._optimizer is not None:
                state = self._state(name, here, layout)
                if state or p in self._optimizer.state:
                    self._optimizer.state[p] = state

    def _state(self, name: str, here: torch.Tensor, layout: Layout) -> dict[str, Any]:
        state: dict[str, Any] = {}
        saved = self._checkpoint.entries[f"model.{name}"]
        for key, entry in self._states.get(name, {}).items():
            lies, dtype = _like(layout, entry.shape), entry.dtype
            if dtype is saved.dtype and dtype.is_floating_point and entry.shape:
                dtype = here.dtype
            device = torch.device("cpu") if not entry.shape and key == "step" else here.device
            x = torch.empty(lies.local_shape, dtype=dtype, device=device)
            self.read(f"optimizer.state.{name}.{key}", x, lies)
            state[key] = stamp(x, lies) if entry.shape else x
        return {**state, **self._others.get(name, {})}

    def read(self, name: str, local: torch.Tensor, layout: Layout) -> None:
        """What this rank holds of one tensor."""
        self.take(name, local, local_box(layout))

    def take(self, name: str, local: torch.Tensor, box: Box) -> None:
        """A box of one tensor."""
        try:
            if self.error is None:
                self._checkpoint.fill(name, local, box)
        except FormatError as error:
            self.error = error


def set_options(optimizer: torch.optim.Optimizer, module: nn.Module, groups: list[Any]) -> None:
    names = {id(p): name for name, p in module.named_parameters()}
    saved = {name: group["options"] for group in groups for name in group["names"]}
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        for key, value in saved[names[id(group["params"][0])]].items():
            if key in ("foreach", "fused", "capturable", "differentiable"):
                continue  # how it computes, not what
            own = group.get(key)
            if isinstance(own, torch.Tensor):
                own.copy_(torch.as_tensor(value))
            else:
                group[key] = value


def _lying(x: torch.Tensor, mesh: Mesh, *, steady: bool = False) -> Lying:
    with raw():
        if type(x) is DTensor or isinstance(x, DTensor):
            return Lying(plain(x.detach()), x._layout.own, steady)
        return Lying(x.detach(), Layout.replicated(mesh, tuple(x.shape)), steady)


def _layout(p: torch.Tensor) -> Layout:
    return p._layout.own  # type: ignore[attr-defined]


def _like(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """How a state of that shape lies, of a parameter that lies so: cut where it has the same sizes."""
    if tuple(layout.shape) == shape:
        return layout
    if len(shape) != len(layout.shape):
        return Layout.replicated(layout.mesh, shape)
    same = [n == m for n, m in zip(shape, layout.shape, strict=True)]
    axes = tuple("R" if isinstance(s, int) and not same[s] else s for s in layout.axes)
    cuts = tuple(cut if keep else () for cut, keep in zip(layout.cuts, same, strict=True))
    return Layout.of(layout.mesh, axes, cuts, shape)


def _mesh_of(module: nn.Module, name: str, mesh: Mesh) -> Mesh:
    """The ranks that hold a buffer: those that hold the parameters about it."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        meshes = {_layout(p).mesh for p in module.get_submodule(path).parameters() if isinstance(p, DTensor)}
        if meshes:
            return meshes.pop() if len(meshes) == 1 else mesh
    return mesh


def named_values(engine: Any) -> Iterator[tuple[str, Any]]:
    """What an engine itself counts."""
    yield "steps", engine.steps
    yield "scaler", None if engine.scaler is None else engine.scaler.state_dict()
    yield "loaders", [loader.state_dict() for loader in engine._loaders]


__all__ = ["Loading", "candidates", "index_and_tree", "opened", "restore", "set_options"]
