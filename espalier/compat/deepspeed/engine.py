"""DeepSpeed's engine over Espalier's: its names and counters, and the configuration's wishes on the way."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from espalier.compat.deepspeed.checkpoints import load, save
from espalier.compat.deepspeed.config import Config
from espalier.compat.deepspeed.monitor import Flops, Monitor
from espalier.engine import Engine, EngineModule
from espalier.mesh.process import start


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
        self._applied = False
        self._losses: list[torch.Tensor] = []
        self._times = dict.fromkeys(("forward", "backward", "step"), 0.0)
        self.monitor = Monitor(settings.values if self.global_rank == 0 else {})
        self._flops = Flops(settings.values, self.module) if self._wants("flops_profiler.enabled") else None
        if self._wants("comms_logger.enabled"):
            self._recording = engine.recording()
            self._recording.__enter__()

    def _wants(self, key: str, otherwise: Any = None) -> Any:
        return self.settings.values.get(key, otherwise)

    @property
    def plan(self) -> Any:
        """See the class."""
        return self.engine.plan

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """See the class."""
        return self.engine.optimizer

    # ---- a step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives for this rank's rows."""
        begin = time.perf_counter()
        if self._flops is not None and torch.is_grad_enabled():
            self._flops.begin(self.global_steps + 1)
        output = super().forward(*args, **kwargs)
        self._times["forward"] += time.perf_counter() - begin
        return output

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
        begin = time.perf_counter()
        self._losses.append(loss.detach())
        if retain_graph:
            loss.backward(retain_graph=True)
        else:
            self.engine.backward(loss)
        self._times["backward"] += time.perf_counter() - begin
        return loss.detach() / self.gradient_accumulation_steps() if scale_wrt_gas else loss.detach()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch that is under way is the last of a step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the step ends with this micro-batch; not after more than the configuration says."""
        self._boundary = is_boundary

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update, after the last micro-batch of a step; and go on in the learning-rate schedule."""
        begin, is_boundary = time.perf_counter(), self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._applied = False
        if not is_boundary:
            return
        passes = self.engine.passes
        if passes.may_step and not passes.is_complete:
            self.engine.finish_gradients()
        self._applied = self.engine.step()
        self._times["step"] += time.perf_counter() - begin
        self._after_step(lr_kwargs)

    def _after_step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
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
        every = self._wants("steps_per_print", 10)
        if every and self.global_steps % every == 0:
            self._report()

    def _report(self) -> None:
        rates = f"lr {self.get_lr()}, mom {self.get_mom()}"
        lines = [f"step {self.global_steps}, skipped {self.skipped_steps}, {rates}"]
        if self._wants("wall_clock_breakdown"):
            told = ", ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in self._times.items())
            lines.append(f"milliseconds since the last report: {told}")
        self._times = dict.fromkeys(self._times, 0.0)
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

    def train_batch_size(self) -> int:
        """Rows of a step, over all ranks."""
        return self.settings.train_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Rows of a micro-batch on one rank."""
        return self.settings.micro_batch

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
        """Whether that follows the gradients."""
        return self.engine.scaler is not None and not self._wants("fp16.loss_scale")

    def gradient_clipping(self) -> float:
        """The largest norm; 0 for none."""
        return self.plan.clip or 0.0

    def steps_per_print(self) -> int:
        """How often rank 0 tells."""
        return int(self._wants("steps_per_print", 10) or 0)

    # ---- data

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> DataLoader[Any]:
        """Micro-batches of a dataset: this rank's rows."""
        mesh, share, here = self.engine.mesh, 1, 0
        for name in self.plan.batch_axes:
            axis = mesh.axis(name)
            share, here = share * mesh.shape[axis], here * mesh.shape[axis] + mesh.coordinate[axis]
        sampler: DistributedSampler[Any] = DistributedSampler(
            cast(Any, dataset), num_replicas=share, rank=here
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

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refused: ``espalier.compile(module)`` compiles a part of the model before ``initialize``."""
        raise ValueError(
            "engine.compile(): call espalier.compile(block) for the model's blocks, before initialize."
        )


def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Join the world that the environment describes; nothing happens where that is done, or there is none."""
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        start("cpu" if dist_backend == "gloo" else None)
