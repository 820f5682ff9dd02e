"""transformers' ``Trainer`` on a plan: its arguments, callbacks, metrics and checkpoints as they are.

accelerate takes each process for one alone, which trains on whole batches; the model that it calls goes
through the engine, which computes this rank's rows. So everything that the Trainer counts, logs and compares
is what it is on one process. Rank 0 alone writes files and logs.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import torch
import transformers
from accelerate.state import PartialState
from accelerate.utils import find_batch_size
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from transformers import TrainingArguments
from transformers.debug_utils import DebugOption
from transformers.training_args import OptimizerNames

from espalier.comm.control import gather_objects
from espalier.compat.accelerate import OfWholes, PreparedModel, autocast_of
from espalier.compat.common import NO_SCALER, note_engine, noted_engine, plan_for_world, world_size
from espalier.device import use
from espalier.engine import Engine, EngineModule, initialize
from espalier.engine.accumulation import OfAll
from espalier.engine.awaited import Awaited
from espalier.meanwhile import having
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.planner import Cluster, auto, shipped
from espalier.tensor import DTensor
from espalier.tensor.observers import tell
from espalier.texts import refuse

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
_THEIRS = ("deepspeed", "fsdp", "parallelism_config")
_OF_ONE = MappingProxyType(
    {
        "auto_find_batch_size": "memory may run out on one rank alone: say per_device_train_batch_size; "
        "`espalier plan` tells what fits",
        "enable_jit_checkpoint": "ranks hear of SIGTERM between different steps: say save_steps=",
    }
)
_OPTIONS = (  # of a DataLoader, beside which rows its batches have
    "num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator "
    "prefetch_factor persistent_workers".split()
)
_FULL = MappingProxyType({"bf16_full_eval": "bfloat16", "fp16_full_eval": "float16"})


@contextmanager
def _alone(mesh: Mesh, args: TrainingArguments) -> Iterator[None]:
    """While open, a process finds nothing of the other ranks; then it knows which of them it is.

    It has one device: that of its rank, of however many there are on the machine.
    """
    hidden = {name: os.environ.pop(name) for name in _LAUNCHED if name in os.environ}
    device = mesh.device()
    args.__dict__.pop("_setup_devices", None)
    _ = args.device
    args.__dict__["_setup_devices"] = device
    args._n_gpu = min(args._n_gpu, 1)
    state = PartialState()
    state.device = device
    use(device)
    try:
        yield
    finally:
        os.environ.update(hidden)
    state.process_index = mesh.rank
    state.local_process_index = int(hidden.get("LOCAL_RANK", "0"))


def _device_type(args: TrainingArguments) -> str | None:
    """What ranks compute on; None: what there is."""
    return "cpu" if args.use_cpu else None


def _searched(
    cluster: Cluster | str | Path | None,
    model: Any,
    args: TrainingArguments,
    said: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> Plan:
    """The fastest plan for what a Trainer is given; rank 0's, on all ranks.

    Raises:
        MistakeError: what the search needs is missing.
    """
    needed = {"cluster": cluster, "model": model, "train_dataset": arguments.get("train_dataset")}
    reason = f"plan='auto' needs it; clusters that are shipped: {', '.join(shipped())}"
    refuse("Trainer", [(name, x, reason) for name, x in needed.items() if x is None])
    assert cluster is not None
    ranks = world_size()
    mesh = Mesh.from_env({"data": ranks}, _device_type(args))
    outcome: Plan | str | None = None
    if mesh.rank == 0:
        rows = args.per_device_train_batch_size * ranks
        collate = arguments.get("data_collator")
        if collate is None and (tokenizer := arguments.get("processing_class")) is not None:
            collate = transformers.DataCollatorWithPadding(tokenizer)
        dataset = arguments["train_dataset"]
        batch = (collate or transformers.default_data_collator)(
            [dataset[i % len(dataset)] for i in range(rows)]
        )
        takes = inspect.signature(model.forward).parameters
        batch = {name: x.to("meta") for name, x in batch.items() if name in takes}
        try:
            fixed = {"pipe": 1, "accumulate": 1, **said}
            outcome = auto(_on_meta(model), batch, cluster, ranks=ranks, **fixed)
        except ValueError as error:
            outcome = str(error)
    if ranks > 1:
        outcome = gather_objects(outcome, mesh)[0]
    if isinstance(outcome, str):
        raise ValueError(outcome)
    assert outcome is not None
    return outcome


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model without its memory."""
    held: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
    }
    held |= {id(x): x.to("meta") for x in model.buffers()}
    return copy.deepcopy(model, held)


def _mistakes(plan: Plan, args: TrainingArguments) -> list[tuple[str, Any, str]]:
    """What of the arguments no plan, or not this one, can do."""
    mistakes: list[tuple[str, Any, str]] = [
        (name, value, "the plan says what is parallel: leave it out")
        for name in _THEIRS
        if (value := getattr(args, name, None))
    ]
    if plan.accumulate > 1 and plan.pipe == 1:
        said_by = "say gradient_accumulation_steps in the arguments: expected 1"
        mistakes.append(("plan.accumulate", plan.accumulate, said_by))
    if plan.pipe > 1 and "fp16" in (args.mixed_precision, "fp16" if args.fp16 else ""):
        mistakes.append(("fp16", True, NO_SCALER))
    if plan.pipe > 1 and DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        reason = "a pipeline's stages run what a trace says, which has no values to look at: leave it out"
        mistakes.append(("debug", "underflow_overflow", reason))
    if plan.pipe > 1 and getattr(args, "predict_with_generate", False):
        reason = (
            "it calls parts of the model, which stages have: leave it out; trainer.engine.generate continues"
        )
        mistakes.append(("predict_with_generate", True, reason))
    if plan.pipe > 1 and args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
        reason = "it updates within a backward pass, which in a pipeline has several micro-batches"
        mistakes.append(("optim", str(args.optim), reason))
    for name, low in _FULL.items():
        if getattr(args, name) and plan.precision.parameters != low:
            reason = (
                "the plan says in which dtype parameters are: bf16=True evaluates under autocast; "
                f"plan={{'precision': '{low}'}} computes in {low} throughout, from float32 masters"
            )
            mistakes.append((name, True, reason))
    if world_size() > 1:
        for name, reason in _OF_ONE.items():
            if getattr(args, name):
                mistakes.append((name, True, reason))
    return mistakes


def _is_laid_out(model: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in model.parameters())


def _engine_of(model: nn.Module, plan: Plan) -> Engine | None:
    """The engine that an earlier Trainer has laid a model out by; None of a plain model.

    Raises:
        MistakeError: it has another plan, or is none of a Trainer's.
    """
    if not _is_laid_out(model):
        return None
    known = noted_engine(model)
    if known is None or known.plan != plan:
        by = "by no Trainer that is left" if known is None else f"by {known.plan}"
        reason = (
            f"it is laid out already, {by}, and the plan here is {plan}: expected the same; or "
            "trainer.save_model(folder) there, and from_pretrained(folder) gives a plain one"
        )
        refuse("Trainer", [("model", type(model).__name__, reason)])
    return known


class _Accelerator(OfWholes):
    """accelerate's, which knows an engine's model.

    Attributes:
        together: so many batches of a loader that is prepared are one: those of ranks that share it.
        drawn: what draws the batches of the last loader that was prepared, as the program made it.
    """

    together = 1
    drawn: Any = None

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """As ever; of a loader of each rank's rows the batches are those of all ranks."""
        self.drawn = data_loader.batch_sampler
        if self.together > 1:
            data_loader = _joined(data_loader, self.together)
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if isinstance(data_loader.dataset, IterableDataset):
            prepared.base_dataloader = _Told(prepared)
        return prepared

    @property
    def process_index(self) -> int:
        """The first of one: each rank has all rows, so all of a gathered tensor is its own part."""
        return 0

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The plain model."""
        if isinstance(model, EngineModule):
            model = model.module
        return super().unwrap_model(model, *args, **kwargs)

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Gradients of a micro-batch wait for the last one, where whole ones have room on each rank."""
        if isinstance(model, EngineModule) and model.engine.plan.zero < 2:
            return model.no_sync()
        return nullcontext()


class _Told:
    """A loader of unknown length, which tells how many rows its last batch has: by them means weigh it."""

    def __init__(self, prepared: Any) -> None:
        self._prepared, self._loader = weakref.ref(prepared), prepared.base_dataloader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            prepared = self._prepared()
            if prepared is not None and (rows := find_batch_size(batch)) is not None:
                prepared.remainder = rows
            yield batch


class _Batches(BatchSampler):
    """Several batches of a sampler as one."""

    def __init__(self, batches: Any, together: int) -> None:
        self.batches, self.together = batches, together
        self.sampler = getattr(batches, "sampler", batches)
        self.batch_size = getattr(batches, "batch_size", 1) * together
        self.drop_last = getattr(batches, "drop_last", False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)  # set_epoch, and states of samplers that have them

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.batches)
        while several := [*islice(batches, self.together)]:
            yield [row for batch in several for row in batch]

    def __len__(self) -> int:
        return math.ceil(len(self.batches) / self.together)


def _joined(loader: DataLoader[Any], together: int) -> DataLoader[Any]:
    """A loader that gives so many of a loader's batches as one."""
    if loader.batch_size is None and loader.batch_sampler is None:
        return loader  # its dataset gives batches
    options: dict[str, Any] = {name: getattr(loader, name) for name in _OPTIONS}
    if isinstance(loader.dataset, IterableDataset):
        assert loader.batch_size is not None
        rows = loader.batch_size * together
        return DataLoader(loader.dataset, rows, drop_last=loader.drop_last, **options)
    if type(loader.batch_sampler) is BatchSampler:
        assert loader.batch_size is not None
        options |= {"sampler": loader.sampler, "drop_last": loader.drop_last}
        return DataLoader(loader.dataset, loader.batch_size * together, **options)
    return DataLoader(loader.dataset, batch_sampler=_Batches(loader.batch_sampler, together), **options)


class _Module(PreparedModel):
    """The model as the Trainer calls it, which asks whether what it gives is a dict."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives for the whole batch."""
        outputs = super().forward(*args, **kwargs)
        return outputs._opened() if isinstance(outputs, Awaited) else outputs


def _late(loss: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """A loss function that sees the values of micro-batches, where a pipeline has yet to compute them."""
    if loss is None:
        return None

    def of_values(outputs: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        if not isinstance(outputs, Awaited) and not _is_awaited(outputs):
            return loss(outputs, *args, num_items_in_batch=num_items_in_batch, **kwargs)
        of_all = None if num_items_in_batch is None else OfAll(num_items_in_batch)
        first = outputs if isinstance(outputs, Awaited) else next(iter(outputs.values()))
        return first._by(
            lambda _, whole, *more, **named: loss(whole, *more, num_items_in_batch=of_all, **named),
            outputs,
            *args,
            **kwargs,
        )

    return of_values


def _is_awaited(outputs: Any) -> bool:
    return isinstance(outputs, dict) and any(isinstance(x, Awaited) for x in outputs.values())


@contextmanager
def _telling(model: nn.Module, states: Mapping[str, Any]) -> Iterator[None]:
    """While open, each of a model's modules has these whole values in its ``state_dict()``."""
    known = {id(x): states[name] for name, x in _named(model) if name in states}

    def told(module: nn.Module, found: dict[str, Any], prefix: str, *more: Any) -> None:
        for name, x in _named(module, recurse=False):
            if prefix + name in found and id(x) in known:
                found[prefix + name] = known[id(x)]

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_state_dict_post_hook(told))
        yield


def _named(model: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from model.named_buffers(recurse=recurse, remove_duplicate=False)


def _by_name(kind: type[Trainer], given: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """What a Trainer is given, by the names of the class that :class:`Trainer` stands before."""
    for base in kind.__mro__[kind.__mro__.index(Trainer) + 1 :]:
        takes = inspect.signature(vars(base).get("__init__", lambda *given: None))
        if all(x.kind is not x.VAR_POSITIONAL for x in takes.parameters.values()):
            takes.bind_partial(None, *given, **options)  # an argument may be there twice
            return {**dict(zip([*takes.parameters][1:], given, strict=False)), **options}
    raise AssertionError("transformers' own names its arguments")


def _arguments(kind: type[Trainer], args: Any) -> TrainingArguments:
    """A Trainer's arguments.

    Raises:
        MistakeError: there are none, and the class makes its own later than they are asked for here.
    """
    if isinstance(args, TrainingArguments):
        return args
    behind = kind.__mro__[kind.__mro__.index(Trainer) + 1]
    if args is not None or behind not in (transformers.Trainer, transformers.Seq2SeqTrainer):
        reason = "expected the TrainingArguments of its kind: args=SFTConfig(output_dir=...), say"
        refuse(kind.__name__, [("args", args, reason)])
    return TrainingArguments(output_dir="tmp_trainer")


def _count_readers(args: Any, readers: int) -> None:
    """Rows that TRL's arguments count are those of ranks that read some; they took each rank for one."""
    if (generated := getattr(args, "generation_batch_size", None)) is None:
        return
    rows = args.per_device_train_batch_size * readers * args.steps_per_generation
    if rows % args.num_generations:
        reason = f"on this plan {rows} rows are generated at once: expected a divisor of these"
        refuse("Trainer", [("num_generations", args.num_generations, reason)])
    if rows != generated and args.steps_per_generation != args.gradient_accumulation_steps:
        tell(
            f"generation_batch_size is {rows} on this plan, of {args.steps_per_generation} steps, and not "
            f"{generated}: ranks that share rows count once. steps_per_generation= says how many steps."
        )
    args.generation_batch_size = rows


class Trainer(transformers.Trainer):
    """As ``transformers.Trainer``, on many ranks: ``espalier run -n 4 script.py``, or torchrun.

    A step's batch has ``per_device_train_batch_size`` rows for each rank that shares it. Each rank reads all
    of them, and computes its own.

    Args:
        args, kwargs: of transformers' own. Without ``plan`` all ranks are on the data axis.
        plan: a :class:`~espalier.Plan`, or a dict of its arguments; ``bf16=True`` of the arguments is
            ``precision="autocast-bfloat16"`` unless the plan says one. The Trainer clips and accumulates; in
            a pipeline ``accumulate`` cuts each of its batches into micro-batches.
            ``"auto"``: rank 0 searches for the fastest one without a pipeline; a step's batch has the rows of
            all ranks then, whichever it is.
        cluster: with ``plan="auto"``: what the ranks run on, as for :meth:`espalier.Plan.auto`.

    Raises:
        MistakeError: arguments ask another library for parallelism, or the plan for what the Trainer does.
    """

    def __init__(
        self,
        *given: Any,
        plan: Plan | Mapping[str, Any] | Literal["auto"] | None = None,
        cluster: Cluster | str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs = _by_name(type(self), given, kwargs)
        args = kwargs["args"] = _arguments(type(self), kwargs.get("args"))
        said: dict[str, Any] = {}
        if precision := autocast_of("fp16" if args.fp16 else args.mixed_precision):
            said["precision"] = precision
        if args.ddp_bucket_cap_mb is not None:
            said["chunk_megabytes"] = float(args.ddp_bucket_cap_mb)
        is_auto = plan == "auto"
        if plan == "auto":
            plan = _searched(cluster, kwargs.get("model"), args, said, kwargs)
        self.plan = plan_for_world(said, plan)
        refuse("Trainer", _mistakes(self.plan, args))
        self._mesh = Mesh.from_env(self.plan.axes, _device_type(args))
        sharing = [self._mesh.shape[self._mesh.axis(name)] for name in self.plan.batch_axes]
        together = self._mesh.size() if is_auto else math.prod(sharing)
        _count_readers(args, together)
        self._module: _Module | None = None
        with _alone(self._mesh, args):
            super().__init__(**kwargs)
        if self.plan.pipe > 1:
            self.compute_loss_func = _late(self.compute_loss_func)
            self.__dict__["label_smoother"] = _late(self.label_smoother)
        self._train_batch_size *= together
        if together > 1 and type(self).get_train_dataloader is not transformers.Trainer.get_train_dataloader:
            self.__dict__["get_train_dataloader"] = self._of_program(self.get_train_dataloader, together)

    def _of_program(self, make: Callable[..., Any], together: int) -> Callable[..., Any]:
        """``get_train_dataloader`` of a program: it makes a loader of each rank's rows, as ever.

        A batch sampler of its own kind decides which rows go together, so its batches are not joined: where
        it has as many rows as the arguments say, the loader is made anew, with the rows of all ranks.
        """
        own, arguments = self.accelerator, self.args

        def of_ranks(times: int, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
            was = self._train_batch_size, arguments.per_device_train_batch_size
            self._train_batch_size = was[0] // together * times
            arguments.per_device_train_batch_size *= times  # the program may have changed it since
            own.together, own.drawn = together // times, None
            try:
                return make(*given, **options)
            finally:
                own.together = 1
                self._train_batch_size, arguments.per_device_train_batch_size = was

        @wraps(make)
        def made(*given: Any, **options: Any) -> Any:
            each = self._train_batch_size // together, arguments.per_device_train_batch_size
            before = torch.random.get_rng_state()
            loader, drawn = of_ranks(1, given, options), own.drawn
            rows = getattr(drawn, "batch_size", None)
            if type(drawn) is BatchSampler or rows not in each:
                return loader
            torch.random.set_rng_state(before)
            anew = of_ranks(together, given, options)
            return anew if getattr(own.drawn, "batch_size", None) == rows * together else loader

        return made

    @property
    def engine(self) -> Engine:
        """The engine that trains the model; it is made now, if it was not."""
        return self._wrapped().engine

    @property
    def _laid_out(self) -> _Module | None:
        """The model on its engine, once it is; ``model_init`` may have made another since."""
        module = self._module
        return module if module is not None and module.module is self.model else None

    @property
    def _is_adapted(self) -> bool:
        """Whether it is one of peft's, of whose weights the adapter's alone are saved."""
        kinds = getattr(transformers.trainer, "PeftModel", ())  # where peft is installed
        return isinstance(self.model, kinds)

    def _wrapped(self) -> _Module:
        if self._laid_out is None:
            model: Any = self.model
            if (engine := _engine_of(model, self.plan)) is None:
                compiler = self.args.torch_compile_backend if self.args.torch_compile else None
                engine = initialize(model, None, self.plan, mesh=self._mesh, compile=compiler or False)
                note_engine(engine, keeps=False)
            self._module = _Module(engine, "whole")
        assert self._module is not None
        return self._module

    # ---- what transformers' own asks for

    def create_accelerator_and_postprocess(self) -> None:
        """As ever; the Accelerator knows an engine's model, and each rank reads batches by itself."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = _Accelerator
        self.accelerator.dataloader_config.dispatch_batches = False

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if not _is_laid_out(model):  # by an earlier Trainer
            super()._move_model_to_device(model, device)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        state, own = PartialState(), self.accelerator
        if kwargs.get("is_training") and "batch_size" in kwargs:
            kwargs["batch_size"] *= own.together
        # all ranks read alike: seeds of workers, too
        rows = having(self, _train_batch_size=self._train_batch_size * own.together)
        with rows, having(state, process_index=0), having(own, together=1):
            return super()._get_dataloader(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        # a batch is that of all ranks
        with having(self.args, per_device_train_batch_size=self._train_batch_size):
            return super()._get_train_sampler(train_dataset)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, in one process; refused on several ranks.

        Raises:
            MistakeError: there are several ranks, each of which would draw its own.
        """
        if self._mesh.size() > 1:
            reason = (
                "each rank would draw its own values: search in a process for each trial that starts ranks"
            )
            refuse("Trainer", [("hyperparameter_search", f"on {self._mesh.size()} ranks", reason)])
        return super().hyperparameter_search(*args, **kwargs)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> nn.Module:
        wrapped = self._wrapped()
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if training and optimizer is not None and wrapped.engine.optimizer is not optimizer:
            wrapped.engine.attach(optimizer, instead=True)
        return wrapped

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a micro-batch; gives its loss."""
        loss = super().training_step(*args, **kwargs)
        return loss._value() if isinstance(loss, Awaited) else loss

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Of the whole model (a collective)."""
        if state_dict is None and self._laid_out is not None:
            state_dict = self._laid_out.engine.state_dict()
        model: Any = self.model
        if self._brings("_save"):  # it may ask the model, so all ranks go, and one writes where all would
            with _telling(model, state_dict or {}), TemporaryDirectory() as elsewhere:
                super()._save(output_dir if self.args.should_save else elsewhere, state_dict)
        else:
            super()._save(output_dir, state_dict)
        self._wait()

    def _brings(self, method: str) -> bool:
        """Whether a package's Trainer that this one stands before has a method of its own."""
        behind = type(self).__mro__[type(self).__mro__.index(Trainer) + 1 :]
        return any(method in vars(base) for base in behind[: behind.index(transformers.Trainer)])

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.optimizer is not None
        states = self.optimizer.state_dict()
        # one rank alone asks for it
        with having(self, optimizer=SimpleNamespace(state_dict=lambda: states)):
            super()._save_optimizer_and_scheduler(output_dir)
        self._wait()

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)
        self._wait()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._laid_out is None or self._is_adapted or self._brings("_load_from_checkpoint"):
            super()._load_from_checkpoint(resume_from_checkpoint, *(() if model is None else (model,)))
        else:
            self._laid_out.engine.load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self._is_adapted or self._brings("_load_best_model") or self._brings("_load_from_checkpoint"):
            super()._load_best_model()
            return
        assert self.state.best_model_checkpoint is not None
        self.engine.load_weights(self.state.best_model_checkpoint)

    def _wait(self) -> None:
        """Until all ranks are here: then what rank 0 writes is there."""
        if self._mesh.size() > 1:
            torch.distributed.barrier()


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """As ``transformers.Seq2SeqTrainer``, with the arguments of :class:`Trainer` beside its own."""


def __getattr__(name: str) -> Any:
    return getattr(transformers, name)


__all__ = ["Seq2SeqTrainer", "Trainer", "TrainingArguments"]
