"""The global gradient norm, clipping by it, the scale of a loss in float16; loss spikes.

The scale is dynamic (Micikevicius et al. 2017, Mixed Precision Training, 3.2)."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from espalier.comm.collectives import sum_whole, sum_whole_
from espalier.comm.control import named
from espalier.device import is_accelerator, moved
from espalier.faults.settings import Spikes
from espalier.layout import Layout
from espalier.layout.layout import is_partial
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.parallel.data.gradients import gradient_of
from espalier.parallel.plan import LossScale
from espalier.tensor import DTensor, plain, redistribute, stamp
from espalier.texts import shown
from espalier.torch_private import foreach_mul_, foreach_norms, getter, raw

# the C functions themselves: this is the way of every step
_device, _dtype = getter("device"), getter("dtype")


class Rider(NamedTuple):
    """Numbers that ride on the norm's all-reduce, so that they need no message of their own.

    Attributes:
        shares: what this rank adds to each: plain scalars, as many on every rank.
        hear: is given their sums over all ranks, once.
        at_once: the program waits for them before it goes on; else they are heard with the norm.
    """

    shares: Sequence[torch.Tensor]
    hear: Callable[[Sequence[torch.Tensor]], None]
    at_once: bool = True


class Norm:
    """The 2-norm of all gradients together, under way: one all-reduce over the whole mesh.

    Riders that want so hear before this is made.

    Args:
        counted: of the gradients what this rank alone is responsible for, as plain tensors, whatever their
            layouts.
        riders: what is summed along with them.
    """

    def __init__(self, counted: Sequence[torch.Tensor], mesh: Mesh, riders: Sequence[Rider] = ()) -> None:
        with raw(), torch.no_grad():  # a gradient may have a graph: backward(create_graph=True)
            total = _norm_here([*counted], mesh.device())
            self._is_known = mesh.size() == 1
            if not self._is_known:
                total = total.square()
            shares = [[x.to(total) for x in rider.shares] for rider in riders]
            self._sums = torch.stack([total, *itertools.chain(*shares)]) if shares else total.view(1)
            sums = self._sums[1:].split([*map(len, shares)]) if riders else ()
            self._unheard = [*zip(riders, (part.unbind() for part in sums), strict=True)][::-1]
            urgent = any(rider.at_once for rider in riders)
            self._pending = sum_whole_(self._sums, mesh, beside=not urgent)
        if urgent:
            self._hear(late=False)

    def _hear(self, late: bool) -> None:
        """Let riders hear that want so at once, or the others too; the last first."""
        self._pending.wait()
        unheard, self._unheard = self._unheard, []
        for rider, sums in unheard:
            if late or rider.at_once:
                rider.hear(sums)
            else:
                self._unheard.append((rider, sums))

    def wait(self) -> torch.Tensor:
        """The norm on every rank: plain, float64, not finite where a gradient is not."""
        self._hear(late=True)
        with raw():
            return self._sums[0] if self._is_known else self._sums[0].sqrt()


def loss_riders(
    loss: torch.Tensor | None, mesh: Mesh, hear: Callable[[torch.Tensor | None], None]
) -> list[Rider]:
    """A loss that may still be a sum over ranks; ``hear`` is given what it is on every rank."""
    loss = _summed(loss, mesh)
    with raw():
        addend = _addend(loss, mesh)
    if addend is None:
        hear(loss)
        return []
    assert isinstance(loss, DTensor)
    dtype, layout = loss.dtype, Layout.replicated(loss._layout.mesh, loss._layout.shape)

    def summed(sums: Sequence[torch.Tensor]) -> None:
        with raw():
            hear(stamp(sums[0].to(dtype).view(layout.local_shape), layout))

    return [Rider([addend], summed, at_once=False)]


def share_of(loss: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """What this rank gives to a sum over the mesh that is to be the loss."""
    loss = _summed(loss, mesh)
    with raw():
        addend = _addend(loss, mesh)
        if addend is None:
            addend = plain(loss).view(())
            addend = torch.zeros_like(addend) if mesh.rank else addend
        return addend


def _summed(loss: Any, mesh: Mesh) -> Any:
    """A loss that is whole, or a sum over ranks."""
    if isinstance(loss, DTensor) and any(is_partial(s) and s != "sum" for s in loss._layout.axes):
        return redistribute(loss, Layout.replicated(mesh, loss.shape))
    return loss


def _addend(loss: torch.Tensor | None, mesh: Mesh) -> torch.Tensor | None:
    """What this rank adds to the sum that the loss is; None where it is whole already."""
    if not isinstance(loss, DTensor) or not loss._layout.partial:
        return None
    own = plain(loss).view(())
    once = not any(mesh.coordinate[a] for a in range(mesh.ndim) if a not in loss._layout.partial)
    return own if once else torch.zeros_like(own)


def scale_gradients(parameters: Sequence[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply all gradients by a scalar."""
    with raw():
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for grad in map(gradient_of, parameters):
            if grad is not None:
                by_kind.setdefault((_device(grad), _dtype(grad)), []).append(plain(grad))
        for (device, dtype), alike in by_kind.items():
            foreach_mul_(alike, factor if isinstance(factor, float) else factor.to(device, dtype))


def _norm_here(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The 2-norm of what is counted on this rank, in float64, on a device."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    if any(dtype.is_complex for dtype in set(map(_dtype, grads))):
        grads = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
    return torch.linalg.vector_norm(moved(_norms(grads), device), dtype=torch.float64)


def _norms(grads: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of each, where some may be off the device; no square overflows that need not."""
    devices = set(map(_device, grads))
    if len(devices) == 1:
        return _alike_norms(grads)
    norms = torch.zeros(len(grads), dtype=torch.float64, device=grads[0].device)
    for device in devices:
        alike = [i for i, g in enumerate(grads) if g.device == device]
        norms[alike] = _alike_norms([grads[i] for i in alike]).to(norms)
    return norms


def _alike_norms(grads: list[torch.Tensor]) -> torch.Tensor:
    dtypes = set(map(_dtype, grads))
    wide = any(dtype.itemsize > 4 for dtype in dtypes)
    if is_accelerator(grads[0].device) and not wide:
        # most have few units for float64: it would take longer than reading the gradients does. A finite one
        # whose square overflows float32 counts as not finite
        return torch.stack(foreach_norms(grads, 2, dtype=torch.float32))
    if grads[0].device.type == "cpu" and dtypes == {torch.float32}:
        # ten times as fast there as a sum in float64, which is left for squares that overflow
        norms = torch.stack(foreach_norms(grads, 2))
        if math.isfinite(norms.sum(dtype=torch.float64)):
            return norms
    return torch.stack(foreach_norms(grads, 2, dtype=torch.float64))


def clip_of(plan: Plan, max_grad_norm: float | None) -> float | None:
    """The largest norm that gradients may have.

    Raises:
        ValueError: the plan says one, and the argument another; it is no number above 0.
    """
    is_number = isinstance(max_grad_norm, int | float) and max_grad_norm > 0
    if max_grad_norm is not None and not is_number:
        raise ValueError(f"max_grad_norm is {shown(max_grad_norm)}, expected a number above 0, or None.")
    if max_grad_norm is not None and plan.clip not in (None, max_grad_norm):
        raise ValueError(
            f"Plan(clip={plan.clip}) and max_grad_norm={max_grad_norm} differ: give one of them."
        )
    return plan.clip if max_grad_norm is None else max_grad_norm


# ---- dynamic loss scaling for float16


_NAMED = 5


@dataclass
class Judgement:
    """What is known of the gradients of a step, or of the steps of several optimizers on the same ones.

    Attributes:
        factor: by which they are to be multiplied.
        may_update: whether they are fit to be used.
        stepped: whose step was made with them.
    """

    factor: torch.Tensor | float | None
    may_update: bool = True
    stepped: set[torch.optim.Optimizer] = field(default_factory=set)


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
        self._good, self._spared = 0, 0

    def scaled(self, loss: torch.Tensor) -> None:
        """Let the next backward of a loss give scaled gradients."""
        scale = self.scale
        with raw():
            loss.register_hook(lambda grad: grad * scale)

    def divided(self, factor: torch.Tensor | None) -> torch.Tensor | float:
        """What takes the scale, as it is now, out of gradients again, beside a factor of their own."""
        return (1.0 if factor is None else factor) / self.scale

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
            if self.settings.refill == "always":
                self._spared = 0
            if self._good == self.settings.growth_interval:
                self.scale *= self.settings.growth_factor
                self._good = self._spared = 0
            return True
        self.skipped += 1
        self._good = 0
        if self._spared + 1 < self.settings.hysteresis:
            self._spared += 1
            return False
        if self.scale * self.settings.backoff_factor < self.settings.min_scale:
            overflows = not_finite(counted, names, mesh)
            raise self._at_minimum([f"{name} (in the part of {of})" for name, of in overflows], len(names))
        self.scale *= self.settings.backoff_factor
        return False

    def _at_minimum(self, overflows: Sequence[str], of: int) -> FloatingPointError:
        rest = len(overflows) - _NAMED
        more = f", and {rest} more, the last {overflows[-1]}" if rest > 0 else ""
        backoff, least = self.settings.backoff_factor, self.settings.min_scale
        return FloatingPointError(
            f"The loss scale is at its minimum: {self.scale:g} times backoff_factor {backoff:g} is below "
            f"min_scale {least:g}, and gradients are not finite; {self.skipped} step(s) were skipped so far. "
            f"Of {of} parameters these overflowed: {', '.join(overflows[:_NAMED])}{more}. See what their "
            "modules "
            "compute in float16 (a backward pass runs from the last to the first). A lower learning rate may "
            'help; precision = "bfloat16" has the range of float32.'
        )

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on alike."""
        counts = {"skipped": self.skipped, "good_steps": self._good, "spared": self._spared}
        return {"scale": self.scale, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.scale, self.skipped = float(state["scale"]), int(state["skipped"])
        self._good, self._spared = int(state["good_steps"]), int(state.get("spared", 0))


def not_finite(
    counted: Mapping[str, torch.Tensor], names: Sequence[str], mesh: Mesh
) -> list[tuple[str, str]]:
    """Whose gradients are not finite, and on which ranks, in words (a collective: all ranks must call)."""
    with raw():
        flags = torch.zeros(mesh.size(), len(names), device=mesh.device())
        for i, name in enumerate(names):
            if name in counted and not bool(counted[name].isfinite().all()):
                flags[mesh.rank, i] = 1
        counts = sum_whole(flags, mesh).T.tolist()
    culprits = []
    for name, here in zip(names, counts, strict=True):
        ranks = [rank for rank, flag in zip(mesh.ranks, here, strict=True) if flag]
        if ranks:
            culprits.append((name, named(ranks)))
    return culprits


# ---- loss spikes and values that are not finite: seen before the update, by all alike, with the culprits
#
# A value is a spike when it lies more than ``factor`` deviations above the median of the last. The
# deviation is the median one (times 1.4826, which makes it that of a normal distribution; Rousseeuw and
# Croux 1993), and at least a twentieth of the median, so that a loss which hardly moves has no spikes.


_NORMAL: Final = 1.4826
_FLAT: Final = 0.05
_CULPRITS: Final = 3


class SpikeError(FloatingPointError):
    """A step that must not be made; nothing was updated.

    Attributes:
        step: which, counted from 1.
        rollback: whether the last checkpoint should be loaded, and this step's batch left out.
        culprits: names of parameters.
    """

    def __init__(self, message: str, step: int, rollback: bool, culprits: Sequence[str]) -> None:
        super().__init__(message)
        self.step, self.rollback, self.culprits = step, rollback, tuple(culprits)

    def __reduce__(self) -> Any:
        return type(self), (*self.args, self.step, self.rollback, self.culprits)


class Guard:
    """Judges each step by its loss and gradient norm, which all ranks know alike.

    Attributes:
        settings: what to do.
        skipped: steps without an update so far.
        told: of the last step, why it was not made; ``""`` if it was.
        culprits: of the last step that was not made.
    """

    def __init__(self, settings: Spikes) -> None:
        self.settings = settings
        self.skipped, self.told = 0, ""
        self.culprits: tuple[str, ...] = ()
        self._row = 0
        self._last = {name: deque[float](maxlen=settings.window) for name in ("loss", "gradient norm")}

    def admits(
        self,
        step: int,
        loss: float,
        norm: float,
        counted: Mapping[str, torch.Tensor],
        names: Sequence[str],
        mesh: Mesh,
    ) -> bool:
        """Whether a step may be made (a collective where it may not).

        Args:
            step: counted from 1.
            loss: of the batch, and ``norm``, of its gradients: the same numbers on all ranks.
            counted: by name, of the gradients what this rank alone is responsible for.
            names: of all parameters.

        Raises:
            SpikeError: on all ranks, as the settings say.
        """
        values = {"loss": loss, "gradient norm": norm}
        wrong = {name: x for name, x in values.items() if not math.isfinite(x)}
        if wrong:
            answer: str = self.settings.on_nan
            what = " and ".join(f"the {name} is {x}" for name, x in wrong.items())
        else:
            leaps = [what for name, x in values.items() if (what := self._leap(name, x))]
            if not leaps or self.settings.on_spike == "ignore":
                for name, x in values.items():
                    self._last[name].append(x)
                self._row, self.told = 0, ""
                return True
            answer, what = self.settings.on_spike, " and ".join(leaps)
        self._row += 1
        culprits, blamed = self._blamed(counted, names, mesh, bool(wrong))
        self.told, self.culprits = f"{what}; {blamed}", culprits
        if self._row > self.settings.limit:
            what = f"{self.told}. That is number {self._row} in a row: spikes.limit = {self.settings.limit}"
            raise SpikeError(what, step, False, culprits)
        if answer != "skip":
            raise SpikeError(self.told, step, answer == "rollback", culprits)
        self.skipped += 1
        return False

    def _leap(self, name: str, x: float) -> str:
        last = self._last[name]
        if len(last) < self.settings.least:
            return ""
        middle = statistics.median(last)
        spread = max(_NORMAL * statistics.median(abs(y - middle) for y in last), _FLAT * abs(middle))
        far = (x - middle) / spread if spread else 0.0
        if far <= self.settings.factor:
            return ""
        return f"the {name} leaps to {x:.6g}, {far:.1f} deviations above its median of {middle:.6g}"

    def _blamed(
        self, counted: Mapping[str, torch.Tensor], names: Sequence[str], mesh: Mesh, bad: bool
    ) -> tuple[tuple[str, ...], str]:
        """The culprits' names, and what is told of them; all ranks call this."""
        if bad:
            culprits = not_finite(counted, names, mesh)
            if not culprits:
                return (), "all gradients are finite"
            more = f", and {len(culprits) - _CULPRITS} more" if len(culprits) > _CULPRITS else ""
            listed = ", ".join(f"{name} (in the part of {where})" for name, where in culprits[:_CULPRITS])
            return tuple(name for name, _ in culprits), f"not finite are the gradients of {listed}{more}"
        with raw():
            squares = torch.zeros(len(names), dtype=torch.float64, device=mesh.device())
            for i, name in enumerate(names):
                if name in counted:
                    x = counted[name]
                    x = torch.view_as_real(x) if x.is_complex() else x
                    squares[i] = x.double().square().sum()
            whole = sum_whole(squares, mesh)
            shares = (whole / whole.sum()).tolist()
        most = sorted(zip(shares, names, strict=True), reverse=True)[:_CULPRITS]
        listed = ", ".join(f"{name} ({share:.0%})" for share, name in most)
        return tuple(name for _, name in most), f"most of the squared gradient norm is of {listed}"

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to judge alike."""
        return {
            "skipped": self.skipped,
            "row": self._row,
            "last": {n: list(x) for n, x in self._last.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.skipped, self._row = int(state["skipped"]), int(state["row"])
        for name, last in self._last.items():
            last.clear()
            last.extend(float(x) for x in state["last"][name])
