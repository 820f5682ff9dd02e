"""The mesh: ranks laid out on named axes.

A mesh is one of three things to the code above it, and all three look the same:

* *real*: ranks of an initialised ``torch.distributed`` world (a ``DeviceMesh`` underneath);
* *single*: one process, every axis of size 1, no process group at all;
* *dry*: any shape, no other process. Collectives on it return tensors of the right shape
  without moving anything, so the code that trains also predicts.

A mesh may name a part of the world's ranks. All ranks build it, and all run the same program: on those
outside it is dry, so they follow the shapes of its tensors and neither compute nor communicate.
"""

from __future__ import annotations

import atexit
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from espalier.device import (
    accelerator,
    backend_of,
    choose,
    current,
    is_accelerator,
    of_further_groups,
    of_world,
)
from espalier.meanwhile import having
from espalier.mesh.hosts import unjoined
from espalier.mesh.process import running_size, start
from espalier.texts import expect, shown, whole
from espalier.torch_private import backend_for, disable_modes, forget_groups, mesh_resources, root_mesh

MAX_AXES = 8
_MOST_RANKS = 1 << 20


class Mesh:
    """Ranks on named axes; immutable.

    Use :meth:`from_env`, :meth:`from_torch`, :meth:`single` or :meth:`dry`. ``mesh["tensor"]`` is the mesh of
    one axis, or of several. It also answers to the names of torch's ``DeviceMesh``.

    Attributes:
        names: the axes' names, outermost first.
        shape: the axes' sizes, in the same order.
        coordinate: this rank's position on each axis (zeros on a rank outside the mesh).
        device_type: where local tensors live (``"cpu"`` or an accelerator's type; ``"meta"`` on a dry mesh).
        ranks: the world's ranks that it is made of, the last axis varying fastest.
        world_rank: this process's rank in the world, or that from which a dry mesh is seen.
        is_member: whether ``world_rank`` is one of ``ranks``.
        ledgers: the open ledgers that traffic on this mesh is written to (see ``espalier.comm``).
        everywhere: those that are opened on every mesh there will be; ``known``: the meshes there are;
            ``built``: the running world, and its meshes (a cache); ``joined``: who is called when a world
            gets its first mesh.
        within: the mesh of which it is a coordinate's ranks (see ``espalier.mesh.parts.at``); None of others.
        copied: parameters that several coordinates have a copy of, as the last engine on it laid them out.
        beside: called with the tensors that a backward pass begins at, on it or a part of it, and what makes
            the pass: engines with stages here act before and after it. None where there are none.
        going: for each backward pass that a program makes, outermost first, what tells all ranks where it
            began (see ``espalier.tensor.told``): engines begin that.
        before_going: what sees that such a pass begins, ``see_begin()``.
        strangers: what sees that an optimizer which is no engine's steps by itself, ``see_step(optimizer)``.
        asked: what tells values on parts of it to the other ranks (see ``espalier.tensor.asked``); None where
            there are none.
        rows: the axes whose ranks share the rows of a batch, by all engines on it.
        put_together: how long are the parts of what a pass has put together along such rows (of an image's
            views, say), by how long that is.
        sums_at_once: whether it is a program's loop that computes with what a model gave (see
            ``espalier.tensor.told``).
        nests: how often a backward pass on it was to make another within itself (reentrant checkpoints), of
            each of which parameters may have gradients.
        passed: how many micro-batches of steps of several have gone back on it, by all engines.
        is_alike: of a part (see ``espalier.mesh.parts.among``), whether what lies on it does so as seen from
            all ranks, copies too.
        lately: what was gathered last, for the next operation that wants the same (a cache of one).
        kept: what stands for the last gathered tensor that the backward pass wants again, weakly.
        comparing: what compares gradients that nobody spoke of along all its axes (see
            ``espalier.tensor.compare``).
        emptied: memories that are emptied between their uses, by the address of each (see
            ``espalier.tensor.saved``), weakly.
        streams: the random keys that its ranks draw, by seeding (see ``espalier.tensor.random``).
        carriers: by axis, what carries its tensors of the CPU (see ``espalier.comm.collectives``).
        timed: by axis, what carries tensors of accelerators while that is timed (see
            ``espalier.comm.waits``).
        lanes: by axis, what carries messages alone, to higher coordinates and to lower ones, and the place
            there of each coordinate (see ``espalier.comm.collectives.open_lanes``).
        under_way: what compiled graphs have begun on it and not ended (see ``espalier.tensor.bucketing``).
        words: by axis, what a rule is told that may go several ways along it (see :meth:`telling`).
    """

    everywhere: ClassVar[tuple[Any, ...]] = ()
    known: ClassVar[weakref.WeakSet[Mesh]] = weakref.WeakSet()
    built: ClassVar[tuple[Any, dict[Any, Mesh]]] = (None, {})
    joined: ClassVar[tuple[Callable[[], object], ...]] = ()

    def __init__(
        self,
        names: tuple[str, ...],
        shape: tuple[int, ...],
        *,
        coordinate: tuple[int, ...],
        device_type: str,
        device_mesh: DeviceMesh | None = None,
        is_dry: bool = False,
        ranks: Sequence[int] | None = None,
        world_rank: int | None = None,
    ) -> None:
        _check_axes(names, shape)
        self.names = names
        self.shape = shape
        self.coordinate = coordinate
        self.device_type = device_type
        self.is_dry = is_dry
        self.ranks = tuple(range(math.prod(shape)) if ranks is None else map(int, ranks))
        _check_ranks(self.ranks, names, shape)
        place = place_at(coordinate, shape)
        self.world_rank = self.ranks[place] if world_rank is None else world_rank
        self.is_member = self.ranks[place] == self.world_rank
        self.ledgers: list[Any] = list(Mesh.everywhere)
        self._device_mesh = device_mesh
        Mesh.known.add(self)
        self.lately: Any = None
        self.kept: Any = None
        self.comparing: Any = None
        self.emptied: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.streams: dict[int, Any] = {}
        self.within: Mesh | None = None
        self.copied: tuple[str, ...] = ()
        self.beside: Callable[[Sequence[Any], Callable[[], None]], None] | None = None
        self.going: list[Any] = []
        self.before_going: weakref.WeakSet[Any] = weakref.WeakSet()
        self.strangers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.asked: Any = None
        self.rows: frozenset[int] = frozenset()
        self.put_together: dict[int, tuple[int, ...]] = {}
        self.sums_at_once, self.nests, self.passed = False, 0, 0
        self.is_alike = False
        self.under_way: dict[int, Any] = {}
        self._groups: list[dist.ProcessGroup | None] = [None] * len(names)
        self._backends: dict[tuple[int, torch.device], Any] = {}
        self.carriers: dict[int, Any] = {}
        self.timed: dict[int, Any] = {}
        self.lanes: dict[int, tuple[Any, Any, list[int]]] = {}
        self._index = {name: i for i, name in enumerate(names)}
        self._parts: dict[tuple[str, ...], Mesh] = {}
        if device_mesh is not None and self.is_member:
            self._groups = [device_mesh.get_group(i) if n > 1 else None for i, n in enumerate(shape)]
            _check_backends(self._groups, device_type)
        self._orders = [self._order(i, group) for i, group in enumerate(self._groups)]
        self._whole: dist.ProcessGroup | None = None
        self.words: Mapping[str, str] = {}
        self._telling: dict[tuple[tuple[str, str], ...], Mesh] = {}

    @staticmethod
    def from_env(
        axes: Mapping[str, int], device_type: str | None = None, *, ranks: Sequence[int] | None = None
    ) -> Mesh:
        """The mesh over the ranks of the running world, the last axis varying fastest.

        Asked again for the same, it is the same object: process groups are made once.

        Under torchrun (or ``espalier run``) the world is joined first, if the program has not done so.

        Args:
            axes: name to size; their product must be the number of ranks.
            device_type: ``"cpu"``, or an accelerator's; by default what the process group runs on,
                or without one the machine's accelerator, if it has one.
            ranks: those that the mesh is made of; by default all. Every rank of the world must build the
                mesh, also those outside it.

        Raises:
            ValueError: the sizes don't multiply to the number of ranks, or a rank is not in the world.
        """
        names, shape = names_and_sizes(axes)
        if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            start(device_type)
        running = dist.is_initialized()
        world = dist.get_world_size() if running else 1
        needed = math.prod(shape)
        if ranks is not None:
            _check_ranks(tuple(ranks), names, shape, world)
        elif needed != world:
            asked_for = " × ".join(f"{k} {v}" for k, v in axes.items())
            alone = "" if running else unjoined(os.environ)
            raise ValueError(
                f"The mesh {asked_for} needs {needed} rank(s), but {world} are running. Start {needed} ranks "
                f"(espalier run -n {needed} ..., torchrun --nproc-per-node {needed} ...) or change the axes."
                f"{alone and f' {alone}.'}"
            )
        if device_type is None:
            device_type = of_world() if running else accelerator() or "cpu"
        elif not running:
            device_type = choose(device_type, 0, 1).type
        members = tuple(range(needed) if ranks is None else map(int, ranks))
        known = _built().get((device_type, names, shape, members))
        if known is not None:
            return known
        if not running:
            if alone := unjoined(os.environ):
                warnings.warn(alone, stacklevel=2)
            mesh = _built()[device_type, names, shape, members] = Mesh.single(names, device_type)
            return mesh
        if ranks is not None:
            return Mesh.from_torch(DeviceMesh(device_type, _array(ranks, shape), mesh_dim_names=names))
        return Mesh.from_torch(init_device_mesh(device_type, shape, mesh_dim_names=names))

    @staticmethod
    def from_torch(device_mesh: DeviceMesh) -> Mesh:
        """The mesh over a ``DeviceMesh``; the same object every time it is asked for, and for its equals.

        On a rank outside it the mesh is dry (:attr:`is_member` says which).
        """
        expect("from_torch: the mesh", device_mesh, DeviceMesh, "a torch DeviceMesh")
        # torch makes a new object for each slice of a mesh, equal to the last: the root remembers ours
        family = _family(device_mesh)
        known = family.get(device_mesh)
        if known is not None:
            return known
        shape = tuple(device_mesh.mesh.shape)
        names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(len(shape)))
        coordinate = device_mesh.get_coordinate()
        mesh = Mesh(
            tuple(names),
            shape,
            coordinate=(0,) * len(shape) if coordinate is None else tuple(coordinate),
            device_type="meta" if coordinate is None else device_mesh.device_type,
            device_mesh=device_mesh,
            is_dry=coordinate is None,
            ranks=device_mesh.mesh.flatten().tolist(),
            world_rank=dist.get_rank(),
        )
        if device_mesh is root_mesh(device_mesh):
            _built()[device_mesh.device_type, mesh.names, shape, mesh.ranks] = mesh
        for relative in family.values():
            mesh.ledgers = relative.ledgers
        family[device_mesh] = mesh
        return mesh

    @staticmethod
    def single(names: tuple[str, ...] = ("data",), device_type: str = "cpu") -> Mesh:
        """One process alone: every axis has size 1 and no process group is needed."""
        names = (names,) if isinstance(names, str) else names
        return Mesh(tuple(names), (1,) * len(names), coordinate=(0,) * len(names), device_type=device_type)

    @staticmethod
    def dry(
        axes: Mapping[str, int],
        coordinate: tuple[int, ...] | None = None,
        device_type: str = "meta",
        *,
        ranks: Sequence[int] | None = None,
        world_rank: int | None = None,
    ) -> Mesh:
        """A mesh of any shape without processes, seen from one coordinate (by default the first).

        Args:
            ranks: the numbers of its ranks in a world, by default 0, 1, ...
            world_rank: in place of a coordinate, the rank of that world from which the mesh is seen. It
                need not be part of the mesh.

        Raises:
            ValueError: there is no such coordinate.
        """
        names, shape = names_and_sizes(axes)
        fits = coordinate is None or (
            isinstance(coordinate, Sequence)
            and len(coordinate) == len(shape)
            and all(isinstance(c, Integral) and 0 <= c < n for c, n in zip(coordinate, shape, strict=True))
        )
        if not fits:
            raise ValueError(
                f"coordinate = {coordinate} is not in a mesh of {dict(axes)}: expected {len(shape)} numbers, "
                "one along each axis, from 0 and below its size."
            )
        if coordinate is None and world_rank is not None:
            numbers = tuple(range(math.prod(shape)) if ranks is None else ranks)
            coordinate = coordinate_at(numbers.index(world_rank) if world_rank in numbers else 0, shape)
        return Mesh(
            names,
            shape,
            coordinate=coordinate or (0,) * len(names),
            device_type=device_type,
            is_dry=True,
            ranks=ranks,
            world_rank=world_rank,
        )

    def __getitem__(self, axes: str | tuple[str, ...]) -> Mesh:
        """The mesh of some axes, at this rank's coordinate on the others; the two share their ledgers.

        Raises:
            ValueError: there is no axis of that name.
        """
        if isinstance(axes, str):
            names: tuple[str, ...] = (axes,)
        else:
            expect("mesh[...]", axes, Sequence, f"names of its axes, among {', '.join(self.names)}")
            names = tuple(axes)
        if names == self.names:
            return self
        if names in self._parts:
            return self._parts[names]
        picked = [self.axis(name) for name in names]
        if self._device_mesh is not None and self.is_member:
            with disable_modes():  # asked for while a program is traced: it is no part of that
                self._parts[names] = Mesh.from_torch(self._device_mesh[names])
        else:
            here = [slice(None) if a in picked else c for a, c in enumerate(self.coordinate)]
            kept = _array(self.ranks, self.shape)[tuple(here)]
            part = Mesh(
                names,
                tuple(self.shape[a] for a in picked),
                coordinate=tuple(self.coordinate[a] for a in picked),
                device_type=self.device_type,
                is_dry=self.is_dry,
                ranks=kept.permute([sorted(picked).index(a) for a in picked]).flatten().tolist(),
                world_rank=self.world_rank,
            )
            part.ledgers = self.ledgers
            part._groups = [self._groups[a] for a in picked]
            part._orders = [self._orders[a] for a in picked]
            self._parts[names] = part
        return self._parts[names]

    def telling(self, **words: str) -> Mesh:
        """This mesh, but with a word on some axes for the rules; the two share process groups and ledgers.

        ``context="ring"``, ``"ulysses"`` or ``"gather"`` says how attention goes over a sequence that the
        axis ``context`` cuts. Tensors on meshes of different words do not meet in one call.
        """
        key = tuple(sorted(words.items()))
        if not key:
            return self
        if key not in self._telling:
            mesh = self._telling[key] = object.__new__(type(self))
            vars(mesh).update(vars(self))
            mesh.words, mesh.lately, mesh.kept, mesh._telling, mesh._parts = words, None, None, {}, {}
            mesh.comparing = None
            Mesh.known.add(mesh)
        return self._telling[key]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def rank(self) -> int:
        """This rank's place in the mesh, the last axis counted fastest; -1 outside it."""
        return place_at(self.coordinate, self.shape) if self.is_member else -1

    @property
    def outermost(self) -> Mesh:
        """The mesh of which it is a part, of stages or branches; itself of others."""
        return self if self.within is None else self.within.outermost

    def axis(self, axis: int | str) -> int:
        """The index of an axis given by name or index."""
        if isinstance(axis, str):
            if axis not in self._index:
                raise ValueError(f"The mesh has no axis {axis!r}; its axes are {', '.join(self.names)}.")
            return self._index[axis]
        if not isinstance(axis, int):
            raise TypeError(
                f"The axis is {shown(axis)}, expected one of {', '.join(self.names)}, or its number."
            )
        if not -self.ndim <= axis < self.ndim:
            raise ValueError(f"The mesh has no axis {axis}; it has {self.ndim}: {', '.join(self.names)}.")
        return axis % self.ndim

    def group(self, axis: int | str) -> dist.ProcessGroup:
        """The process group of the ranks that differ from this one along ``axis`` only.

        Raises:
            ValueError: the axis has one rank, or the mesh is dry: there is none.
        """
        group = self._groups[self.axis(axis)]
        if group is None:
            raise ValueError(
                f"{self!r} has no process group along {axis!r}: axes of one rank and dry meshes need none."
            )
        return group

    def whole_group(self) -> dist.ProcessGroup:
        """The process group of all its ranks. Made when first asked for: they must all ask."""
        busy = [axis for axis, n in enumerate(self.shape) if n > 1]
        if len(busy) == 1:
            return self.group(busy[0])
        assert busy and not self.is_dry, "single and dry meshes have no process group"
        if self._whole is None and self.size() == dist.get_world_size():
            self._whole = dist.group.WORLD
        elif self._whole is None:
            self._whole = group_among(self.ranks)
        assert self._whole is not None
        return self._whole

    def backend(self, axis: int, device: torch.device) -> Any:
        """What carries an axis' traffic of a device's tensors: its group, less torch's dispatcher."""
        known = self._backends.get((axis, device))
        if known is None:
            known = self._backends[axis, device] = backend_for(self.group(axis), device)
        return known

    def order(self, axis: int) -> tuple[int, ...] | None:
        """For each coordinate of the axis its place in the process group; None where they are equal.

        Torch sorts the ranks of a group, whatever their order in the mesh.
        """
        return self._orders[axis]

    def _order(self, axis: int, group: dist.ProcessGroup | None) -> tuple[int, ...] | None:
        if group is None:
            return None
        order = tuple(dist.get_group_rank(group, rank) for rank in self.along(axis))
        return None if order == tuple(range(len(order))) else order

    def along(self, axis: int) -> list[int]:
        """The world's ranks that differ from this one along an axis only, in the order of coordinates."""
        step = math.prod(self.shape[axis + 1 :])
        first = self.rank - self.coordinate[axis] * step
        return [self.ranks[first + i * step] for i in range(self.shape[axis])]

    def place(self, axes: Iterable[int]) -> int:
        """This rank's number among those that differ from it along these axes alone, the first outermost."""
        place = 0
        for axis in axes:
            place = place * self.shape[axis] + self.coordinate[axis]
        return place

    def to_torch(self) -> DeviceMesh:
        """The ``DeviceMesh`` underneath.

        Raises:
            ValueError: a dry or single mesh has none.
        """
        if self._device_mesh is None:
            raise ValueError(
                f"{self!r} stands on no torch DeviceMesh: it is "
                f"{'dry' if self.is_dry else 'a single process without a process group'}."
            )
        return self._device_mesh

    def device(self) -> torch.device:
        """The device on which this rank's local tensors live."""
        return current(self.device_type)

    def check_same_world(self, other: Mesh) -> None:
        """See that a tensor can go from this mesh to another.

        Raises:
            ValueError: one is dry and the other not, or they are seen from different ranks, or are made
                of different kinds of device, or one is a process alone, of which the others don't know.
        """
        mine, theirs = self._world(), other._world()
        if mine != theirs:
            raise ValueError(
                f"A tensor cannot go from {self!r} to {other!r}: the first is {mine}, the second {theirs}. "
                "Build both with Mesh.from_env (ranks= names a part of the world), or both with Mesh.dry "
                "(world_rank= says from where they are seen)."
            )

    def _world(self) -> str:
        if self.within is not None:
            return self.within._world()
        if self._device_mesh is not None:
            return f"of the running world ({self._device_mesh.device_type})"
        return f"dry, seen from rank {self.world_rank}" if self.is_dry else "one process alone"

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self

    def __reduce__(self) -> Any:
        kind = "meta" if not self.is_member else self.device_type
        words = tuple(sorted(self.words.items()))
        return known_mesh, (self.names, self.shape, self.ranks, kind, self.is_dry, self.world_rank, words)

    def __repr__(self) -> str:
        axes = " × ".join(f"{name} {n}" for name, n in zip(self.names, self.shape, strict=True))
        if not self.is_member:
            return f"Mesh({axes}, ranks {list(self.ranks)}, seen from rank {self.world_rank} outside it)"
        return f"Mesh({axes}{', dry' if self.is_dry else ''}, {self.device_type})"

    # ---- the names under which torch's ``DeviceMesh`` is asked, so that ours may stand in its place

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """The axes' names."""
        return self.names

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks' numbers in the world, in the shape of the mesh."""
        return torch.tensor(self.ranks, dtype=torch.int, device="cpu").view(self.shape)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of ranks, of the mesh or of one axis."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[self.axis(mesh_dim)]

    def get_rank(self) -> int:
        """This process's rank in the world."""
        return self.world_rank

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's coordinate on an axis, which may be left out where there is only one."""
        return self.coordinate[self._one_axis(mesh_dim)]

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's coordinate on each axis; None on a rank outside the mesh."""
        return self.coordinate if self.is_member else None

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        """The process group along an axis, which may be left out where there is only one.

        Raises:
            ValueError: a dry or single mesh has none.
        """
        return self.to_torch().get_group(self._one_axis(mesh_dim))

    def get_all_groups(self) -> list[dist.ProcessGroup]:
        """The process group of each axis."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def abort(self) -> None:
        """Break off what goes on in the process groups of its axes: ``DeviceMesh.abort`` of torch 2.15.

        Raises:
            ValueError: a dry or single mesh has none.
            NotImplementedError: an older torch is here.
        """
        break_off: Any = getattr(self.to_torch(), "abort", None)
        if break_off is None:
            raise NotImplementedError(f"mesh.abort() needs torch 2.15 or newer; this is {torch.__version__}")
        break_off()

    def _one_axis(self, axis: int | str | None) -> int:
        if axis is None and self.ndim > 1:
            raise ValueError(f"{self!r} has {self.ndim} axes: say which of {', '.join(self.names)} is meant.")
        return self.axis(0 if axis is None else axis)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DeviceMesh):
            return self._device_mesh is not None and self._device_mesh == other
        return self is other

    def __hash__(self) -> int:
        return id(self) if self._device_mesh is None else hash(self._device_mesh)

    def __enter__(self) -> Mesh:
        mesh_resources.mesh_stack.append(self if self._device_mesh is None else self._device_mesh)
        return self

    def __exit__(self, *error: Any) -> None:
        mesh_resources.mesh_stack.pop()


MeshLike = Mesh | DeviceMesh


def as_mesh(mesh: MeshLike | None) -> Mesh:
    """Take Espalier's mesh or torch's ``DeviceMesh``; None is the one whose ``with`` block is open."""
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is None:
        return as_mesh(current_mesh())
    if isinstance(mesh, DeviceMesh):
        return Mesh.from_torch(mesh)
    raise TypeError(
        f"Expected an espalier.Mesh or a torch DeviceMesh, got {type(mesh).__name__}. "
        "Build one with espalier.Mesh.from_env({'data': 2, 'tensor': 2}) or init_device_mesh(...)."
    )


def place_at(coordinate: Iterable[int], shape: Iterable[int]) -> int:
    """The place of a coordinate in a grid, the last axis counted fastest."""
    place = 0
    for here, n in zip(coordinate, shape, strict=True):
        place = place * n + here
    return place


def coordinate_at(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The coordinate of a place in a grid, the last axis counted fastest."""
    coordinate = []
    for n in reversed(shape):
        place, here = divmod(place, n)
        coordinate.append(here)
    return tuple(reversed(coordinate))


def _array(ranks: Sequence[int], shape: tuple[int, ...]) -> torch.Tensor:
    # not wherever a program under torch.device("meta") would have it
    return torch.tensor(list(ranks), dtype=torch.int, device="cpu").view(shape)


def _check_ranks(
    ranks: tuple[int, ...], names: tuple[str, ...], shape: tuple[int, ...], world: int | None = None
) -> None:
    outside = [r for r in ranks if r < 0 or (world is not None and r >= world)]
    if len(ranks) != math.prod(shape) or len(set(ranks)) != len(ranks) or outside:
        asked_for = " × ".join(f"{k} {n}" for k, n in zip(names, shape, strict=True))
        raise ValueError(
            f"The mesh {asked_for} needs {math.prod(shape)} different rank(s)"
            f"{f' of the {world} running' if world is not None else ''}; got ranks {list(ranks)}."
        )


def _built() -> dict[Any, Mesh]:
    """The meshes of the running world by what they are made of.

    Those of a world that has gone give up its process groups, each of which has threads.
    """
    if Mesh.built[0] is not dist.group.WORLD:
        _release()
        Mesh.built = (dist.group.WORLD, {})
        for tell in Mesh.joined:
            tell()
    return Mesh.built[1]


@atexit.register
def _release() -> None:
    """Let go of all process groups: gloo aborts a process that has some when its interpreter has ended."""
    for mesh in Mesh.known:
        mesh._groups = [None] * mesh.ndim
        mesh._whole = mesh.comparing = None
        mesh._backends.clear()
        mesh.carriers.clear()
        mesh.lanes.clear()
        if mesh._device_mesh is not None:
            forget_groups(mesh._device_mesh)
    Mesh.built = (None, {})


def _family(device_mesh: DeviceMesh) -> dict[DeviceMesh, Mesh]:
    """The meshes made so far of a ``DeviceMesh``, of the slices of its root, and of their equals."""
    built, root = _built(), root_mesh(device_mesh)
    family: dict[DeviceMesh, Mesh] | None = vars(root).get("_espalier_meshes")
    if family is None:
        names, shape, ranks = root.mesh_dim_names, root.mesh.shape, root.mesh.flatten().tolist()
        equal = built.get((root.device_type, names, tuple(shape), tuple(ranks)))
        family = {}
        if equal is not None and equal._device_mesh is not None:
            family = vars(root_mesh(equal._device_mesh))["_espalier_meshes"]
        vars(root)["_espalier_meshes"] = family
    return family


def group_among(ranks: Sequence[int], *, by_pairs: bool = False) -> dist.ProcessGroup:
    """A process group that its members make, and nobody else, with its ranks in order.

    Torch would split the communicator of a world that is bound to its devices, at which all of the world
    must be. So that is told of no device meanwhile.

    Args:
        by_pairs: each two ranks are to have a queue of their own for messages.
    """
    world: Any = dist.group.WORLD
    options = of_further_groups(world, by_pairs)
    with having(world, bound_device_id=None):
        group: Any = dist.new_group(sorted(ranks), use_local_synchronization=True, **options)
    return cast("dist.ProcessGroup", group)  # its members alone call this


def _check_backends(groups: Sequence[dist.ProcessGroup | None], device_type: str) -> None:
    """See that a backend carries tensors of that device: gloo would read their memory from the host."""
    for group in groups if is_accelerator(device_type) else ():
        if group is not None and backend_of(device_type, group) == dist.Backend.GLOO:
            raise ValueError(
                f"The ranks of the mesh exchange tensors of {device_type!r} by gloo, which sends those of "
                "the CPU alone. Let espalier start the world (espalier run, torchrun without "
                "init_process_group), or call init_process_group() without a backend."
            )


def names_and_sizes(axes: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The axes that a mesh is to have."""
    expect("The mesh's axes", axes, Mapping, "names and sizes, such as {'data': 2, 'tensor': 2}")
    for name in axes:
        expect("The name of an axis", name, str, "a text, such as 'data'")
    names = tuple(axes)
    shape = tuple(whole(f"The size of axis {name!r}", n, least=-math.inf) for name, n in axes.items())
    _check_axes(names, shape)
    return names, shape


def _check_axes(names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    wrong = []
    if len(names) != len(shape):
        wrong.append(f"{len(names)} names for {len(shape)} sizes")
    if len(set(names)) != len(names):
        wrong.append("an axis name stands twice")
    if not 0 < len(names) <= MAX_AXES:
        wrong.append(f"1 to {MAX_AXES} axes are possible, not {len(names)}")
    wrong += [
        f"axis {k!r} has size {n}; a size is at least 1" for k, n in zip(names, shape, strict=False) if n < 1
    ]
    if not wrong and math.prod(shape) > _MOST_RANKS:
        wrong.append(f"up to {_MOST_RANKS:,} ranks are possible")
    if wrong:
        raise ValueError(f"Not a mesh: names {names}, sizes {shape}: " + "; ".join(wrong) + ".")


def current_mesh() -> Mesh | DeviceMesh:
    """The mesh whose ``with`` block is open, ours or torch's, the innermost.

    Raises:
        ValueError: there is none.
    """
    stack = getattr(mesh_resources, "mesh_stack", None)
    if not stack:
        raise ValueError("No mesh was given. Pass device_mesh=, or call inside `with mesh:`.")
    mesh: Mesh | DeviceMesh = stack[-1]
    return mesh


def known_mesh(
    names: Sequence[str],
    shape: Sequence[int],
    ranks: Sequence[int],
    device_type: str,
    is_dry: bool,
    world_rank: int,
    words: Sequence[tuple[str, str]],
) -> Mesh:
    """The mesh that a pickle names: one that there is, or that of the whole world, made now.

    Raises:
        ValueError: there is none, and making it takes ranks that don't know of it.
    """
    names, shape, ranks = tuple(names), tuple(shape), tuple(ranks)
    words_by_axis: dict[str, str] = dict(words)
    for mesh in _meshes():
        alike = (mesh.names, mesh.shape, mesh.ranks, mesh.is_dry) == (names, shape, ranks, is_dry)
        alike = alike and (mesh.device_type, dict(mesh.words)) == (device_type, words_by_axis)
        if alike and _is_usable(mesh, world_rank):
            return mesh
    axes = dict(zip(names, shape, strict=True))
    if is_dry and device_type == "meta":
        return Mesh.dry(axes, ranks=ranks, world_rank=world_rank).telling(**words_by_axis)
    if ranks == tuple(range(running_size())):
        return Mesh.from_env(axes, device_type).telling(**words_by_axis)
    asked_for = " × ".join(f"{name} {n}" for name, n in axes.items())
    raise ValueError(
        f"What is loaded lies on the mesh {asked_for} of the ranks {list(ranks)}, and there is none like it. "
        "It is one rank's part; what any number of ranks reads is written by engine.save(path), of an "
        "average or another copy of the model by engine.save(path, average=average). Or make that mesh "
        "first, on all ranks: Mesh.from_env(axes, ranks=...), or a part of a larger one by its name."
    )


def _meshes() -> Iterator[Mesh]:
    """Those that there are, the one whose ``with`` block is open first."""
    with suppress(ValueError):
        yield as_mesh(None)
    yield from list(Mesh.known)


def _is_usable(mesh: Mesh, world_rank: int) -> bool:
    """Whether a mesh is seen from that rank, or its process groups are there."""
    if mesh.is_dry:
        return mesh.world_rank == world_rank
    return all(n == 1 or group is not None for n, group in zip(mesh.shape, mesh._groups, strict=True))
