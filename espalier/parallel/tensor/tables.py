"""Tensor-parallel layouts of models that are described: by name pattern, or by torch's styles.

A pattern (``fnmatch``) names modules; what it says holds for their parameters:

============  ===============================================================
``column``    the output features are cut: weight [out, in] on out, bias too
``row``       the input features are cut: weight on in, bias whole
``vocab``     the rows of an embedding are cut
``whole``     nothing is cut
============  ===============================================================

Column then row is Megatron-LM's pair: no communication between them, one all-reduce after.
"""

from __future__ import annotations

import fnmatch
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from espalier.blocks import named_parameters_in, parameters_in
from espalier.layout import Layout, Partial, Placement, Replicate, Shard
from espalier.layout.layout import R
from espalier.mesh import Mesh
from espalier.mesh.mesh import MeshLike, as_mesh
from espalier.tensor import DTensor, full_tensor, redistribute
from espalier.tensor.dtensor import become_parameter
from espalier.tensor.modules import distribute_module, lay_out_parameter
from espalier.tensor.observers import tell
from espalier.texts import expect, few, listed
from espalier.torch_private import forward_hooks

Table = Mapping[str, str]
_HOOKED = re.compile("_(g|v|orig)$")  # what torch.nn.utils.weight_norm and its kin call them

_GPT2: Final[Table] = MappingProxyType(
    {
        "embed": "vocab",
        "*.attention.[qkv]_proj": "column",
        "*.attention.o_proj": "row",
        "*.mlp.up_proj": "column",
        "*.mlp.down_proj": "row",
        "head": "column",
    }
)
_GPT: Final[Table] = MappingProxyType({**_GPT2, "*.mlp.gate_proj": "column"})
_VIT: Final[Table] = MappingProxyType({name: kind for name, kind in _GPT2.items() if "*" in name})
# what every token passes; the experts themselves are laid out by espalier.parallel.experts
_MOE: Final[Table] = MappingProxyType(
    {name.replace(".mlp.", ".shared."): kind for name, kind in _GPT.items()}
)

# by class name, so that this file needs none of the models
TABLES: Final[Mapping[str, Table]] = MappingProxyType(
    {"GPT": _GPT, "GPT2": _GPT2, "BERT": _GPT2, "ViT": _VIT, "MoE": _MOE}
)

KINDS: Final = ("column", "row", "vocab", "whole")


def table_for(model: nn.Module) -> Table | None:
    """The table of a described model (one of ``espalier.models``), or None."""
    if not type(model).__module__.startswith("espalier.models"):
        return None
    names = [name for name, _ in model.named_modules()]
    table = TABLES.get(type(model).__name__, {})
    return {pattern: kind for pattern, kind in table.items() if fnmatch.filter(names, pattern)} or None


def kinds_of(model: nn.Module, table: Table) -> dict[str, str]:
    """For each module that the table names, what it says of it.

    Raises:
        ValueError: listing all patterns that match nothing and unknown kinds.
    """
    kinds: dict[str, str] = {}
    wrong: list[str] = []
    modules = dict(model.named_modules())
    for pattern, kind in table.items():
        matched = fnmatch.filter(modules, pattern)
        if kind not in KINDS:
            wrong.append(f"{pattern!r}: unknown kind {kind!r}; expected one of {', '.join(KINDS)}")
        elif not matched:
            wrong.append(f"{pattern!r} matches no module of {type(model).__name__}")
        kinds.update(dict.fromkeys(matched, kind))
    if wrong:
        raise ValueError(listed("Tensor-parallel layouts:", wrong))
    return kinds


def by_table(model: nn.Module, table: Table) -> dict[str, int]:
    """For each parameter that the table cuts, the dim that the tensor axis cuts.

    Raises:
        ValueError: see :func:`kinds_of`.
    """
    cut: dict[str, int] = {}
    for name, kind in kinds_of(model, table).items():
        module = model.get_submodule(name)
        for own, of, parameter in parts_of(module):
            dim = dim_of(module, of, kind)
            # a factor for each row has one column
            if dim is not None and dim < parameter.ndim and (own == of or parameter.shape[dim] > 1):
                cut[f"{name}.{own}" if name else own] = dim
    return cut


def parts_of(module: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """A module's own parameters, and those that its parametrized tensors are made of.

    Yields:
        the parameter's name in the module, the name of what is made of it (``"weight"``), and itself.
    """
    for name, p in module.named_parameters(recurse=False):
        base = _HOOKED.sub("", name)
        yield name, base if base in vars(module) else name, p
    if is_parametrized(module):
        for of, parametrization in module.parametrizations.items():  # type: ignore[operator, union-attr]
            for name, p in parametrization.named_parameters(recurse=False):
                yield f"parametrizations.{of}.{name}", of, p


def kinds_from(model: nn.Module, cut: Mapping[str, int]) -> dict[str, str]:
    """The kinds of modules whose weights are cut so: the other way of :func:`by_table`."""
    kinds = {}
    for owner, module in model.named_modules():
        for own, of, _ in parts_of(module):
            dim = cut.get(f"{owner}.{own}" if owner else own)
            if dim is not None and of == "weight" and dim_of(module, of, "row") == dim:
                kinds[owner] = "row"
    return kinds


def dim_of(module: nn.Module, parameter: str, kind: str) -> int | None:
    """The dim of a module's parameter that the tensor axis cuts; None for one that stays whole."""
    if kind in ("column", "vocab"):
        return 1 if transposed(module) and parameter == "weight" else 0
    if kind == "row" and parameter == "weight":
        return 0 if transposed(module) else 1
    return None


def transposed(module: nn.Module) -> bool:
    """Whether a layer keeps its weight as [in, out]: transformers' Conv1D does."""
    return type(module).__name__ == "Conv1D"


# ---- tensor parallelism on a grid or a cube of ranks (2D, 2.5D, 3D): every weight matrix is cut both ways
#
# The table, outermost cut first. *features* are the output features, *hidden* a model's residual stream.
#
# =================================  =======================  =====================================
# parameter                          2d and 2.5d              3d
# =================================  =======================  =====================================
# Linear ("column")                  in row, features col     in k, features j then i
# Linear after a column one ("row")  in row, features col     in j, features k then i
# Embedding                          rows row, features col   rows j then i, features k
# vectors, whatever else             last dim as features     last dim as features, j or k alone
# =================================  =======================  =====================================
#
# With rows of activations cut over row (2d), depth and row (2.5d) or i and j (3d) the rule of a linear
# layer sees by these layouts which algorithm fits (``espalier.tensor.rules.summa``). In 3d a column layer
# gives rows over i and k, features over j; a row layer takes these and gives back what the first took.
#
# 2D: Xu and You 2021 (2104.05343), after SUMMA (van de Geijn, Watts 1997); 2.5D: Wang et al. 2021
# (2105.14500); 3D: Bian et al. 2021 (2105.14450), after Agarwal et al. 1995.


Axes = tuple[str, ...]
Cuts = tuple[Axes, ...]  # of a parameter: for each dim the axes that cut it, outermost first


@dataclass(frozen=True)
class _Role:
    """The axes that cut a weight's input and output features; activations have the outermost of each."""

    into: Axes
    out: Axes


_GRID: Final = _Role(("row",), ("col",))
_FLAT: Final = MappingProxyType({"column": _GRID, "row": _GRID, "vocab": _GRID})
_CUBE: Final = MappingProxyType(
    {
        "column": _Role(("k",), ("j", "i")),
        "row": _Role(("j",), ("k", "i")),
        "vocab": _Role(("j", "i"), ("k",)),
    }
)
ROLES: Final[Mapping[str, Mapping[str, _Role]]] = MappingProxyType({"2d": _FLAT, "2.5d": _FLAT, "3d": _CUBE})


_CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def by_grid(
    model: nn.Module, mode: str, kinds: Mapping[str, str], sizes: Mapping[str, int]
) -> dict[str, Cuts]:
    """For each parameter, for each dim, the axes that cut it.

    A dim with fewer elements than ranks stays whole.

    Args:
        kinds: of modules by name, ``"column"``, ``"row"``, ``"vocab"`` or ``"whole"``; others are
            ``"column"``, or ``"vocab"`` if they are embeddings.
        sizes: of the mesh's axes.
    """
    cuts_by_id: dict[int, Cuts] = {}
    for name, module in model.named_modules():
        looked_up = isinstance(module, nn.Embedding)
        kind = kinds.get(name, "vocab" if looked_up else "column")
        for _, own, p in parts_of(module):
            # of a weight that is tied the embedding decides
            if looked_up or id(p) not in cuts_by_id:
                cuts = ((),) * p.ndim if kind == "whole" else _cuts(module, own, p.ndim, ROLES[mode], kind)
                cuts_by_id[id(p)] = tuple(
                    axes if n >= math.prod(sizes[a] for a in axes) else ()
                    for n, axes in zip(p.shape, cuts, strict=True)
                )
    return {name: cuts_by_id[id(p)] for name, p in named_parameters_in(model)}


def _cuts(module: nn.Module, parameter: str, ndim: int, roles: Mapping[str, _Role], kind: str) -> Cuts:
    role = roles[kind]
    if isinstance(module, nn.Linear) or transposed(module):
        if parameter == "weight" and ndim == 2:
            return (role.into, role.out) if transposed(module) else (role.out, role.into)
        if ndim == 1:
            return (role.out[:1],)
    if isinstance(module, nn.Embedding) and ndim == 2:
        return role.into, role.out
    hidden = roles["row"].out[:1]
    if isinstance(module, _CONVOLUTIONS):
        return (hidden, *((),) * (ndim - 1))
    return (*((),) * (ndim - 1), hidden) if ndim else ()


# ---- torch's tensor-parallel styles: what is cut of a module, and how its inputs and outputs lie
#
# The plain tensors that go in and come out are those of Megatron-LM (https://arxiv.org/abs/1909.08053):
# where one is said to be replicated, every rank computes the same from it, so that its gradient is the
# whole one on every rank. What a style gathers is typed *deferred* at once, so that its gradient is
# reduce-scattered, and not all-reduced and cut.


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
        before = [set(hooks) for hooks in forward_hooks(module)]
        styled = parallelize_plan._apply(module, mesh)
        if styled is module:
            hooks = tuple(tuple(set(now) - b) for now, b in zip(forward_hooks(module), before, strict=True))
            vars(module).setdefault(_STYLED, []).append(Styled(parallelize_plan, as_mesh(mesh), hooks))
        return styled
    elif isinstance(parallelize_plan, Mapping):
        for pattern, style in parallelize_plan.items():
            matching = _matching(module, pattern.split(".")) if pattern else [module]
            if not matching:
                warnings.warn(
                    f"parallelize_module: {pattern!r} matches no module of {type(module).__name__} and is "
                    "left out.",
                    stacklevel=2,
                )
            for part in matching:
                parallelize_module(part, mesh, style, src_data_rank=src_data_rank)
    else:
        raise TypeError(
            f"parallelize_plan: expected a ParallelStyle or names and their styles, got {parallelize_plan!r}."
        )
    return module


class Styled(NamedTuple):
    """What a style has done to a module.

    Attributes:
        hooks: the keys of those that it has put on it, before its forward and behind it.
    """

    style: ParallelStyle
    mesh: Mesh
    hooks: tuple[tuple[int, ...], ...]


_STYLED = "_styled"


def unstyled(model: nn.Module) -> tuple[list[Mesh], dict[str, str], bool]:
    """Take the styles of a model's modules off again, for an engine that lays it out (a collective).

    Its parameters are plain and whole then.

    Returns:
        the meshes; a table of the modules that they cut; whether they cut sequences.

    Raises:
        ValueError: a style is none of torch's.
    """
    meshes: dict[Mesh, None] = {}
    table: dict[str, str] = {}
    cuts_sequences = False
    for name, module in model.named_modules():
        for style, mesh, hooks in vars(module).pop(_STYLED, ()):
            if type(style) not in _OF_TORCH:
                raise ValueError(
                    f"{name}: {type(style).__name__} is a style of its own, and the wrapper's engine lays "
                    "the model out on all axes. Leave parallelize_module out, and say "
                    "fully_shard(model, plan={'tensor': n})."
                )
            meshes[mesh] = None
            cuts_sequences |= isinstance(style, SequenceParallel)
            if isinstance(style, _Cut):
                kind = "row" if isinstance(style, RowwiseParallel) else "column"
                table[name] = "vocab" if isinstance(module, nn.Embedding) else kind
            for held, keys in zip(forward_hooks(module), hooks, strict=True):
                for key in keys:
                    del held[key]
            vars(module).pop("_distribute_module_applied", None)
    if meshes:
        _count_all_heads(model, table, next(iter(meshes)).size())
    for p in parameters_in(model) if meshes else ():
        if isinstance(p, DTensor) and p.device_mesh in meshes:
            become_parameter(p, whole_of(p))
    return list(meshes), table, cuts_sequences


def whole_of(p: DTensor) -> torch.Tensor:
    """A parameter's whole value, without one where it has none yet (a collective, where it has one)."""
    x = p.detach()
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if x.is_meta else full_tensor(x)


def _count_all_heads(model: nn.Module, table: Mapping[str, str], ranks: int) -> None:
    """Give modules the number of all heads again, where a program has divided it by the ranks of the styles.

    Behind torch's styles a module has the heads of this rank alone; here its forward sees those of all.
    """
    told: list[str] = []
    for name, module in model.named_modules() if ranks > 1 else ():
        layers = {n: m for n, m in module.named_children() if table.get(f"{name}.{n}".strip(".")) == "column"}
        features = {m.out_features for m in layers.values() if isinstance(m, nn.Linear)}
        counts = {n: x for n, x in vars(module).items() if type(x) is int and "head" in n}
        sizes = {n: counts.pop(n) for n in list(counts) if "dim" in n or "size" in n}
        divided = {n: k for n, k in counts.items() if any(k * x * ranks in features for x in sizes.values())}
        if any(features.isdisjoint(k * x for x in sizes.values()) for k in divided.values()):
            vars(module).update({n: k * ranks for n, k in divided.items()})
            told += [f"{name}.{n}" for n in divided]
    if told:
        tell(
            f"{few(told)}: had been divided by the {ranks} ranks that share heads, and are what they were: "
            "forward sees the heads of all ranks here. Leave the number of heads as it is."
        )


def _matching(module: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    children = [child for name, child in module.named_children() if fnmatch.fnmatch(name, patterns[0])]
    return (
        children
        if len(patterns) == 1
        else [part for child in children for part in _matching(child, patterns[1:])]
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


def _brought(x: DTensor, mesh: Mesh, placements: Placements, defer: bool = False) -> DTensor:
    layout = Layout(mesh, placements, x.shape)
    # what comes from shards to be used on all ranks is used by each for its own share
    if defer and isinstance(x.placements[0], Shard) and layout.axes[0] == R:
        layout = layout.with_deferred([0])
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
        for what, given in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
            expect(
                f"{type(self).__name__}: {what}", given, Placement | None, "Shard(dim), Replicate() or None"
            )
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
            return _brought(x, mesh, self.desired_input_layouts, defer=True)

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


def _each(layouts: Each, wanted: Each, what: str) -> list[tuple[Placement | None, Placement | None]]:
    pairs = [(x,) if isinstance(x, Placement) else () if x is None else x for x in (layouts, wanted)]
    if len(pairs[0]) != len(pairs[1]):
        raise ValueError(
            f"{what}_layouts {layouts} and desired_{what}_layouts {wanted} must speak of the same number of "
            f"{what}s; None stands for one that is left as it is."
        )
    return list(zip(*pairs, strict=True))


def _prepared(x: Any, mesh: Mesh, pair: tuple[Placement | None, Placement | None], local: bool) -> Any:
    layout, wanted = pair
    if layout is None:
        return x
    typed = _typed(x, mesh, (layout,))
    return _left(typed if wanted is None else _brought(typed, mesh, (wanted,), defer=not local), local)


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
            several = outputs if isinstance(outputs, tuple) else (outputs,)
            if len(several) != len(self._pairs):
                raise ValueError(
                    f"{type(part).__name__} gave {len(several)} output(s), output_layouts speaks of "
                    f"{len(self._pairs)}. Give one for each, None for one that is left as it is."
                )
            both = zip(several, self._pairs, strict=True)
            prepared = tuple(_prepared(x, mesh, pair, self.use_local_output) for x, pair in both)
            return prepared[0] if len(prepared) == 1 else prepared

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


_OF_TORCH = (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)


@contextmanager
def loss_parallel() -> Iterator[None]:
    """For programs written for torch: a cross-entropy of class-sharded logits never gathers them anyway."""
    yield
