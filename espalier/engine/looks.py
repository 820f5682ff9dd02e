"""What the program may look at when it has called a model in stages, which runs once more for that.

What hooks that look are shown: see ``observing.py``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from espalier.blocks import called
from espalier.engine.awaited import Awaited
from espalier.engine.kept import SOUGHT, step_of
from espalier.engine.model_run import ModelRun
from espalier.engine.observing import ONLY_LOOKS, Observers, Place
from espalier.tensor.observers import tell
from espalier.torch_private import FORWARD_HOOKS, version_of
from espalier.trees import leaves, tree_map


def let_look(call: ModelRun, observers: Observers, inputs: Any, out: Any) -> None:
    """Call the program's hooks on modules that look, with what they see of a call of the model.

    Raises:
        TypeError: one writes to that.
    """
    if torch.is_grad_enabled() and not call.is_part:
        tell(_SEEN)
    args, named = called(lambda *args, **named: (args, named), inputs)
    for hook in observers.of_model(FORWARD_HOOKS[0]):
        observers.call(hook, (args, named) if hook.takes_named(observers.module) else (args,))
    for sight in call.sights:
        tensors = leaves(sight.args, torch.Tensor)
        stand = {id(x): _seen(call, x, Place(sight.hook, sight.call, i)) for i, x in enumerate(tensors)}
        versions = [version_of(x) for x in tensors]
        observers.call(sight.hook, _with(stand, sight.args))
        if versions != [version_of(x) for x in tensors]:
            raise TypeError(ONLY_LOOKS)
    for hook in observers.of_model(FORWARD_HOOKS[1]):
        took = (args, named) if hook.takes_named(observers.module) else (args,)
        observers.call(hook, (*took, out))


@lru_cache
def tell_of_writes(micro_batches: int) -> None:
    """Tell once that a model, called on so many parts, runs for the sake of weights that it writes to."""
    tell(_WRITES + (_BY_PARTS.format(micro_batches) if micro_batches > 1 else ""))


def _with(stand: dict[int, Any], args: Any) -> Any:
    """Arguments with what stands for their tensors."""
    return tree_map(lambda x: stand.get(id(x), x), args, SOUGHT)


def _seen(call: ModelRun, value: torch.Tensor, place: Place) -> Any:
    """What a hook gets for a tensor."""
    if not torch.is_grad_enabled():
        return value
    leaf = value.view_as(value)
    if value.is_floating_point() and not call.is_part:
        call.made_by[id(leaf.requires_grad_())] = place
        call.leaves.append(leaf)
    x = Awaited(call, step_of(call, torch.Tensor.view_as, (leaf, leaf), {}))
    x._known, x._seen_at = value, place
    return x


_SEEN = (
    "Modules have forward hooks, which are called on all ranks with what the modules compute. For that the "
    "model runs once more, without gradients, each time it is called. Quicker is a forward that returns it; "
    "or remove() hooks that are not needed any more."
)
_WRITES = (
    "The model's forward writes to its own weights (through .data, under no_grad, or by max_norm). The loop "
    "may read them before its loss goes back, in a penalty say: so in a pipeline the model runs twice in a "
    "step, first without gradients. Quicker is to write behind optimizer.step(), in the loop; or "
    "engine.train_step(batch), which asks for nothing between."
)
_BY_PARTS = (
    " With accumulate = {} it writes what it makes of a micro-batch: where a first call makes weights of its "
    "rows (ActNorm), call the plain model once on a whole batch, before prepare."
)
