"""torch's tensor-parallel styles: what is cut of a module, and how its inputs and outputs lie.

The plain tensors that go in and come out are those of Megatron-LM (https://arxiv.org/abs/1909.08053):
where one is said to be replicated, every rank computes the same from it, so that its gradient is the
whole one on every rank. What a style gathers is typed *varied* at once, so that its gradient is
reduce-scattered, and not all-reduced and cut.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from espalier.layout import Layout, Partial, Placement, Replicate, Shard
from espalier.layout.layout import R
from espalier.mesh import Mesh
from espalier.mesh.mesh import MeshLike, as_mesh
from espalier.tensor import DTensor, redistribute
from espalier.tensor.modules import distribute_module, lay_out_parameter

Placements = tuple[Placement, ...]


class ParallelStyle(ABC):
    """What :func:`parallelize_module` does to a module; for styles of your own, override ``_apply``.

    Attributes:
        src_data_rank: whose values of the parameters are sent to all (see :func:`distribute_tensor`).
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: MeshLike) -> nn.Module:
        """Prepare the module in place (its parameters, hooks for inputs and outputs) and return it."""


def parallelize_module(
    module: nn.Module,
    device_mesh: MeshLike | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Apply styles to modules, in place.

    Args:
        device_mesh: a mesh of one axis (``mesh["tensor"]``); by default that whose ``with`` block is open.
        parallelize_plan: a style for ``module``, or a table from names of modules below it to styles. In a
            name each part between dots may be a pattern, as in ``fnmatch``.
        src_data_rank: whose values are sent to all; None: every rank has the same already.

    Raises:
        TypeError: the plan is neither.
        ValueError: the mesh has several axes, or a parameter cannot be laid out so.
    """
    mesh = device_mesh if device_mesh is not None else as_mesh(None)
    if as_mesh(mesh).ndim != 1:
        raise ValueError(
            f"parallelize_module works along one axis, {as_mesh(mesh)!r} has several: pass one of them, "
            f"as in mesh[{as_mesh(mesh).names[-1]!r}]."
        )
    if parallelize_plan is None:
        warnings.warn("parallelize_module got no parallelize_plan and does nothing.", stacklevel=2)
    elif isinstance(parallelize_plan, ParallelStyle):
        parallelize_plan.src_data_rank = src_data_rank
        return parallelize_plan._apply(module, mesh)
    elif isinstance(parallelize_plan, Mapping):
        for pattern, style in parallelize_plan.items():
            found = _matching(module, pattern.split(".")) if pattern else [module]
            if not found:
                warnings.warn(
                    f"parallelize_module: {pattern!r} matches no module of {type(module).__name__} and is "
                    "left out.",
                    stacklevel=2,
                )
            for part in found:
                parallelize_module(part, mesh, style, src_data_rank=src_data_rank)
    else:
        raise TypeError(
            f"parallelize_plan: expected a ParallelStyle or names and their styles, got {parallelize_plan!r}."
        )
    return module


def _matching(module: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    found = [child for name, child in module.named_children() if fnmatch(name, patterns[0])]
    return (
        found if len(patterns) == 1 else [part for child in found for part in _matching(child, patterns[1:])]
    )


# ---- what goes in and comes out


def _typed(x: Any, mesh: Mesh, placements: Placements, features: int | None = None) -> DTensor:
    """A DTensor as it is, a plain tensor as this rank's part; ``features`` is its last dim's global size."""
    if isinstance(x, DTensor):
        return x
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"A tensor-parallel style expected a tensor, got {type(x).__name__}.")
    shape = None
    if features is not None and placements[0] in (Shard(-1), Shard(x.ndim - 1)):
        shape = (*x.shape[:-1], features)
    return DTensor.from_local(x, mesh, placements, shape=shape)


def _brought(x: DTensor, mesh: Mesh, placements: Placements, vary: bool = False) -> DTensor:
    layout = Layout(mesh, placements, x.shape)
    # what comes from shards to be used on all ranks is used by each for its own share
    if vary and isinstance(x.placements[0], Shard) and layout.axes[0] == R:
        layout = layout.with_varied([0])
    return redistribute(x, layout)


def _left(x: DTensor, local: bool) -> torch.Tensor:
    if not local:
        return x
    return x.to_local(grad_placements=[Replicate() if isinstance(p, Partial) else p for p in x.placements])


class _Cut(ParallelStyle):
    """A Linear or an Embedding of which a dim is cut."""

    _default_input: Placement = Replicate()
    _default_output: Placement = Replicate()

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = (input_layouts or self._default_input,)
        self.output_layouts = (output_layouts or self._default_output,)
        self.desired_input_layouts: Placements = (self._default_input,)
        self.use_local_output = use_local_output

    @abstractmethod
    def _dims(self, module: nn.Module) -> Mapping[str, int]:
        """For each parameter that is cut the dim; an empty table where the module is of another kind."""

    def _apply(self, module: nn.Module, device_mesh: MeshLike) -> nn.Module:
        dims = self._dims(module)
        if not dims:
            raise NotImplementedError(
                f"{type(self).__name__} is for nn.Linear and nn.Embedding, not {type(module).__name__}: name "
                "the modules inside it, or write a ParallelStyle of your own."
            )

        def partition(name: str, part: nn.Module, device_mesh: MeshLike) -> None:
            for key, p in part.named_parameters(recurse=False):
                placement = Shard(dims[key]) if key in dims else Replicate()
                layout = Layout(device_mesh, [placement], tuple(p.shape))
                lay_out_parameter(p, layout, source=self.src_data_rank)

        def enter(part: nn.Module, inputs: tuple[Any, ...], device_mesh: MeshLike) -> Any:
            mesh = as_mesh(device_mesh)
            x = _typed(inputs[0], mesh, self.input_layouts, getattr(part, "in_features", None))
            return _brought(x, mesh, self.desired_input_layouts, vary=True)

        def leave(part: nn.Module, out: DTensor, device_mesh: MeshLike) -> torch.Tensor:
            return _left(_brought(out, as_mesh(device_mesh), self.output_layouts), self.use_local_output)

        return distribute_module(module, device_mesh, partition, enter, leave)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output})"
        )


class ColwiseParallel(_Cut):
    """A Linear (or an Embedding) whose output features are cut; its bias too.

    Args:
        input_layouts: how a plain input lies; replicated by default. A DTensor says so itself.
        output_layouts: how the output is to lie; by default sharded on its last dim, without communication.
        use_local_output: the output is this rank's plain part.
    """

    _default_output = Shard(-1)

    def _dims(self, module: nn.Module) -> Mapping[str, int]:
        if isinstance(module, nn.Linear):
            return {"weight": 0, "bias": 0}
        return {"weight": 1} if isinstance(module, nn.Embedding) else {}


class RowwiseParallel(_Cut):
    """A Linear whose input features are cut, or an Embedding whose rows are; the bias is whole.

    Args:
        input_layouts: how a plain input lies; by default sharded on its last dim. (For an Embedding say
            ``Replicate()``.)
        output_layouts: how the output is to lie; by default replicated, by an all-reduce.
        use_local_output: the output is this rank's plain part.
    """

    _default_input = Shard(-1)

    def _dims(self, module: nn.Module) -> Mapping[str, int]:
        if isinstance(module, nn.Embedding):
            return {"weight": 0}
        return {"weight": 1} if isinstance(module, nn.Linear) else {}

    def _apply(self, module: nn.Module, device_mesh: MeshLike) -> nn.Module:
        if isinstance(module, nn.Embedding):
            self.desired_input_layouts = (Replicate(),)
        return super()._apply(module, device_mesh)


class SequenceParallel(ParallelStyle):
    """A module (a norm, a dropout) with whole parameters, whose input and output are cut along the sequence.

    Source: https://arxiv.org/abs/2205.05198.

    Args:
        sequence_dim: the dim that is cut. A plain input is this rank's part of it.
        use_local_output: the output is this rank's plain part.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: MeshLike) -> nn.Module:
        def partition(name: str, part: nn.Module, device_mesh: MeshLike) -> None:
            for p in part.parameters(recurse=False):
                layout = Layout(device_mesh, [Replicate()], tuple(p.shape))
                lay_out_parameter(p, layout, source=self.src_data_rank)

        def enter(part: nn.Module, inputs: tuple[Any, ...], device_mesh: MeshLike) -> Any:
            mesh = as_mesh(device_mesh)
            x = _brought(_typed(inputs[0], mesh, self.sequence_sharding), mesh, self.sequence_sharding)
            return (x, *inputs[1:])

        def leave(part: nn.Module, out: DTensor, device_mesh: MeshLike) -> torch.Tensor:
            return _left(out, self.use_local_output)

        return distribute_module(module, device_mesh, partition, enter, leave)

    def __repr__(self) -> str:
        dim = self.sequence_sharding[0].dim
        return f"SequenceParallel(sequence_dim={dim}, use_local_output={self.use_local_output})"


Each = Placement | tuple[Placement | None, ...] | None


def _each(given: Each, wanted: Each, what: str) -> list[tuple[Placement | None, Placement | None]]:
    pairs = [(x,) if isinstance(x, Placement) else () if x is None else x for x in (given, wanted)]
    if len(pairs[0]) != len(pairs[1]):
        raise ValueError(
            f"{what}_layouts {given} and desired_{what}_layouts {wanted} must speak of the same number of "
            f"{what}s; None stands for one that is left as it is."
        )
    return list(zip(*pairs, strict=True))


def _prepared(x: Any, mesh: Mesh, pair: tuple[Placement | None, Placement | None], local: bool) -> Any:
    given, wanted = pair
    if given is None:
        return x
    typed = _typed(x, mesh, (given,))
    return _left(typed if wanted is None else _brought(typed, mesh, (wanted,), vary=not local), local)


class PrepareModuleInput(ParallelStyle):
    """A module whose inputs are typed, and brought to the layouts it wants.

    Args:
        input_layouts: how plain inputs lie, one for each positional input; None: left as it is.
        desired_input_layouts: how each is to lie.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same for inputs by keyword.
        use_local_output: the module gets this rank's plain parts.
    """

    def __init__(
        self,
        *,
        input_layouts: Each = None,
        desired_input_layouts: Each = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self._pairs = _each(input_layouts, desired_input_layouts, "input")
        by_name, wanted = input_kwarg_layouts or {}, desired_input_kwarg_layouts or {}
        if by_name.keys() != wanted.keys():
            raise ValueError(
                f"input_kwarg_layouts names {sorted(by_name)}, desired_input_kwarg_layouts {sorted(wanted)}; "
                "they must name the same."
            )
        self._by_name = {name: (by_name[name], wanted[name]) for name in by_name}
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: MeshLike) -> nn.Module:
        mesh = as_mesh(device_mesh)

        def enter(part: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._pairs:
                if len(inputs) != len(self._pairs):
                    raise ValueError(
                        f"{type(part).__name__} got {len(inputs)} positional input(s), input_layouts speaks "
                        f"of {len(self._pairs)}. Give one for each, None for one that is left as it is."
                    )
                both = zip(inputs, self._pairs, strict=True)
                inputs = tuple(_prepared(x, mesh, pair, self.use_local_output) for x, pair in both)
            named = {
                name: _prepared(x, mesh, self._by_name.get(name, (None, None)), self.use_local_output)
                for name, x in kwargs.items()
            }
            return inputs, named

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module

    def __repr__(self) -> str:
        return f"PrepareModuleInput({self._pairs}, {self._by_name}, use_local_output={self.use_local_output})"


class PrepareModuleOutput(ParallelStyle):
    """A module whose outputs are typed, and brought to the layouts that are wanted of them.

    Args:
        output_layouts: how plain outputs lie, one for each; None: left as it is.
        desired_output_layouts: how each is to lie.
        use_local_output: what comes out is this rank's plain part.
    """

    def __init__(
        self, *, output_layouts: Each, desired_output_layouts: Each, use_local_output: bool = True
    ) -> None:
        self._pairs = _each(output_layouts, desired_output_layouts, "output")
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: MeshLike) -> nn.Module:
        mesh = as_mesh(device_mesh)

        def leave(part: nn.Module, inputs: Any, outputs: Any) -> Any:
            given = outputs if isinstance(outputs, tuple) else (outputs,)
            if len(given) != len(self._pairs):
                raise ValueError(
                    f"{type(part).__name__} gave {len(given)} output(s), output_layouts speaks of "
                    f"{len(self._pairs)}. Give one for each, None for one that is left as it is."
                )
            both = zip(given, self._pairs, strict=True)
            made = tuple(_prepared(x, mesh, pair, self.use_local_output) for x, pair in both)
            return made[0] if len(made) == 1 else made

        module.register_forward_hook(leave)
        return module

    def __repr__(self) -> str:
        return f"PrepareModuleOutput({self._pairs}, use_local_output={self.use_local_output})"


class PrepareModuleInputOutput(ParallelStyle):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` in one."""

    def __init__(
        self,
        *,
        input_layouts: Each = None,
        desired_input_layouts: Each = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Each,
        desired_output_layouts: Each,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: MeshLike) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)

    def __repr__(self) -> str:
        return f"PrepareModuleInputOutput({self.prepare_module_input}, {self.prepare_module_output})"


@contextmanager
def loss_parallel() -> Iterator[None]:
    """For programs written for torch: a cross-entropy of class-sharded logits never gathers them anyway."""
    yield
