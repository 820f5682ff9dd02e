"""Weights of transformers that have other names on disk than in the model: converted once, by transformers.

Some architectures (mixtures of experts, most of all) are saved under the names that they had when they were
published, and rearranged when they are loaded. Ranks read boxes of files: so the files are rewritten, under
the model's own names, in the process that starts the ranks, where all of the model is in memory for that.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from espalier.train.job import Job
from espalier.train.model_spec import HuggingFaceSpec, transformers_class
from espalier.train.sections import TextData


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
