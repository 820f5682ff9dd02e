"""An engine as a module: what a program calls in place of its model; and ``prepare``, which makes one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, wraps
from types import MethodType
from typing import Any, Self

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from espalier.blocks import parameters_in
from espalier.comm.control import gather_objects
from espalier.engine.by_model import add_notes, with_notes_of
from espalier.engine.engine import Engine
from espalier.engine.given import Rows, check_kinds, check_rows
from espalier.engine.loader import Orders
from espalier.engine.seen import give_back, held_gradients
from espalier.engine.start import initialize
from espalier.engine.surface import GivenState, bound
from espalier.parallel import Plan
from espalier.parallel.several import Several, as_one, holders, inner_of
from espalier.tensor.fallback import GatherWarning
from espalier.tensor.observers import tell
from espalier.torch_private import (
    BUFFERS,
    LEFT_OUT,
    MODULES,
    PARAMETERS,
    as_written,
    draws_all,
    goes_by_apply,
    open_transform,
    own_buffers,
    own_parameters,
    takes_tangents,
)
from espalier.trees import tensors_in


class EngineModule(nn.Module):
    """Stands for a model that an engine trains: calls go through the engine, the rest is the model's.

    Parameters, buffers and state dicts have the model's own names; other attributes are the model's.

    Args:
        engine: trains it.
        rows: what a call is given and gives, as for :meth:`espalier.Engine.outputs`.

    An optimizer that was made after it, on its parameters, is found at the first call that trains.

    Attributes:
        module: the model.
    """

    lays_out = True  # what calls it is not compiled

    def __init__(self, engine: Engine, rows: Rows = "all") -> None:
        super().__init__()
        self._rows, self._engine = check_rows(rows), engine
        engine.gives_whole_states = True
        engine.passes.first_batches.look_away()
        self.module = engine.module
        self.training = engine.module.training

    @property
    def engine(self) -> Engine:
        """The engine that trains the model."""
        return self._engine

    @property
    def is_made(self) -> bool:
        """Whether there is an engine already."""
        return True

    @property
    def rows(self) -> Rows:
        """What a call is given and gives."""
        return self._rows

    @rows.setter
    def rows(self, value: Rows) -> None:
        self._rows = check_rows(value)

    @as_written
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of every module: hooks, and :meth:`forward`."""
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives.

        Raises:
            ValueError: in a transform of torch.func, before the model is laid out.
            NotImplementedError: given tangents, in a pipeline.
        """
        given: GivenState | None = self.__dict__.pop("_given_state", None)
        if given is not None:
            given.tell()
        if torch.is_grad_enabled() and self.engine.optimizer is None:
            optimizer = optimizer_of(self.module)
            if optimizer is not None:
                self.engine.attach(optimizer)
        if open_transform() is not None:
            return self._transformed(args, kwargs)
        if takes_tangents() and self.engine.plan.pipe > 1:
            _refuse_tangents(self.engine.plan, (args, kwargs))
        return self.engine.outputs(self._bound(args, kwargs), self._rows)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a call as the model's inputs."""
        return bound(self.module, args, kwargs)

    def _transformed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model gives for what torch.vmap or a transform of torch.func makes of its inputs.

        These are no batches that could be cut: the model runs on what it is given, and the transform gathers
        the parameters.
        """
        what = "The model is called inside of torch.vmap or a transform of torch.func"
        if self.engine.arrangement is None:
            raise ValueError(
                f"{what}, and how its parameters lie is to be inferred from a batch. Call it on one before, "
                "outside of the transform, or pass example=batch to espalier.prepare."
            )
        if self.engine.plan.pipe > 1:
            tell(
                f"{what}, and is in a pipeline ({self.engine.plan}): it is computed whole, on every rank, "
                "with all its weights. Right, but slow. Put the transform into the model's forward, or train "
                "under a plan without pipe.",
                GatherWarning,
            )
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == LEFT_OUT:
            raise TypeError(
                "DistributedDataParallel is put around a model that is laid over the ranks already, and "
                "would add up its gradients once more. Leave it out; to a package that puts it there by "
                "itself, say that the run is not distributed."
            )
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the model as it lies (for averages of weights, targets), which no engine trains.

        Called, it takes global batches and gives what it computes of all rows (in a pipeline without
        gradients).
        """
        if (twin := memo.get(id(self.module))) is not None:
            return twin  # the model is being copied, and in it is what holds this: a trainer, say
        return self.engine.passes.copied(memo)

    def __prepare_scriptable__(self) -> nn.Module:
        """What ``torch.jit.script`` compiles in its place."""
        return self.engine.full_model()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """``model.compile()``, as modules have it: this one runs as it is written, which is told."""
        tell(
            "model.compile(): torch's compiler does not follow DTensors, so the model runs as it is written. "
            "initialize(..., compile=True), or engine.compile(), compiles its blocks, collectives included."
        )

    def no_sync(self) -> Any:
        """See :meth:`espalier.Engine.no_sync`."""
        return self.engine.no_sync()

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return self.engine.device

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's, under its own names."""
        return self.module.named_parameters(*args, **kwargs)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Names begin below ``module``, for ``torch.distributed.checkpoint.state_dict``."""
        below = [name for name, _ in self.module.named_children()]
        return dict.fromkeys(below or [""], "module")

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's, under its own names."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any) -> Any:
        """See :meth:`espalier.Engine.state_dict`."""
        own = self.engine.state_dict()
        self.__dict__["_given_state"] = GivenState(own, self.module)
        states = with_notes_of(own, {f"{prefix}{name}": x for name, x in own.items()}, prefix)
        if destination is None:
            return states
        destination.update(states)
        add_notes(states, destination)
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False, **options: Any
    ) -> Any:
        """See :meth:`espalier.Engine.load_state_dict`; values are copied, also with ``assign``."""
        self.__dict__.pop("_given_state", None)
        return self.engine.load_state_dict(state_dict, strict, **options)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        """``to``, ``float``, ``half``, ...: the parameters are where the plan says.

        Casts have an effect until the model is laid out.

        Raises:
            ValueError: it is.
        """
        tensors = [*parameters_in(self.module), *self.module.buffers()]
        casts: dict[torch.dtype, torch.dtype] = {}
        with suppress(Exception):  # what is no cast may go for no empty tensor
            casts = {d: fn(torch.empty(0, dtype=d)).dtype for d in {x.dtype for x in tensors}}
        cast = [x for x in tensors if casts.get(x.dtype, x.dtype) is not x.dtype]
        if not cast:
            return self
        held = ", ".join(sorted({str(x.dtype) for x in cast}))
        said = f"{type(self.module).__name__} stays in {held}: a cast of a prepared model"
        is_open = not self.is_made or (self.engine.arrangement is None and not any(x.is_meta for x in cast))
        if self.is_made and self.engine.plan.precision.parameters is not None:
            tell(f"{said} has no effect where the plan says precision.")
        elif is_open:
            for x in cast:
                x.data = x.data.to(casts[x.dtype])
        else:
            raise ValueError(
                f"{said} is too late: how its parameters and the optimizer's states lie is known. Cast it "
                "before espalier.prepare (or what else wraps it here), or say precision= in the plan."
            )
        return self


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer | None:
    """What holds a model's parameters, wherever the program keeps it; several as one; None if there is none.

    Raises:
        ValueError: a parameter is in two of them.
    """
    owners = holders(parameters_in(module))
    inner = {id(part) for x in owners if isinstance(x, Several) for part in x.parts}
    inner |= {id(inner_of(x)) for x in owners}  # which the one around it steps
    return as_one([x for x in owners if id(x) not in inner]) if owners else None


def _to_model(held: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Have a module around find what its state dict gave: values by the model's own names."""
    held.__dict__.pop("_given_state", None)
    given = {key: state_dict[key] for key in [*state_dict] if key.startswith(prefix)}
    own = {*own_parameters(held), *own_buffers(held)}  # which a prepared model has as its own
    for key in given:
        if key.removeprefix(prefix) not in own:
            del state_dict[key]
    state_dict.update({f"{prefix}module.{key.removeprefix(prefix)}": x for key, x in given.items()})


def _table_of_model(name: str) -> property:
    """The table of that name of what a prepared model stands for; its own until there is that."""

    def table(self: PreparedModule) -> Any:
        module = self.__dict__.get(MODULES, {}).get("module")
        return self.__dict__[name] if module is None else getattr(module, name)

    def put(self: PreparedModule, value: Any) -> None:
        self.__dict__[name] = value

    return property(table, put)


class PreparedModule(EngineModule):
    """In the model's place in a program: what is set, taken away, registered or looked for is the model's.

    Else ``model.temperature = 2.0`` or ``model.head = nn.Linear(...)`` would be this module's own, and the
    model would go on without it. So are the methods that its class has in the place of torch's, and special
    ones; and to ``isinstance`` it is of that class.
    """

    def __new__(cls, engine: Engine, rows: Rows = "all") -> Self:
        """Of a kind that has the model's own methods where ``nn.Module`` has others, or none.

        Models of one class are of one kind: ``torch.func.stack_module_state`` asks.
        """
        of_model = type(engine.module)
        methods = [(name, getattr(of_model, name)) for name in (*_own_methods(engine.module), "forward")]
        kind: Any = _kind_for(cls, tuple(methods))  # type: ignore[arg-type]
        return super().__new__(kind)

    def __init__(self, engine: Engine, rows: Rows = "all") -> None:
        super().__init__(engine, rows)
        self.register_load_state_dict_pre_hook(_to_model)

    @property
    def __class__(self) -> type:
        """The model's."""
        tables = object.__getattribute__(self, "__dict__")
        return type(tables[MODULES]["module"]) if tables.get(MODULES) else type(self)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        self.module.__class__ = kind

    @property
    def rows(self) -> Any:
        """What a call is given and gives; the model's, if it has an attribute of that name."""
        return getattr(self.module, "rows", self._rows)

    @rows.setter
    def rows(self, value: Any) -> None:
        if hasattr(self.module, "rows"):
            self.module.rows = value
        else:
            self.__dict__["_rows"] = check_rows(value)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return bool(self.module.training)

    @training.setter
    def training(self, value: bool) -> None:
        if "module" in self.__dict__.get(MODULES, {}):
            self.module.training = value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "rows" or "module" not in self.__dict__.get(MODULES, {}):
            super().__setattr__(name, value)
        elif name == "forward":
            self._put_forward(value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        module = self.__dict__[MODULES].get("module")
        if module is None or not isinstance(found, MethodType) or found.__self__ is not module:
            return found

        @wraps(found)
        def method(*args: Any, **kwargs: Any) -> Any:
            out = found(*args, **kwargs)
            if torch.is_grad_enabled():
                self.engine.passes.follow_all(out)
            return self if out is module else out  # ``model = model.freeze()`` is to be trained on

        return method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives; within a forward that a program has put in its place, the model's own."""
        if self.__dict__.get("_is_within") and (own := self.__dict__.get("_own_forward")) is not None:
            return own(*args, **kwargs)
        before, self.__dict__["_is_within"] = self.__dict__.get("_is_within", False), True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__["_is_within"] = before

    def _put_forward(self, value: Callable[..., Any]) -> None:
        """``model.forward = value``, which may call what ``model.forward`` was before."""
        if self.engine.plan.pipe > 1:
            raise NotImplementedError(
                "model.forward = ...: in a pipeline the forward is divided among stages, by runs of copies "
                "of the model. Give it to the model before espalier.prepare, put what is around it into a "
                "module of its own, or train under a plan without pipe."
            )
        module, own = self.module, self.__dict__.get("_own_forward")
        if getattr(value, "__self__", None) is self:  # it is put back
            if own is not None:
                module.forward = own
            self.__dict__["_own_forward"] = None
            return
        self.__dict__["_own_forward"] = module.forward if own is None else own
        module.forward = value

    def __repr__(self) -> str:
        return repr(self.module)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def __copy__(self) -> Self:
        """Another of the same engine: a copy that shares all that the model has."""
        return type(self)(self.engine, self._rows)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file has the model as on one process: see :meth:`espalier.Engine.full_model`."""
        return self.engine.full_model().__reduce_ex__(protocol)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, which may be another thing than a mode."""
        out: Any = self.module.train(*args, **kwargs)
        return self if out is self.module else out

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """A function of the model and all in it."""
        self.module.apply(fn)
        return self

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        """The model's."""
        self.module.register_buffer(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        """The model's."""
        self.module.register_parameter(*args, **kwargs)

    def add_module(self, *args: Any, **kwargs: Any) -> None:
        """The model's."""
        self.module.add_module(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The model's."""
        return self.module.named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The model, and all in it under its own names."""
        return self.module.named_modules(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """Of the model, by its name there."""
        return self.module.get_submodule(target)


# by these torch.func.functional_call puts other tensors in the place of parameters and buffers
for _table in (PARAMETERS, BUFFERS):
    setattr(PreparedModule, _table, _table_of_model(_table))


# special methods that say how an object comes about, or that Python asks of what stands for the model
_NOT_OF_MODEL = frozenset(
    "__class__ __new__ __init__ __init_subclass__ __del__ __call__ __eq__ __hash__ "
    "__getattribute__ __getattr__ __setattr__ __delattr__ __dir__ "
    "__reduce__ __reduce_ex__ __getstate__ __setstate__ __copy__ __deepcopy__".split()
)
# torch's that move or cast: they change nothing here, whatever the model does around them
_MOVES = frozenset(name for name, method in vars(nn.Module).items() if goes_by_apply(method))


def _refuse_tangents(plan: Plan, inputs: Any) -> None:
    """See that none of a pipeline's inputs has a tangent, which stages do not hand on.

    Raises:
        NotImplementedError: one has.
    """
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors_in(inputs)):
        raise NotImplementedError(
            f"The model is given tensors with tangents (torch.autograd.forward_ad) in a pipeline ({plan}): "
            "stages do not hand tangents on. Take derivatives by torch.autograd.grad(..., "
            "create_graph=True), or plan without pipe."
        )


def _own_methods(model: nn.Module) -> list[str]:
    """Special methods of a model's class, and those that it has in the place of ``nn.Module``'s."""
    kinds = type(model).__mro__[: type(model).__mro__.index(nn.Module)]
    found = [name for kind in kinds for name, x in vars(kind).items() if callable(x)]
    special = [name for name in found if name.startswith("__") and name.endswith("__")]
    over = [name for name in found if hasattr(nn.Module, name) and not name.startswith("_")]
    ours = vars(EngineModule).keys() | vars(PreparedModule).keys()
    return [name for name in (*special, *over) if name not in _NOT_OF_MODEL and name not in ours]


@lru_cache(maxsize=256)
def _kind_for(base: type[PreparedModule], methods: tuple[tuple[str, Callable[..., Any]], ...]) -> Any:
    """A class that stands for models which have these methods."""
    held = {name: _of_model(name, own) for name, own in methods}
    return type(base.__name__, (base,), {**held, "forward": _with_signature(base.forward, methods[-1][1])})


def _with_signature(forward: Callable[..., Any], of_model: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, of which ``inspect.signature`` tells what the model's takes."""

    @wraps(of_model)
    def method(self: PreparedModule, *args: Any, **kwargs: Any) -> Any:
        if not issubclass(type(self), PreparedModule):  # a library's copy, of a class that it made (higher's)
            return self.module(*args, **kwargs)
        return forward(self, *args, **kwargs)

    return method


def _of_model(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the model for what stands for it, which it gives in its own place."""

    @wraps(own)
    def method(self: PreparedModule, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        out = own(self if name in _MOVES else module, *args, **kwargs)
        return self if out is module else out

    return method


class Prepared:
    """A loader of this rank's rows whose batches are global.

    Attributes:
        loader: gives the rows.
    """

    def __init__(self, loader: DataLoader[Any], take: Callable[[Any], Any]) -> None:
        self.loader, self._take = loader, take

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self._take, self.loader)


def prepare(
    model: nn.Module,
    *things: Any,
    plan: Plan | Mapping[str, Any] | None = None,
    rows: Rows = "all",
    **options: Any,
) -> Any:
    """A model and what a loop around it uses, for many ranks: the loop stays as it is on one process.

    ``model, optimizer, loader, schedule = prepare(model, optimizer, loader, schedule, plan={"data": 2})``

    Args:
        things: the optimizer, or several; loaders; schedules; None and others are given back as they are. Of
            a torch ``DataLoader`` each rank loads its rows, and a batch is as large as on one process, with
            the same rows in it: rank 0 draws them, as that does. Where rows draw random numbers, or the
            ``collate_fn`` makes something of several, each rank loads all of them, with a warning.
            ``engine.save`` knows where it stands. One
            with a ``DistributedSampler`` is cut already. One with another sampler is taken as it is: it must
            give the same batches on all ranks.
        plan: as for :func:`espalier.initialize`.
        rows: what the model gives, as for :meth:`espalier.Engine.outputs`.
        options: more for :func:`espalier.initialize`.

    Returns:
        an :class:`EngineModule` in the model's place (whose ``engine`` is the engine), and all ``things`` in
        their order.
    """
    check_kinds(model, plan)
    optimizers = [x for x in things if isinstance(x, torch.optim.Optimizer)]
    gradients = held_gradients(model)
    engine = initialize(model, optimizers or None, plan, **options)
    if engine.arrangement is not None:
        give_back(gradients)
    module = PreparedModule(engine, rows)
    if not things:
        return module
    return module, *(spread(engine, x) if isinstance(x, DataLoader) else x for x in things)


def spread(engine: Engine, loader: DataLoader[Any]) -> Any:
    """A DataLoader whose global batches are cut over the ranks; see :func:`prepare`."""
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        _check_sampler(engine, sampler)
        return Prepared(loader, engine.local_batch)
    whole = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and draws_all(sampler)
    )
    if not whole or loader.batch_size is None:
        return loader
    shuffled = isinstance(sampler, RandomSampler)
    options = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    dataset: Dataset[Any] = loader.dataset
    shared = engine.loader(
        dataset,
        loader.batch_size,
        shuffled,
        seed=_orders(engine, loader),
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        **options,
    )
    shared.stand_for(loader)
    return shared


def _check_sampler(engine: Engine, sampler: DistributedSampler[Any]) -> None:
    """See that a sampler gives each rank the rows that the plan has it read.

    Raises:
        ValueError: it gives other rows to ranks that read the same, or the other way round.
    """
    n, here = sampler.num_replicas, engine.batch_rows(sampler.num_replicas)
    is_one_each = here.stop - here.start == 1
    if is_one_each and (n == engine.mesh.size() or here.start == sampler.rank):
        return
    raise ValueError(
        f"The loader's DistributedSampler cuts rows for {n} ranks and gives this one those of rank "
        f"{sampler.rank}; by {engine.plan} a batch of {n} rows gives it {here.stop - here.start}, from row "
        f"{here.start} on. Ranks that differ on no axis that shares the batch read the same rows. Give "
        "prepare a DataLoader without it, which it spreads by itself."
    )


def _orders(engine: Engine, loader: DataLoader[Any]) -> Orders:
    """Draws what a DataLoader draws, and when: gives the states of generators of its orders."""
    sampler: Any = loader.sampler

    stays = loader.num_workers > 0 and loader.persistent_workers
    has_begun = False

    def asked() -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        nonlocal has_begun
        before = (loader.generator or torch.default_generator).get_state()
        if not (stays and has_begun):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # for its workers
        has_begun = True
        if not loader.num_workers:
            return before, drawn
        state = drawn()  # workers begin at once
        return before, lambda: state

    def drawn() -> torch.Tensor:
        own = getattr(sampler, "generator", None)
        if own is not None:
            state = own.get_state()
            for _ in range(2):  # at the end of an epoch it draws another order, of which it takes nothing
                torch.randperm(len(sampler), generator=own)
        elif isinstance(sampler, RandomSampler):
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            state = torch.Generator().manual_seed(seed).get_state()
        else:
            return torch.Generator().get_state()
        mesh = engine.mesh
        return state if mesh.size() == 1 or mesh.is_dry else gather_objects(state, mesh)[0]

    return asked
