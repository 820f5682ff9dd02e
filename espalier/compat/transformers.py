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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate.state import PartialState
from torch import nn
from transformers import TrainingArguments
from transformers.trainer import OPTIMIZER_NAME

from espalier.comm.control import gather_objects
from espalier.compat.plans import NO_SCALER, plan_for_world, world_size
from espalier.compat.torch.data_parallel import whole_states
from espalier.engine import Engine, EngineModule, initialize
from espalier.engine.awaited import Awaited
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.planner import Cluster, auto, shipped
from espalier.texts import refuse

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
_THEIRS = ("deepspeed", "fsdp", "parallelism_config")


@contextmanager
def _alone(mesh: Mesh) -> Iterator[None]:
    """While open, a process finds nothing of the other ranks; then it knows which of them it is."""
    hidden = {name: os.environ.pop(name) for name in _LAUNCHED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
    state = PartialState()
    state.process_index = mesh.rank
    state.local_process_index = int(hidden.get("LOCAL_RANK", "0"))


def _searched(
    cluster: Cluster | str | Path | None,
    model: Any,
    args: TrainingArguments,
    said: Mapping[str, Any],
    more: list[Any],
    options: Mapping[str, Any],
) -> Plan:
    """The fastest plan for what a Trainer is given; rank 0's, on all ranks.

    Raises:
        MistakeError: what the search needs is missing.
    """
    names = ("data_collator", "train_dataset", "eval_dataset", "processing_class")
    arguments = {**dict(zip(names, more, strict=False)), **options}
    needed = {"cluster": cluster, "model": model, "train_dataset": arguments.get("train_dataset")}
    reason = f"plan='auto' needs it; clusters that are shipped: {', '.join(shipped())}"
    refuse("Trainer", [(name, x, reason) for name, x in needed.items() if x is None])
    assert cluster is not None
    ranks = world_size()
    mesh = Mesh.from_env({"data": ranks})
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


class _Model(EngineModule):
    """The model as the Trainer calls it."""

    def _get_name(self) -> str:
        return self.module._get_name()


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
        model: Any = None,
        args: TrainingArguments | None = None,
        *more: Any,
        plan: Plan | Mapping[str, Any] | Literal["auto"] | None = None,
        cluster: Cluster | str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        said: dict[str, Any] = {}
        if args.bf16 or args.fp16:
            low = "bfloat16" if args.bf16 else "float16"
            said["precision"] = {"compute": f"autocast-{low}"}
            if args.fp16:  # accelerate scales the loss itself
                said["precision"]["loss_scale"] = {"init_scale": 1.0, "growth_factor": 1.0}
        is_auto = plan == "auto"
        if plan == "auto":
            plan = _searched(cluster, model, args, said, [*more], kwargs)
        self.plan = plan_for_world(said, plan)
        mistakes = [
            (name, value, "the plan says what is parallel: leave it out")
            for name in _THEIRS
            if (value := getattr(args, name, None))
        ]
        if self.plan.accumulate > 1 and self.plan.pipe == 1:
            said_by = "say gradient_accumulation_steps in the arguments: expected 1"
            mistakes.append(("plan.accumulate", self.plan.accumulate, said_by))
        if self.plan.pipe > 1 and args.fp16:
            mistakes.append(("fp16", True, NO_SCALER))
        refuse("Trainer", mistakes)
        self._mesh = Mesh.from_env(self.plan.axes)
        self._module: _Model | None = None
        with _alone(self._mesh):
            args.__dict__.pop("_setup_devices", None)
            _ = args.device
            super().__init__(model, args, *more, **kwargs)
        sharing = [self._mesh.shape[self._mesh.axis(name)] for name in self.plan.batch_axes]
        self._train_batch_size *= self._mesh.size() if is_auto else math.prod(sharing)

    @property
    def engine(self) -> Engine:
        """The engine that trains the model; it is made now, if it was not."""
        return self._wrapped().engine

    def _wrapped(self) -> _Model:
        if self._module is None:
            model: Any = self.model
            engine = initialize(model, None, self.plan, mesh=self._mesh)
            self._module = _Model(engine, "whole")
        return self._module

    # ---- what transformers' own asks for

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> nn.Module:
        wrapped = self._wrapped()
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if training and optimizer is not None and wrapped.engine.optimizer is not optimizer:
            wrapped.engine.attach(optimizer)
        return wrapped

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a micro-batch; gives its loss."""
        loss = super().training_step(*args, **kwargs)
        return loss.value() if isinstance(loss, Awaited) else loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As ``save_pretrained`` writes it (a collective: all ranks call)."""
        if self._module is None:
            super().save_model(output_dir, _internal_call)
            return
        self._save(output_dir or self.args.output_dir, state_dict=self._module.engine.state_dict())
        self._wait()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        assert self.optimizer is not None
        state = whole_states(self.optimizer.state_dict(), self._mesh)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
        self._wait()

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)
        self._wait()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._module is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._module.engine.load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self.engine.load_weights(self.state.best_model_checkpoint)

    def _wait(self) -> None:
        """Until all ranks are here: then what rank 0 writes is there."""
        if self._mesh.size() > 1:
            torch.distributed.barrier()


__all__ = ["Trainer", "TrainingArguments"]
