"""Hooks that look at modules of a model in stages, in a plain loop: on all ranks, as on one process.

A forward hook that only looks (:mod:`espalier.parallel.pipeline.observed`) is called when the program calls
the model, on all ranks, in the program's order. For that the model runs at once, without gradients, and what
hooked modules are given and give is brought to all ranks. Where gradients are recorded a hook gets what
stands for it: a loss may hang on that, whose gradient is added to that of the stage's own tensor when the
loss goes back. Backward hooks, and hooks on gradients of such tensors, are called after the backward pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.comm.control import Ballot, compared_with_first, gather_objects, numbers_of_all
from espalier.mesh import Mesh
from espalier.parallel.compose import Stages
from espalier.parallel.pipeline import ActionKind
from espalier.parallel.pipeline.arguments import leaves, mapped
from espalier.parallel.pipeline.model_stand_ins import hooks_of, observed
from espalier.parallel.pipeline.observed import Observed, is_of_modules, only_looks
from espalier.parallel.schedules.actions import Action
from espalier.tensor import full_tensor
from espalier.tensor.names import made_in
from espalier.tensor.observers import tell
from espalier.torch_private import FORWARD_HOOKS, HOOKS
from espalier.trees import ATOMS

_WAIT = timedelta(seconds=60)  # for ranks that come later to a call of the model
_WAIT_AGAIN = timedelta(seconds=5)  # where they did not come once


class Sight(NamedTuple):
    """What one call of a hook sees.

    Attributes:
        stage: in which its module lies.
        number: which of the calls of such hooks it is, in that stage's pass on a micro-batch.
        hook: which it is, in the order of modules: the same on all ranks.
        call: which of its own calls.
        args: what it is given beside the module.
    """

    stage: int
    number: int
    hook: int
    call: int
    args: list[Any]


class Place(NamedTuple):
    """One of the tensors that a hook sees, by the numbers of the hook, of its call and its own."""

    hook: int
    call: int
    leaf: int


class InPass(NamedTuple):
    """What a backward pass adds to, and tells of.

    Attributes:
        hooks: those that there were when the model was called.
        added: by places, the gradient of each micro-batch.
        told: places whose gradients are told.
    """

    hooks: Sequence[Observed]
    added: Mapping[Place, Sequence[torch.Tensor]]
    told: Mapping[Place, Any]


# by what they are of, a place or a backward hook, and micro-batch: those of each call
Gradients = dict[Any, dict[int, list[Any]]]


class Observers:
    """The hooks of one model that only look.

    Args:
        module: the model.
        mesh: along whose axis ``pipe`` its stages lie.
    """

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self.module, self._mesh = module, mesh
        self._now: Action | None = None
        self._tables: list[Any] = []  # of hooks, of all modules
        self._places: list[tuple[str, str]] = []  # of each, the module's name and the table's
        self._known: set[tuple[int, int]] = set()  # by tables and places in them, hooks that were looked at
        self._calls, self._ballot = 0, Ballot(mesh, "hooks") if not mesh.is_dry else None
        self._hooks: list[Observed] = []  # as they are, and where
        self._taken: list[tuple[str, str]] = []
        self._is_agreed = False  # that all ranks have these
        self._came_alone = False  # once to a ballot
        self._told = set[str]()
        self._elsewhere: Mapping[nn.Module, Sequence[Mapping[int, Any]]] | None = None
        self._has_told_of_others = False
        self._modules: frozenset[nn.Module] = frozenset()
        self._is_quiet = False
        self._seen: list[Sight] | None = None
        self._pass: InPass | None = None
        self._grads: Gradients = {}
        self._reached: set[Place] = set()
        self._calls_of: list[int] = []  # in what a stage does now: numbers of hooks that were called

    # ---- hooks

    def take(self) -> None:
        """Take those that the program may have put there since."""
        if not self._tables:
            for name, module in self.module.named_modules():
                self._tables += hooks_of(module)
                self._places += [(name, table) for table in HOOKS]
            self._modules = frozenset(self.module.modules())
        has_any = any(self._tables)  # none in most steps
        for hooks, (name, table) in zip(self._tables, self._places, strict=True) if has_any else ():
            for key, hook in [*hooks.items()]:
                if (id(hooks), key) in self._known:
                    continue
                self._known.add((id(hooks), key))
                is_own = made_in(hook, "espalier", "torch", "transformers")
                if not is_own and not is_of_modules(hook, self._modules) and only_looks(hook):
                    hooks[key] = Observed(self, hook, name, table, key)
        self._calls, is_first = self._calls + 1, not self._calls
        all_hooks = (x for hooks in self._tables for x in hooks.values()) if has_any else ()
        self._hooks = [x for x in all_hooks if isinstance(x, Observed)]
        taken, before = [(x.module, x.table) for x in self._hooks], self._taken
        self._taken = taken
        if is_first and not self._mesh.is_dry:
            self._is_agreed = self._all_begin_with_them() and bool(taken)
        elif self._is_agreed:
            self._is_agreed = self._all_have_them_yet(before) and bool(taken)
        elif taken != before:
            self._is_agreed = bool(taken) and self._all_have_them()

    def _said(self) -> bytes:
        return hashlib.sha256(repr(self._taken).encode()).digest()

    def _all_have_them(self) -> bool:
        """Whether all ranks have the same; who has some that others do not have waits for them."""
        within = _WAIT_AGAIN if self._came_alone else _WAIT
        if self._ballot is None or self._ballot.all_come(f"{self._calls}/{self._said().hex()}", within):
            return self._ballot is not None
        self._tell_alone()
        return False

    def _all_begin_with_them(self) -> bool:
        """Whether all ranks have the same when the model is called first, to which all come."""
        _, is_so = compared_with_first(self._mesh, b"", self._said(), "hooks of modules")
        if not is_so and self._taken:
            self._tell_alone()
        return is_so

    def _tell_alone(self) -> None:
        self._came_alone = True
        tell(f"Module {self._taken[0][0]!r} has a hook on this rank, and not on all. {_ALONE}")

    def _all_have_them_yet(self, before: Sequence[tuple[str, str]]) -> bool:
        """Whether all ranks have the same, as they had before (a collective: who has none now comes, too)."""
        said = int.from_bytes(self._said()[:7], "big")
        if len({number for (number,) in numbers_of_all([said], self._mesh)}) == 1:
            return True
        module, _ = min({*before} ^ {*self._taken} or before)
        tell(f"A hook on module {module!r} was registered or removed on some ranks, and not on all. {_ALONE}")
        return False

    def _has(self, kinds: Iterable[str]) -> bool:
        """Of those that all ranks had when the model was called last: on all ranks alike."""
        return self._is_agreed and any(table in kinds for _, table in self._taken)

    @property
    def look_forward(self) -> bool:
        """Whether there are any that see what modules compute."""
        return self._has(FORWARD_HOOKS)

    @property
    def look_back(self) -> bool:
        """Whether there are any that see gradients."""
        return self._has([name for name in HOOKS if name not in FORWARD_HOOKS])

    def tell_of_divided(self, divided: Set[str]) -> None:
        """Warn of those that no stage calls, as it calls what is in their modules."""
        lost = sorted(name for name, _ in self._taken if name and name in divided and name not in self._told)
        self._told |= {*lost}
        if lost:
            tell(
                f"{lost[0]!r} has a hook, and is divided among stages, which call what is in it: the hook is "
                "not called. Put it on modules within, or register it before the first batch: a module with "
                "hooks is not divided."
            )

    def tell_of_others(self, stages: Stages) -> None:
        """Warn once of what hooks that do not only look collect in stages of other ranks."""
        if self._has_told_of_others or self._mesh.is_dry:
            return
        if self._elsewhere is None:
            programs = stages.split.stages
            here = {m for i in stages.local for m in programs[i].inner}
            self._elsewhere = {m: hooks_of(m) for of in programs for m in of.inner if m not in here}
        are_there = any(map(any, self._elsewhere.values()))  # each pass looks
        if not are_there or not (modules := observed(self._elsewhere)):
            return
        self._has_told_of_others = True
        names = {m: name for name, m in self.module.named_modules()}
        name = min(names.get(m, type(m).__name__) for m in modules)
        tell(
            f"{name!r} has a hook, and lies in a stage of another rank: hooks are called where their module "
            "is, and what one collects (a dict of features, say) is not on this rank. What it gives in the "
            "place of an output counts. Let the model's forward give features, beside its output: these are "
            "known on all ranks. What takes a model apart by hooks (attributions, say) wants the copy that "
            "engine.full_model() gives."
        )

    def of_model(self, table: str) -> list[Observed]:
        """Those of the model itself."""
        return [hook for hook in vars(self.module)[table].values() if isinstance(hook, Observed)]

    def call(self, of: int | Observed, args: Iterable[Any]) -> None:
        """Call a hook, if it is there yet."""
        hook = self._hooks[of] if isinstance(of, int) else of
        module = self.module.get_submodule(hook.module)
        if vars(module)[hook.table].get(hook.key) is hook and hook.hook(module, *args) is not None:
            raise TypeError(
                f"A hook on {hook.module or 'the model'!r} was taken for one that only looks, as its code "
                "ends so, and has given something back. Let it end with return x where x is to be in place."
            )

    def met(self, hook: Observed, args: Sequence[Any]) -> Any:
        """In the place of a hook, where its module is."""
        is_of_pass = self._pass is not None and bool(self._pass.added or self._pass.told)
        if not (self._is_quiet and (self._is_agreed or is_of_pass)):
            return hook.hook(*args)
        now, others = self._now, [*args[1:]]
        if now is None or not hook.module:
            return None
        if hook.table not in FORWARD_HOOKS:
            if self._pass is not None:
                self._note(self._hooks.index(hook), now.micro_batch, others)
        elif now.kind is ActionKind.F:  # what is recomputed was seen
            self._see(hook, others, now)
        return None

    # ---- in passes

    def begin(self, action: Action | None) -> None:
        """A stage begins this; None: a pass is over."""
        self._now, self._calls_of = action, []

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """While open, hooks are not called where modules are, nor by runs without values."""
        self._is_quiet, before = True, self._is_quiet
        try:
            yield
        finally:
            self._is_quiet = before
            if not before:  # what forwards have put there is theirs
                self._known |= {(id(hooks), key) for hooks in self._tables for key in hooks}

    def _see(self, hook: Observed, args: list[Any], now: Action) -> None:
        of = self._pass
        if hook not in (hooks := self._hooks if of is None else of.hooks):
            return  # it came later
        at, before = hooks.index(hook), self._calls_of
        if self._seen is not None:
            seen = mapped(_whole, args)
            self._seen.append(Sight(now.stage, len(before), at, before.count(at), seen))
        call = before.count(at)
        before.append(at)
        if of is None:
            return
        for i, x in enumerate(leaves(args, torch.Tensor)):
            place = Place(at, call, i)
            if x.requires_grad and place in of.added:
                x.register_hook(partial(self._add, place, of.added[place][now.micro_batch]))
            if x.requires_grad and place in of.told:
                x.register_hook(partial(self._note, place, now.micro_batch))

    def _add(self, place: Place, more: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        self._reached.add(place)
        return grad + more.to(grad.dtype)

    def _note(self, of: Any, micro_batch: int, grad: Any) -> None:
        self._grads.setdefault(of, {}).setdefault(micro_batch, []).append(mapped(_whole, grad))

    def looked(self, run: Callable[[], Any]) -> tuple[Any, list[Sight]]:
        """What a pass of one micro-batch gives, and what hooks see of it, on all ranks."""
        if self._mesh.is_dry or not self.look_forward:
            return run(), []
        self._seen = []
        try:
            with self.quiet():
                out = run()
            seen = self._seen
        finally:
            self._seen = None
        every = [sight for of in gather_objects(seen, self._mesh["pipe"]) for sight in of]
        device = self._mesh.device()
        sights = sorted(every, key=lambda sight: sight[:2])
        return out, [sight._replace(args=mapped(partial(_on, device), sight.args)) for sight in sights]

    @contextmanager
    def going_back(self, of: InPass) -> Iterator[None]:
        """While open, a training pass adds to gradients, and those that are to be told are seen."""
        self._pass, self._grads, self._reached = of, {}, set()
        gone = []  # hooks that were removed since the model was called
        for hook in of.hooks if of.added or of.told else ():
            hooks = vars(self.module.get_submodule(hook.module))[hook.table]
            if hook.key not in hooks:
                hooks[hook.key] = hook
                gone.append((hooks, hook.key))
        try:
            with self.quiet():
                yield
        finally:
            self._pass = None
            for hooks, key in gone:
                del hooks[key]

    @property
    def hooks(self) -> Sequence[Observed]:
        """Those that there are now."""
        return self._hooks

    def missed(self, places: Collection[Place]) -> bool:
        """Whether the gradient of one of these has reached no stage (a collective, where there are any)."""
        if not places:
            return False
        by_rank = numbers_of_all([int(place in self._reached) for place in places], self._mesh)
        return not all(map(any, zip(*by_rank, strict=True)))

    def gradients(self) -> Gradients:
        """Those that were seen, of all stages, on all ranks (a collective)."""
        every: Gradients = {}
        for of in gather_objects(self._grads, self._mesh["pipe"])[::-1]:  # the last stage has them first
            every |= of
        self._grads = {}
        device = self._mesh.device()
        return {key: mapped(partial(_on, device), calls) for key, calls in every.items()}


def _whole(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return full_tensor(x).detach().cpu()
    return x if type(x) in ATOMS else None  # objects of other classes stay where they are


def _on(device: torch.device, x: Any) -> Any:
    return x.to(device) if isinstance(x, torch.Tensor) else x


_ALONE = (
    "Such a hook is called where its module is, if that is here, with what a stage computes. Register hooks "
    "on all ranks, and remove them on all: they are called on all then."
)
ONLY_LOOKS = (
    "A forward hook writes to what its module gives or is given, and returns nothing. In a pipeline such a "
    "hook only looks: return what is to be in its place."
)
