"""Checkpoints that DeepSpeed wrote under ZeRO 0 to 3, as whole tensors by name.

A folder has one ``*model_states.pt`` (at stage 3 one a rank) and, from stage 1 on, one ``*optim_states.pt`` a
rank. Stages 1 and 2 lay the parameters of a group end to end, in float32, and cut the row into even parts;
stage 3 cuts each parameter by itself, and lays a rank's parts end to end. Optimizer states lie as the
parameters do. Nothing that was pickled is executed: what is neither a tensor nor plain becomes a record.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from espalier.checkpoint.index import FormatError
from espalier.checkpoint.records import load_records

MODEL, OPTIMIZER = "*model_states.pt", "*optim_states.pt"
# options of DeepSpeed's own optimizers, which torch's have not
_BESIDE = ("bias_correction", "step", "name", "use_muon", "adam_w_mode")
_OWN = (
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments "
    "lr_scheduler data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps "
    "checkpoint_parallel_dimensions global_samples dp_world_size mp_world_size ds_config ds_version "
    "micro_steps"
).split()


def is_zero(path: Path) -> bool:
    """Whether a folder holds such a checkpoint."""
    return any(path.glob(MODEL))


def tagged(path: Path) -> Path:
    """The checkpoint that the file ``latest`` of a folder names; the folder itself if there is none."""
    latest = path / "latest"
    if latest.is_file() and is_zero(path / latest.read_text("utf-8").strip()):
        return path / latest.read_text("utf-8").strip()
    return path


class Run(NamedTuple):
    """What a checkpoint says of its run, beside weights and states."""

    counters: Mapping[str, int]
    schedule: Any
    client_state: Mapping[str, Any]


def run_of(path: Path) -> Run:
    """The run of a checkpoint."""
    state = _load(_files(path, MODEL)[0])
    counted = ("global_steps", "global_samples")
    counters: dict[str, int] = {key: int(state[key]) for key in counted if key in state}
    return Run(counters, state.get("lr_scheduler"), {k: x for k, x in state.items() if k not in _OWN})


def read_zero(path: Path) -> dict[str, Any]:
    """A checkpoint as ``{"model": ..., "optimizer": {"state": ..., "param_groups": ...}}``, by names.

    Weights are the float32 ones that the optimizer updated.

    Raises:
        FormatError: it was saved with tensor, pipeline or expert parallelism, or files are missing.
    """
    if any("_expert_" in file.name for file in path.glob(MODEL)):
        raise FormatError(
            f"{path} has experts of DeepSpeed's MoE in files of their own. Give the model's weights as one "
            "state dict, {name: whole tensor}, written by torch.save under DeepSpeed: of all ranks' "
            "engine.module.state_dict(), each expert under its number."
        )
    if any(re.match(r"layer_\d+-model_", file.name) for file in path.glob(MODEL)):
        raise FormatError(
            f"{path} was saved by a pipeline, with a file for each layer and states of each stage apart. "
            "Give the weights as one state dict, {'LAYER.NAME': tensor}, of the files layer_LAYER-model_00-"
            "model_states.pt, written by torch.save; optimizer states are not read."
        )
    models = [_load(file) for file in _files(path, MODEL)]
    first, files = models[0], _files(path, OPTIMIZER)
    if len({re.findall(r"mp_rank_(\d+)", file.name)[-1] for file in _files(path, MODEL)}) > 1:
        raise FormatError(
            f"{path} was saved by several tensor-parallel ranks, whose parts have no names. Load "
            "the weights alone, from save_16bit_model."
        )
    if not files:
        return _unsharded(first)
    states = [_load(file)["optimizer_state_dict"] for file in files]
    count = states[0].get("partition_count", len(states))
    count = max(count) if isinstance(count, list) else count
    if count != len(states):
        raise FormatError(f"{path} has {len(states)} files {OPTIMIZER}, expected {count}. Use another copy.")
    lay = _Third(states) if "fp32_flat_groups" in states[0] else _Second(states)
    model = {n: x for n, x in (first["module"] or {}).items() if n in first["buffer_names"]}
    model |= _frozen(models, len(states))
    optimizer: dict[str, Any] = {"state": {}, "param_groups": []}
    for number, shapes in enumerate(first["param_shapes"]):
        for name, cut in lay.group(number, {n: tuple(shape) for n, shape in shapes.items()}):
            model[name] = cut(lay.parameters(number))
            state = {key: cut(flats) for key, flats in lay.states(number).items()}
            if (step := lay.step(number)) is not None:
                state["step"] = torch.tensor(float(step))
            optimizer["state"][name] = state
        options = {k: x for k, x in lay.options(number).items() if k not in ("params", *_BESIDE)}
        optimizer["param_groups"].append({"params": list(shapes), **options})
    for name, other in dict(first.get("shared_params") or {}).items():
        if other in model:
            model[name] = model[other]
    return {"model": model, "optimizer": optimizer}


def _unsharded(state: Mapping[str, Any]) -> dict[str, Any]:
    """Stage 0: a state dict, and torch's of an optimizer, whose numbers are the parameters' order."""
    unsharded: dict[str, Any] = {"model": dict(state["module"])}
    optimizer = state.get("optimizer")
    if isinstance(optimizer, Mapping) and {"state", "param_groups"} <= optimizer.keys():
        unsharded["optimizer"] = dict(optimizer)
    return unsharded


class _Lies(ABC):
    """How the flat tensors of ranks hold a group of parameters."""

    def __init__(self, states: Sequence[Mapping[str, Any]], weights: str, optimizer: str) -> None:
        self.ranks = len(states)
        self._weights = [state[weights] for state in states]
        self._optimizers = [state[optimizer] for state in states]

    @abstractmethod
    def group(self, number: int, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Any]]:
        """Of each parameter its name, and what cuts it out of the ranks' flat tensors."""

    def numbers(self, number: int) -> list[int]:
        """Of the flat tensors of a group."""
        return [number]

    def parameters(self, number: int) -> list[torch.Tensor]:
        """Each rank's."""
        return [torch.cat([flat[i].flatten() for i in self.numbers(number)]) for flat in self._weights]

    def states(self, number: int) -> dict[str, list[torch.Tensor]]:
        """Each rank's, by key."""
        held = [[o["state"][i] for i in self.numbers(number) if i in o["state"]] for o in self._optimizers]
        if not all(held):
            return {}
        keys = [key for key, x in held[0][0].items() if isinstance(x, torch.Tensor) and x.numel() > 1]
        return {key: [torch.cat([x[key].flatten() for x in of_rank]) for of_rank in held] for key in keys}

    def step(self, number: int) -> float | None:
        """How many updates there were; None if nobody counted."""
        first = self._optimizers[0]
        state = first["state"].get(self.numbers(number)[0], {})
        step = state.get("step", self.options(number).get("step"))
        return None if step is None else float(step)

    def options(self, number: int) -> Mapping[str, Any]:
        """Of the group."""
        options: Mapping[str, Any] = self._optimizers[0]["param_groups"][number]
        return options


class _Second(_Lies):
    """Stages 1 and 2: one row a group, cut into even parts."""

    def __init__(self, states: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(states, "single_partition_of_fp32_groups", "base_optimizer_state")
        self._paddings = states[0].get("param_alignment_paddings")

    def group(self, number: int, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Any]]:
        paddings = self._paddings[number] if self._paddings else [0] * len(shapes)
        start = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):

            def cut(
                flats: list[torch.Tensor], start: int = start, shape: tuple[int, ...] = shape
            ) -> torch.Tensor:
                return torch.cat(flats).narrow(0, start, math.prod(shape)).view(shape).clone()

            yield name, cut
            start += math.prod(shape) + int(padding)


class _Third(_Lies):
    """Stage 3: each parameter cut into even parts, a rank's one after the other."""

    def __init__(self, states: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(states, "fp32_flat_groups", "optimizer_state_dict")

    def numbers(self, number: int) -> list[int]:
        return list(self.options(number)["params"])

    def group(self, number: int, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Any]]:
        start = 0
        for name, shape in shapes.items():
            each = math.ceil(math.prod(shape) / self.ranks)

            def cut(
                flats: list[torch.Tensor],
                start: int = start,
                each: int = each,
                shape: tuple[int, ...] = shape,
            ) -> torch.Tensor:
                parts = [flat.narrow(0, start, each) for flat in flats]
                return torch.cat(parts).narrow(0, 0, math.prod(shape)).view(shape)

            yield name, cut
            start += each


def _frozen(models: Sequence[Mapping[str, Any]], ranks: int) -> dict[str, torch.Tensor]:
    """Parameters that were not trained."""
    shapes, tensors = models[0].get("frozen_param_shapes") or {}, {}
    for name, shape in shapes.items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        whole = (
            torch.cat([part.flatten() for part in parts]) if len(parts) == ranks > 1 else parts[0].flatten()
        )
        tensors[name] = whole.narrow(0, 0, math.prod(shape)).view(tuple(shape))
    return tensors


def _files(path: Path, pattern: str) -> list[Path]:
    def by_numbers(file: Path) -> list[Any]:
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", file.name)]

    return sorted(path.glob(pattern), key=by_numbers)


def _load(path: Path) -> dict[str, Any]:
    return load_records(path, "a checkpoint of DeepSpeed's")
