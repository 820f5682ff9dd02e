"""Checkpoints of Megatron-core, under the names of transformers' models, and back (as ``torch_dist``).

Such a folder is one of ``torch.distributed.checkpoint``, with ``metadata.json`` and ``common.pt`` beside it.
What all layers have is one tensor there, with the layer as its first dim; queries, keys and values stand in
one matrix, group by group; gate and up in one, one after the other; the vocabulary may have more rows than
words. Each is the same values in other places, so one list of boxes (:func:`places`) says both ways.

The layout of ``linear_qkv`` and the names are those of megatron.core 0.16, models of its GPT class.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from espalier.checkpoint.index import FormatError, TensorInfo
from espalier.checkpoint.megatron_buckets import STATE, Unpacked
from espalier.checkpoint.megatron_places import LAYERS, Place, Sizes, is_routed, is_trained, places
from espalier.checkpoint.records import load_records
from espalier.checkpoint.sources import TensorSource, reading
from espalier.layout.layout import Box, overlap
from espalier.texts import listed

COMMON, METADATA = "common.pt", "metadata.json"
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
# of the distributed optimizer, of the one for 16 bits, and of Transformer Engine's
MASTERS = ("param", "fp32_param", "master_param")
_GROUPED = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")  # by what Megatron makes groups
_BESIDE = {"params", "step", "bias_correction", "default_config", "max_lr", "min_lr", "pre_wd_mult"}
_BESIDE |= {"pre_lr_mult", *_GROUPED}


# ---- tensors that are made of boxes of others


class _Part(NamedTuple):
    box: Box
    name: str
    there: Box
    turned: bool


class Composed(TensorSource):
    """Tensors whose values stand in boxes of those of another source.

    Args:
        extra: further ones, in memory.
    """

    def __init__(
        self, source: TensorSource, parts: Mapping[str, Sequence[_Part]], extra: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(source.path)
        self._source, self._parts, self._extra = source, parts, extra
        self.entries = {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in extra.items()}
        for name, of in parts.items():
            ends = zip(
                *([o + n for o, n in zip(p.box.offsets, p.box.sizes, strict=True)] for p in of), strict=True
            )
            shape = tuple(max(end) for end in ends)
            if sum(math.prod(p.box.sizes) for p in of) != math.prod(shape):
                raise FormatError(f"{source.path}: parts of {name} are missing, or of another size.")
            self.entries[name] = TensorInfo(shape, source.entries[of[0].name].dtype)

    def same(self, name: str) -> Any:
        if name in self._extra:
            return name
        return tuple((p.box, self._source.same(p.name), p.there) for p in self._parts[name])

    def _read(self, name: str, box: Box) -> torch.Tensor:
        if name in self._extra:
            return self._extra[name][box.slices]
        out = torch.empty(box.sizes, dtype=self.entries[name].dtype)
        for part in self._parts[name]:
            common = overlap(part.box, box)
            if common is None:
                continue
            start = [o - at for o, at in zip(common.offsets, part.box.offsets, strict=True)]
            sizes = list(common.sizes)
            before = len(part.there.sizes) - len(sizes)
            if before < 0:
                start, sizes = start[-before:], sizes[-before:]
            if part.turned:
                start, sizes = start[::-1], sizes[::-1]
            offsets = [o + s for o, s in zip(part.there.offsets, [0] * before + start, strict=True)]
            values = self._source.read(part.name, Box(tuple(offsets), (*(1,) * before, *sizes))).reshape(
                sizes
            )
            values = values.t() if part.turned else values
            out[common.within(box)] = values.reshape(common.sizes) if before < 0 else values
        return out


# ---- in


def is_megatron(path: Path) -> bool:
    """Whether a folder holds such a checkpoint."""
    try:
        said = json.loads((path / METADATA).read_text("utf-8"))
        return isinstance(said, dict) and said.get("sharded_backend") == "torch_dist"
    except (OSError, ValueError, RecursionError):
        return False


def in_names_of(source: TensorSource, config: Mapping[str, Any] | None) -> TensorSource:
    """A source as it is; one of Megatron's under ``model.NAME`` and ``optimizer.`` of transformers' models.

    Weights are the float32 ones that an optimizer updated, where there are such.

    Args:
        config: the model's, as config.json has it.

    Raises:
        FormatError: the config is missing or unknown, or tensors are there that such a model has not.
    """
    if not is_megatron(source.path):
        if not is_fsdp(source):
            return source
        source = Sharded(source, _BESIDE)
    if config is None or "model_type" not in config:
        raise FormatError(
            f"{source.path} is a checkpoint of Megatron's, whose tensors have other names and shapes: give "
            "a folder with the config.json of a model of transformers (--like), or load it into such a model."
        )
    weights = {key for key in source.entries if ".distributed." not in key and "optimizer." not in key}
    stacked = not any(key.startswith(f"{LAYERS}0.") for key in weights)
    table = [place for place in places(config, stacked=stacked) if place.key in weights]
    wrong = [f"{key} is not in it" for key in sorted(weights - {place.key for place in table})]
    wrong += _other_sizes(source, table)
    if wrong:
        raise FormatError(
            listed(f"{source.path} does not hold the weights of this {config['model_type']}:", wrong, 8)
            + "\nGive the config of the model that was saved."
        )
    trained = {key for key in weights if is_trained(key)}
    groups = source.groups() if isinstance(source, Sharded) else None
    source = Unpacked(source, trained, gated=config["model_type"] != "gpt2")
    kinds = _kinds_of(source, trained)
    parts: dict[str, list[_Part]] = defaultdict(list)
    for box, there, turned, name, key in ((p.box, p.there, p.turned, p.name, p.key) for p in table):
        master = next((f"{STATE}{k}.{key}" for k in MASTERS if k in kinds and key in trained), key)
        parts[f"model.{name}"].append(_Part(box, master, there, turned))
        for kind in (k for k in kinds if k not in MASTERS and key in trained):
            parts[f"{STATE}{name}.{kind}"].append(_Part(box, f"{STATE}{kind}.{key}", there, turned))
    keys: dict[str, set[str]] = defaultdict(set)
    for place in table:
        if place.key in trained:
            keys[place.name].add(place.key)
    if groups is None:
        dims = {name: len(parts[f"model.{name}"][0].box.sizes) for name in keys}
        divided = _divided(source, dims) if kinds else []
    else:
        divided = [(g.options, g.step, [n for n, of in keys.items() if of <= g.keys]) for g in groups]
        if kinds and (mixed := keys.keys() - {name for *_, names in divided for name in names}):
            first = f"{source.path} does not say one group of an optimizer for each of these:"
            raise FormatError(f"{listed(first, sorted(mixed), 8)}\nSave it again by Megatron as torch_dist.")
    steps, values = _options(divided) if kinds else ({}, {})
    composed = Composed(source, parts, steps)
    composed.without = source.without
    composed.values, composed.trees = values, frozenset(("model", "optimizer") if kinds else ("model",))
    return composed


def _other_sizes(source: TensorSource, table: Iterable[Place]) -> list[str]:
    """A line for each tensor whose size is not what the places in it need; words may be padded."""
    ends: dict[str, list[int]] = {}
    for place in table:
        end = [o + n for o, n in zip(place.there.offsets, place.there.sizes, strict=True)]
        ends[place.key] = [*map(max, ends.get(place.key, end), end)]
    wrong = []
    for key, end in ends.items():
        shape = list(source.entries[key].shape)
        if shape != end and not (key in _PADDED and shape[1:] == end[1:] and shape[0] > end[0]):
            wrong.append(f"{key} is {shape}, expected {end}")
    return wrong


def _kinds_of(source: TensorSource, weights: Collection[str]) -> list[str]:
    """The kinds of states that lie as the weights do."""
    holders: dict[str, set[str]] = defaultdict(set)
    for name in source.entries:
        kind, _, key = name.removeprefix(STATE).partition(".")
        if name.startswith(STATE) and key in weights:
            holders[kind].add(key)
            if source.entries[name].shape != source.entries[key].shape:
                raise FormatError(
                    f"{source.path}: {name} is flat, as megatron.core before 0.14 wrote it. Save it again by "
                    "a later one, with dist_ckpt_optim_fully_reshardable."
                )
    return [kind for kind, keys in holders.items() if len(keys) == len(weights)]


_Divided = list[tuple[Mapping[str, Any], Any, list[str]]]
"""Options of each group, its count of steps, and the names of its parameters."""


def _options(divided: _Divided) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Counts of steps, and the options of groups, as torch's distributed checkpoint has them."""
    steps: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for i, (options, step, names) in enumerate(divided):
        values[f"optimizer.param_groups.{i}.params"] = names
        values |= {f"optimizer.param_groups.{i}.{k}": x for k, x in options.items() if k not in _BESIDE}
        if step is not None:
            steps |= {f"{STATE}{n}.step": torch.tensor(float(step)) for n in names}
    return steps, values


def _divided(source: TensorSource, dims: Mapping[str, int]) -> _Divided:
    """What groups there are, and which parameters are in which, as Megatron divides them by default.

    Args:
        dims: of each weight, how many.
    """
    groups, step = _groups(source)
    decays, routed = ({g.get(key) for g in groups} for key in ("wd_mult", "is_expert_parallel"))
    return [
        (
            group,
            group.get("step", step),
            [
                name
                for name, d in dims.items()
                if (len(decays) == 1 or _decays(name, d) is (group.get("wd_mult", 1.0) != 0))
                and (len(routed) == 1 or is_routed(name) is bool(group.get("is_expert_parallel")))
            ],
        )
        for group in groups
    ]


def _groups(source: TensorSource) -> tuple[list[Mapping[str, Any]], Any]:
    """The options of groups, and the count of steps that they have in common."""
    common = load_records(source.path / COMMON, "what Megatron has in common.pt")
    saved = [common.get("optimizer")]
    saved += [
        source.values[key]
        for key in source.values
        if ".distributed." in key and key.rpartition("/")[0].endswith(".optimizer")
    ]
    groups, step = dict[tuple[str, ...], Mapping[str, Any]](), None
    while saved:
        x = saved.pop(0)
        if isinstance(x, Mapping):
            if isinstance(x.get("param_groups"), list):
                for group in (g for g in x["param_groups"] if isinstance(g, Mapping)):
                    groups.setdefault(tuple(repr(group.get(key)) for key in _GROUPED), group)
            state = x.get("state")
            step = state.get("common_step", step) if isinstance(state, Mapping) else step
            saved += [y for key, y in x.items() if key not in ("param_groups", "state")]
        elif isinstance(x, list):
            saved += x
    kinds = [dict(zip(_GROUPED, kind, strict=True)) for kind in groups]
    same = all(len({kind[key] for kind in kinds}) <= 1 for key in ("lr_mult", "is_decoupled_lr"))
    decays = {kind["wd_mult"] for kind in kinds}
    if not same or len(decays) > 2 or (len(decays) == 2 and not decays & {"0.0", "0"}):
        raise FormatError(
            f"{source.path} has {len(groups)} groups of an optimizer, and does not say which parameters are "
            "in which: expected such as differ in wd_mult, which is 0 for one, and in is_expert_parallel. "
            "Load without optimizer=True."
        )
    return list(groups.values()), step


# ---- out


class Outward(NamedTuple):
    """What is written for Megatron: tensors, values by name, and files by name."""

    tensors: TensorSource
    values: Mapping[str, Any]
    files: Mapping[str, bytes]


def as_megatron(
    source: TensorSource,
    config: Mapping[str, Any] | None,
    weights: Mapping[str, str],
    options: Mapping[str, Any],
) -> Outward:
    """A model under the keys of Megatron's, layers stacked, or apart where not all have experts; its
    optimizer too, where it has options.

    Args:
        config: of a model of transformers.
        weights: names of a model, and those in the source.
        options: ``optimizer.param_groups.NUMBER.KEY``.

    Raises:
        FormatError: the config is missing, tensors are there that such a model has not, or groups that
            Megatron does not make.
    """
    if config is None:
        raise FormatError(
            "Megatron's names depend on the model: give a folder with its config.json (--like)."
        )
    parts: dict[str, list[_Part]] = defaultdict(list)
    table = [*places(config, stacked=True, every=False)]
    stacked = _are_alike(table, weights)
    if not stacked:
        table = [_as_dense(place, weights) for place in places(config, stacked=False, every=False)]
    if unknown := sorted(set(weights) - {place.name for place in table}):
        raise FormatError(
            listed(f"{source.path} holds what no {config.get('model_type')} has:", unknown, 8)
            + "\nGive the config of this model."
        )
    steps = set()
    for place in table:
        if place.name not in weights:
            continue
        theirs = weights[place.name]
        parts[place.key].append(_Part(place.there, theirs, place.box, place.turned))
        states = source.under(f"{STATE}{place.name}.") if options else {}
        for kind, entry in states.items():
            name = f"{STATE}{place.name}.{kind}"
            if kind == "step":
                steps.add(float(source.read(name)))
            elif entry.shape == source.entries[theirs].shape:
                parts[f"{STATE}{kind}.{place.key}"].append(_Part(place.there, name, place.box, place.turned))
    if len(steps) > 1:
        raise FormatError(f"{source.path} has parameters of other counts of steps, which Megatron has not.")
    step = int(max(steps, default=0))
    common: dict[str, Any] = {"iteration": step, "checkpoint_version": 3.0}
    if options:
        common["optimizer"] = {"param_groups": _regrouped(source, options), "state": {"common_step": step}}
    buffer = io.BytesIO()
    torch.save(common, buffer)
    return Outward(
        Composed(source, parts, {}),
        _extra_states(parts, Sizes.of(config), stacked),
        {COMMON: buffer.getvalue(), METADATA: json.dumps(_BACKENDS).encode()},
    )


def _are_alike(table: Iterable[Place], weights: Collection[str]) -> bool:
    """Whether all layers have the same tensors, as stacks need."""
    layers: dict[str, set[int]] = defaultdict(set)
    for place in table:
        if place.name in weights and place.key.startswith(LAYERS):
            layers[place.key].add(place.there.offsets[0])
    return len({frozenset(of) for of in layers.values()}) <= 1


def _as_dense(place: Place, weights: Collection[str]) -> Place:
    """Where the norm before an MLP stands in a layer without experts, among layers with such."""
    layer, norm, word = place.key.partition("pre_mlp_layernorm.")
    gate = f"{place.name.removesuffix(f'post_attention_layernorm.{word}')}mlp.gate_proj.weight"
    if not norm or gate not in weights:
        return place
    return place._replace(key=f"{layer}mlp.linear_fc1.layer_norm_{word}")


def _extra_states(keys: Iterable[str], sizes: Sizes, stacked: bool) -> dict[str, Any]:
    """What modules of Transformer Engine ask for beside their tensors: nothing, by name."""
    modules = {key.rpartition(".")[0] for key in keys if key.startswith(LAYERS) and ".linear_" in key}
    starts = [LAYERS] if stacked else [f"{LAYERS}{i}." for i in range(sizes.layers)]
    modules |= {f"{start}self_attention.core_attention" for start in starts}
    shards: dict[str, Any] = {}
    for module in sorted(modules):
        lengths = [sizes.layers] * stacked + [sizes.experts] * (".experts." in module)
        lengths = lengths or [1]
        for at in product(*map(range, lengths)):
            shards[f"{module}._extra_state/shard_{'.'.join(map(str, at))}_{'.'.join(map(str, lengths))}"] = [
                None
            ]
    return shards


def _regrouped(source: TensorSource, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups with what Megatron tells them apart by."""
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in options.items():
        start, _, key = name.rpartition(".")
        if start.startswith("optimizer.param_groups."):
            groups[start][key] = value
    for group in groups.values():
        kinds = {_decays(n, len(source.entries[f"model.{n}"].shape)) for n in group.pop("params")}
        if len(groups) > 1 and len(kinds) > 1:
            break
        decays = len(groups) == 1 or kinds == {True}
        group |= {
            "wd_mult": float(decays),
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
        }
    if len(groups) > 2 or any("wd_mult" not in group for group in groups.values()):
        raise FormatError(
            f"{source.path} has {len(groups)} groups of an optimizer: Megatron has one, or one of "
            "matrices and one of the rest. Export another format."
        )
    return list(groups.values())


def _decays(name: str, dims: int) -> bool:
    """Whether Megatron lets a parameter decay."""
    return dims > 1 and not name.endswith(".bias")


def config_in(folder: Path) -> Mapping[str, Any] | None:
    """The config.json of a folder, if there is one."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    with reading(path, "the config of a model"):
        config = json.loads(path.read_text("utf-8"))
        if not isinstance(config, dict):
            raise TypeError("it is no dict")
        return config


# ---- checkpoints of Megatron-FSDP (``fsdp_dtensor``), under the keys that ``torch_dist`` has
#
# Such a folder is one of ``torch.distributed.checkpoint`` and nothing beside it. Weights, which are the ones
# in float32, are called as modules are, ``model.module.decoder.layers.0...``; states are
# ``optimizer.state.NAME.KIND``, and each parameter has the options of its group,
# ``optimizer.param_to_group_meta.NAME.OPTION``. Where an MLP is gated, its gate and up are tensors of their
# own, and so is each expert.
# The names are those of megatron.core 0.16, its ``fsdp_dtensor_checkpoint``.

_WEIGHT = re.compile(r"model(\d*)\.(?:module\.)*((?:decoder|embedding|output_layer)\..*)")
_STATE = re.compile(r"optimizer\.state\.(?:module\.)*(.+)\.(\w+)")
_OPTION = re.compile(r"optimizer\.param_to_group_meta\.(?:module\.)*(.+)\.(\w+)")
_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
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
    return _EXPERT.sub(r"mlp.experts.experts.\3.\1.\2", name)
