"""Grids of ranks by DeepSpeed's names: topologies, and a rank's place and groups in one."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterable
from functools import cached_property
from itertools import groupby, product
from types import MappingProxyType
from typing import Any, Final

from espalier.compat.common import group_of
from espalier.compat.deepspeed.groups import init_distributed
from espalier.mesh.process import running_rank, running_size
from espalier.parallel import Plan


class ProcessTopology:
    """Ranks on named axes, the last one varying fastest. It makes nothing: the engine's mesh does.

    Attributes:
        axes, dims: names and sizes.
        mapping: coordinates to ranks.
    """

    def __init__(self, axes: list[str], dims: list[int]) -> None:
        self.axes, self.dims = axes, dims
        make: Any = namedtuple("ProcessCoord", axes)  # type: ignore[misc]  # names as given
        self.ProcessCoord = make
        self.mapping: dict[Any, int] = {
            make(*place): rank for rank, place in enumerate(product(*map(range, dims)))
        }

    def get_dim(self, axis: str) -> int:
        """The size of an axis; 0 if there is none of that name."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_axis_names(self) -> list[str]:
        """The outermost first."""
        return self.axes

    def world_size(self) -> int:
        """Ranks of the grid."""
        return len(self.mapping)

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at a place, which names all axes.

        Raises:
            ValueError: it does not, or there is no such place.
        """
        if {*coord_kwargs} != {*self.axes} or (at := self.ProcessCoord(**coord_kwargs)) not in self.mapping:
            sizes = ", ".join(f"{axis} below {n}" for axis, n in zip(self.axes, self.dims, strict=True))
            raise ValueError(f"get_rank({coord_kwargs}): expected {sizes}; filter_match() takes some axes.")
        return self.mapping[at]

    def get_coord(self, rank: int) -> Any:
        """Where a rank is, by the axes' names.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < len(self.mapping):
            raise ValueError(f"get_coord({rank}): expected a rank below {len(self.mapping)}.")
        return list(self.mapping)[rank]

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Iterable[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Its place in words, as in names of files."""
        at, left_out = self.get_coord(rank), {*omit_axes}
        names = [axis for axis in self.axes if axis not in left_out]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(at, axis):02d}" for axis in names)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The ranks that differ along an axis alone; none if there is no such axis."""
        if axis not in self.axes:
            return []
        groups: dict[Any, list[int]] = {}
        for at, rank in self.mapping.items():
            groups.setdefault(at._replace(**{axis: 0}), []).append(rank)
        return list(groups.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks at these places."""
        wanted = filter_kwargs.items()
        return [rank for at, rank in self.mapping.items() if all(getattr(at, k) == n for k, n in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at a place of an axis."""
        return self.filter_match(**{axis: idx})

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline and data."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data and tensor."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


# of axes of a plan, DeepSpeed's words; the others, but for those of tensors, have their own
_WORDS: Final = MappingProxyType({"replicate": "data", "expert": "data", "context": "sequence"})


def topology_of(plan: Plan, given: ProcessTopology | None = None) -> ProcessTopology:
    """The ranks of a plan.

    Args:
        given: what a program has made, which is to be the same.

    Raises:
        ValueError: it is not.
    """
    cut = [(name, size) for name, size in plan.axes.items() if size > 1]
    sizes: dict[str, int] = {}
    for word, group in groupby(
        cut, lambda axis: "model" if axis[0] in plan.tensor_axes else _WORDS.get(axis[0], axis[0])
    ):
        each = dict(group)
        # what stands apart from its like, as experts beyond a context axis, keeps its name
        sizes[next(iter(each)) if word in sizes else word] = math.prod(each.values())
    lies = dict(sizes)
    sizes = {"pipe": sizes.pop("pipe", 1), **({} if "data" in sizes else {"data": 1}), **sizes}
    if given is None:
        return ProcessTopology([*sizes], [*sizes.values()])
    asked = {axis: n for axis, n in zip(given.axes, given.dims, strict=True) if n > 1}
    if [*asked.items()] != [*lies.items()]:
        told, planned = (" × ".join(f"{k} {n}" for k, n in x.items()) or "one rank" for x in (asked, lies))
        raise ValueError(
            f"The topology has {told}, outermost first, and the plan {planned}: expected the same. The "
            "configuration says it (tensor_parallel.autotp_size, sequence_parallel_size), or plan={...}."
        )
    return given


class PipelineParallelGrid:
    """This rank's place in a topology, and its groups: each is made when it is asked for, which all of its
    ranks must do.

    Args:
        topology: by default a pipeline and its copies, as near to a square as the number of ranks allows.
        process_group: all ranks, in any case.

    Attributes:
        data_parallel_size, pipe_parallel_size, model_parallel_size, slice_parallel_size: sizes of axes.
        stage_id, data_parallel_id: this rank's places.
        dp_groups, pipe_groups, model_groups: the ranks along each axis, all of them.
        dp_group, pp_group, slice_group: those with this rank.
        p2p_groups: of each rank, it and that of the next stage.

    Raises:
        ValueError: there are not as many ranks as the topology has.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        init_distributed()
        self.global_rank, self.world_size = running_rank(), running_size()
        self._topo = _square(self.world_size) if topology is None else topology
        if self._topo.world_size() != self.world_size:
            raise ValueError(
                f"PipelineParallelGrid: the topology has {self._topo.world_size()} rank(s), "
                f"but {self.world_size} are running."
            )
        get = self._topo.get_dim
        self.data_parallel_size, self.pipe_parallel_size = max(get("data"), 1), max(get("pipe"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(get("model"), 1)
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.dp_groups = self._topo.get_axis_comm_lists("data")
        self.pipe_groups = self._topo.get_axis_comm_lists("pipe")
        self.dp_group, self.pp_group = self._own(self.dp_groups), self._own(self.pipe_groups)
        self.model_groups = self._topo.get_axis_comm_lists("model")
        self.slice_group = self._own(self.model_groups)
        self._with = sorted(self._topo.get_axis_list("data", self.data_parallel_id))
        self.ds_model_world_size, self.ds_model_rank = len(self._with), self._with.index(self.global_rank)
        pipes = {rank: ranks for ranks in self.pipe_groups for rank in ranks}
        self.p2p_groups = [
            [rank, pipes[rank][(pipes[rank].index(rank) + 1) % self.pipe_parallel_size]]
            for rank in range(self.world_size)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineParallelGrid:
        return self  # of a copy of the model too: groups are the process's

    def __reduce__(self) -> Any:
        return PipelineParallelGrid, (self._topo,)

    def _own(self, groups: list[list[int]]) -> list[int]:
        return next((ranks for ranks in groups if self.global_rank in ranks), [self.global_rank])

    # ---- groups

    @cached_property
    def dp_proc_group(self) -> Any:
        """Of the same stage of all pipelines."""
        return group_of(self.dp_group)

    @cached_property
    def pp_proc_group(self) -> Any:
        """Of a pipeline."""
        return group_of(self.pp_group)

    @cached_property
    def slice_proc_group(self) -> Any:
        """Of those that share layers."""
        return group_of(self.slice_group)

    @cached_property
    def ds_model_proc_group(self) -> Any:
        """Of those that hold a model together."""
        return group_of(self._with)

    # ---- questions

    def topology(self) -> ProcessTopology:
        """See the class."""
        return self._topo

    def get_stage_id(self) -> int:
        """This rank's stage."""
        return int(self._topo.get_coord(self.global_rank).pipe)

    def get_data_parallel_id(self) -> int:
        """In which pipeline it is."""
        return int(self._topo.get_coord(self.global_rank).data)

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank of a stage, of this rank's pipeline or at other places."""
        at = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)
        return self._topo.get_rank(**at._asdict())

    def get_global_rank(self) -> int:
        """This one."""
        return self.global_rank

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Stages."""
        return self.pipe_parallel_size

    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_pipe_parallel_group(self) -> Any:
        """Of this rank's pipeline."""
        return self.pp_proc_group

    def get_data_parallel_rank(self) -> int:
        """In which pipeline this rank is."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Pipelines."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """Of this rank's stage in all pipelines."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Its ranks."""
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """This one among those that hold a model together, stages too."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """How many they are."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """Of them."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """This one among those that share layers."""
        return int(getattr(self._topo.get_coord(self.global_rank), "model", 0))

    get_tensor_model_parallel_rank = get_slice_parallel_rank

    def get_slice_parallel_world_size(self) -> int:
        """How many they are."""
        return self.slice_parallel_size

    get_tensor_model_parallel_world_size = get_slice_parallel_world_size

    def get_slice_parallel_group(self) -> Any:
        """Of them."""
        return self.slice_proc_group


def _square(ranks: int) -> ProcessTopology:
    """As many ranks, their prime factors in turn on the two axes."""
    sizes, turn, factor = [1, 1], 0, 2
    while ranks > 1:
        if ranks % factor:
            factor += 1
            continue
        sizes[turn] *= factor
        ranks //= factor
        turn = 1 - turn
    return PipeDataParallelTopology(*sizes)


__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
]
