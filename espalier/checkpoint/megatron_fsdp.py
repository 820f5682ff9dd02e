"""Checkpoints of Megatron-FSDP (``fsdp_dtensor``), under the keys that ``torch_dist`` has.

Such a folder is one of ``torch.distributed.checkpoint`` and nothing beside it. Weights, which are the ones
in float32, are called as modules are, ``model.module.decoder.layers.0...``; states are
``optimizer.state.NAME.KIND``, and each parameter has the options of its group,
``optimizer.param_to_group_meta.NAME.OPTION``. Where an MLP is gated, its gate and up are tensors of their
own, and so is each expert.

The names are those of megatron.core 0.16, its ``fsdp_dtensor_checkpoint``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from espalier.checkpoint.index import FormatError, TensorInfo
from espalier.checkpoint.sources import TensorSource
from espalier.layout.layout import Box

_WEIGHT = re.compile(r"model(\d*)\.(?:module\.)*((?:decoder|embedding|output_layer)\..*)")
_STATE = re.compile(r"optimizer\.state\.(?:module\.)*(.+)\.(\w+)")
_OPTION = re.compile(r"optimizer\.param_to_group_meta\.(?:module\.)*(.+)\.(\w+)")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
_STEP = "step"


class Group(NamedTuple):
    """Keys of parameters that have the same options, and the count of their steps."""

    keys: frozenset[str]
    options: Mapping[str, Any]
    step: Any


def is_fsdp(source: TensorSource) -> bool:
    """Whether a folder holds such a checkpoint."""
    return "checkpoint_version" in source.values and any(_WEIGHT.fullmatch(name) for name in source.entries)


class Sharded(TensorSource):
    """Such a checkpoint with the keys of ``torch_dist`` where each layer has tensors of its own.

    Args:
        without: options that are not read.

    Raises:
        FormatError: its model has several parts, each of which numbers its layers anew.
    """

    def __init__(self, source: TensorSource, without: Collection[str]) -> None:
        super().__init__(source.path)
        self._source, self._without = source, without
        self._names: dict[str, str] = {}
        self._steps: dict[str, str] = {}
        for name in source.entries:
            if match := _WEIGHT.fullmatch(name):
                if match[1]:
                    raise FormatError(
                        f"{source.path} holds the parts of an interleaved pipeline, whose layers do not say "
                        "their places in the model. Save it by Megatron as torch_dist."
                    )
                self._names[_key_of(match[2])] = name
            elif match := _STATE.fullmatch(name):
                key = _key_of(match[1])
                if match[2] == _STEP:
                    self._steps[key] = name
                else:
                    self._names[f"optimizer.state.{match[2]}.{key}"] = name
        self.entries: dict[str, TensorInfo] = {key: source.entries[name] for key, name in self._names.items()}

    def groups(self) -> list[Group]:
        """Parameters by their options."""
        options: dict[str, dict[str, Any]] = defaultdict(dict)
        for name in (*self._source.values, *self._source.entries):
            match = _OPTION.fullmatch(name)
            if match and (match[2] == _STEP or match[2] not in self._without):
                options[_key_of(match[1])][match[2]] = self._value(name)
        groups: dict[str, tuple[set[str], dict[str, Any]]] = {}
        for key, own in options.items():
            step = self._steps.get(key, self._steps.get(f"{key}_w"))
            if step is not None:
                own[_STEP] = self._value(step)
            groups.setdefault(repr(sorted(own.items())), (set(), own))[0].update(
                (key, f"{key}_w", f"{key}_v")
            )
        return [
            Group(frozenset(keys), {k: x for k, x in own.items() if k != _STEP}, own.get(_STEP))
            for keys, own in groups.values()
        ]

    def _value(self, name: str) -> Any:
        if name in self._source.entries:
            return self._source.read(name).tolist()
        value = self._source.values[name]
        return value.tolist() if isinstance(value, torch.Tensor) else value

    def same(self, name: str) -> Any:
        return self._source.same(self._names[name])

    def _read(self, name: str, box: Box) -> torch.Tensor:
        return self._source.read(self._names[name], box)


def _key_of(name: str) -> str:
    """What torch_dist calls a parameter."""
    name = name.replace("mlp.experts.local_experts.", "mlp.experts.experts.")
    return _GROUPED.sub(r"mlp.experts.experts.\3.\1.\2", name)
