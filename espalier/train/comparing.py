"""A job's plan, predicted and run: one beside the other."""

from __future__ import annotations

from typing import Any

import torch

from espalier.planner.compare import Measured, measure
from espalier.train.building import build_model, build_optimizer, count_of
from espalier.train.corpus import prepare
from espalier.train.data import training_batches
from espalier.train.job import Job


def measured(job: Job, steps: int, device_type: str | None = None) -> Measured | None:
    """Train the job's model for some steps on this rank, with its own data, from weights drawn at random.

    Args:
        device_type: on which; by default what the ranks have.

    Returns:
        What they took, on rank 0; None on the others.
    """
    import espalier

    dtype = getattr(torch, job.train.dtype)
    model = build_model(job.model, job.train.seed, dtype)
    optimizer = build_optimizer(job.optimizer, model)
    options: dict[str, Any] = {"max_grad_norm": job.clip, "count": count_of(job.model)}
    if device_type is not None:
        options["mesh"] = espalier.Mesh.from_env(job.plan.axes, device_type)
    engine = espalier.initialize(model, optimizer, job.plan, **options)
    sizes = {"size": job.train.batch_size, "sequence": job.train.sequence, "seed": job.train.seed}
    batches = training_batches(job, prepare(job), **sizes, dtype=dtype)
    step = 0

    def batch() -> list[Any]:
        nonlocal step
        step += 1
        return [
            engine.local_batch(batches.batch(step, rows), size)
            for rows, size in engine.micro_batches(batches.size)
        ]

    seconds = measure(engine, batch, steps)
    return seconds if engine.mesh.rank == 0 else None
