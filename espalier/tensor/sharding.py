"""register_sharding: torch's way to describe an operator, as acceptable placements along one axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from espalier.layout import Placement
from espalier.layout.layout import AxisState, R, normal_dim
from espalier.tensor.api import register_rule
from espalier.tensor.rules.spec import Operand, RuleFunction, Spec
from espalier.tensor.rules.table import spellings
from espalier.trees import leaves, tensors_in, tree_map

Way = tuple[Sequence[Placement | None], Sequence[Placement | None]]
ShardingFunction = Callable[..., Sequence[Way]]


def register_sharding(op: Any) -> Callable[[ShardingFunction], ShardingFunction]:
    """Teach the dispatcher an operator by the placements that it may have along one axis of a mesh.

    Args:
        op: an overload of ``torch.ops``, or several. For one of aten's, the public functions of its name are
            taught too.

    The decorated function has the operator's parameters; where the call has a tensor it gets its global
    ``shape``, ``ndim`` and ``dtype``. It returns pairs of lists: placements of the outputs, and of the inputs
    (``None`` for arguments that are no tensors). Everything replicated is always possible.

    Raises:
        ValueError: the operator writes to its inputs, or the placements do not fit the call.
    """
    ops = op if isinstance(op, list | tuple) else [op]
    for one in ops:
        if one._schema.is_mutable:
            raise ValueError(f"register_sharding: {one} writes to its inputs; use espalier.register_rule.")

    def register(function: ShardingFunction) -> ShardingFunction:
        for one in ops:
            space, name = one._schema.name.split("::")
            public = spellings(name) if space == "aten" else []
            register_rule(one, one.overloadpacket, *public)(_rule(one, function))
        return function

    return register


def _rule(op: Any, function: ShardingFunction) -> RuleFunction:
    def rule(*args: Any, **kwargs: Any) -> Spec:
        values = leaves((args, kwargs))
        places = [i for i, x in enumerate(values) if isinstance(x, Operand)]
        ins = [values[i].shape for i in places]
        args_on_meta, kwargs_on_meta = tree_map(_on_meta, (args, kwargs))
        shapes = [x.shape for x in tensors_in(op(*args_on_meta, **kwargs_on_meta))]
        ways = []
        for outs, given in function(*args, **kwargs):
            wanted = [given[i] for i in places if i < len(given)]
            if len(outs) != len(shapes) or len(wanted) != len(ins) or None in (*outs, *wanted):
                raise ValueError(
                    f"register_sharding for {op}: the call has {len(values)} argument(s), tensors at "
                    f"{places}, and {len(shapes)} output(s); got placements {list(given)} and {list(outs)}."
                )
            ways.append((_states(wanted, ins), _states(outs, shapes)))
        return Spec(
            ins=[(None,) * len(shape) for shape in ins],
            outs=[(None,) * len(shape) for shape in shapes],
            shapes=[tuple(shape) for shape in shapes],
            ways=ways,
        )

    return rule


def _on_meta(x: Any) -> Any:
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Operand) else x


def _states(placements: Sequence[Any], shapes: Sequence[Sequence[int]]) -> tuple[AxisState, ...]:
    found: list[AxisState] = []
    for placement, shape in zip(placements, shapes, strict=True):
        if placement.is_shard():
            found.append(normal_dim(placement.dim, len(shape), f"{placement}: dim"))
        else:
            found.append(placement.reduce_op if placement.is_partial() else R)
    return tuple(found)
