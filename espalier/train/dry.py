"""One step of a job, predicted: the engine's own code on a mesh without processes."""

from typing import Any

import torch

from espalier.train.build import build_model, build_optimizer
from espalier.train.job import Job


def dry_step(job: Job) -> Any:
    """Run one step of the job dry; the report says bytes per axis and op, and memory of a rank.

    Nothing of the model or batch is allocated: all of it lies on the meta device.
    """
    import espalier

    with torch.device("meta"):
        model = build_model(job.model, job.train.seed, getattr(torch, job.train.dtype))
    optimizer = build_optimizer(job.optimizer, model)
    plan = espalier.Plan.from_dict(dict(job.plan))
    return espalier.dry_run(model, plan, batch_on_meta(job), optimizer=optimizer, max_grad_norm=job.clip)


def batch_on_meta(job: Job) -> dict[str, torch.Tensor]:
    """The global batch's tensors without content."""
    size, image = job.train.batch_size, job.facts.image
    if image is not None:
        pixels = torch.empty((size, *image), dtype=getattr(torch, job.train.dtype), device="meta")
        return {"pixel_values": pixels, "labels": torch.empty(size, dtype=torch.int64, device="meta")}
    tokens = torch.empty((size, job.train.sequence), dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": torch.empty_like(tokens)}
