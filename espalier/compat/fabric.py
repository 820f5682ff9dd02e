"""A strategy of Lightning Fabric's on a plan: ``Fabric(devices=2, strategy=EspalierStrategy(plan={...}))``.

Launchers, loaders, precision, callbacks, loggers and files are Fabric's. Each rank that reads rows of its own
gives them to the model and gets what comes of them, as under its DDP strategy; ranks that share a model's
layers read the same ones.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from inspect import getclosurevars
from types import FunctionType, MethodType
from typing import Any

import torch
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.strategies import DDPStrategy as Theirs
from lightning_fabric.strategies.strategy import _BackwardSyncControl
from lightning_fabric.utilities.types import _Stateful
from torch import nn

from espalier.blocks import Arguments
from espalier.comm.control import gather_objects
from espalier.compat.common import NO_SCALER, Readers, plan_for_world
from espalier.engine import Engine, EngineModule, initialize
from espalier.engine.awaited import Awaited
from espalier.meanwhile import having
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.tensor import DTensor, full_tensor
from espalier.tensor.deferred import deferred, make_parameters_real
from espalier.texts import refuse

_LOW: Mapping[str, str] = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}
_PRECISIONS = frozenset({"Precision", "DoublePrecision", "HalfPrecision"})
_LAUNCHED = ("RANK", "WORLD_SIZE")
_METHOD = "espalier_method"  # an argument of a call
_OF_DDP = frozenset(
    "find_unused_parameters static_graph broadcast_buffers gradient_as_bucket_view init_sync".split()
)


class OnMesh:
    """What a strategy of Fabric's, or of the Trainer's, has of a plan: the mesh, and who reads which rows.

    Args:
        plan, options: as of :class:`EspalierStrategy`.
    """

    plan: Plan

    def __init__(self, plan: Plan | Mapping[str, Any] | None = None, **options: Any) -> None:
        if options.get("cluster_environment") is None and all(name in os.environ for name in _LAUNCHED):
            options["cluster_environment"] = TorchElasticEnvironment()
        super().__init__(**options)
        known = "the plan says how gradients are summed: leave it out"
        theirs: Any = self
        refuse("EspalierStrategy", [(name, x, known) for name, x in theirs._ddp_kwargs.items()])
        self._said = plan
        self._mesh: Mesh | None = None
        self._readers: Readers | None = None

    def _meet(self, plan: Plan) -> None:
        """The world is there: see which ranks read which rows (a collective)."""
        theirs: Any = self
        self.plan = plan
        self._mesh = Mesh.from_env(plan.axes, theirs.root_device.type)
        self._readers = Readers(self._mesh, plan)

    def _tell_environment(self) -> None:
        """Let the process's environment say what Lightning's says."""
        theirs: Any = self
        environment = theirs.cluster_environment
        assert environment is not None
        os.environ |= {
            "RANK": str(environment.global_rank()),
            "WORLD_SIZE": str(environment.world_size()),
            "LOCAL_RANK": str(environment.local_rank()),
        }
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(theirs.num_processes))

    def _planned(self, plugin: Any, known: str) -> Plan:
        """The plan of what this is told and of a precision; ``known`` says how a program accumulates."""
        said: dict[str, Any] = {}
        mistakes: list[tuple[str, Any, str]] = []
        if _is_mixed(plugin):
            said["precision"] = {"compute": f"autocast-{_LOW[plugin.precision]}"}
            if plugin.scaler is not None:  # Lightning scales
                said["precision"]["loss_scale"] = {"init_scale": 1.0, "growth_factor": 1.0}
        elif type(plugin).__name__ not in _PRECISIONS:
            mistakes.append(
                ("precision", type(plugin).__name__, "expected 32, 64, bf16 or 16, true or mixed")
            )
        plan = plan_for_world(said, self._said)
        if plan.pipe > 1 and getattr(plugin, "scaler", None) is not None:
            mistakes.append(("precision", "16-mixed", NO_SCALER))
        if plan.accumulate > 1 and plan.pipe == 1:
            mistakes.append(("plan.accumulate", plan.accumulate, f"{known}: expected 1"))
        refuse("EspalierStrategy", mistakes)
        return plan

    @property
    def readers(self) -> Readers:
        """Which ranks read rows of their own.

        Raises:
            RuntimeError: the ranks have not met yet.
        """
        if self._readers is None:
            raise RuntimeError("The ranks have not met yet: call fabric.launch() first.")
        return self._readers

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """A loader has a part of the rows for each rank that reads some of its own."""
        return {"num_replicas": self.readers.size, "rank": self.readers.place}

    # ---- values of all ranks: of each that reads rows

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Stacked, ``[ranks that read rows, ...]``; those of ranks that share a batch once."""
        theirs: Any = super()
        gathered: torch.Tensor = theirs.all_gather(tensor, group, sync_grads)
        return gathered[self.readers.firsts] if self.readers.is_shared and _is_world(group) else gathered

    def once_each(self, reduced: Any, group: Any, reduce_op: Any) -> Any:
        """A sum of all ranks' tensors, in place, in which of those that share a batch one counts."""
        is_sum = reduce_op == "sum" or reduce_op == torch.distributed.ReduceOp.SUM
        if not (is_sum and self.readers.is_shared and _is_world(group) and isinstance(reduced, torch.Tensor)):
            return reduced
        return reduced.copy_(self.readers.one_of_each(reduced))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any of them, say yes."""
        assert self._mesh is not None
        said = gather_objects(bool(decision), self._mesh)
        return False not in said if all else True in said


class EspalierStrategy(OnMesh, Theirs):
    """Trains models on engines: started by ``espalier run -n 2 script.py``, torchrun, or ``fabric.launch``.

    Args:
        plan: a :class:`~espalier.Plan`, or keys of one. Without it all ranks are on the data axis.
            ``Fabric(precision="bf16-mixed")`` is autocast, unless the plan says a precision. The program
            accumulates (``no_backward_sync``) and clips; in a pipeline ``accumulate`` of the plan cuts each
            batch into micro-batches.
        options: of Fabric's ``DDPStrategy``: ``start_method``, ``timeout``, ``process_group_backend``,
            ``accelerator``, ``parallel_devices``, ``cluster_environment``, ``checkpoint_io``, ``precision``.

    Raises:
        MistakeError: options of torch's DistributedDataParallel, or what the plan leaves to the program.
    """

    def __init__(self, plan: Plan | Mapping[str, Any] | None = None, **options: Any) -> None:
        tell_copies("lightning.fabric.strategies", EspalierStrategy)
        super().__init__(plan, **options)
        self._backward_sync_control = _NoSync()
        self._modules: list[EngineModule] = []
        self._waits = False

    # ---- the world

    def setup_environment(self) -> None:
        """Join the world, and see which ranks read which rows (a collective)."""
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self._set_world_ranks()
        self._tell_environment()
        self._setup_distributed()
        self._meet(self._planned(self.precision, "accumulate by fabric.no_backward_sync, and divide losses"))

    # ---- what is set up

    def setup_module(self, module: nn.Module) -> Any:
        """The model on an engine of its own, see :meth:`engine_of`."""
        _take_methods(module)
        wrapped = _Model(initialize(module, None, self.plan, mesh=self._mesh), "own")
        wrapped.as_asked = self.precision.convert_output
        if not self._waits:  # Fabric takes no optimizer of parameters without memory
            make_parameters_real([p for p in module.parameters() if p.is_meta and not isinstance(p, DTensor)])
        self._modules.append(wrapped)
        return wrapped

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, *more: Any) -> Any:
        """Each; together a model may wait for its memory until its first batch says how layers lie."""
        with having(self, _waits=True):
            return super().setup_module_and_optimizers(module, optimizers, *more)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer, which its model's engine steps."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for module in self._modules:
            if any(id(p) in held for p in module.parameters()):
                module.engine.attach(optimizer)
        return optimizer

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: the engine puts each rank's part of a model on its device."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Models that are built in it have no memory before they are set up, and then the values that their
        constructors draw."""
        stack = ExitStack()
        stack.enter_context(self.precision.module_init_context())
        stack.enter_context(deferred())
        return stack

    def engine_of(self, module: nn.Module) -> Engine:
        """The engine that trains a model that was set up, given as ``fabric.setup`` gave it or as it was."""
        plain = getattr(module, "_original_module", module)
        return next(known.engine for known in self._modules if plain in (known, known.module))

    # ---- states

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> Any:
        """With plain whole tensors (a collective)."""
        return optimizer.state_dict()

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As ever (a collective); what else has optimizers or models in it, as a schedule in a dict has, has
        them as on one process, too: plain and whole."""
        whole = {name: x if _has_states(x) else self._as_alone(x) for name, x in state.items()}
        super().save_checkpoint(path, whole, *args, **kwargs)

    def _as_alone(self, value: Any) -> Any:
        """A copy of it, or itself where there is nothing of an engine's in it."""
        apart = _Apart()
        apart.dump(value)
        if all(type(x) is torch.Tensor for x in apart.things):
            return value
        return apart.put_together([self._thing_alone(x) for x in apart.things])

    def _thing_alone(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            known = [m.engine for m in self._modules if thing in (m, m.module)]
            return known[0].full_model() if known else thing
        if isinstance(thing, torch.Tensor):
            return self._tensor_alone(thing)
        thing = getattr(thing, "_optimizer", thing)  # of Fabric's around it
        states, groups = thing.state_dict()["state"], []
        for group in thing.param_groups:
            groups.append({**group, "params": [self._tensor_alone(p) for p in group["params"]]})
        held = [p for group in groups for p in group["params"]]
        alone = object.__new__(type(thing))
        alone.__setstate__(
            {
                "defaults": thing.defaults,
                "state": defaultdict(dict, {held[i]: state for i, state in states.items()}),
                "param_groups": groups,
            }
        )
        return alone

    def _tensor_alone(self, x: torch.Tensor) -> torch.Tensor:
        owner = next((m.engine for m in self._modules if any(x is p for p in m.parameters())), None)
        if owner is not None:
            return nn.Parameter(owner.full_parameter(x), x.requires_grad)  # type: ignore[arg-type]
        return full_tensor(x.detach()) if isinstance(x, DTensor) else x

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The sum or mean of all ranks' tensors, in place; of ranks that share a batch one counts."""
        return self.once_each(super().all_reduce(tensor, group, reduce_op), group, reduce_op)


class _Apart(pickle.Pickler):
    """What is to be written, apart from the tensors, optimizers and models in it."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._places: dict[int, int] = {}
        self._written = io.BytesIO()
        super().__init__(self._written)

    def persistent_id(self, thing: Any) -> int | None:
        """Where it is among :attr:`things`."""
        if not isinstance(thing, torch.Tensor | nn.Module | torch.optim.Optimizer):
            return None
        place = self._places.setdefault(id(thing), len(self.things))
        if place == len(self.things):
            self.things.append(thing)
        return place

    def put_together(self, made: list[Any]) -> Any:
        """The same with others in the places of :attr:`things`."""
        self._written.seek(0)
        reader = pickle.Unpickler(self._written)
        reader.persistent_load = made.__getitem__  # type: ignore[method-assign]
        return reader.load()


class DDPStrategy(EspalierStrategy):
    """Fabric's own ``DDPStrategy`` by name and arguments: all ranks on the data axis.

    Args:
        plan, options: as of :class:`EspalierStrategy`; and of torch's ``DistributedDataParallel``
            ``bucket_cap_mb``, which is ``Plan(chunk_megabytes=...)``. ``find_unused_parameters``,
            ``static_graph``, ``broadcast_buffers``, ``gradient_as_bucket_view`` and ``init_sync`` have no
            effect: parameters and buffers are in step, unused parameters are seen.
    """

    def __init__(self, plan: Plan | Mapping[str, Any] | None = None, **options: Any) -> None:
        options = {name: x for name, x in options.items() if name not in _OF_DDP}
        if (megabytes := options.pop("bucket_cap_mb", None)) is not None and not isinstance(plan, Plan):
            plan = {"chunk_megabytes": float(megabytes), **(plan or {})}
        super().__init__(plan, **options)


class _Model(EngineModule):
    """A model that was set up."""

    as_asked: Callable[[Any], Any] = staticmethod(lambda output: output)
    _method: str | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives; what a pipeline has yet to give, as Fabric would cast it."""
        with having(self, _method=self._asked_method()):
            output = super().forward(*args, **kwargs)
        return output._by(self.as_asked) if isinstance(output, Awaited) else output

    def _asked_method(self) -> str | None:
        """The method that Fabric has put in the place of the model's forward for one call.

        It would take itself out in the model's first run, which may be a trial of a copy.
        """
        put = vars(self.module).get("forward")
        if not isinstance(put, FunctionType) or not put.__module__.endswith("fabric.wrappers"):
            return None
        known = getclosurevars(put).nonlocals
        vars(self.module)["forward"] = known["original_forward"]
        name: str = known["method_name"]
        return name

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._method is None:
            return super()._bound(args, kwargs)
        return Arguments(args, {**kwargs, _METHOD: self._method})


def _take_methods(module: nn.Module) -> None:
    """Let a call of a model say by which of its methods it goes."""
    own = module.forward

    @wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        method = kwargs.pop(_METHOD, None)
        return (own if method is None else getattr(self, method))(*args, **kwargs)

    vars(module)["forward"] = MethodType(forward, module)


class _NoSync(_BackwardSyncControl):
    """Backward passes that only accumulate."""

    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[Any]:
        return module.no_sync() if enabled else nullcontext()


def tell_copies(module: str, kind: type[Any]) -> None:
    """Let the package ``lightning``, which copies classes, take a strategy for one of its own.

    Whoever uses its ``Fabric`` or ``Trainer`` has imported it before a strategy is made.

    Args:
        module: of the package, with its own ``DDPStrategy``.
    """
    copies = sys.modules.get(module)
    if copies is not None:
        copies.DDPStrategy.register(kind)


def _is_mixed(plugin: Any) -> bool:
    """Whether it is Lightning's autocast, from whichever of its packages."""
    return any(kind.__name__ == "MixedPrecision" for kind in type(plugin).__mro__)


def _has_states(x: Any) -> bool:
    """Whether Fabric writes what its ``state_dict()`` says."""
    return isinstance(x, nn.Module | torch.optim.Optimizer | _Stateful)


def _is_world(group: Any) -> bool:
    return group is None or group.size() == torch.distributed.get_world_size()


__all__ = ["DDPStrategy", "EspalierStrategy", "OnMesh", "tell_copies"]
