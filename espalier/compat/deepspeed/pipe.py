"""A model as a list of layers: ``PipelineModule``, whose stages the plan makes."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import nn

from espalier.compat.deepspeed.config import Config
from espalier.parallel import Plan
from espalier.texts import MistakeError


class LayerSpec:
    """A layer that is built where it is needed.

    Args:
        typename: its class.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ValueError(f"LayerSpec: expected a class of torch.nn.Module, got {typename!r}.")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """The layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        arguments = [*map(repr, self.module_args), *(f"{k}={v!r}" for k, v in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(arguments)})"


class TiedLayerSpec(LayerSpec):
    """A layer that is the same, parameters included, wherever its key stands.

    Args:
        key: names it.
        forward_fn: ``forward_fn(layer, x)`` is called in its place here.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | list[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else tied_weight_attr


class PipelineModule(nn.Module):
    """Layers one after the other, which ``initialize`` puts on ``num_stages`` ranks, or groups of them.

    It is a plain model: it runs on one process too, all layers are built on each rank (under
    ``deepspeed.zero.Init()`` without memory), and ZeRO of any stage goes with it.

    Args:
        layers: modules, :class:`LayerSpec` and functions of one value; or an ``nn.Sequential``.
        num_stages: of the pipeline.
        topology: DeepSpeed's; its ``pipe`` is the number of stages.
        loss_fn: ``loss_fn(output, labels)``.
        partition_method: ``"uniform"`` and ``"type:REGEX"`` cut as DeepSpeed does, where layers that are
            modules of their own stand at the cuts; with ``"parameters"`` and ``"best"`` the engine balances.
        activation_checkpoint_interval: above 0, layers are computed again in the backward pass.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Any = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Any = None,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        if num_stages is None and topology is None:
            raise ValueError("PipelineModule needs num_stages=..., or topology=...")
        self.num_stages: int = topology.get_dim("pipe") if num_stages is None else num_stages
        self.loss_fn, self.partition_method = loss_fn, partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.tied_modules = nn.ModuleDict()
        self._calls: list[tuple[str, Callable[..., Any] | None]] = []  # of a module, by name, or a function
        self._kinds: list[str] = []
        for i, layer in enumerate(layers):
            self._kinds.append(getattr(layer, "typename", type(layer)).__name__)
            if seed_layers:
                torch.manual_seed(base_seed + i) if seed_fn is None else seed_fn(base_seed + i)
            self._add(str(i), layer)

    def _add(self, name: str, layer: Any) -> None:
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            self._calls.append((f"tied_modules.{layer.key}", layer.forward_fn))
            return
        built = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(built, nn.Module):
            self.add_module(name, built)
            self._calls.append((name, None))
        elif callable(built):
            self._calls.append(("", built))
        else:
            raise ValueError(f"Layer {name}: expected a module, a LayerSpec or a function, got {layer!r}.")

    def forward(self, *inputs: Any) -> Any:
        """All layers."""
        x = inputs[0] if len(inputs) == 1 else inputs
        for name, function in self._calls:
            module = self.get_submodule(name) if name else None
            if module is None:
                assert function is not None
                x = function(x)
            else:
                x = module(x) if function is None else function(module, x)
        return x

    def arranged(self, settings: Config) -> Config:
        """A configuration with what this model says of its stages.

        Raises:
            ValueError: ``partition_method`` is unknown, or cuts more stages than there are layers.
        """
        more: dict[str, Any] = {}
        if self.num_stages > 1 and (cuts := self._cuts()) is not None and settings.plan.cuts is None:
            more["cuts"] = cuts
        if self.activation_checkpoint_interval and settings.plan.recompute == "none":
            more["recompute"] = "full"
        if not more:
            return settings
        return replace(settings, plan=Plan(**{**settings.plan.model_dump(), **more}))

    def _cuts(self) -> list[str] | None:
        """The modules at which stages begin, as DeepSpeed cuts; None where the engine is to balance."""
        kind, _, pattern = self.partition_method.partition(":")
        kind = kind.lower()
        if kind == "uniform":
            weights = [1] * len(self._calls)
        elif kind == "type":
            weights = [int(bool(re.search(pattern, name, re.IGNORECASE))) for name in self._kinds]
        elif kind in ("parameters", "best"):
            return None
        else:
            expected = "expected parameters, uniform, best or type:REGEX"
            raise MistakeError("PipelineModule", [("partition_method", self.partition_method, expected)])
        if sum(weights) < self.num_stages:
            expected = f"finds {sum(weights)} layer(s) for {self.num_stages} stages"
            raise MistakeError("PipelineModule", [("partition_method", self.partition_method, expected)])
        first = _starts(weights, self.num_stages)
        names = [self._calls[i][0] for i in first]
        own = all(name and not name.startswith("tied_modules.") for name in names)
        return names if own else None

    def topology(self) -> Any:
        """DeepSpeed's grid of ranks: ask ``engine.mesh``."""
        raise ValueError("PipelineModule.topology(): engine.engine.mesh names the axes and their sizes.")


def _starts(weights: list[int], stages: int) -> list[int]:
    """Where all stages but the first begin, so that they weigh about the same."""
    total, seen = sum(weights), 0
    starts: list[int] = []
    for i, weight in enumerate(weights):
        if weight and len(starts) < stages - 1 and seen >= (len(starts) + 1) * total / stages:
            starts.append(i)
        seen += weight
    return starts


class ProcessTopology:
    """A grid of ranks on named axes, the last one varying fastest. It makes nothing: the engine's mesh does.

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
