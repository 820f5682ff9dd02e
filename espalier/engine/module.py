"""An engine as a module: what a program calls in place of its model; and ``prepare``, which makes one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from espalier.blocks import parameters_in
from espalier.comm.control import gather_objects
from espalier.engine.engine import Engine, Rows
from espalier.engine.start import initialize
from espalier.engine.surface import bound
from espalier.parallel import Plan
from espalier.parallel.several import Several, as_one, holders
from espalier.torch_private import MODULES, as_written, draws_all, open_transform


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
        self.rows, self._engine = rows, engine
        self.module = engine.module
        self.training = engine.module.training

    @property
    def engine(self) -> Engine:
        """The engine that trains the model."""
        return self._engine

    @as_written
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of every module: hooks, and :meth:`forward`."""
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives.

        Raises:
            ValueError: in a transform of torch.func, before the model is laid out.
            NotImplementedError: in one, in a pipeline.
        """
        if torch.is_grad_enabled() and self.engine.optimizer is None:
            optimizer = optimizer_of(self.module)
            if optimizer is not None:
                self.engine.attach(optimizer)
        if open_transform() is not None:
            return self._transformed(args, kwargs)
        return self.engine.outputs(bound(self.module, args, kwargs), self.rows)

    def _transformed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model gives for what torch.vmap or a transform of torch.func makes of its inputs.

        These are no batches that could be cut: the model runs on what it is given, and the transform gathers
        the parameters.
        """
        what = "The model is called inside of torch.vmap or a transform of torch.func"
        if self.engine.plan.pipe > 1:
            raise NotImplementedError(
                f"{what}: in a pipeline ({self.engine.plan}) its parameters are on several ranks. Put the "
                "transform into the model's forward, or train under a plan without pipe."
            )
        if self.engine.arrangement is None:
            raise ValueError(
                f"{what}, and how its parameters lie is to be inferred from a batch. Call it on one before, "
                "outside of the transform, or pass example=batch to espalier.prepare."
            )
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the model as it lies (for averages of weights, targets), which no engine trains.

        Called, it takes global batches and gives what it computes of all rows (in a pipeline without
        gradients).
        """
        return self.engine.passes.copied(memo)

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
        states = OrderedDict() if destination is None else destination
        states.update({f"{prefix}{name}": x for name, x in self.engine.state_dict().items()})
        return states

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """See :meth:`espalier.Engine.load_state_dict`; values are copied, also with ``assign``."""
        return self.engine.load_state_dict(state_dict, strict)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        """``to``, ``float``, ``half``, ...: the parameters are where the plan says, and as it says."""
        return self


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer | None:
    """What holds a model's parameters, wherever the program keeps it; several as one; None if there is none.

    Raises:
        ValueError: a parameter is in two of them.
    """
    owners = holders(parameters_in(module))
    inner = {id(part) for x in owners if isinstance(x, Several) for part in x.parts}
    return as_one([x for x in owners if id(x) not in inner]) if owners else None


class PreparedModule(EngineModule):
    """In the model's place in a program: what is set, taken away, registered or looked for is the model's.

    Else ``model.temperature = 2.0`` or ``model.head = nn.Linear(...)`` would be this module's own, and the
    model would go on without it.
    """

    _is_own = frozenset({"rows", "training"})

    def __new__(cls, engine: Engine, rows: Rows = "all") -> Self:
        """Of a kind that has the special methods of a container, if the model is one."""
        model = type(engine.module)
        special = {name: _of_model(name) for name in _CONTAINERS if hasattr(model, name)}
        kind = type(cls.__name__, (cls,), special) if special else cls
        return super().__new__(kind)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._is_own or "module" not in self.__dict__.get(MODULES, {}):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def train(self, mode: bool = True) -> Self:
        """Of the model, as it says."""
        self.training = mode
        self.module.train(mode)
        return self

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


# the special methods by which models that are containers are used
_CONTAINERS = "__getitem__ __setitem__ __delitem__ __len__ __iter__ __reversed__ __contains__".split()


def _of_model(name: str) -> Callable[..., Any]:
    def method(self: PreparedModule, *args: Any) -> Any:
        return getattr(self.module, name)(*args)

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
            the same rows in it: rank 0 draws them, as that does. ``engine.save`` knows where it stands. One
            with a ``DistributedSampler`` is cut already. One with another sampler is taken as it is: it must
            give the same batches on all ranks.
        plan: as for :func:`espalier.initialize`.
        rows: what the model gives, as for :meth:`espalier.Engine.outputs`.
        options: more for :func:`espalier.initialize`.

    Returns:
        an :class:`EngineModule` in the model's place (whose ``engine`` is the engine), and all ``things`` in
        their order.
    """
    optimizers = [x for x in things if isinstance(x, torch.optim.Optimizer)]
    engine = initialize(model, optimizers or None, plan, **options)
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
    return engine.loader(
        dataset,
        loader.batch_size,
        shuffled,
        seed=_orders(engine, loader),
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        **options,
    )


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


def _orders(engine: Engine, loader: DataLoader[Any]) -> Callable[[], torch.Tensor]:
    """Draws, for each epoch, what a DataLoader draws: gives the state of a generator of its order."""
    sampler: Any = loader.sampler

    def next_order() -> torch.Tensor:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # for its workers
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

    return next_order
