"""DeepSpeed's engine over Espalier's: its names and counters, and the configuration's wishes on the way."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed import answers
from espalier.compat.deepspeed.checkpoints import load, save
from espalier.compat.deepspeed.config import Config
from espalier.compat.deepspeed.groups import Axes, axes_of, note_newest
from espalier.compat.deepspeed.moe import layers
from espalier.compat.deepspeed.monitor import Flops, Monitor
from espalier.compat.deepspeed.ops import show_scale
from espalier.compat.deepspeed.timers import BACKWARD, FORWARD, STEP, ThroughputTimer, Timers
from espalier.compat.deepspeed.utils.tensors import own_by
from espalier.compat.deepspeed.zero import mark_as_cut
from espalier.engine import Engine, EngineModule


class DeepSpeedEngine(EngineModule):
    """What ``deepspeed.initialize`` gives: ``forward``, ``backward``, ``step``, under DeepSpeed's names.

    A call takes this rank's rows and gives the model's output for them. Attributes that are not here are
    the model's.

    Attributes:
        engine: Espalier's.
        plan: the plan that the configuration became.
        settings: the configuration.
        config: as it was given.
        optimizer, lr_scheduler, training_dataloader: None where there is none.
        micro_steps: backward passes so far.
        global_steps: steps so far, those that were skipped too.
        global_samples: rows so far, over all ranks.
        monitor: writes events where the configuration says.
        timers: of forward, backward and step (``fwd``, ``bwd``, ``step``), and of the program's own.
        client_optimizer, client_lr_scheduler: what the program brought; None where the configuration says.
        mpu: what the program brought; None without.
        losses: of the step's micro-batches so far, their mean; None before the first.
        tput_timer: how fast rows pass.
        training_data, collate_fn: what the loader was made of.
        has_moe_layers, num_experts: whether the model has layers of ``deepspeed.moe``, and of each how many.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Config,
        config: Mapping[str, Any],
        lr_scheduler: Any = None,
        loader: DataLoader[Any] | None = None,
    ) -> None:
        super().__init__(engine, rows="own")
        self.settings, self.config = settings, dict(config)
        self.lr_scheduler, self.training_dataloader = lr_scheduler, loader
        self.micro_steps = self.global_steps = self.global_samples = 0
        self.global_rank, self.world_size = engine.mesh.rank, engine.mesh.size()
        self.local_rank = engine.device.index or 0
        self._boundary: bool | None = None
        self._since = 0  # micro-batches behind the last step
        self._applied = False
        self._losses: list[torch.Tensor] = []
        self.timers = Timers()
        self.tput_timer = ThroughputTimer(batch_size=self.train_batch_size())
        self.training_data: Any = None
        self.collate_fn: Any = None
        self.client_optimizer: Any = None
        self.client_lr_scheduler: Any = None
        self.mpu: Any = None
        self.num_experts = [layer.num_experts for layer in layers(self.module)]
        self.has_moe_layers = bool(self.num_experts)
        self._is_compiled = False
        own_by(engine)
        note_newest(engine)
        if self.zero_optimization_partition_weights():
            mark_as_cut(engine.module)
        show_scale(self)
        self.monitor = Monitor(settings.values if self.global_rank == 0 else {})
        self._flops = Flops(settings.values, self.module) if self._wants("flops_profiler.enabled") else None
        if self._wants("comms_logger.enabled"):
            self._recording = engine.recording()
            self._recording.__enter__()

    def _wants(self, key: str, otherwise: Any = None) -> Any:
        return self.settings.values.get(key, otherwise)

    def __getattr__(self, name: str) -> Any:
        if name in answers.GIVEN or name in answers.OFF:
            return partial(answers.answer, name, self.settings.configured)
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(answers.missing(name, type(self).__name__)) from None

    @property
    def plan(self) -> Any:
        """See the class."""
        return self.engine.plan

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """See the class."""
        return self.engine.optimizer

    basic_optimizer = optimizer  # nothing is wrapped around it

    # ---- a step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives for this rank's rows."""
        self.timers(FORWARD).start()
        if torch.is_grad_enabled():
            self.tput_timer.start()
            if self._flops is not None:
                self._flops.begin(self.global_steps + 1)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.timers(FORWARD).stop()

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Gradients of this rank's loss; those of the ranks are averaged, and of micro-batches too.

        Returns:
            the loss, divided by the micro-batches of a step, as DeepSpeed does.
        """
        if not scale_wrt_gas and self.gradient_accumulation_steps() > 1:
            raise ValueError(
                "backward(scale_wrt_gas=False): a step's gradients are the mean over its micro-batches. "
                "Multiply the loss by gradient_accumulation_steps in place of it."
            )
        self._losses.append(loss.detach())
        self.timers(BACKWARD).start()
        try:
            if retain_graph:
                loss.backward(retain_graph=True)
            else:
                self.engine.backward(loss)
        finally:
            self.timers(BACKWARD).stop()
        return loss.detach() / self.gradient_accumulation_steps() if scale_wrt_gas else loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss times :meth:`loss_scale`, for ``engine.scale(loss).backward()``.

        Gradients are scaled where they enter the model, so that none is twice.
        """
        scale = self.engine.scale
        return loss if scale == 1 else loss + (scale - 1) * loss.detach()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch that is under way is the last of a step."""
        if self._boundary is not None:
            return self._boundary
        return self._since + 1 >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the step ends with this micro-batch; not after more than the configuration says."""
        self._boundary = is_boundary

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update, after the last micro-batch of a step; and go on in the learning-rate schedule."""
        is_boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._since += 1
        self._applied = False
        if not is_boundary:
            self.tput_timer.stop()
            return
        self._since = 0
        self.timers(STEP).start()
        try:
            passes = self.engine.passes
            if passes.may_step and not passes.is_complete:
                self.engine.finish_gradients()
            self._applied = self.engine.step()
        finally:
            self.timers(STEP).stop()
        self._after_step(lr_kwargs)

    def _after_step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self.tput_timer.stop(global_step=True)
        show_scale(self)
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        losses, self._losses = self._losses, []
        if self._flops is not None:
            self._flops.end(self.global_steps, self.global_rank)
        if self.monitor.writers:
            events = [("Train/Samples/lr", self.get_lr()[0])]
            if losses:
                events.insert(0, ("Train/Samples/train_loss", float(torch.stack(losses).float().mean())))
            if self.engine.scaler is not None:
                events.append(("Train/Samples/loss_scale", self.engine.scale))
            self.monitor.write_events([(name, value, self.global_samples) for name, value in events])
        every = self.steps_per_print()
        if every and self.global_steps % every == 0:
            self._report()

    def _report(self) -> None:
        rates = f"lr {self.get_lr()}, mom {self.get_mom()}"
        lines = [f"step {self.global_steps}, skipped {self.skipped_steps}, {rates}"]
        if self._wants("wall_clock_breakdown"):
            lines.append(f"milliseconds since the last report: {self.timers.told((FORWARD, BACKWARD, STEP))}")
        if self._wants("memory_breakdown"):
            lines.append(str(self.engine.memory()))
        if self._wants("comms_logger.enabled") and self._wants("comms_logger.verbose"):
            lines.append(str(self.engine.ledger()))
        if self.global_rank == 0:
            print("\n".join(lines), flush=True)

    def was_step_applied(self) -> bool:
        """Whether the last :meth:`step` has updated."""
        return self._applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and the micro-batches that made them."""
        self.engine.zero_grad()

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Sum them over the ranks now; :meth:`step` does."""
        self.engine.finish_gradients()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in here only accumulate."""
        return self.engine.no_sync()

    # ---- what there is to know

    @property
    def skipped_steps(self) -> int:
        """Steps that did not update, because gradients were not finite."""
        guard = self.engine.guard
        return self.engine.skipped + (0 if guard is None else guard.skipped)

    def get_global_grad_norm(self) -> float | None:
        """Of all gradients together, before they were clipped; None before the first step."""
        return None if self.engine.grad_norm is None else float(self.engine.grad_norm)

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return self._of_groups(lambda group: float(group["lr"]))

    def get_mom(self) -> list[Any]:
        """The momentum, or betas, of each group."""
        return self._of_groups(lambda group: group.get("betas", group.get("momentum", 0.0)))

    def _of_groups(self, get: Callable[[dict[str, Any]], Any]) -> list[Any]:
        return [] if self.optimizer is None else [get(group) for group in self.optimizer.param_groups]

    def get_type(self) -> list[Any]:
        """The ``type`` of each group, where it has one."""
        return self._of_groups(lambda group: group.get("type", 0.0))

    def train_batch_size(self) -> int:
        """Rows of a step, over all ranks."""
        return self.settings.train_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Rows of a micro-batch on one rank."""
        return self.settings.micro_batch

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """From the next step on there are so many rows in one, by more or fewer micro-batches.

        Raises:
            ValueError: it is no multiple of a micro-batch of all ranks, or a step is begun.
        """
        each = self.settings.micro_batch * self.dp_world_size
        if train_batch_size < each or train_batch_size % each:
            product = f"{self.settings.micro_batch} rows of a micro-batch × {self.dp_world_size} rank(s)"
            raise ValueError(f"set_train_batch_size({train_batch_size}): expected a multiple of {product}.")
        self.engine.resize(train_batch_size // each)
        self.settings = replace(self.settings, train_batch=train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """From now on a rank's micro-batches have so many rows; there are as many of them."""
        rows = micro_batch_size * self.gradient_accumulation_steps() * self.dp_world_size
        self.settings = replace(self.settings, train_batch=rows, micro_batch=micro_batch_size)

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return int(self.plan.accumulate)

    def get_batch_info(self) -> tuple[int, int, int]:
        """The three of them."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def zero_optimization_stage(self) -> int:
        """What is cut over the data axis."""
        return int(self.plan.zero)

    def zero_optimization(self) -> bool:
        """Whether anything is."""
        return bool(self.plan.zero)

    def fp16_enabled(self) -> bool:
        """Whether parameters are float16."""
        return bool(self.plan.precision.compute == "float16")

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bfloat16."""
        return bool(self.plan.precision.compute == "bfloat16")

    def loss_scale(self) -> float:
        """By which the loss is multiplied now."""
        return self.engine.scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the configuration leaves it to the gradients: so it does where it says none, in any
        precision."""
        return not self._wants("fp16.loss_scale")

    def gradient_clipping(self) -> float:
        """The largest norm; 0 for none."""
        return self.plan.clip or 0.0

    def steps_per_print(self) -> int:
        """How often rank 0 tells; 0 for never."""
        return int(self._wants("steps_per_print") or 0)

    def optimizer_name(self) -> str | None:
        """The class of the program's optimizer, or the configuration's word."""
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        chosen = self.settings.optimizer
        return None if chosen is None else answers.optimizer_name(chosen.name)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Of parameters, and in which gradients are summed."""
        own = getattr(torch, self.plan.precision.parameters or "float32")
        word = self.settings.configured.get("data_types.grad_accum_dtype")
        return own, own if word is None else getattr(torch, answers.dtype_word(word))

    @property
    def communication_data_type(self) -> torch.dtype:
        """In which gradients are summed over the ranks; the configuration says it."""
        word = self.settings.configured.get("communication_data_type")
        return self.get_data_types()[0] if word is None else getattr(torch, answers.dtype_word(word))

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Of the autocast; None without."""
        word = self.plan.precision.autocast
        return None if word is None else getattr(torch, word)

    def initial_dynamic_scale(self) -> int:
        """The loss scale that training begins with, where it follows the gradients."""
        return int(2 ** self.settings.configured.get("fp16.initial_scale_power", 16))

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """How it follows them."""
        get = self.settings.configured.get
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": get("fp16.loss_scale_window", 1000),
            "delayed_shift": get("fp16.hysteresis", 2),
            "consecutive_hysteresis": get("fp16.consecutive_hysteresis", False),
            "min_scale": get("fp16.min_loss_scale", 1),
        }

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided behind their sum."""
        return not self.settings.configured.get("prescale_gradients", False)

    def zero_overlap_comm(self) -> bool:
        """As the configuration says; by default at stage 3."""
        return bool(self.settings.configured.get("zero_optimization.overlap_comm", self.plan.zero == 3))

    def zero_offload_optimizer(self) -> Any:
        """``device``, ``nvme_path``, ``ratio``, ...; None where nothing is said."""
        return answers.offload(self.settings.configured, "offload_optimizer")

    def zero_offload_param(self) -> Any:
        """``device``, ``nvme_path``, ...; None where nothing is said."""
        return answers.offload(self.settings.configured, "offload_param")

    def zero_cpu_offload(self) -> bool:
        """Whether states lie on the host."""
        return getattr(self.zero_offload_optimizer(), "device", "none") == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether states lie on a disk."""
        return getattr(self.zero_offload_optimizer(), "device", "none") == "nvme"

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether states are updated on the host."""
        return self.zero_cpu_offload() or self.zero_nvme_offload_optimizer()

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are cut."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are cut."""
        return self.zero_optimization_stage() == 3

    is_first_weights_partition_group = zero_optimization_partition_weights

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether tags are asked to be compared; all ranks write one checkpoint in any case."""
        return self._tag_validation() != "IGNORE"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether tags that differ are asked to be errors."""
        return self._tag_validation() == "FAIL"

    def _tag_validation(self) -> str:
        return str(self.settings.configured.get("checkpoint.tag_validation", "Warn")).upper()

    def checkpoint_writer_enabled(self) -> bool:
        """Whether the configuration speaks of a writer."""
        return any(key.startswith("checkpoint.writer.") for key in self.settings.configured)

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of each timer, with ``wall_clock_breakdown``; they run on."""
        if not self._wants("wall_clock_breakdown"):
            return {}
        return {name: timer.elapsed(reset=False) for name, timer in self.timers.get_timers().items()}

    def collect_python_gc(self) -> int:
        """``gc.collect()``."""
        return gc.collect()

    # ---- ranks

    @property
    def dp_world_size(self) -> int:
        """Ranks that share the batch."""
        return self._axes("data").size

    @property
    def seq_dp_world_size(self) -> int:
        """Ranks that share the batch or a sequence."""
        return self._axes("data and sequence").size

    @property
    def mp_world_size(self) -> int:
        """Ranks of the tensor axis."""
        return int(self.plan.tensor)

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share a sequence."""
        return int(self.plan.context)

    @property
    def pipeline_parallelism(self) -> bool:
        """Whether there are stages."""
        return bool(self.plan.pipe > 1)

    def get_data_parallel_rank(self) -> int:
        """This rank's place among those that share the batch."""
        return self._axes("data").rank

    def get_tensor_parallel_rank(self) -> int:
        """This rank's place on the tensor axis."""
        mesh = self.engine.mesh
        return mesh.coordinate[mesh.axis("tensor")] if self.mp_world_size > 1 else 0

    get_model_parallel_rank = get_tensor_parallel_rank

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that share a sequence.

        Raises:
            ValueError: none do.
        """
        if self.plan.context == 1:
            raise ValueError("No ranks share a sequence: expected sequence_parallel_size above 1.")
        return self.engine.mesh.group("context")

    def _axes(self, kind: str) -> Axes:
        return axes_of(self.engine, kind)

    def get_data_parallel_group(self) -> Any:
        """The ranks that share the batch, as a process group; None without a world."""
        return self._axes("data").group()

    data_parallel_group = property(get_data_parallel_group)

    @property
    def seq_data_parallel_group(self) -> Any:
        """The ranks that share the batch or a sequence."""
        return self._axes("data and sequence").group()

    @property
    def expert_parallel_group(self) -> dict[str, Any]:
        """The ranks that hold different experts, by the group's name in DeepSpeed."""
        return {f"ep_size_{n}": self._axes("expert").group() for n in self._expert_sizes()}

    @property
    def expert_data_parallel_group(self) -> dict[str, Any]:
        """The ranks that hold the same experts, by the group's name in DeepSpeed."""
        return {f"ep_size_{n}": self._axes("data of experts").group() for n in self._expert_sizes()}

    def _expert_sizes(self) -> list[int]:
        return [self.plan.expert] if self.has_moe_layers else []

    @property
    def param_names(self) -> dict[torch.nn.Parameter, str]:
        """Of each parameter, by itself."""
        return {p: name for name, p in self.module.named_parameters()}

    @property
    def losses(self) -> float | None:
        """See the class."""
        return float(torch.stack(self._losses).float().mean()) if self._losses else None

    # ---- data

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        """Whether it has rows by number."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        """Whether it gives rows one after the other."""
        return isinstance(obj, IterableDataset)

    def reads(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None) -> None:
        """Train on its loader."""
        self.training_data, self.collate_fn = dataset, collate_fn
        self.training_dataloader = self.deepspeed_io(dataset, collate_fn=collate_fn)

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> DataLoader[Any]:
        """Micro-batches of a dataset: this rank's rows."""
        axes = self._axes("data")
        sampler: DistributedSampler[Any] = DistributedSampler(
            cast(Any, dataset), num_replicas=axes.size, rank=axes.rank
        )
        return DataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=bool(self._wants("dataloader_drop_last")),
            **options,
        )

    # ---- what outlives it

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save all that a run needs to go on, under ``save_dir/tag`` (every rank must call).

        Args:
            tag: by default ``global_step`` and its number.
            client_state: plain values and tensors, which :meth:`load_checkpoint` gives back.
            save_latest: let ``load_checkpoint(save_dir)`` take this one.
        """
        if exclude_frozen_parameters:
            raise ValueError(
                "save_checkpoint(exclude_frozen_parameters=True): a checkpoint holds all of a model."
            )
        save(self, Path(save_dir), f"global_step{self.global_steps}" if tag is None else str(tag),
             client_state or {}, save_latest)  # fmt: skip
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:
        """Go on from a checkpoint, saved under any plan on any number of ranks (every rank must call).

        Returns:
            its folder and its ``client_state``; ``(None, {})`` if ``load_dir`` has none.
        """
        if custom_load_fn is not None or not load_module_strict:
            raise ValueError(
                "load_checkpoint: expected load_module_strict=True and no custom_load_fn; "
                "engine.load_state_dict(state_dict, strict=False) takes what fits."
            )
        only = load_module_only or not load_optimizer_states
        return load(self, Path(load_dir), None if tag is None else str(tag), only, load_lr_scheduler_states)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole weights, in the dtype that the model computes in, as one ``torch.save`` file.

        Returns:
            whether it did: at stage 3 not without ``stage3_gather_16bit_weights_on_model_save``.
        """
        gathers = self._wants("zero_optimization.stage3_gather_16bit_weights_on_model_save")
        if self.plan.zero == 3 and not gathers:
            if self.global_rank == 0:
                warnings.warn(
                    "save_16bit_model wrote nothing: at stage 3 it needs "
                    "zero_optimization.stage3_gather_16bit_weights_on_model_save.",
                    stacklevel=2,
                )
            return False
        low = self.plan.precision.parameters
        path = Path(save_dir) / save_filename
        if self.global_rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        self.engine.export(path, "torch", dtype=None if low is None else getattr(torch, low))
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model's, whole (every rank must call)."""
        return self.engine.state_dict()

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **_: Any) -> Any:
        """Take it over (every rank must call)."""
        return self.load_state_dict(state_dict, strict)

    def destroy(self) -> None:
        """Nothing outlives an engine."""

    def empty_partition_cache(self) -> None:
        """Nothing gathered is kept after a pass."""

    def compile(self, backend: Any = "inductor", *args: Any, **kwargs: Any) -> None:
        """Compile the model's blocks, collectives included; options of ``torch.compile`` have no effect."""
        if not self._is_compiled:
            self.engine.compile(backend)
            self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` was called."""
        return self._is_compiled


__all__ = ["DeepSpeedEngine"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime.engine",
    {"EngineTimers split_half_float_double_sparse": "engine.timers(name) are the engine's timers"},
)
