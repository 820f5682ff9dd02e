"""What a job says, built: the plain model, its optimizer and schedule; and one step of it predicted."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from espalier.checkpoint import open_any
from espalier.checkpoint.foreign import Foreign
from espalier.checkpoint.index import FormatError
from espalier.engine.accumulation import Count as CountOf
from espalier.tensor.dry_runs import UNCOUNTED
from espalier.texts import MISSING, Mistake
from espalier.train.job import Job, JobError
from espalier.train.model_spec import HuggingFaceSpec, ModelSpec, transformers_class
from espalier.train.optimizers import build_optimizer, rate
from espalier.train.sections import OptimizerSection, TextData

# ---- weights of transformers that have other names on disk than in the model: it converts them, once
#
# Some architectures (mixtures of experts, most of all) are saved under the names that they had when they were
# published, and rearranged when they are loaded. Ranks read boxes of files: so the files are rewritten, under
# the model's own names, in the process that starts the ranks, where all of the model is in memory for that.


def _folder(job: Job) -> Path | None:
    """Where converted weights of a job lie, or would; None where there is nothing that transformers loads."""
    spec = job.model
    if not isinstance(spec, HuggingFaceSpec) or spec.path is None or spec.weights != spec.path:
        return None
    cache = Path(job.data.cache) if isinstance(job.data, TextData) else Path(TextData().cache)
    files = sorted(p for p in Path(spec.path).iterdir() if p.is_file())
    stamp = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return cache / f"weights-{hashlib.sha256(repr([spec.name, stamp]).encode()).hexdigest()[:16]}"


def weights_of(job: Job) -> str | None:
    """The file or folder of the weights that a job begins with: converted ones, where there are such."""
    folder = _folder(job)
    return str(folder) if folder is not None and folder.is_dir() else job.weights


def convert(job: Job, report: Callable[[str], None]) -> bool:
    """Let transformers rewrite the weights under the model's own names; whether it could.

    Args:
        report: told what takes time.
    """
    from safetensors.torch import save_file

    folder, spec = _folder(job), job.model
    if folder is None or not isinstance(spec, HuggingFaceSpec) or spec.path is None:
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            return True
        report(f"converting the weights in {spec.path} to the names of this version of transformers")
        kind = transformers_class(spec.name)
        model, loading = kind.from_pretrained(
            spec.path, dtype="auto", local_files_only=True, output_loading_info=True
        )
        if loading["missing_keys"] or loading["mismatched_keys"]:
            return False
        hidden = folder.with_name(f".{folder.name}-{os.getpid()}")
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir()
        state = {name: x.clone().contiguous() for name, x in model.state_dict().items()}
        save_file(state, hidden / "model.safetensors", {"format": "pt"})
        os.rename(hidden, folder)
    return True


# ---- models and optimizers


def build_model(spec: ModelSpec, seed: int, dtype: torch.dtype) -> nn.Module:
    """Build the model; equal seeds give equal weights on every rank.

    Args:
        spec: which model.
        seed: of torch's global random numbers, from which the weights are drawn.
        dtype: of the weights.
    """
    torch.manual_seed(seed)
    return spec.build().to(dtype).train()


def build_schedule(section: OptimizerSection, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """The learning rates of all groups: each its own, times :func:`rate`."""
    return LambdaLR(optimizer, lambda step: rate(section, step, steps))


def count_of(spec: ModelSpec) -> CountOf | None:
    """What a micro-batch's loss is a mean over, where the engine cannot see it; else None.

    The balance loss of a mixture of experts is no mean over tokens; its micro-batches weigh by their labels.
    """
    return _labels if getattr(spec, "kind", None) == "moe" else None


def _labels(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (batch["labels"] != -100).sum()


def check_buildable(job: Job, report: Callable[[str], None] = lambda message: None) -> int:
    """Build the model on the meta device, where it takes no memory; return its parameter count.

    Weights that are named otherwise than in the model are converted, if transformers can; ``report`` is told.

    Raises:
        JobError: where the model cannot be built from its config, or the weights are not those of it.
    """
    try:
        with torch.device("meta"):
            model = job.model.build()
    except (ValueError, TypeError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        message = f"the model cannot be built from this config: {error}"
        raise JobError(job.source, [Mistake("model", MISSING, message)]) from error
    weights = weights_of(job)
    if weights is not None:
        try:
            Foreign(open_any(weights), model, None)
        except FormatError as error:
            if not convert(job, report):
                raise JobError(job.source, [Mistake("model.weights", job.weights, str(error))]) from error
    return sum(p.numel() for p in model.parameters())


# ---- one step, predicted on a mesh without processes


def dry_step(job: Job, rank: Mapping[str, int] | None = None) -> Any:
    """Run one step of the job dry; the report says bytes per axis and op, and memory of a rank.

    Nothing of the model or batch is allocated: all of it lies on the meta device. ``rank`` says which rank,
    by axes' names.
    """
    import espalier

    model, plan, options = on_meta(job)
    batch = batch_on_meta(job)
    return espalier.dry_run(model, plan, batch, max_grad_norm=job.clip, coordinate=rank, **options)


def step_flops(job: Job) -> int | None:
    """Floating-point operations that a step of the plain model takes: three times its forward pass.

    Counted on one row without content. None where the model does not run so.
    """
    from torch.utils.flop_counter import FlopCounterMode

    row = {name: x[:1] for name, x in batch_on_meta(job).items()}
    counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):  # ranks draw alike as before
            model = job.model.build().to(getattr(torch, job.train.dtype)).train()
            with torch.no_grad(), counter:
                model(**row)
    except Exception:  # whatever a model does to values that are not there
        return None
    return 3 * int(counter.get_total_flops()) * job.train.batch_size


def layout_table(job: Job) -> Any:
    """How the job's plan lays its model out, and why: a table, printed or read."""
    import espalier

    model, plan, options = on_meta(job)
    return espalier.explain_layouts(model, plan, batch_on_meta(job), **options)


def on_meta(job: Job) -> tuple[torch.nn.Module, Any, dict[str, Any]]:
    """The job's model on the meta device, its plan, its optimizer and what its losses count."""
    with torch.device("meta"):
        model = build_model(job.model, job.train.seed, getattr(torch, job.train.dtype))
    return model, job.plan, {"optimizer": build_optimizer(job.optimizer, model), "count": count_of(job.model)}


def batch_on_meta(job: Job) -> dict[str, torch.Tensor]:
    """The global batch's tensors without content."""
    size, image = job.train.batch_size, job.facts.image
    if image is not None:
        pixels = torch.empty((size, *image), dtype=getattr(torch, job.train.dtype), device="meta")
        return {"pixel_values": pixels, "labels": torch.empty(size, dtype=torch.int64, device="meta")}
    tokens = torch.empty((size, job.train.sequence), dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": torch.empty_like(tokens)}
