"""What the interfaces have in common: ranks along axes, plans, modules with engines made late, optimizers."""

from __future__ import annotations

import math
import os
import random
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import nn

from espalier.comm.control import gather_objects
from espalier.device import count
from espalier.engine import Engine, EngineModule, initialize
from espalier.engine.module import optimizer_of
from espalier.mesh import Mesh
from espalier.mesh.mesh import group_among
from espalier.mesh.process import World, running_size
from espalier.parallel import Plan
from espalier.parallel.plan import known_as
from espalier.parallel.tensor.tables import unstyled
from espalier.tensor.observers import tell
from espalier.texts import dtype_name, refuse

# ---- the ranks that differ from this one along some axes, as programs of other systems ask for them


class Axes(NamedTuple):
    """The ranks that differ from this one along some axes of a mesh."""

    mesh: Mesh
    axes: tuple[int, ...]

    @classmethod
    def among(cls, mesh: Mesh, names: Iterable[str]) -> Axes:
        """Those of these names that the mesh has, and that have several ranks."""
        there = [mesh.axis(name) for name in names if name in mesh.names]
        return cls(mesh, tuple(axis for axis in there if mesh.shape[axis] > 1))

    @property
    def size(self) -> int:
        """How many there are."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def rank(self) -> int:
        """This one among them."""
        return self.mesh.place(self.axes)

    @property
    def ranks(self) -> list[int]:
        """The world's numbers of them."""
        names = tuple(self.mesh.names[axis] for axis in self.axes)
        return list(self.mesh[names].ranks) if names else [self.mesh.world_rank]

    def group(self) -> Any:
        """Their process group, see :func:`group_of`."""
        if 1 < self.size < running_size():
            return self.mesh[tuple(self.mesh.names[axis] for axis in self.axes)].whole_group()
        return group_of(self.ranks)


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A process group, made when it is first asked for: all of its ranks must ask. None without a world."""
    if not dist.is_initialized():
        return None
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    groups: dict[tuple[int, ...], dist.ProcessGroup] = World.own().setdefault("groups", {})
    among = tuple(sorted(ranks))
    if among not in groups:
        groups[among] = group_among(among)
    return groups[among]


# ---- a plan for the running world, modules that make their engine late

# why trainers that scale losses by themselves have no pipelines in float16, and who has
NO_SCALER = (
    "with plan.pipe > 1 the loss is where it was made, and no other rank sees a gradient overflow: use "
    "bfloat16; or a loop around espalier.prepare(..., plan={'pipe': 2, 'precision': 'float16'}), whose "
    "engine scales"
)


def counts_one(batch: Any) -> int:
    """Micro-batches count alike, whatever tokens they have: as in DeepSpeed and in Colossal-AI."""
    return 1


def world_size() -> int:
    """Ranks of the running world, whether it was joined yet or not."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def plan_for_world(said: Mapping[str, Any], more: Plan | Mapping[str, Any] | None = None) -> Plan:
    """A plan of what a program says, and of what is said ``more``, which holds; the rest is ``data``."""
    if isinstance(more, Plan):
        return more
    fields = {**said, **known_as(more or {})}
    if "data" not in fields:
        others = ("pipe", "replicate", "tensor", "context", "branch")
        beside = math.prod(int(fields.get(name, 1)) for name in others)
        fields["data"] = max(world_size() // beside, 1)
    return Plan(**fields)


def tell_of_ranks(told: str) -> None:
    """Tell a program without other ranks, on a machine with several devices, how all of them are used best.

    Args:
        told: what it does instead, with ``{devices}``.
    """
    if world_size() == 1 and (devices := count()) > 1:
        tell(
            f"{told.format(devices=devices)}. "
            f"Ranks are processes: espalier run -n {devices} SCRIPT.py has one for each."
        )


class Readers:
    """Which ranks read rows of their own: those that differ on an axis that shares the batch.

    A collective where there are several ranks.

    Attributes:
        size: how many batches there are.
        place: which of them is this rank's.
        firsts: of each, the first rank that has it.
        is_shared: whether several ranks have one batch.
        among: how many ranks have each.
    """

    def __init__(self, mesh: Mesh, plan: Plan) -> None:
        place = mesh.place(map(mesh.axis, plan.batch_axes))
        places = gather_objects(place, mesh) if mesh.size() > 1 else [0]
        self.place, self.size = place, len(set(places))
        self.firsts = [places.index(i) for i in range(self.size)]
        self.is_shared = self.size < mesh.size()
        self.among = mesh.size() // self.size

    def one_of_each(self, total: torch.Tensor) -> torch.Tensor:
        """A sum over all ranks, as one in which each batch counts once."""
        return total / self.among if total.is_floating_point() else total // self.among


def seed_all(seed: int) -> None:
    """Of Python's, NumPy's and torch's generators."""
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002  # that of programs which draw by numpy.random
    torch.manual_seed(seed)


def make_folder_of(filename: str | Path) -> None:
    """Make the folder that a file is to be in."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def precision_of(
    compute: torch.dtype | None, reduce: torch.dtype | None, buffers: torch.dtype | None = None
) -> dict[str, Any]:
    """A plan's precision of the dtypes of parameters, sums, buffers; scaling is the program's own affair."""
    low = compute if compute in (torch.bfloat16, torch.float16) else None
    precision: dict[str, Any] = {"compute": "float32" if low is None else dtype_name(low)}
    for key, dtype in (("reduce", reduce), ("buffers", buffers)):
        if dtype is not None and dtype in (torch.float32, torch.bfloat16, torch.float16):
            precision[key] = dtype_name(dtype)
    if low is torch.float16:
        precision["loss_scale"] = {"init_scale": 1.0, "growth_factor": 1.0}
    return precision


class _Note:
    """In a model: which engine it is laid out by. A copy of the model has none."""

    def __init__(self, engine: Callable[[], Engine | None] = lambda: None) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> _Note:
        return _Note()

    def __reduce__(self) -> Any:
        return _Note, ()


_NOTE = "_engine_of_trainer"


def note_engine(engine: Engine, *, keeps: bool) -> None:
    """Let an engine's model know it, for a Trainer that comes later.

    Args:
        keeps: whether the engine stays as long as its model; else as long as anyone else has it.
    """
    vars(engine.module)[_NOTE] = _Note((lambda: engine) if keeps else weakref.ref(engine))


def noted_engine(model: nn.Module) -> Engine | None:
    """The engine that an earlier Trainer has laid a model out by, if it is still there."""
    note: _Note | None = vars(model).get(_NOTE)
    return None if note is None else note.engine()


def axis_of_styles(
    owner: str,
    module: nn.Module,
    said: Mapping[str, Any],
    more: Plan | Mapping[str, Any] | None,
    mesh_of: Callable[[Plan], Mesh | None],
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """What a program says of a plan, and of layouts, with what ``parallelize_module`` has done to its module.

    Raises:
        MistakeError: the axis that it cut along is not the innermost.
    """
    meshes, layouts, cuts_sequences = unstyled(module)
    if not meshes:
        return dict(said), None
    along = meshes[0]
    said = {
        **said,
        "tensor": along.size(),
        "sequence_parallel": cuts_sequences and along.size() > 1,
    }
    plan = plan_for_world(said, more)
    inner = (mesh_of(plan) or Mesh.from_env(plan.axes)).ranks
    first = along.ranks[0] // along.size() * along.size()
    if any(mesh.ranks != inner[first : first + along.size()] for mesh in meshes):
        expected = "expected the mesh's last axis: init_device_mesh(..., mesh_dim_names=('dp', 'tp'))"
        refuse(owner, [("parallelize_module", ", ".join(map(repr, meshes)), expected)])
    return said, layouts


class LateModule(EngineModule):
    """A module that makes its engine when it is first called: by then the program has said all, and has made
    its optimizer.

    Args:
        module: the plain model.
        said: the plan that the program asks for.
        more: a plan, or keys of one, that hold in place of what is said.
        mesh_of: the mesh on which a plan lays it; by default that of all its axes.

    Attributes:
        layouts: of modules on the tensor axis, as for :func:`espalier.initialize`.
        mistakes: are told when it makes an engine of its own; as a part of another model it does not.
    """

    def __init__(
        self,
        module: nn.Module,
        rows: Any,
        said: Mapping[str, Any],
        more: Plan | Mapping[str, Any] | None = None,
        mesh_of: Callable[[Plan], Mesh | None] = lambda plan: None,
    ) -> None:
        nn.Module.__init__(self)
        self.rows, self.said, self.more, self._mesh_of = rows, dict(said), more, mesh_of
        self.layouts: Mapping[str, str] | None = None
        self.mistakes: list[tuple[str, Any, str]] = []
        self.module = module
        self.training = module.training
        self._made: Engine | None = None

    @property
    def is_made(self) -> bool:
        """Whether the model is laid out already."""
        return self._made is not None

    @property
    def engine(self) -> Engine:
        """The engine that trains the model; it is made now, if it was not."""
        if self._made is None:
            refuse(type(self).__name__, self.mistakes)
            optimizer = optimizer_of(self.module)
            if optimizer is not None:
                self.said |= getattr(optimizer, "asks_for", {})
            name = type(self).__name__
            self.said, layouts = axis_of_styles(name, self.module, self.said, self.more, self._mesh_of)
            self.layouts = self.layouts if layouts is None else layouts
            plan = plan_for_world(self.said, self.more)
            mesh = self._mesh_of(plan) if world_size() > 1 else None
            self._made = initialize(self.module, optimizer, plan, mesh=mesh, layouts=self.layouts)
            self._made.gives_whole_states = True
        return self._made

    @property
    def device(self) -> torch.device:
        """This rank's."""
        if self._made is None:
            return next(self.module.parameters()).device
        return self._made.device

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any) -> Any:
        """With plain whole tensors (a collective where the plan cuts parameters or casts them)."""
        if self._made is not None:
            return super().state_dict(destination=destination, prefix=prefix)
        return self.module.state_dict(destination=destination, prefix=prefix)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False, **options: Any
    ) -> Any:
        """Of whole tensors, the same on all ranks."""
        if self._made is not None:
            return super().load_state_dict(state_dict, strict, **options)
        return self.module.load_state_dict(state_dict, strict, assign, **options)


# ---- optimizers of other systems that torch lacks: operation by operation, exact on whatever layout


class OneByOne(torch.optim.Optimizer):
    """Updates one parameter after the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update.

        Returns:
            what ``closure`` gives.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(group, p, p.grad)
        return loss

    @abstractmethod
    def _update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> None:
        """Let a parameter be what it is after the step."""
