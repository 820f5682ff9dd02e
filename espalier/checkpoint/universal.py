"""DeepSpeed's universal checkpoints: a parameter has a folder, with a file for each of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from espalier.checkpoint.index import FormatError
from espalier.checkpoint.sources import TensorSource

_VERSION = "0.19.8"  # of DeepSpeed, whose files these are
LATEST = "latest_universal"


class Universal(NamedTuple):
    """What a universal checkpoint has.

    Attributes:
        tag: the folder in it.
        tensors: by file, names in the source.
        values: by file.
    """

    tag: str
    tensors: Mapping[str, str]
    values: Mapping[str, Any]


def as_universal(source: TensorSource, weights: Mapping[str, str], options: Mapping[str, Any]) -> Universal:
    """A model and its optimizer as DeepSpeed loads them with ``{"checkpoint": {"load_universal": true}}``.

    A parameter has a folder there, with a file for its float32 values and one for each kind of states.

    Args:
        weights: names of a model, and those in the source.
        options: ``optimizer.param_groups.NUMBER.KEY``.

    Raises:
        FormatError: there is no optimizer, or its parameters have counts of steps that differ.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        start, _, key = name.rpartition(".")
        if start.startswith("optimizer.param_groups."):
            groups.setdefault(start, {})[key] = value
    if not groups:
        raise FormatError(
            f"{source.path} has no optimizer, and DeepSpeed's universal checkpoint is one of an optimizer's "
            "weights: export safetensors or torch, and load that into the model before deepspeed.initialize."
        )
    tag, tensors, steps = "universal", dict[str, str](), dict[str, float]()
    trained = [name for group in groups.values() for name in group.pop("params")]
    for name in trained:
        tensors[f"{tag}/zero/{name}/fp32.pt"] = weights[name]
        for kind, entry in source.under(f"optimizer.state.{name}.").items():
            theirs = f"optimizer.state.{name}.{kind}"
            if kind == "step":
                steps[name] = float(source.read(theirs))
            elif entry.shape == source.entries[weights[name]].shape:
                tensors[f"{tag}/zero/{name}/{kind}.pt"] = theirs
    if len(set(steps.values())) > 1:
        raise FormatError(f"{source.path} has parameters of other counts of steps, which DeepSpeed has not.")
    step = max(steps.values(), default=0.0)
    listed = [{**group, "params": [i]} for i, group in enumerate(groups.values())]
    values: dict[str, Any] = {f"{tag}/zero/{name}/step.pt": torch.tensor(x) for name, x in steps.items()}
    values[f"{tag}/zero/optimizer_state.pt"] = {
        "param_groups": listed,
        "optimizer_state_dict": {"state": {0: {"step": torch.tensor(step)}}, "param_groups": listed},
        "ds_version": _VERSION,
    }
    shapes = {name: torch.Size(source.entries[weights[name]].shape) for name in trained}
    common = {
        "module": {},
        "buffer_names": [],
        "param_shapes": [shapes],
        "optimizer": None,
        "lr_scheduler": None,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "global_steps": int(step),
        "skipped_steps": 0,
        "ds_version": _VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
    for stage in ("", "zero_pp_rank_0_"):  # the third has names of its own
        values[f"{tag}/{stage}mp_rank_00_model_states.pt"] = common
    return Universal(tag, tensors, values)
