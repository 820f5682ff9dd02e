"""Branches: parts of a layer that don't need each other, on different ranks, at the same time.

The parameters of a branch lie on the ranks of one coordinate of the axis ``branch``; on the others they
have no values. Its input is *deferred* along the axis: each rank uses it for its own branch alone, and the
gradients are summed. What comes out of it is Partial, with zeros on the ranks that did not compute it. So
branches that are added to one another (``attention(y) + mlp(y) + x``) meet in one all-reduce. Ranks that
don't hold a branch follow its shapes without data, so that random values and errors are the same on all.

This is the operator-wise parallelism of Jia et al. 2019 (Beyond Data and Model Parallelism), as a layout.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from espalier.blocks import around, named_parameters_in
from espalier.comm import broadcast
from espalier.layout import Layout
from espalier.layout.layout import D, R
from espalier.mesh import Mesh
from espalier.mesh.parts import at
from espalier.tensor import full_tensor, plain, stamp
from espalier.tensor.draws import Drawing
from espalier.tensor.dtensor import DTensor, become_parameter, layout_of, redistribute
from espalier.texts import listed
from espalier.torch_private import disable_modes, raw, version_of
from espalier.trees import tree_map

Branches = Mapping[str, int]

# transformers' models whose attention and MLP have one input, by class name
TABLES: Final[Mapping[str, Branches]] = MappingProxyType(
    {
        "GPTJForCausalLM": {"*.attn": 0, "*.mlp": 1},
        "GPTNeoXForCausalLM": {"*.attention": 0, "*.mlp": 1},
    }
)


def found_branches(model: nn.Module, table: Branches | None, n: int) -> dict[str, int]:
    """The modules that are branches, by name, and the coordinate that each belongs to.

    Raises:
        ValueError: listing patterns that match nothing, numbers that are none of the n, modules within
            modules; or there is a branch axis and no table, or a table and no axis.
    """
    if n == 1 and table is None:
        return {}
    table = table if table is not None else TABLES.get(type(model).__name__)
    if not table or n == 1:
        raise ValueError(
            f"branch = {n}, and the modules that are branches: {dict(table) if table else None}. Give both: "
            "Plan(branch=2) and initialize(..., branches={'*.attention': 0, '*.mlp': 1})."
        )
    names = [name for name, _ in model.named_modules()]
    numbers: dict[str, int] = {}
    wrong = []
    for pattern, number in table.items():
        matched = fnmatch.filter(names, pattern)
        if not matched:
            wrong.append(f"{pattern!r} matches no module of {type(model).__name__}")
        if not 0 <= number < n:
            wrong.append(f"{pattern!r}: {number} is none of the branches 0 to {n - 1}")
        numbers.update(dict.fromkeys(matched, number))
    wrong += [f"{a!r} lies within {b!r}" for a in numbers for b in numbers if a.startswith(f"{b}.")]
    if wrong:
        raise ValueError(listed("Branches:", wrong))
    return numbers


def homes_of(model: nn.Module, branches: Branches, mesh: Mesh, stages: Mapping[int, Mesh]) -> dict[int, Mesh]:
    """For each parameter of a branch or a pipeline's stage, by its id, the mesh of the ranks that hold it.

    Raises:
        ValueError: others use it too.
    """
    homes = dict(stages)
    owner_of: dict[int, str] = {}
    for name, p in named_parameters_in(model, remove_duplicate=False):
        branch = next((b for b in branches if name.startswith(f"{b}.")), "")
        if owner_of.setdefault(id(p), branch) != branch:
            raise ValueError(
                f"Branches: the parameter {name} is used in {branch or 'the rest of the model'!r} and in "
                f"{owner_of[id(p)] or 'the rest of the model'!r}. A branch has parameters of its own: name a "
                "module that holds all its uses."
            )
        if branch:
            homes[id(p)] = at(stages.get(id(p), mesh), "branch", branches[branch])
    return homes


def leave_out(model: nn.Module, layouts: Mapping[str, Layout], dtype: torch.dtype | None) -> None:
    """Let the parameters of other ranks' branches have no memory here; who holds them goes on holding them.

    Args:
        dtype: in which the model computes; None for the parameters' own.
    """
    for name, p in named_parameters_in(model):
        layout = layouts[name]
        if not layout.mesh.is_member:
            cast = dtype if dtype is not None and p.is_floating_point() else p.dtype
            local = torch.empty(layout.local_shape, dtype=cast, device="meta")
            become_parameter(p, local, layout)


def place_branches(model: nn.Module, branches: Branches, mesh: Mesh) -> None:
    """Let each branch, whose parameters are laid out, be computed by those that hold it; in place."""
    for name, number in branches.items():
        around(model.get_submodule(name), partial(_branch, mesh, number))


def everywhere(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The plain global tensor on every rank, also of what lies on one coordinate of the branch axis."""
    home = layout_of(x, mesh).mesh
    if home is mesh or "branch" not in mesh.names:
        return full_tensor(x)
    axis = mesh.axis("branch")
    source = next(k for k in range(mesh.shape[axis]) if at(mesh, axis, k) is home)
    whole = full_tensor(x) if home.is_member else torch.empty(x.shape, dtype=x.dtype, device=mesh.device())
    return broadcast(whole, mesh, axis, source)


def _branch(
    mesh: Mesh, number: int, module: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Around the ``forward`` of a branch; DTensors in and out."""
    axis = mesh.axis("branch")
    home = at(mesh, axis, number)
    used: list[torch.Tensor] = []

    def enter(x: Any) -> Any:
        if type(x) is not DTensor or layout_of(x).mesh is not mesh:
            return x
        deferred = _deferred_along(x, axis)
        with raw():
            here = plain(deferred)
            used.append(here)
            layout = _on(home, layout_of(deferred), axis, R)
            if not home.is_member:
                here = here.detach().new_empty(layout.local_shape, device="meta")
            return stamp(here.view_as(here), layout)

    def leave(x: Any) -> Any:
        if type(x) is not DTensor or layout_of(x).mesh is not home:
            return x
        summed = layout_of(x)
        for a in summed.partial:
            if summed.axes[a] != "sum":
                summed = summed.with_axis(a, R)
        out = redistribute(x, summed)
        with raw():
            layout = _on(mesh, summed, axis, "sum")
            here = plain(out)
            if not home.is_member:
                here = torch.zeros(layout.local_shape, dtype=x.dtype, device=mesh.device())
                # backward, all ranks must come by where the input was deferred
                for y in used:
                    if y.requires_grad and here.is_floating_point():
                        here = here + y.reshape(-1)[:0].sum().to(here.dtype)
            return stamp(here.view_as(here), layout)

    args, kwargs = tree_map(enter, args), tree_map(enter, kwargs)
    with nullcontext() if home.is_member else _uncounted():
        out = own(*args, **kwargs)
    return tree_map(leave, out)


@contextmanager
def _uncounted() -> Iterator[None]:
    """What is done without data is not this rank's work: a dry run is not to count it; but it draws."""
    with disable_modes() as modes, ExitStack() as kept:
        for mode in modes:
            if isinstance(mode, Drawing):
                kept.enter_context(mode)
        yield


def _on(mesh: Mesh, layout: Layout, axis: int, state: Any) -> Layout:
    """The same layout on another mesh, but for one axis, which cuts nothing."""
    return Layout.of(mesh, (*layout.axes[:axis], state, *layout.axes[axis + 1 :]), layout.cuts, layout.shape)


def _deferred_along(x: DTensor, axis: int) -> DTensor:
    """``x`` deferred along the axis; remembered on it, so that branches share one all-reduce backward."""
    layout = layout_of(x)
    tag = layout, version_of(x), torch.is_grad_enabled()
    known = x.__dict__.get("_branched")
    if known is not None and known[0] == tag:
        return known[1]
    moved = redistribute(x, layout.with_axis(axis, D))
    if not x.is_leaf:
        x._branched = tag, moved  # type: ignore[attr-defined]
    return moved
