"""One step of a job, predicted: the engine's own code on a mesh without processes."""

from typing import Any

import torch

from espalier.train.build import build_model, build_optimizer, count_of
from espalier.train.job import Job


def dry_step(job: Job) -> Any:
    """Run one step of the job dry; the report says bytes per axis and op, and memory of a rank.

    Nothing of the model or batch is allocated: all of it lies on the meta device.
    """
    import espalier

    model, plan, given = _on_meta(job)
    return espalier.dry_run(model, plan, batch_on_meta(job), max_grad_norm=job.clip, **given)


def layout_table(job: Job) -> Any:
    """How the job's plan lays its model out, and why: a table, printed or read."""
    import espalier

    model, plan, given = _on_meta(job)
    return espalier.explain_layouts(model, plan, batch_on_meta(job), **given)


def _on_meta(job: Job) -> tuple[torch.nn.Module, Any, dict[str, Any]]:
    import espalier

    with torch.device("meta"):
        model = build_model(job.model, job.train.seed, getattr(torch, job.train.dtype))
    plan = espalier.Plan.from_dict(dict(job.plan))
    return model, plan, {"optimizer": build_optimizer(job.optimizer, model), "count": count_of(job.model)}


def batch_on_meta(job: Job) -> dict[str, torch.Tensor]:
    """The global batch's tensors without content."""
    size, image = job.train.batch_size, job.facts.image
    if image is not None:
        pixels = torch.empty((size, *image), dtype=getattr(torch, job.train.dtype), device="meta")
        return {"pixel_values": pixels, "labels": torch.empty(size, dtype=torch.int64, device="meta")}
    tokens = torch.empty((size, job.train.sequence), dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": torch.empty_like(tokens)}
