"""What an engine is at a step: as a tree of tensors and values, to save and to load."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import nn

from espalier.blocks import named_parameters_in, named_tensors_in, parameters_in
from espalier.checkpoint import Checkpoint, CheckpointError, Index, Lying, encode
from espalier.checkpoint.foreign import Foreign, mixed_options, strange_options, tied
from espalier.checkpoint.index import FormatError, TensorInfo
from espalier.checkpoint.saver import index_of
from espalier.checkpoint.sinks import Write, cannot_be_written, laid_out, root_of, stream
from espalier.checkpoint.sources import Loaded, TensorSource, is_extra_state, open_any
from espalier.comm.collectives import reduce, sum_whole
from espalier.comm.control import agree, gather_objects
from espalier.comm.redistribute import carry_out
from espalier.device import get_rng_state, set_rng_state
from espalier.engine.beside import is_beside, named_trained, names_of_trained
from espalier.engine.by_model import load_by_model, loads_by_itself, with_notes_of
from espalier.engine.loader import Loader, restore_loaders
from espalier.engine.norm import LossScaler
from espalier.engine.passes import Passes
from espalier.engine.states import apart, like_parameter
from espalier.layout import Layout, Shard, local_box
from espalier.layout.layout import Box, overlap
from espalier.meanwhile import call_if_there
from espalier.mesh import Mesh
from espalier.parallel.data.zero import ZeroState
from espalier.parallel.several import parts_of
from espalier.tensor import DTensor, full_tensor, layout_of, plain, stamp
from espalier.tensor.dtensor import is_sparse
from espalier.tensor.loans import before_handing_out, is_handed_out
from espalier.tensor.random import state_of_keys
from espalier.texts import dtype_name, listed
from espalier.torch_private import raw

_RANDOM, _STREAMS = "random.torch", "random.device"  # the latter has a row for each rank


def tree_of(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    mesh: Mesh,
    saves: Callable[[str], bool] = lambda name: True,
    state: Mapping[str, Any] | None = None,
) -> dict[str, Lying]:
    """The tensors of a model and its optimizer by name, as they lie; each tensor once.

    Args:
        saves: whether a parameter is to be in it.
        state: the model's state dict, its own tensors, where it is at hand.
    """
    tree: dict[str, Lying] = {}
    for name, x in tensors_of(_all_of(module) if state is None else state).items():
        if not isinstance(x, DTensor):
            tree[f"model.{name}"] = _lying(x, _mesh_of(module, name, mesh))
        elif saves(name):
            tree[f"model.{name}"] = _lying(x, mesh, steady=isinstance(x, nn.Parameter))
    if optimizer is not None:
        for name, p in named_trained(module, optimizer):
            states = optimizer.state.get(p, {})
            if is_beside(name):
                tree[_value_at(name)] = _lying(p, mesh)
            for key in sorted(states, key=str):  # on other ranks they may have come in another order
                x = states[key]
                if isinstance(x, torch.Tensor) and (is_beside(name) or saves(name)):
                    on = layout_of(p).mesh if isinstance(p, DTensor) else mesh
                    tree[f"optimizer.state.{name}.{key}"] = _lying(x, on, steady=x.ndim > 0)
    return tree


def await_before_handing_out(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, waits: WeakMethod[Callable[[], None]]
) -> None:
    """Have who takes an alias of a parameter or state (``p.data``) wait: nothing counts its writes."""

    wait = partial(call_if_there, waits)
    states = [] if optimizer is None else [x for state in optimizer.state.values() for x in state.values()]
    for x in (*parameters_in(module), *states):
        if isinstance(x, DTensor):
            before_handing_out(x, wait)


def _value_at(name: str) -> str:
    """Where a checkpoint has a parameter."""
    return f"optimizer.{name}" if is_beside(name) else f"model.{name}"


def tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters and buffers that a state dict has, each under its first name."""
    aliases = aliases_of(state)
    return {name: x for name, x in state_tensors(state).items() if f"model.{name}" not in aliases}


def aliases_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Further names that a checkpoint has of tensors of a state dict, and their first."""
    first: dict[int, str] = {}
    known = {name: first.setdefault(id(x), name) for name, x in state_tensors(state).items()}
    return {f"model.{name}": f"model.{of}" for name, of in known.items() if name != of}


def groups_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups: names of parameters, and options."""
    names = names_of_trained(module, optimizer)
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
    state = _all_of(module)
    _refuse_sparse(state)
    tree = tree_of(module, optimizer, mesh, saves, state)

    def take(at: str, x: torch.Tensor) -> str:
        while at in tree:  # {1: x, "1": y}
            at += "'"
        tree[at] = _lying(x, mesh)
        return at

    said = dict(values)
    said["extra"] = {k: x.state_dict() if hasattr(x, "state_dict") else x for k, x in extra.items()}
    said["model"] = {n: x for n, x in state.items() if is_extra_state(n)}
    if optimizer is not None:
        said["optimizer"] = {
            "class": _kind_of(optimizer),
            "groups": groups_of(module, optimizer),
            "states": {
                name: {k: x for k, x in optimizer.state.get(p, {}).items() if not isinstance(x, torch.Tensor)}
                for name, p in named_trained(module, optimizer)
            },
        }
    encoded = {key: encode(value, key, take) for key, value in said.items()}
    take(_RANDOM, state_of_keys(mesh))
    if (stream := device_stream(mesh)) is not None:
        row = stream.get()[None].cpu()
        lies = Layout(mesh, [Shard(0)] * mesh.ndim, (mesh.size(), row.shape[1]))
        tree[_STREAMS] = Lying(row, lies)
    index = Index(values=encoded, aliases=aliases_of(state), tensors=index_of(tree))
    return index, tree


class GeneratorState(NamedTuple):
    """What gets and what sets the state of a generator, bytes in the host's memory."""

    get: Callable[[], torch.Tensor]
    set: Callable[[torch.Tensor], None]


def device_stream(mesh: Mesh) -> GeneratorState | None:
    """That of this rank's device; None on a CPU, whose stream is torch's own."""
    if mesh.device_type == "cpu":
        return None
    device = mesh.device()
    return GeneratorState(partial(get_rng_state, device), partial(set_rng_state, device))


def agreed(error: Exception | None, mesh: Mesh, kind: type[Exception] = CheckpointError) -> None:
    """Raise on all ranks, as an error of one kind, what one of them has met (a collective)."""
    met = None if error is None else kind(str(error))
    if met is not None:
        met.__cause__ = error
    agree(met, mesh, range(mesh.ndim))


Everywhere = Callable[[str, torch.Tensor], torch.Tensor]
Values = Mapping[torch.Tensor, torch.Tensor]


class EngineState(NamedTuple):
    """What a checkpoint holds of an engine, beside the number of its steps.

    Attributes:
        everywhere: gives the whole value, on every rank, of what has a name and lies somehow.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    mesh: Mesh
    scaler: LossScaler | None
    loaders: tuple[Loader, ...]
    everywhere: Everywhere


def restore(
    own: EngineState,
    checkpoint: Checkpoint,
    data: ZeroState | None,
    extra: Mapping[str, Any],
    model_only: bool,
) -> Mapping[str, Any]:
    """Take a checkpoint over; gives the values in it, among them ``steps`` and ``extra``.

    Args:
        data: None while the model is the plain one: then it and the optimizer take whole values over.

    Raises:
        ValueError: on all ranks, if model, optimizer and checkpoint of one don't fit together: then nothing
            was changed.
        CheckpointError: on all ranks, if one of them met a damaged file.
    """
    module, mesh = own.module, own.mesh
    optimizer = None if model_only else own.optimizer
    values = checkpoint.values
    lines = conflicts(checkpoint, module, optimizer)
    lines += [f"it has no {name!r}" for name in extra if name not in values["extra"]]
    positions = () if model_only else zip(own.loaders, values.get("loaders") or (), strict=False)
    lines += [line for loader, state in positions for line in loader.differences(state)]
    agreed(told_conflicts(checkpoint, lines), mesh, ValueError)
    loading = Loading(checkpoint, module, optimizer, mesh)
    loading.run(data, own.optimizer)
    _set_extra_states(module, values["model"])
    random = torch.get_rng_state()
    loading.read(_RANDOM, random, Layout.replicated(mesh, tuple(random.shape)))
    stream, row = device_stream(mesh), None
    if stream is not None and _STREAMS in checkpoint.entries:
        rows, n = checkpoint.entries[_STREAMS].shape
        row = torch.empty(1, n, dtype=torch.uint8)
        loading.take(_STREAMS, row, Box((mesh.rank % rows, 0), (1, n)))
    agreed(loading.error, mesh)
    if loads_by_itself(module):
        state = _whole_state(checkpoint, _all_of(module), mesh)
        take_state(own, data, partial(nn.Module.load_state_dict, module, state))
    if not model_only:
        torch.set_rng_state(random)
        if stream is not None and row is not None and row[0].shape == stream.get().shape:
            stream.set(row[0])
        if own.scaler is not None and values["scaler"] is not None:
            own.scaler.load_state_dict(values["scaler"])
        if optimizer is not None:
            set_options(optimizer, module, values["optimizer"]["groups"])
        restore_loaders(own.loaders, values.get("loaders"))
    for name, thing in extra.items():
        thing.load_state_dict(values["extra"][name])
    return values


class Loading:
    """Fills parameters and states from a checkpoint. Errors are kept: others wait in collectives.

    Args:
        checkpoint: has ``model.NAME`` and ``optimizer.state.NAME.KEY``, and the value ``optimizer``.
        optimizer: whose states are to be filled, too.
        mesh: on which plain tensors are whole.
    """

    def __init__(
        self, checkpoint: TensorSource, module: nn.Module, optimizer: torch.optim.Optimizer | None, mesh: Mesh
    ) -> None:
        self._checkpoint, self._module, self._optimizer, self._mesh = checkpoint, module, optimizer, mesh
        self._names = names_of_trained(module, optimizer)
        self._states = {} if optimizer is None else states_of(checkpoint)
        self._others = {} if optimizer is None else checkpoint.values["optimizer"]["states"]
        self.error: Exception | None = None

    def run(self, data: ZeroState | None, optimizer: torch.optim.Optimizer | None) -> None:
        """Fill all (a collective).

        Args:
            data: None while parameters are plain: what they and the states hold then is cut with them.
        """
        filled = set()
        with torch.no_grad():
            if data is not None:
                data.fill(self.fill, {} if optimizer is None else optimizer.state)
                filled = {id(m.p) for chunk in data.chunks for m in chunk.members}
            for name, x in tensors_of(_all_of(self._module)).items():
                if id(x) in filled:
                    continue
                if isinstance(x, nn.Parameter):  # it is plain yet, or frozen
                    self.fill(x)
                else:
                    self.read(f"model.{name}", x.detach(), layout_of(x, self._mesh))
            for name, p in named_trained(self._module, self._optimizer):
                if is_beside(name):
                    self.fill(p)

    def fill(self, p: torch.Tensor) -> None:
        """A parameter, and its states."""
        layout, name = layout_of(p, self._mesh), self._names.get(id(p))
        if name is None or not layout.mesh.is_member:  # the program has put another in its place
            return
        with raw():
            here = plain(p.detach())
            self.read(_value_at(name), here, layout)
            if self._optimizer is not None:
                state = self._state(name, here, layout, isinstance(p, DTensor))
                if state or p in self._optimizer.state:
                    self._optimizer.state[p] = state

    def _state(self, name: str, here: torch.Tensor, layout: Layout, stamped: bool) -> dict[str, Any]:
        state: dict[str, Any] = {}
        saved = self._checkpoint.entries[_value_at(name)]
        for key, entry in self._states.get(name, {}).items():
            lies, dtype = like_parameter(layout, entry.shape), entry.dtype
            if dtype is saved.dtype and dtype.is_floating_point and entry.shape:
                dtype = here.dtype
            device = torch.device("cpu") if not entry.shape and key == "step" else here.device
            x = torch.empty(lies.local_shape, dtype=dtype, device=device)
            self.read(f"optimizer.state.{name}.{key}", x, lies)
            state[key] = stamp(x, lies) if entry.shape and stamped else x
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


def _refuse_sparse(state: Mapping[str, Any]) -> None:
    """Files hold values in a row.

    Raises:
        ValueError: a buffer of a state dict has none.
    """
    for name, x in state.items():
        if isinstance(x, torch.Tensor) and is_sparse(x):
            raise ValueError(
                f"The buffer {name!r} is sparse ({x.layout}), and files hold dense tensors. Register it with "
                "persistent=False, if the program makes it anew; else register its indices and values."
            )


def held(p: nn.Parameter) -> torch.Tensor:
    """See :meth:`espalier.Engine.held_parameter`."""
    with raw():
        here = plain(p.detach()).clone()
        return stamp(here, layout_of(p)) if isinstance(p, DTensor) else here


def set_parameters(own: EngineState, data: ZeroState | None, values: Values) -> None:
    """Let parameters, and their float32 masters, be tensors; ``data`` as for :func:`restore`.

    Args:
        values: by parameter; whole and the same on all ranks, or DTensors.

    Raises:
        ValueError: one has another shape.
    """
    for p, value in values.items():
        if value.shape != p.shape:
            raise ValueError(
                f"A parameter has the shape {list(p.shape)}, the value that it is to take "
                f"{list(value.shape)}: expected the same."
            )

    def fill(p: torch.Tensor) -> None:
        value = values.get(p)
        if value is None or not (layout := layout_of(p)).mesh.is_member:
            return
        if isinstance(value, DTensor):
            part = plain(carry_out(plain(value.detach()), layout_of(value), layout))
        else:
            part = value.detach()[local_box(layout).slices]
        with raw():
            plain(p.detach()).copy_(part)

    trained = set() if data is None else {m.p for chunk in data.chunks for m in chunk.members}
    with torch.no_grad():
        if data is not None and not trained.isdisjoint(values):
            data.fill(fill, {} if own.optimizer is None else own.optimizer.state)
        for p, value in values.items():
            if p in trained:
                continue
            if isinstance(p, DTensor):
                fill(p)
            else:
                p.copy_(full_tensor(value))


def take_state(own: EngineState, data: ZeroState | None, load: Callable[[], Any]) -> Any:
    """Have a model that loads by itself do so, by ``load``; ``data`` as for :func:`restore`."""
    if data is None:
        return load()
    parameters = dict(named_parameters_in(own.module, remove_duplicate=False))
    whole: dict[nn.Parameter, nn.Parameter] = {}
    with torch.no_grad(), data.precise():
        for name, p in parameters.items():
            if p not in whole:
                whole[p] = nn.Parameter(own.everywhere(name, p).clone(), p.requires_grad)
    given, after = load_by_model(own.module, {name: whole[p] for name, p in parameters.items()}, load)
    set_parameters(own, data, {p: after[name] for name, p in parameters.items() if name in after})
    return given


def set_options(optimizer: torch.optim.Optimizer, module: nn.Module, groups: list[Any]) -> None:
    names = names_of_trained(module, optimizer)
    saved = {name: group["options"] for group in groups for name in group["names"]}
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        for key, value in saved[names[id(group["params"][0])]].items():
            if key in ("foreach", "fused", "capturable", "differentiable"):
                continue  # how it computes, not what
            present = group.get(key)
            if isinstance(present, torch.Tensor):
                present.copy_(torch.as_tensor(value))
            else:
                group[key] = value


def _lying(x: torch.Tensor, mesh: Mesh, *, steady: bool = False) -> Lying:
    with raw():
        if isinstance(x, DTensor):
            return Lying(plain(x.detach()), x._layout.own, steady and not is_handed_out(x))
        return Lying(x.detach(), Layout.replicated(mesh, tuple(x.shape)), steady)


def _mesh_of(module: nn.Module, name: str, mesh: Mesh) -> Mesh:
    """The ranks that hold a buffer: those that hold the parameters about it."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        meshes = {
            layout_of(p).mesh for p in parameters_in(module.get_submodule(path)) if isinstance(p, DTensor)
        }
        if meshes:
            return meshes.pop() if len(meshes) == 1 else mesh
    return mesh


def named_values(own: EngineState, steps: int) -> Iterator[tuple[str, Any]]:
    """What an engine itself counts."""
    yield "steps", steps
    yield "scaler", None if own.scaler is None else own.scaler.state_dict()
    yield "loaders", [loader.state_dict() for loader in own.loaders]


# ---- what keeps a checkpoint from being loaded


_SHOWN = 40
# what jobs with Muon were once saved as
_FORMER_KINDS = {"Muon and AdamW": "Mixed"}


def _own_state(module: nn.Module) -> dict[str, Any]:
    """A model's state dict as it gives it, with its parameters themselves."""
    return module.state_dict(keep_vars=True)


def _all_of(module: nn.Module) -> dict[str, Any]:
    """The same under torch's own names, of all that there is: the model may leave out or rename some."""
    return nn.Module.state_dict(module, keep_vars=True)


def state_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a state dict."""
    return {name: x for name, x in state.items() if not is_extra_state(name)}


def states_of(checkpoint: TensorSource) -> dict[str, dict[str, TensorInfo]]:
    """The optimizer's states that are tensors, by parameter and kind."""
    states: dict[str, dict[str, TensorInfo]] = {}
    for name, entry in checkpoint.under("optimizer.state.").items():
        parameter, _, key = name.rpartition(".")
        states.setdefault(parameter, {})[key] = entry
    return states


def conflicts(
    checkpoint: Checkpoint,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> list[str]:
    """One line for each."""
    state = _all_of(module)
    tensors = state_tensors(state)
    saved = {n: e for n, e in checkpoint.under("model.").items() if "_extra_state" not in n.split(".")}
    lines = [f"missing from it: {n} {list(x.shape)}" for n, x in tensors.items() if n not in saved]
    told = checkpoint.values["model"]
    lines += [f"missing from it: {n}" for n in state if n not in tensors and n not in told]
    lines += [f"not in the model: {n}" for n in told if n not in state]
    lines += [f"not in the model: {n} {list(e.shape)}" for n, e in saved.items() if n not in tensors]
    lines += [
        f"{name}: {list(entry.shape)} in it, {list(tensors[name].shape)} in the model"
        for name, entry in saved.items()
        if name in tensors and tuple(tensors[name].shape) != entry.shape
    ]
    if optimizer is not None:
        lines += _of_optimizer(checkpoint.values, module, optimizer)
    return lines


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    return " and ".join(type(part).__name__ for part in parts_of(optimizer))


def _of_optimizer(
    values: Mapping[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer
) -> list[str]:
    known = values.get("optimizer")
    if known is None:
        return ["it has no optimizer: initialize the engine without one, or load(..., model_only=True)"]
    if known["class"] is None:  # it was imported
        if strange := strange_options(known["groups"], optimizer):
            return strange
    elif known["class"] not in (kind := _kind_of(optimizer), _FORMER_KINDS.get(kind)):
        return [f"its optimizer is {known['class']}, not {kind}"]
    names = names_of_trained(module, optimizer)
    saved = {name for group in known["groups"] for name in group["names"]}
    grouped = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    lines = [f"its optimizer does not hold {name}" for held in grouped for name in held if name not in saved]
    return lines + mixed_options(known["groups"], grouped)


def told_conflicts(checkpoint: Checkpoint, lines: Sequence[str]) -> ValueError | None:
    """An error that tells all of them, if there are some."""
    if not lines:
        return None
    return ValueError(
        listed(f"{checkpoint.path} does not fit this engine; nothing was changed:", lines, _SHOWN)
    )


# ---- weights of other formats, read into a laid-out model and written from it


def load_weights(
    own: EngineState, data: ZeroState | None, path: str | Path | Mapping[str, Any], optimizer: bool
) -> None:
    """See :meth:`espalier.Engine.load_weights`; ``data`` as for :func:`restore`."""
    module, trained = own.module, own.optimizer if optimizer else None
    weights, source, error = None, None, None
    try:
        source = Loaded(Path("The state dict"), path) if isinstance(path, Mapping) else open_any(path)
        weights = Foreign(source, module, trained)
    except (FormatError, OSError) as met:
        error = met
    by_itself = loads_by_itself(module)
    if source is None or trained is not None or not by_itself:  # else it may know names that don't fit
        agreed(error, own.mesh, ValueError)
    if weights is not None and (trained is not None or not by_itself):
        loading = Loading(weights, module, trained, own.mesh)
        loading.run(data, own.optimizer)
        agreed(loading.error, own.mesh, ValueError)
        _set_extra_states(module, weights.values["model"])
    if by_itself and source is not None:
        of = source.entries if weights is None else _own_state(module)
        state = _whole_state(source if weights is None else weights, of, own.mesh)
        take_state(own, data, partial(module.load_state_dict, state))
    if weights is not None and trained is not None:
        set_options(trained, module, weights.values["optimizer"]["groups"])


def _whole_state(source: TensorSource, like: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """A state dict of all that a source has of a model, plain and whole.

    Args:
        like: has the names; those of a source itself stand in it as they are.
    """
    before = "" if like is source.entries else "model."
    said = source.values if like is source.entries else source.values["model"]
    state: dict[str, Any] = {name: x for name, x in said.items() if is_extra_state(name)}
    error: Exception | None = None
    try:
        state |= {name: source.read(at) for name in like if (at := f"{before}{name}") in source.entries}
    except CheckpointError as met:
        error = met
    agreed(error, mesh)
    return with_notes_of(like, state)


def _set_extra_states(module: nn.Module, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


class WeightsFormat(NamedTuple):
    """How weights are to be written; see :meth:`espalier.Engine.export`."""

    name: str
    dtype: torch.dtype | None
    shard_bytes: int
    metadata: Mapping[str, str] | None


def export(model: nn.Module, data: ZeroState, passes: Passes, path: str | Path, form: WeightsFormat) -> None:
    """See :meth:`espalier.Engine.export`."""
    mesh, path = passes.mesh, Path(path)
    kind = "file" if form.name == "safetensors" and path.suffix == ".safetensors" else form.name
    with torch.no_grad(), data.precise(), ExitStack() as stack:
        own = _own_state(model)
        _refuse_sparse(own)
        root, ties = root_of(kind), {} if kind == "file" else tied(model)
        parameters = set(map(id, parameters_in(model)))

        def lies_alike(x: torch.Tensor) -> bool:
            """On all ranks; what a stage's forward puts in a buffer's place is plain where it did not run."""
            return isinstance(x, DTensor) and ("pipe" not in mesh.names or id(x) in parameters)

        state = {
            f"{root}{name}": x if lies_alike(x) else passes.everywhere(name, x)
            for name, x in own.items()
            if isinstance(x, torch.Tensor) and name not in ties
        }
        dtypes = _dtypes(state, mesh)
        ties = {f"{root}{name}": f"{root}{of}" for name, of in ties.items()}
        entries = {
            name: TensorInfo(tuple(x.shape), dtypes[name]).cast(form.dtype) for name, x in state.items()
        }
        writing = _Writing(path)
        if mesh.rank == 0:
            with writing.careful():
                sink = laid_out(path, kind, entries, ties, form.shard_bytes, form.metadata)
                stack.push(sink)
                writing.write = sink.write
        agreed(writing.error, mesh, ValueError)

        first_names = {id(p): name for name, p in named_parameters_in(model)}

        def read(name: str, box: Box) -> torch.Tensor:
            x = state[name]
            gives = passes.saves(first_names.get(id(x), name))
            return _on_first(x, box, dtypes[name], mesh, gives).to(entries[name].dtype)

        stream(entries, read, writing)
        agreed(writing.error, mesh, ValueError)
        if mesh.rank == 0:
            with writing.careful():
                stack.close()
                if kind == "safetensors":
                    _write_config(model, entries, path)
        agreed(writing.error, mesh, ValueError)


class _Writing:
    """Writes on the first rank; an error is kept, so that all ranks go on together."""

    def __init__(self, path: Path) -> None:
        self._path = path
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
        except OSError as met:
            self.error = ValueError(cannot_be_written(self._path, met))
        except Exception as met:
            self.error = met


def _dtypes(state: Mapping[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.dtype]:
    """Those of tensors on the ranks that hold them: others do not know of masters."""
    own_dtypes = {
        n: x.dtype for n, x in state.items() if not isinstance(x, DTensor) or layout_of(x).mesh.is_member
    }
    return {name: dtype for dtypes in gather_objects(own_dtypes, mesh) for name, dtype in dtypes.items()}


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
            box_here = local_box(layout)
            common = overlap(box_here, box)
            if common is not None:
                out[common.within(box)] = plain(x.detach())[common.within(box_here)]
        # each byte is zero but on one rank: their sum is exact
        wire = out.view(-1).view(torch.uint8)
        for axis in range(mesh.ndim):
            wire = reduce(wire, mesh, axis, 0)
        return wire.view(dtype).view(box.sizes)


def _write_config(model: Any, entries: Mapping[str, TensorInfo], folder: Path) -> None:
    """What ``from_pretrained`` of Hugging Face's models wants beside the weights."""
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    floats = [entry.dtype for entry in entries.values() if entry.dtype.is_floating_point]
    config.dtype = dtype_name(floats[0] if floats else torch.float32)
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)


# ---- what the ranks hold together, whole on each of them


def state_of(model: nn.Module, everywhere: Everywhere) -> dict[str, Any]:
    """A model's state dict; tied tensors are one, gathered once.

    Args:
        everywhere: gives the whole value, on every rank, of what has a name and lies somehow.
    """
    state, values = _own_state(model), dict[int, torch.Tensor]()
    with torch.no_grad():
        every = named_tensors_in(model, remove_duplicate=False)
        names = {id(x): name for name, x in reversed(every)}  # a state dict may have others
        for name, x in state.items():
            if isinstance(x, torch.Tensor) and id(x) not in values:
                known = names.get(id(x), name)
                values[id(x)] = x.detach() if is_sparse(x) else everywhere(known, x.detach())
    return with_notes_of(state, apart({name: values.get(id(x), x) for name, x in state.items()}))


def whole_values(state: Mapping[str, Any], mesh: Mesh, everywhere: Everywhere) -> dict[str, Any]:
    """A state dict whose DTensors are plain global values on every rank (a collective).

    Args:
        everywhere: as for :func:`state_of`, of what lies in a stage or branch.
    """
    in_parts = {n for n, x in state.items() if type(x) is DTensor and layout_of(x).mesh.size() < mesh.size()}
    if "pipe" in mesh.names and not mesh.is_dry:
        # what a forward puts in a buffer's place is a DTensor where it ran, and plain elsewhere
        in_parts = set().union(*gather_objects(in_parts, mesh))

    def whole(name: str, x: Any) -> Any:
        if name in in_parts:
            return everywhere(name, x)
        return x.full_tensor() if hasattr(x, "full_tensor") else x

    return {name: whole(name, x) for name, x in state.items()}


def gradients_of(model: nn.Module, mesh: Mesh, everywhere: Everywhere) -> dict[str, torch.Tensor | None]:
    """The gradients of its parameters; None where no rank has one."""
    parameters = dict(named_parameters_in(model))
    grads = {name: p.grad for name, p in parameters.items()}
    with raw():
        has = [float(g is not None) for g in grads.values()]
        used = sum_whole(torch.tensor(has, device=mesh.device()), mesh).tolist()
    gradients: dict[str, torch.Tensor | None] = {}
    with torch.no_grad():
        for (name, p), n in zip(parameters.items(), used, strict=True):
            grad = grads[name]
            gradients[name] = everywhere(name, p if grad is None else grad) if n else None
    return gradients
