"""Runners on a rank without elements, where torch itself is not asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from espalier.sharding.spec import Placed, Runner
from espalier.tensor.dry_autocast import autocast_dtype
from espalier.tensor.fallback import uncounted
from espalier.tensor.inputs import Path, at, put
from espalier.torch_private import FakeTensorMode, disable_modes
from espalier.trees import tensors_in, tree_map


class RunnerOfNothing:
    """A rule's runner, of which a rank without elements gives what others do: in their dtype, or an error.

    Under autocast it is another than that of the inputs, and outside of it inputs of several may be refused.
    Torch is asked once for each mix of dtypes, with tensors of the whole shapes that have no data.

    Args:
        shapes: of the whole tensors among the arguments, and where these stand.
    """

    def __init__(self, run: Runner, shapes: Sequence[tuple[Path, tuple[int, ...]]]) -> None:
        self._run, self._shapes = run, shapes
        self._told: dict[Any, list[torch.dtype]] = {}

    def __call__(self, func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
        """What the runner gives, in the dtype of other ranks.

        Raises:
            RuntimeError: as on other ranks, torch takes no such mix of dtypes.
        """
        out = self._run(func, args, kwargs, placed)
        given = tensors_in((args, kwargs))
        low = autocast_dtype(given[0].device.type)
        dtypes = tuple(x.dtype for x in given)
        if low is None and len({d for d in dtypes if d.is_floating_point}) <= 1:
            return out
        key = low, dtypes
        if key not in self._told:
            self._told[key] = self._asked(func, args, kwargs)
        wanted = iter(self._told[key])
        return tree_map(lambda x: x.to(next(wanted, x.dtype)) if isinstance(x, torch.Tensor) else x, out)

    def _asked(self, func: Callable[..., Any], args: Any, kwargs: Any) -> list[torch.dtype]:
        """The dtypes of what torch gives."""
        (device, *_) = {x.device for x in tensors_in((args, kwargs))}
        mode = nullcontext() if device.type == "meta" else FakeTensorMode()
        with uncounted(), disable_modes(), torch.no_grad(), mode:
            for path, shape in self._shapes:
                x = at(args, kwargs, path)
                args, kwargs = put(args, kwargs, path, torch.empty(shape, dtype=x.dtype, device=device))
            return [x.dtype for x in tensors_in(func(*args, **kwargs))]
