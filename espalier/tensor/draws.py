"""What stages draw from torch's generators, known from a run without data.

One process draws for one stage after the other, micro-batch by micro-batch. A rank draws what others draw
in between as well, and drops it: so its own stages find the generators as one process would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from espalier.comm.control import gather_objects
from espalier.device import get_rng_state, is_accelerator, set_rng_state
from espalier.mesh import Mesh
from espalier.tensor.dry_runs import NoValueError, remembered
from espalier.tensor.observers import site, user_frame
from espalier.tensor.random import (
    REJECTING,
    at_position,
    is_drawing_by_key,
    same_position,
    same_seed,
    without_tag,
)
from espalier.tensor.traces import Generators
from espalier.torch_private import DispatchMode, raw, schema_of
from espalier.trees import tensors_in, tree_map

States = tuple[torch.Tensor, ...]
_META = torch.device("meta")


class _Like(NamedTuple):
    """Stands for a tensor of a call; one without data is one of the device that computes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Draw(NamedTuple):
    """An operation that draws from a default generator, so many times in a row."""

    func: Any
    args: Any
    kwargs: Any
    times: int = 1

    def again(self, device: torch.device) -> None:
        """Draw as much, on the device that computes, and drop it."""

        def real(x: Any) -> Any:
            if type(x) is _Like:
                on = device if x.device == _META else x.device
                return torch.full(x.shape, 0.5 if x.dtype.is_floating_point else 1, dtype=x.dtype, device=on)
            return device if x == _META and isinstance(x, torch.device) else x

        with torch.no_grad(), raw():
            args = [real(x) for x in self.args]
            kwargs = {name: real(x) for name, x in self.kwargs.items()}
            for _ in range(self.times):
                self.func(*args, **kwargs)


class Drawing(DispatchMode):
    """Notes what is drawn while it is open, in a run without data: what has none has none on any device.

    Args:
        device: on which what has no data here is drawn all the same; None: it is not.

    Attributes:
        draws: all of them, in order.
    """

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self.draws: list[Draw] = []
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._pack_padded_sequence.default and args[0].is_meta:
            raise NoValueError(
                "pack_padded_sequence gives as many rows as the values of lengths say, and what stages send "
                "one another must follow from shapes. Give the padded sequence and a mask, or train under a "
                "plan without pipe."
            )
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]  # as what is saved for the backward pass is taken off the device
        with raw():
            args, kwargs = _all_without_data(func, args, kwargs)
            # how often these draw hangs on values: where these are known, they are the same again
            rejects = func.overloadpacket.__name__ in REJECTING
            made = torch.empty_like(args[0]) if rejects and args[0].is_meta else None  # not all can do that
            if not _draws(func, kwargs):
                try:
                    return remembered(func, args, kwargs) if made is None else made
                except (RuntimeError, NotImplementedError) as error:
                    if " meta " not in str(error):
                        raise
                    raise _asked_of_stage(func, error) from error
            # an overload with a generator is called with it, be it None
            call_arguments = args, {k: x for k, x in kwargs.items() if x is not None or k == "generator"}
            draw = Draw(func, *tree_map(_known if rejects else _like, call_arguments))
            out = func(*args, **kwargs) if made is None else made
            if isinstance(out, torch.Tensor) and out.is_meta and self._device is not None:
                draw.again(self._device)
        last = self.draws[-1] if self.draws else None
        if last is not None and not rejects and last[:3] == draw[:3]:
            self.draws[-1] = last._replace(times=last.times + 1)
        else:
            self.draws.append(draw)
        return out


def _asked_of_stage(func: Any, error: Exception) -> NoValueError:
    """What torch says of an operation that needs values, where a stage is run without."""
    return NoValueError(
        f"What a stage gives is found by a run without data, and {site(user_frame()[1])} asks for a value "
        f"there ({func.overloadpacket.__name__}: {error}). So it is within autograd functions (adjoint "
        "methods), and where a shape hangs on values (repeat_interleave without output_size=). Ask for it "
        "before, in the model's forward, or train under a plan without pipe."
    )


def _all_without_data(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of an operation, none of them with data if one has none, nor taken to where it has."""
    has = {x.is_meta for x in tensors_in([args, kwargs])}
    if True not in has:
        return args, kwargs
    if func is torch.ops.aten._to_copy.default:
        return args, {**kwargs, "device": None}
    written = schema_of(func).is_mutable and isinstance(args[0], torch.Tensor) and not args[0].is_meta
    if False in has and not written:
        return tree_map(lambda x: x.to(_META) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    return args, kwargs


def _draws(func: Any, kwargs: Any) -> bool:
    """Whether an operation draws; fused ones, attention say, draw nothing where DTensors call them."""
    if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
        return False
    name = func.overloadpacket.__name__
    return not is_drawing_by_key() and (name in REJECTING or not name.startswith("_"))


def _known(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) and not x.is_meta else _like(x)


def _like(x: Any) -> Any:
    return _Like(tuple(x.shape), x.dtype, x.device) if isinstance(x, torch.Tensor) else x


def states(device: torch.device) -> States:
    """Of the generators from which a program on a device draws."""
    of_cpu = torch.get_rng_state()
    return (of_cpu, get_rng_state(device)) if is_accelerator(device) else (of_cpu,)


def restore(device: torch.device, saved: States) -> None:
    """Let them go on from there."""
    torch.set_rng_state(saved[0])
    if is_accelerator(device):
        set_rng_state(device, saved[1])


def equal(a: States, b: States) -> bool:
    """Whether these are the same."""
    return same_position(a[0], b[0]) and all(map(torch.equal, a[1:], b[1:]))


def draw_again(draws: Sequence[Draw], device: torch.device) -> None:
    """Draw what was noted, and drop it."""
    for draw in draws:
        draw.again(device)


class Dice:
    """What one stage alone draws from generators of random numbers, so that all ranks go on from there.

    Other ranks cannot know it: it may hang on values, or the generators are Python's or NumPy's. Made on
    all of them before that stage runs.

    Args:
        mesh: of the whole model.
        source: the coordinate on the axis ``pipe`` of the rank that draws.
    """

    def __init__(self, mesh: Mesh, source: int) -> None:
        self._line, self._source, self._device = mesh["pipe"], source, mesh.device()
        self._before, self._others = states(self._device), Generators()

    def tell(self) -> None:
        """After it has run: all ranks along the axis come here."""
        drawn = self._drawn() if self._line.rank == self._source else None
        torchs, others = gather_objects(drawn, self._line)[self._source]
        if torchs is not None:
            is_seeded, (cpu, *device) = torchs
            here = states(self._device)[0]
            restore(self._device, (cpu if is_seeded else at_position(here, cpu), *device))
        if others is not None:
            others.restore()

    def _drawn(self) -> tuple[tuple[bool, States] | None, Generators | None]:
        """What has changed: states of torch's generators, and whether they were seeded; others' states."""
        now, was = states(self._device), self._before
        is_seeded = not same_seed(now[0], was[0])
        has_drawn = is_seeded or not equal(now, was)
        torchs = (is_seeded, (without_tag(now[0]), *now[1:])) if has_drawn else None
        return torchs, None if self._others.as_now() else Generators()
