"""A strategy of Lightning's ``Trainer`` on a plan: ``Trainer(devices=2, strategy=EspalierStrategy(plan))``.

A step (``training_step``, ``validation_step``, ...) runs inside of the model's engine, as it runs inside of
torch's wrapper under DDP: there this rank's rows, and all that comes of them, are global tensors. So a loss
is the mean over all rows, and what is logged is what one process would log. Loops, loaders, precision,
callbacks, loggers and files are Lightning's.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

import torch
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.strategies import DDPStrategy as Theirs
from pytorch_lightning.strategies.strategy import _ForwardRedirection
from torch import nn

from espalier.comm.control import gather_objects
from espalier.compat.common import note_engine, noted_engine
from espalier.compat.fabric import OnMesh, tell_copies
from espalier.engine import Engine, EngineModule, initialize
from espalier.meanwhile import having
from espalier.parallel import Plan
from espalier.tensor import DTensor, full_tensor
from espalier.tensor.deferred import deferred, make_parameters_real
from espalier.tensor.observers import tell
from espalier.texts import refuse
from espalier.trees import tensors_in, tree_map

_NOTHING: Final = object()


class EspalierStrategy(OnMesh, Theirs):
    """Trains a ``LightningModule`` on an engine: ``espalier run -n 2 script.py``, torchrun, or the Trainer.

    Args:
        plan: a :class:`~espalier.Plan`, or keys of one. Without it all ranks are on the data axis.
            ``Trainer(precision="bf16-mixed")`` is autocast, unless the plan says a precision. The Trainer
            accumulates and clips.
        options: of Lightning's ``DDPStrategy``: ``start_method``, ``timeout``, ``process_group_backend``,
            ``accelerator``, ``parallel_devices``, ``cluster_environment``, ``checkpoint_io``,
            ``precision_plugin``.

    Attributes:
        engine: of the model, behind the first ``fit``, ``validate``, ``test`` or ``predict``.

    Raises:
        MistakeError: options of torch's DistributedDataParallel, a pipeline, or what the plan leaves to the
            Trainer.
    """

    def __init__(self, plan: Plan | Mapping[str, Any] | None = None, **options: Any) -> None:
        tell_copies("lightning.pytorch.strategies", EspalierStrategy)
        super().__init__(plan, **options)
        self._forward_redirection = _Redirection()
        self._put: list[tuple[nn.Module, str, Any]] = []  # for a run: where, and what was there
        self.is_within = False  # a step

    @property
    def engine(self) -> Engine:
        """See the class.

        Raises:
            RuntimeError: there is none yet.
        """
        engine = None if self.lightning_module is None else noted_engine(self.lightning_module)
        if engine is None:
            raise RuntimeError("The model has no engine yet: it is made by trainer.fit, validate or test.")
        return engine

    # ---- the world

    def setup_environment(self) -> None:
        """Join the world, and see which ranks read which rows (a collective)."""
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        self._tell_environment()
        self.setup_distributed()
        plan = self._planned(self.precision_plugin, "say accumulate_grad_batches= of the Trainer")
        if plan.pipe > 1:
            known = "a step runs on all ranks: expected 1. espalier.compat.fabric has stages"
            refuse("EspalierStrategy", [("plan.pipe", plan.pipe, known)])
        self._meet(plan)

    def process_dataloader(self, dataloader: Any) -> Any:
        """The loader as it is.

        Raises:
            ValueError: to predict, ranks would read different numbers of batches, and wait for each other.
        """
        module: Any = self.lightning_module
        if module is not None and module.trainer.predicting and hasattr(dataloader, "__len__"):
            assert self._mesh is not None
            lengths = gather_objects(len(dataloader), self._mesh)
            if len({*lengths}) > 1:
                raise ValueError(
                    f"To predict, the ranks would read {lengths} batches: expected as many on each, as a "
                    "model's layers lie on all of them. Choose another batch_size; or a sampler of your own, "
                    "and Trainer(use_distributed_sampler=False)."
                )
        return dataloader

    # ---- what is set up

    def setup(self, trainer: Any) -> None:
        """Put the model on an engine, and let it train by the optimizer that the model configures."""
        assert self.accelerator is not None
        module: Any = self.lightning_module
        self.accelerator.setup(trainer)
        trains = trainer.state.fn == "fit"
        self.precision_plugin.convert_module(module)
        self.model = EngineModule(self._engine_of(module), "own")
        if trains:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trains and self.optimizers:
            self.engine.attach(self.optimizers, instead=True)  # of those of another run
        self._follow(module)

    def _engine_of(self, module: nn.Module) -> Engine:
        """That which it has, from another run of a Trainer's, or a new one.

        Raises:
            ValueError: it has one of another plan.
        """
        engine = noted_engine(module)
        if engine is None:
            engine = initialize(module, None, self.plan, mesh=self._mesh)
            note_engine(engine, keeps=True)
        if engine.plan != self.plan:
            raise ValueError(
                f"The model lies by the plan {engine.plan}, and the strategy says {self.plan}: expected the "
                "same. Make the model anew, and load trainer.save_checkpoint's file into it."
            )
        return engine

    def _follow(self, module: nn.Module) -> None:
        """Let what the model logs, and its metrics, be those of all rows, until the Trainer has done."""
        log: Callable[..., Any] = module.log  # type: ignore[assignment]
        signature = inspect.signature(log)  # a module may have a ``log`` of its own

        def logged(*args: Any, **kwargs: Any) -> Any:
            if all(not isinstance(x, DTensor) for x in tensors_in((args, kwargs))):
                return log(*args, **kwargs)
            args, kwargs = _whole((args, kwargs))  # of all rows, so there is nothing to be summed
            if "sync_dist" not in signature.parameters:
                return log(*args, **{name: x for name, x in kwargs.items() if name != "sync_dist"})
            call = signature.bind(*args, **kwargs)
            call.arguments["sync_dist"] = False
            return log(*call.args, **call.kwargs)

        self._lend(module, "log", logged)
        for metric in filter(_is_metric, module.modules()):
            if self.engine.passes.data is not None:  # an earlier Trainer has brought it to the host
                metric.to(self.root_device)
            self._lend(metric, "update", self._of_all_rows(metric))
            for name in ("sync_on_compute", "dist_sync_on_step", "_to_sync"):
                self._lend(metric, name, False)

    def _lend(self, module: nn.Module, name: str, value: Any) -> None:
        held = vars(module)
        self._put.append((module, name, held.get(name, _NOTHING)))
        held[name] = value

    def _take_back(self, kept: int = 0) -> None:
        """What was lent, but for the first ``kept``."""
        while len(self._put) > kept:
            module, name, before = self._put.pop()
            if before is _NOTHING:
                del vars(module)[name]
            else:
                vars(module)[name] = before

    def _of_all_rows(self, metric: Any) -> Callable[..., Any]:
        """A metric's ``update``, of whole tensors: outside of a step those that each rank has of its rows.

        What it gives for a batch may be a loss: then gradients go back through them.
        """
        update = metric.update

        def updated(*args: Any, **kwargs: Any) -> Any:
            if not self.is_within and any(
                type(x) is torch.Tensor and x.ndim for x in tensors_in((args, kwargs))
            ):
                args, kwargs = self.engine.local_batch((args, kwargs))
            args, kwargs = _whole((args, kwargs), keeps_graph=getattr(metric, "_enable_grad", False))
            return update(*args, **kwargs)

        return updated

    def teardown(self) -> None:
        """The model stays where it lies; what it logs is its own again."""
        self._take_back()
        self.model = self.lightning_module
        self.precision_plugin.teardown()
        assert self.accelerator is not None and self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Models that are built in it have no memory before they are set up, and then the values that their
        constructors draw."""
        with self.precision_plugin.tensor_init_context(), deferred():
            yield

    def model_to_device(self) -> None:
        """Nothing: the engine puts each rank's part of a model on its device."""

    # ---- steps

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """Backward passes in here only accumulate."""
        return self.engine.no_sync()

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """The engine's, behind the closure's forward and backward pass."""
        return self.precision_plugin.optimizer_step(
            optimizer, model=model or self.lightning_module, closure=closure, **kwargs
        )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, of the rows of all ranks."""
        module: Any = self.lightning_module
        with self._step():
            if module.automatic_optimization:
                return super().training_step(*args, **kwargs)
            if self.engine.arrangement is None and args:
                self._lay_out(module, args[0])
            with self.precision_plugin.train_step_context():
                step = partial(module.training_step, **kwargs)
                return self.engine.passes.one_by_one("training_step").by_hand(step, args)

    def _lay_out(self, module: Any, batch: Any) -> None:
        """Of a module that steps by hand, where how layers lie is inferred of its ``forward``.

        It is called on Lightning's example of what it takes, or on the batch, or on the batch's first part.
        """
        given = module.example_input_array
        if given is None:
            given = batch[0] if isinstance(batch, tuple | list) and batch else batch
        try:
            self.engine.lay_out(given if isinstance(given, Mapping | tuple) else (given,))
        except Exception as error:
            if self.plan.tensor == 1 or self.engine.arrangement is not None:
                raise
            tell(
                f"{type(module).__name__}.forward does not take the batch's first part "
                f"({type(error).__name__}: {error}), so its parameters stay whole on the tensor axis. Set "
                "self.example_input_array, in its constructor, to what forward takes: how layers are cut is "
                "inferred of that."
            )
            self.engine.lay_out(layouts={})

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, of the rows of all ranks."""
        with self._step(), _counted():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, of the rows of all ranks."""
        with self._step(), _counted():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The model's; what it gives is of this rank's rows."""
        with self._step(), _counted():
            return super().predict_step(*args, **kwargs)

    def _step(self) -> AbstractContextManager[None]:
        return having(self, is_within=True)

    # ---- states

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Each rank takes its part."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """With plain whole tensors (a collective)."""
        return self.engine.state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Of whole tensors, saved under any plan, or without."""
        module = self.engine.module
        # of a plan that looks at the first batch: they have memory on each rank until then
        waiting = [p for p in module.parameters() if p.is_meta and not isinstance(p, DTensor)]
        make_parameters_real(waiting)
        self.engine.load_state_dict(checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """With plain whole tensors (a collective)."""
        states: dict[str, Any] = getattr(optimizer, "_optimizer", optimizer).state_dict()
        return states

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Of whole tensors."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    # ---- values of all ranks

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Stacked, ``[ranks that read rows, ...]``; in a step, which has the rows of all, these are cut.

        Raises:
            ValueError: the ranks' parts are of different sizes.
        """
        if not isinstance(tensor, DTensor):
            return super().all_gather(tensor, group, sync_grads)
        readers, value = self.readers.size, tensor if sync_grads else tensor.detach()
        if not tensor.ndim:
            return value.expand(readers)
        if tensor.shape[0] % readers:
            raise ValueError(
                f"all_gather of {list(tensor.shape)} in a step: expected a multiple of {readers} rows, as "
                "ranks' parts are stacked. In a step a tensor has the rows of all ranks: use it as it is."
            )
        return value.unflatten(0, (readers, -1))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The sum or mean of all ranks' tensors; of ranks that share a batch one counts."""
        return self.once_each(super().reduce(tensor, group, reduce_op), group, reduce_op)


class _Redirection(_ForwardRedirection):
    """Lets a call of the engine's go by a step of the module's.

    A copy of it that is looked at beforehand, which Lightning keeps without a Trainer, knows what the Trainer
    knows, and tells it nothing.
    """

    def __call__(
        self, wrapper_module: nn.Module, original_module: Any, method_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        own, known = original_module.forward, weakref.ref(original_module.trainer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            original_module.forward = own
            if original_module._trainer is None:
                _show(original_module, known())
            return getattr(original_module, method_name)(*args, **kwargs)

        original_module.forward = forward  # a copy's has the copy in its place
        return wrapper_module(*args, **kwargs)


def _show(copy: Any, trainer: Any) -> None:
    """Let a copy of a module see a Trainer."""
    copy.trainer = _Shown(trainer)
    for part in copy.modules():
        if hasattr(part, "_trainer"):
            vars(part)["log"] = lambda *args, **kwargs: None
            vars(part)["all_gather"] = lambda data, *args, **kwargs: tree_map(_stacked, data)


class _Shown:
    """A Trainer to look at: what is set of it is forgotten, and what is written goes nowhere."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.logger = DummyLogger()
        self.loggers = [self.logger]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._trainer, name)


def _stacked(x: Any) -> Any:
    return x.unsqueeze(0) if isinstance(x, torch.Tensor) else x


@contextmanager
def _counted() -> Iterator[None]:
    """Without gradients, but with versions of tensors, by which changes of parameters are told."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _whole(tree: Any, *, keeps_graph: bool = False) -> Any:
    def plain(x: Any) -> Any:
        return full_tensor(x if keeps_graph else x.detach()) if isinstance(x, torch.Tensor) else x

    return tree_map(plain, tree)


def _is_metric(module: nn.Module) -> bool:
    return any(kind.__module__ == "torchmetrics.metric" for kind in type(module).__mro__)


__all__ = ["EspalierStrategy"]
