"""Optimizers a part of their parameters at a time, and whether that gives the same.

It does for optimizers that update each parameter by itself, as all of torch's but LBFGS do. It does not for
one that makes something of all of them (a norm, an estimate of the distance to go), or notes its own calls
in a list. Nothing says which an optimizer of another class is: so it is tried, on small tensors.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch

from espalier.parallel.fused import holding
from espalier.parallel.several import Several, parts_of
from espalier.tensor.draws import restore, states
from espalier.tensor.observers import tell
from espalier.torch_private import forget_step_hooks
from espalier.trees import leaves

_SCALES = (1e-3, 1.0, 1e3, 1e-1, 10.0, 1.0)
"""Of the gradients of the steps that are tried: a limit of a norm lies somewhere between."""
_STEADY = (1.0,) * 24
"""Of gradients that stay as they are, from which estimates of the distance to go begin to grow."""
_FAST = 1.0  # a learning rate at which they soon do; the optimizer's own may be a warmup's
_ROUNDING = 0.02  # of how far a parameter has come


_GIVEN = "_step_with_a_loss"


def shadow_of(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer again, with some of its parameters, the same states, and no hooks."""
    if isinstance(optimizer, Several):
        return Several([shadow_of(part, parameters) for part in optimizer.parts])
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    step = vars(optimizer).get(_GIVEN, type(optimizer).step)
    if getattr(step, "hooked", False):  # by torch.optim.Optimizer: what is within runs no hooks
        step = step.__wrapped__
    shadow.step = partial(step, shadow)  # type: ignore
    shadow.step.hooked = False  # type: ignore[attr-defined]
    forget_step_hooks(shadow)
    ids = {id(p) for p in parameters}
    shadow.param_groups = []
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if id(p) in ids]
        if params:
            shadow.param_groups.append({**group, "params": params})
    return shadow


def updates_each_alone(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether it gives the same if its parameters are updated a part at a time.

    Args:
        device: on which it is tried.
    """
    return all(map(partial(_is_apart, device), parts_of(optimizer)))


def _is_apart(device: torch.device, optimizer: torch.optim.Optimizer) -> bool:
    if is_torchs(optimizer):
        return not isinstance(optimizer, torch.optim.LBFGS)
    if holds_others(optimizer):
        return False
    ends = tried(optimizer, device, [(_whole, 1.0), (_one_by_one, 1.0)])
    return ends is not None and ends[0].is_as(ends[1]) and not _reaches_others(optimizer, device, _whole)


def makes_one_of_all(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it gives something else where each rank has some of its parameters, and none the others."""
    return any(map(_is_of_all, parts_of(optimizer)))


def _is_of_all(optimizer: torch.optim.Optimizer) -> bool:
    if is_torchs(optimizer):
        return False
    cpu, (one, two) = torch.device("cpu"), map(_clipping_alike, (_whole, _on_two_ranks))
    ends = tried(optimizer, cpu, [(one, 1.0), (two, 1.0)])
    if ends is None and (use := use_of_closure(optimizer)) is not None:
        if use == "within":
            return False  # its step is no part of the engine's
        one, two = map(_given_loss, (one, two))  # it asks for that (AliG)
        ends = tried(optimizer, cpu, [(one, 1.0), (two, 1.0)])
    if ends is None:
        tell(
            f"{type(optimizer).__name__} could not be tried on small tensors. In a pipeline, and with "
            "branches, its step has the parameters and gradients of this rank's stages alone: if it makes "
            "something of all of them (a norm, an estimate of the distance to go), or draws random numbers "
            "for each, that is another than on one process."
        )
        return False
    return not ends[0].is_as(ends[1], options=False) or _reaches_others(optimizer, cpu, one)


def _reaches_others(optimizer: torch.optim.Optimizer, device: torch.device, way: Way) -> bool:
    """Whether a parameter's updates hang on the gradients of others.

    Those are made others: what is computed of each by itself is the same then to the last bit, also where
    matrices of one shape are multiplied together. So a little is seen, too.
    """
    for scales, rate in ((_SCALES, None), (_STEADY, None), (_STEADY, _FAST)):
        ends = tried(optimizer, device, [(way, 1.0), (way, -3.0)], scales=scales, rate=rate)
        if ends is not None and not ends[0].is_as(ends[1], options=False, every=2, rounding=0.0):
            return True
    return False


def use_of_closure(optimizer: torch.optim.Optimizer) -> Literal["first", "within", "never"] | None:
    """When its step calls a closure that it is given; None: not known.

    Most call it once, before anything else. One that does so *within*, after it has changed parameters, or
    more than once, is one for a gradient elsewhere (sharpness-aware minimization). Some *never* look at it.
    """
    if is_torchs(optimizer):
        return "within" if isinstance(optimizer, torch.optim.LBFGS) else "first"
    if isinstance(optimizer, Several):
        return None
    found: list[list[bool]] = []  # of each step and call: have parameters been as they were?

    def watched(twin: torch.optim.Optimizer, params: list[torch.Tensor]) -> Step:
        def step() -> None:
            before, calls = [p.detach().clone() for p in params], list[bool]()

            def closure() -> torch.Tensor:
                calls.append(all(map(torch.equal, before, params)))
                return torch.ones(())

            twin.step(closure)  # type: ignore[arg-type]
            found.append(calls)

        return step

    if tried(optimizer, torch.device("cpu"), [(watched, 1.0)]) is None:
        return None
    if any(len(calls) > 1 or not all(calls) for calls in found):
        return "within"
    return "first" if any(found) else "never"


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's own, of which is known what its step does."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


# ---- trials

Step = Callable[[], object]
Way = Callable[[torch.optim.Optimizer, list[torch.Tensor]], Step]


class _End(NamedTuple):
    """What parameters were and are, and the numbers and names in options and attributes."""

    starts: list[torch.Tensor]
    params: list[torch.Tensor]
    said: list[Any]

    def is_as(self, other: _End, options: bool = True, every: int = 1, rounding: float = _ROUNDING) -> bool:
        """Whether another is the same, but for rounding: some compute with parameters of a shape at once.

        Args:
            every: of so many parameters the first is looked at.
        """
        ends = list(zip(self.starts, self.params, other.params, strict=True))
        near = all(
            torch.equal(a.isfinite(), b.isfinite()) and _largest(a - b) <= rounding * _largest(a - start)
            for start, a, b in ends[::every]
        )
        if not near or not options:
            return near
        return len(self.said) == len(other.said) and all(map(_is_near, self.said, other.said))


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(0, 0, 0).abs().max()


def _is_near(a: Any, b: Any) -> bool:
    return math.isclose(a, b, rel_tol=_ROUNDING) if isinstance(a, float) and isinstance(b, float) else a == b


def tried(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    ways: Sequence[tuple[Way, float]],
    size: Callable[[int], Sequence[int]] = lambda ndim: (3,) * ndim,
    scales: Sequence[float] = _SCALES,
    rate: float | None = None,
) -> list[_End] | None:
    """What some steps on small tensors come to, made in several ways; None if it cannot be tried.

    Args:
        ways: each with a factor of the gradients of every second parameter, which a negative one turns
            around in every second step.
        size: of a tensor of so many dims.
        scales: of the gradients of each step.
        rate: the learning rate; by default its own.
    """
    held = leaves(list(_own(optimizer).values()))
    if not holds_others(optimizer) and any(isinstance(x, torch.Tensor) and x.ndim for x in held):
        return None  # it holds more than states, of all its parameters
    before = states(device)
    try:
        with warnings.catch_warnings(), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")
            return [_end(optimizer, device, way, size, scales, of_others, rate) for way, of_others in ways]
    except Exception:  # it wants other tensors, or a closure
        return None
    finally:
        restore(device, before)


def _end(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    way: Way,
    size: Callable[[int], Sequence[int]],
    scales: Sequence[float],
    of_others: float,
    rate: float | None,
) -> _End:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)

    def drawn(ndim: int) -> torch.Tensor:
        return torch.randn(tuple(size(ndim)), generator=generator).to(device)

    if holds_others(optimizer):
        twin, params = _with_others(optimizer, drawn)
    else:
        twin = object.__new__(type(optimizer))
        vars(twin).update({**vars(optimizer), **copy.deepcopy(_own(optimizer)), "state": defaultdict(dict)})
        twin.param_groups = []
        for group in optimizer.param_groups:
            sizes = sorted({p.ndim for p in group["params"]})
            like = [drawn(ndim).requires_grad_() for ndim in sizes for _ in range(2)]
            twin.param_groups.append({**copy.deepcopy(_options(group)), "params": like})
        params = [p for group in twin.param_groups for p in group["params"]]
        twin = shadow_of(twin, params)
    for group in twin.param_groups:
        if rate is not None and "lr" in group:
            own = group["lr"]
            group["lr"] = torch.full_like(own, rate) if isinstance(own, torch.Tensor) else rate
    starts = [p.detach().clone() for p in params]
    if callable(into_training := getattr(twin, "train", None)):  # as those that keep averages want
        into_training()
    step = way(twin, params)
    grads = [drawn(p.ndim) for p in params]
    for number, scale in enumerate(scales):
        for i, p in enumerate(params):
            grad = grads[i] if scales is _STEADY else drawn(p.ndim) * scale
            p.grad = grad * (abs(of_others) if number % 2 else of_others) if i % 2 else grad.clone()
        step()
    said = leaves([*map(_options, twin.param_groups), _own(twin)], (bool, int, float, str))
    return _End(starts, [p.detach() for p in params], said)


def _whole(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> Step:
    return optimizer.step


def _one_by_one(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> Step:
    """A step without parameters, which is the one that counts, and then one for each."""

    def step() -> None:
        shadows = [shadow_of(optimizer, [p]) for p in params]
        with holding(optimizer):
            for group in optimizer.param_groups:
                group["params"] = []
            optimizer.step()
        for shadow in shadows:
            shadow.step()

    return step


def _on_two_ranks(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> Step:
    if holds_others(optimizer):
        ranks = [_copied(optimizer, {id(p): p for p in params}, params[i::2]) for i in range(2)]
    else:
        ranks = [shadow_of(optimizer, params[i::2]) for i in range(2)]
        for rank in ranks:
            vars(rank).update({**copy.deepcopy(_own(optimizer)), "state": defaultdict(dict)})
    generators = [torch.get_rng_state()] * len(ranks)

    def step() -> None:
        for i, rank in enumerate(ranks):  # each draws from a generator of its own
            torch.set_rng_state(generators[i])
            rank.step()
            generators[i] = torch.get_rng_state()

    return step


def holds_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is around another optimizer (an average, a step elsewhere)."""
    return any(isinstance(x, torch.optim.Optimizer) for x in _own(optimizer).values())


def _with_others(
    optimizer: torch.optim.Optimizer, drawn: Callable[[int], torch.Tensor]
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """One that is around others again, with small parameters: two of each number of dims in each group."""
    like = {
        id(p): drawn(p.ndim).requires_grad_() for group in optimizer.param_groups for p in group["params"]
    }
    kept: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        for ndim in sorted({p.ndim for p in group["params"]}):
            kept += [like[id(p)] for p in group["params"] if p.ndim == ndim][:2]
    return _copied(optimizer, dict(like), kept), kept


def _copied(
    optimizer: torch.optim.Optimizer, memo: dict[int, Any], kept: Sequence[torch.Tensor]
) -> torch.optim.Optimizer:
    """A copy, and of those that it is around, without states, hooks, and what was put in place of its step.

    Args:
        memo: what stands in the place of its parameters.
        kept: those that it has.
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    memo[id(optimizer.state)] = defaultdict(dict)
    held = {name: x for name, x in vars(optimizer).items() if name != "step"}
    for x in held.values():
        if isinstance(x, torch.optim.Optimizer) and id(x) not in memo:
            _copied(x, memo, kept)
        elif isinstance(x, torch.nn.Module):
            memo[id(x)] = torch.nn.Module()
    vars(twin).update(copy.deepcopy({name: x for name, x in held.items() if "hooks" not in name}, memo))
    vars(twin).update({name: x for name, x in held.items() if "hooks" in name})
    forget_step_hooks(twin)
    ids = set(map(id, kept))
    for group in twin.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in ids]
    return twin


def _given_loss(way: Way) -> Way:
    """A way in which each step is given a closure, whose loss is one."""

    def made(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> Step:
        own = type(optimizer).step

        def given(self: torch.optim.Optimizer) -> Any:
            return own(self, partial(torch.ones, ()))  # type: ignore

        vars(optimizer).update({_GIVEN: given, "step": partial(given, optimizer)})
        return way(optimizer, params)

    return made


class _Clipping:
    """Shows gradients of all stages, as ``espalier.engine.seen`` does; in their place nothing is clipped."""

    def norm(self, parameters: object, order: float) -> torch.Tensor:
        return torch.zeros(())

    def scaled(self) -> None:
        pass


def _clipping_alike(way: Way) -> Way:
    """A way in which torch's own clipping within a step takes the norm of all, as it does in stages."""

    def made(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> Step:
        clipping = _Clipping()
        for p in params:
            p._seen = clipping  # type: ignore[attr-defined]
        return way(optimizer, params)

    return made


def _own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes that its class has beside those of every optimizer."""
    others = _of_every_optimizer()
    return {name: x for name, x in vars(optimizer).items() if name not in others and not callable(x)}


@cache
def _of_every_optimizer() -> frozenset[str]:
    """The attributes that each optimizer has; when it is asked, as torch's first one imports its compiler."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)])))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in group.items() if name != "params"}
