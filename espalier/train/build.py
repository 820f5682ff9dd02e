"""The plain model, optimizer and learning-rate schedule of a job."""

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from espalier.checkpoint import open_any
from espalier.checkpoint.names import Foreign
from espalier.checkpoint.pickles import FormatError
from espalier.engine.accumulation import Count
from espalier.train.job import Job, OptimizerSection
from espalier.train.mistakes import MISSING, JobError, Mistake
from espalier.train.specs import ModelSpec


def build_model(spec: ModelSpec, seed: int, dtype: torch.dtype) -> nn.Module:
    """Build the model; equal seeds give equal weights on every rank.

    Args:
        spec: which model.
        seed: of torch's global random numbers, from which the weights are drawn.
        dtype: of the weights.
    """
    torch.manual_seed(seed)
    return spec.build().to(dtype).train()


def build_optimizer(section: OptimizerSection, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer over all of the model's parameters.

    Raises:
        ValueError: it cannot train them.
    """
    try:
        return getattr(torch.optim, section.name)(model.parameters(), **section.arguments)
    except ValueError as error:
        raise ValueError(
            f"optimizer.name = {section.name!r}: it cannot train this model: {error}. Give another."
        ) from error


def build_schedule(section: OptimizerSection, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Linear warm-up to the full rate, then constant or a cosine to ``final_lr`` of it at ``steps``."""
    return LambdaLR(optimizer, lambda step: rate(section, step, steps))


def rate(section: OptimizerSection, step: int, steps: int) -> float:
    """The share of ``lr`` used in optimizer step ``step``, counted from 0, of ``steps``."""
    if step < section.warmup:
        return (step + 1) / section.warmup
    if section.schedule == "constant":
        return 1.0
    progress = min((step - section.warmup) / max(steps - 1 - section.warmup, 1), 1.0)
    return section.final_lr + (1 - section.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def count_of(spec: ModelSpec) -> Count | None:
    """What a micro-batch's loss is a mean over, where the engine cannot see it; else None.

    The balance loss of a mixture of experts is no mean over tokens; its micro-batches weigh by their labels.
    """
    return _labels if getattr(spec, "kind", None) == "moe" else None


def _labels(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (batch["labels"] != -100).sum()


def check_buildable(job: Job) -> int:
    """Build the model on the meta device, where it takes no memory; return its parameter count.

    Raises:
        JobError: where the model cannot be built from its config, or the weights are not those of it.
    """
    try:
        with torch.device("meta"):
            model = job.model.build()
    except (ValueError, TypeError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        message = f"the model cannot be built from this config: {error}"
        raise JobError(job.source, [Mistake("model", MISSING, message)]) from error
    if job.weights is not None:
        try:
            Foreign(open_any(job.weights), model, None)
        except FormatError as error:
            raise JobError(job.source, [Mistake("model.weights", job.weights, str(error))]) from error
    return sum(p.numel() for p in model.parameters())
