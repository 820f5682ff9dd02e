"""Dynamic loss scaling for float16 (Micikevicius et al. 2017, Mixed Precision Training, 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm.collectives import sum_whole
from espalier.comm.side import named
from espalier.mesh import Mesh
from espalier.parallel.precision import LossScale

_NAMED = 5


class LossScaler:
    """Gradients are those of the loss times ``scale``, which falls when one overflows, else grows.

    Attributes:
        settings: the plan's.
        scale: the scale now.
        skipped: steps that were skipped so far.
    """

    def __init__(self, settings: LossScale) -> None:
        self.settings = settings
        self.scale = settings.init_scale
        self.skipped = 0
        self._good = 0

    def scaled(self, loss: torch.Tensor) -> None:
        """Let the next backward of a loss give scaled gradients."""
        scale = self.scale
        with raw():
            loss.register_hook(lambda grad: grad * scale)

    def divided(self, factor: Callable[[], Any]) -> Callable[[], Any]:
        """What takes the scale, as it is now, out of gradients again, beside a factor of their own."""
        scale = self.scale

        def found() -> Any:
            own = factor()
            return (1.0 if own is None else own) / scale

        return found

    def update(
        self, norm: torch.Tensor, counted: Mapping[str, torch.Tensor], names: Sequence[str], mesh: Mesh
    ) -> bool:
        """Whether a step may be made with its gradients; the scale follows.

        Args:
            norm: of all gradients, equal on all ranks; not finite if one of them is not.
            counted: by name, of the gradients what this rank alone is responsible for.
            names: of all parameters.

        Raises:
            FloatingPointError: on all ranks, where the scale would fall below its minimum.
        """
        if mesh.is_dry or bool(norm.isfinite()):
            self._good += 1
            if self._good == self.settings.growth_interval:
                self.scale *= self.settings.growth_factor
                self._good = 0
            return True
        self.skipped += 1
        self._good = 0
        if self.scale * self.settings.backoff_factor < self.settings.min_scale:
            found = not_finite(counted, names, mesh)
            raise self._at_minimum([f"{name} (in the part of {of})" for name, of in found], len(names))
        self.scale *= self.settings.backoff_factor
        return False

    def _at_minimum(self, found: Sequence[str], of: int) -> FloatingPointError:
        rest = len(found) - _NAMED
        more = f", and {rest} more, the last {found[-1]}" if rest > 0 else ""
        backoff, least = self.settings.backoff_factor, self.settings.min_scale
        return FloatingPointError(
            f"The loss scale is at its minimum: {self.scale:g} times backoff_factor {backoff:g} is below "
            f"min_scale {least:g}, and gradients are not finite; {self.skipped} step(s) were skipped so far. "
            f"Of {of} parameters these overflowed: {', '.join(found[:_NAMED])}{more}. See what their modules "
            "compute in float16 (a backward pass runs from the last to the first). A lower learning rate may "
            'help; precision = "bfloat16" has the range of float32.'
        )

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on alike."""
        return {"scale": self.scale, "skipped": self.skipped, "good_steps": self._good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.scale, self.skipped = float(state["scale"]), int(state["skipped"])
        self._good = int(state["good_steps"])


def not_finite(
    counted: Mapping[str, torch.Tensor], names: Sequence[str], mesh: Mesh
) -> list[tuple[str, str]]:
    """Whose gradients are not finite, and on which ranks, in words (a collective: all ranks must call)."""
    with raw():
        flags = torch.zeros(mesh.size(), len(names), device=mesh.device())
        for i, name in enumerate(names):
            if name in counted and not bool(counted[name].isfinite().all()):
                flags[mesh.rank, i] = 1
        found = sum_whole(flags, mesh).T.tolist()
    told = []
    for name, here in zip(names, found, strict=True):
        ranks = [rank for rank, flag in zip(mesh.ranks, here, strict=True) if flag]
        if ranks:
            told.append((name, named(ranks)))
    return told


__all__ = ["LossScaler", "not_finite"]
