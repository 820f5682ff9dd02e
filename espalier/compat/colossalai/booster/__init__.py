"""``colossalai.booster``: today's interface of Colossal-AI, a plugin's plan around a plain loop."""

from __future__ import annotations

import importlib
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from espalier.comm.control import gather_objects
from espalier.compat.absent import or_absent
from espalier.compat.colossalai.booster.mixed_precision import MixedPrecision, mixed_precision_factory
from espalier.compat.colossalai.booster.plugin import Plugin, TorchDDPPlugin
from espalier.compat.colossalai.interface import Boosted, show
from espalier.compat.common import counts_one
from espalier.engine import Engine
from espalier.mesh.process import running_rank, running_size
from espalier.parallel import Plan
from espalier.texts import refuse
from espalier.trees import tensors_in

_STATES = "pytorch_optim.bin"  # in the folder of a sharded optimizer


class Booster:
    """Colossal-AI's, on Espalier.

    Args:
        device: no effect: ranks are on the mesh's devices.
        mixed_precision: ``"fp16"`` or ``"bf16"``, where the plugin says none: under autocast; or what
            ``booster.mixed_precision`` has.
        plugin: says the plan; by default all ranks share the batch.
    """

    def __init__(
        self,
        device: Any = None,
        mixed_precision: MixedPrecision | str | None = None,
        plugin: Plugin | None = None,
    ) -> None:
        if isinstance(mixed_precision, str):
            mixed_precision = mixed_precision_factory(mixed_precision)
        self.plugin, self.mixed_precision = plugin or TorchDDPPlugin(), mixed_precision
        self._models = WeakSet[Boosted]()

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
        **options: Any,
    ) -> tuple[Boosted, Any, Any, Any, Any]:
        """Lay the model out.

        Args:
            dataloader: gives this rank's rows (``plugin.prepare_dataloader`` makes such).
            options: more for :func:`espalier.initialize`: ``layouts=``, ``example=``.

        Returns:
            all five; all but the model as they are. The optimizer has ``backward`` and the like, too.
        """
        plan = self.plugin.plan(running_size())
        if self.mixed_precision is not None and plan.precision.compute == "float32":
            plan = Plan(**{**plan.model_dump(), "precision": self.mixed_precision.precision})
        if plan.accumulate > 1:
            options.setdefault("count", counts_one)
        boosted = Boosted(model, optimizer, plan, options)
        self._models.add(boosted)
        if optimizer is not None:
            here = weakref.ref(boosted)
            show(optimizer, lambda: getattr(here(), "engine", None))
        return boosted, optimizer, criterion, dataloader, lr_scheduler

    def backward(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Gradients of this rank's loss; those of the ranks are averaged."""
        loss.backward()

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: Boosted,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Forward and backward of the next batch through the stages; ``optimizer.step()`` is next.

        Args:
            data_iter: gives the model's inputs, on every rank: a dict, tuple or tensor of its own rows.
            criterion: ``criterion(output, inputs)``; where these are a pair, its first is for the model, its
                second for the criterion.
            return_outputs: whole ones are gathered where the last stage is.

        Returns:
            ``loss`` (on every rank) and ``outputs`` of this rank's rows (in training where the last stage
            is); None if not asked for.
        """
        batch, engine = next(data_iter), model.engine
        self._resize(engine, batch)
        if torch.is_grad_enabled() and model.training:
            result, outputs = model.pass_through(batch, criterion, return_outputs)
            return {"loss": result if return_loss else None, "outputs": outputs}
        model.judge_by(criterion)
        loss = engine.evaluate(engine.cut(engine.local_batch(batch))) if return_loss else None
        with torch.no_grad():
            return {"loss": loss, "outputs": engine.outputs(batch, "own") if return_outputs else None}

    def _resize(self, engine: Engine, batch: Any) -> None:
        """Let a step have as many micro-batches as ``microbatch_size`` of the plugin asks for.

        Raises:
            ValueError: the rows are no multiple of it.
        """
        each = self.plugin.rows_of_micro_batch
        if each is None:
            return
        rows = next((len(x) for x in tensors_in(batch) if x.ndim), 0)
        if rows < each or rows % each:
            raise ValueError(
                f"execute_pipeline: a batch of {rows} rows; expected a multiple of microbatch_size = {each}."
            )
        if engine.plan.accumulate != rows // each:
            engine.resize(rows // each)

    def no_sync(
        self, model: Boosted, optimizer: torch.optim.Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Backward passes in here only accumulate."""
        return model.no_sync()

    # ---- checkpoints (every rank must call)

    def save_model(
        self,
        model: Boosted,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """Write the whole weights: one file, or with ``shard`` a folder as Hugging Face has it (safetensors).

        Weights that are there already are written over.

        Args:
            size_per_shard: megabytes of a file.
            gather_dtensor, use_async: no effect: weights are whole, and there when this returns.

        Raises:
            MistakeError: a ``prefix`` is given.
        """
        if prefix is not None:
            refuse("save_model", [("prefix", prefix, "names are the model's: leave it out")])
        path = Path(checkpoint)
        if not shard and not use_safetensors and path.suffix != ".safetensors":
            if model.engine.mesh.rank == 0:
                path.unlink(missing_ok=True)
            model.engine.export(path, "torch")
        elif shard:
            _export_shards(model, path, size_per_shard * _MEGABYTE)
        else:
            model.engine.export(path.with_suffix(".safetensors"))

    def load_model(
        self,
        model: Boosted,
        checkpoint: str | Path,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> Boosted:
        """Take over weights: a file, or a folder of shards.

        Args:
            low_cpu_mem_mode, num_threads: no effect: each rank reads what it holds.
        """
        if not strict:
            raise ValueError(
                "load_model(strict=False): model.load_state_dict(state_dict, strict=False) takes what fits."
            )
        model.engine.load_weights(Path(checkpoint))
        return model

    def save_checkpoint(self, model: Boosted, folder: str | Path) -> None:
        """Save all that a run needs to go on, under any plugin on any number of ranks."""
        model.engine.save(folder)

    def load_checkpoint(self, model: Boosted, folder: str | Path) -> None:
        """Go on from :meth:`save_checkpoint`."""
        model.engine.load(folder)

    def save_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Write the whole states of a boosted optimizer (a collective), for :meth:`load_optimizer`.

        Masters of float16 and bfloat16 are not among them: :meth:`save_checkpoint` keeps these too.

        Args:
            checkpoint: a file, or with ``shard`` a folder.
            gather_dtensor, size_per_shard, use_async: no effect: states are gathered, in one file.
        """
        self._check_boosted(optimizer)
        state = optimizer.state_dict()
        if running_rank() == 0:
            path = Path(checkpoint)
            if shard:
                path = path / f"{prefix + '.' if prefix else ''}{_STATES}"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path)

    def load_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        checkpoint: str | Path,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Take over states from :meth:`save_optimizer`, under any plugin on any number of ranks.

        Args:
            low_cpu_mem_mode, num_threads: no effect.
        """
        self._check_boosted(optimizer)
        path = Path(checkpoint)
        if path.is_dir():
            (path,) = path.glob(f"*{_STATES}")
        optimizer.load_state_dict(torch.load(path, weights_only=True))

    # ---- adapters

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> Any:
        """A model with the adapters of peft, which is to be installed; :meth:`boost` is next.

        Args:
            pretrained_dir: where adapters were saved.
            lora_config: of peft, else.

        Raises:
            MistakeError: weights are to be quantised, or neither is given.
        """
        mistakes = [
            (key, value, "weights are not quantised in training: leave it out")
            for key, value in (("bnb_quantization_config", bnb_quantization_config), ("quantize", quantize))
            if value
        ]
        if pretrained_dir is None and lora_config is None:
            mistakes.append(("lora_config", None, "expected one of peft, or pretrained_dir"))
        refuse("enable_lora", mistakes)
        peft = importlib.import_module("peft")
        if pretrained_dir is None:
            return peft.get_peft_model(model, lora_config)
        return peft.PeftModel.from_pretrained(model, pretrained_dir, is_trainable=True)

    def save_lora_as_pretrained(
        self, model: Boosted, checkpoint: str | Path, use_safetensors: bool = False
    ) -> None:
        """Write the adapters and their configuration, as peft reads them (every rank must call)."""
        state = model.engine.full_state_dict()
        if model.engine.mesh.rank == 0:
            adapted: Any = model.module
            adapted.save_pretrained(str(checkpoint), state_dict=state, safe_serialization=use_safetensors)
        if model.engine.mesh.size() > 1:
            gather_objects(None, model.engine.mesh)

    def _check_boosted(self, optimizer: torch.optim.Optimizer) -> None:
        if not any(model.engine.optimizer is optimizer for model in self._models):
            raise ValueError("This optimizer was not boosted: give the one that booster.boost(...) returned.")

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Write its state, on rank 0."""
        if running_rank() == 0:
            torch.save(lr_scheduler.state_dict(), checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Take it over."""
        lr_scheduler.load_state_dict(torch.load(checkpoint, weights_only=True))


def _export_shards(model: Boosted, folder: Path, gigabytes: float) -> None:
    """Write shards beside a folder, then put them in the place of those in it."""
    mesh = model.engine.mesh
    beside = folder.with_name(f".{folder.name}.new")
    if mesh.rank == 0:
        shutil.rmtree(beside, ignore_errors=True)
    model.engine.export(beside, shard_gigabytes=gigabytes)
    if mesh.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for file in (*folder.glob("model*.safetensors"), *folder.glob("model*.safetensors.index.json")):
            file.unlink()
        for file in beside.iterdir():
            file.replace(folder / file.name)
        beside.rmdir()
    if mesh.size() > 1:
        gather_objects(None, mesh)


_MEGABYTE = 1024**2 / 1e9


__all__ = [
    "Booster",
    "Plugin",
    "mixed_precision",
    "plugin",
]


__getattr__ = or_absent(
    __name__,
    "colossalai.booster",
    {"Accelerator": "colossalai.accelerator.get_accelerator() tells of the device"},
    elsewhere={"accelerator booster": __name__},
)
