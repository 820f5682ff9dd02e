"""Where the strategies meet: from a plan to the layout of every parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.layout import Layout, Placement, Replicate, Shard
from espalier.mesh import Mesh
from espalier.parallel.branches import Branches, found_branches, homes_of, leave_out, place_branches
from espalier.parallel.data.axis import DataAxis
from espalier.parallel.data.units import blocks
from espalier.parallel.expert.exchange import send_tokens
from espalier.parallel.expert.modules import left_out, stacked
from espalier.parallel.plan import Plan
from espalier.parallel.tensor.automatic import Chosen, choose
from espalier.parallel.tensor.boundary import cut_inputs, cut_sequences, is_norm
from espalier.parallel.tensor.grids import Cuts, by_grid
from espalier.parallel.tensor.infer import infer
from espalier.parallel.tensor.tables import Table, kinds_from, kinds_of, table_for
from espalier.tensor import lay_out
from espalier.tensor.deferred import make_the_rest_real
from espalier.tensor.dtensor import DTensor
from espalier.tensor.modules import unwatched


class Arrangement(dict[str, Layout]):
    """The layout of every parameter, by name.

    Attributes:
        chosen: what was chosen on the tensor axis.
        branches: the modules that are branches, and of which number.
        parts: of a pipeline, the names of the parameters that each stage of this rank uses.
    """

    chosen: Chosen
    branches: Branches
    parts: tuple[frozenset[str], ...] = ()


def arrange(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    *,
    table: Table | None = None,
    branches: Branches | None = None,
    batch: Any = None,
    rows: int = 1,
    stages: Mapping[int, Mesh] | None = None,
) -> Arrangement | None:
    """The layout of every parameter of a model under a plan.

    On the data axes parameters are replicated and varied while the model computes with them: their
    gradients are reduced chunk by chunk (``espalier.parallel.data``). So are, on the tensor axis, those of
    norms that meet shards of a sequence. On the tensor axes parameters are cut by a table of name patterns
    (``table``, or the model's own), or, for a model nobody described, by what a run on ``batch`` (of one row)
    and trials of its blocks (of ``rows``) show (1d), that run alone
    (3d), or all alike (2d, 2.5d). Experts (``espalier.parallel.expert``) are cut one from another, along the
    expert axis and the tensor axes. A pipeline's parameters lie on the meshes of their ``stages`` (by their
    ids).

    Returns:
        name to layout; None if a batch is needed and missing.

    Raises:
        ValueError: there is an expert axis and there are no experts.
    """
    table = table if table is not None else table_for(model)
    if plan.tensor_mode == "1d":
        given: Any = {"table": table, "batch": batch, "rows": rows, "sequence": plan.sequence_parallel}
        with left_out(model):
            chosen = choose(model, plan.tensor, blocks(model), **given)
        cuts = None if chosen is None else _on_a_line(model, chosen.cut)
    else:
        chosen = Chosen({}, False, f"{plan.tensor_mode}: matrices both ways, vectors with their features")
        cuts = _on_a_grid(model, plan, table, batch)
    if chosen is None or cuts is None:
        return None
    experts = stacked(model)
    if plan.expert > 1 and not experts:
        raise ValueError(
            f"expert = {plan.expert}, but {type(model).__name__} has no experts: no module with num_experts, "
            "parameters [num_experts, ...] and forward(hidden, top_k_index, top_k_weights)."
        )
    apart = tuple(axis for axis in ("expert", *plan.tensor_axes) if axis in mesh.names)
    layouts = Arrangement()
    layouts.chosen, layouts.branches = chosen, found_branches(model, branches, plan.branch)
    if apart:
        chosen.why.update(dict.fromkeys(experts, "experts, one from another"))
    homes = homes_of(model, layouts.branches, mesh, stages or {})
    for name, p in model.named_parameters():
        places: list[Placement] = [Replicate()] * mesh.ndim
        order: list[str] = []
        for dim, axes in enumerate((apart,) if name in experts else cuts.get(name, ())):
            order += axes
            for axis in axes:
                places[mesh.axis(axis)] = Shard(dim)
        varied = [a for a in plan.data_axes if a not in order]
        home = homes.get(id(p), mesh)
        layouts[name] = Layout(home, places, tuple(p.shape), order=order, varied=varied)
    if chosen.sequence:
        _defer(model, layouts, mesh.axis("tensor"))
    return layouts


def _defer(model: nn.Module, layouts: Arrangement, axis: int) -> None:
    """Let the engine sum the gradients of norms, which meet shards of the sequence (design, section 3.1)."""
    met = {id(p) for module in model.modules() if is_norm(module) for p in module.parameters()}
    for name, p in model.named_parameters():
        if id(p) in met:
            layouts[name] = layouts[name].with_varied([axis])


def _on_a_line(model: nn.Module, cut: Mapping[str, int]) -> dict[str, Cuts]:
    """1d: the tensor axis cuts the dims chosen."""
    shared: dict[int, Cuts] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if name in cut:
            shared[id(p)] = tuple(("tensor",) if d == cut[name] else () for d in range(p.ndim))
    return {name: shared[id(p)] for name, p in model.named_parameters() if id(p) in shared}


def _on_a_grid(model: nn.Module, plan: Plan, table: Table | None, batch: Any) -> dict[str, Cuts] | None:
    """2d, 2.5d and 3d: every matrix both ways; in a cube it matters which layers follow which."""
    if table is not None:
        kinds = kinds_of(model, table)
    elif plan.tensor_mode != "3d" or plan.tensor == 1:
        kinds = {}
    elif batch is None:
        return None
    else:
        with left_out(model):
            groups = infer(model, batch, plan.tensor_axes["k"])
        kinds = kinds_from(model, {name: dim for group in groups for name, dim in group.items()})
    return by_grid(model, plan.tensor_mode, kinds, plan.tensor_axes)


def lay_out_model(
    model: nn.Module,
    layouts: Arrangement,
    mesh: Mesh,
    plan: Plan,
    optimizer: torch.optim.Optimizer | None = None,
) -> DataAxis:
    """Make every parameter a DTensor, in place: who holds it (an optimizer, a tie) goes on holding it.

    Rank 0's values are sent to all, so ranks that were seeded differently train one model all the
    same. Buffers are sent too and stay plain tensors: every rank holds the same.

    Args:
        layouts: of the parameters while the model computes with them.
        optimizer: whose states will need space on disk, where the plan puts them there.

    Raises:
        ValueError: a parameter was laid out already.
        DiskError: there is no space for the states.
    """
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            raise ValueError(
                f"The parameter {name} is a DTensor already. Give initialize() the plain model, once."
            )
    low = plan.precision.parameters
    with unwatched(model):
        leave_out(model, layouts, None if low is None else getattr(torch, low))
        data = DataAxis(model, layouts, mesh, plan, layouts.parts, optimizer)
    send_tokens(model)
    place_branches(model, layouts.branches, mesh)
    for module in model.modules():
        if not mesh.is_dry:
            make_the_rest_real(module)
        for name, b in module._buffers.items():
            if b is not None:
                whole = lay_out(b, Layout.replicated(mesh.within or mesh, tuple(b.shape)))
                with raw():
                    module._buffers[name] = whole.as_subclass(torch.Tensor)
    if layouts.chosen.sequence:
        cut_sequences(model, layouts, mesh.axis("tensor"), blocks(model).values())
    if plan.context > 1:
        # where a sequence is made inside the model: of an image, say
        cut_inputs(blocks(model).values(), mesh.axis("context"))
    return data
