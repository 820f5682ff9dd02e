"""Checkpoints of Megatron-core (``torch_dist``), under the names of transformers' models, and back.

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
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from espalier.checkpoint.index import FormatError, TensorInfo
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
_LAYERS = "decoder.layers."
_STATE = "optimizer.state."
MASTERS = ("param", "fp32_param")  # of the distributed optimizer and of the one for 16 bits
_GROUPED = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")  # by what Megatron makes groups
_BESIDE = {"params", "step", "bias_correction", "default_config", "max_lr", "min_lr", "pre_wd_mult"}
_BESIDE |= {"pre_lr_mult", *_GROUPED}


class Place(NamedTuple):
    """Where values of a tensor of transformers' stand in one of Megatron's.

    Attributes:
        box: of the tensor ``name``.
        there: the same values in the tensor ``key``, which may have one dim more before.
        turned: whether rows are columns there.
    """

    name: str
    box: Box
    key: str
    there: Box
    turned: bool = False


class Sizes(NamedTuple):
    """What is to be known of a model: heads of queries, of keys and values, and the lengths of dims."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head: int
    inner: int
    words: int
    positions: int

    @staticmethod
    def of(config: Mapping[str, Any]) -> Sizes:
        """Those of a config.json."""

        def get(*names: str) -> int | None:
            return next((int(config[n]) for n in names if config.get(n) is not None), None)

        hidden, heads = get("hidden_size", "n_embd"), get("num_attention_heads", "n_head")
        layers, words = get("num_hidden_layers", "n_layer"), get("vocab_size")
        if hidden is None or heads is None or layers is None or words is None:
            raise FormatError("The config does not say hidden_size, num_attention_heads and the like.")
        return Sizes(
            layers,
            hidden,
            heads,
            get("num_key_value_heads") or heads,
            get("head_dim") or hidden // heads,
            get("intermediate_size", "n_inner") or 4 * hidden,
            words,
            get("max_position_embeddings", "n_positions") or 0,
        )


def places(config: Mapping[str, Any], *, stacked: bool) -> Iterator[Place]:
    """Where each tensor that such a model may have stands.

    Args:
        config: of a model of transformers.
        stacked: whether layers are one tensor, else each has its own.

    Raises:
        FormatError: the model is of no kind that is known.
    """
    kind, sizes = config.get("model_type"), Sizes.of(config)
    if kind not in _KINDS:
        raise FormatError(
            f"Models of the type {kind!r} have no names of Megatron's here: expected {', '.join(_KINDS)}."
        )
    outside, inside, layers = _KINDS[kind]
    for name, key, shape in outside(sizes):
        whole = Box((0,) * len(shape), shape)
        yield Place(name, whole, key, whole)
    for i in range(sizes.layers):
        for place in inside(sizes):
            for key in (place.key, *_OLDER.get(place.key, ())):
                there = place.there
                if stacked:
                    there = Box((i, *there.offsets), (1, *there.sizes))
                middle = "" if stacked else f"{i}."
                yield Place(
                    f"{layers}{i}.{place.name}",
                    place.box,
                    f"{_LAYERS}{middle}{key}",
                    there,
                    place.turned,
                )


def _rows(
    name: str, key: str, parts: Iterable[tuple[int, int, int]], width: int | None, turned: bool = False
) -> Iterator[Place]:
    """Of a tensor and its bias: runs of rows, from where, to where, how many."""
    for start, at, n in parts:
        if width is None:
            yield Place(name, Box((start,), (n,)), key, Box((at,), (n,)))
            continue
        box, there = Box((start, 0), (n, width)), Box((at, 0), (n, width))
        if turned:
            box = Box(box.offsets[::-1], box.sizes[::-1])
        yield Place(name, box, key, there, turned)


def _queries(s: Sizes) -> tuple[list[tuple[int, int, int]], ...]:
    """Rows of queries, keys and values, in matrices of their own and in Megatron's."""
    each = s.heads // s.groups * s.head
    group = each + 2 * s.head
    return (
        [(g * each, g * group, each) for g in range(s.groups)],
        [(g * s.head, g * group + each, s.head) for g in range(s.groups)],
        [(g * s.head, g * group + each + s.head, s.head) for g in range(s.groups)],
    )


def _llama(s: Sizes) -> Iterator[Place]:
    """A layer of Llama's kind."""
    for word, parts in zip("qkv", _queries(s), strict=True):
        yield from _rows(f"self_attn.{word}_proj.weight", f"{_QKV}weight", parts, s.hidden)
        yield from _rows(f"self_attn.{word}_proj.bias", f"{_QKV}bias", parts, None)
    for word in "qk":
        key = f"self_attention.{word}_layernorm.weight"
        yield from _rows(f"self_attn.{word}_norm.weight", key, [(0, 0, s.head)], None)
    rows = [(0, 0, s.hidden)]
    yield from _rows("self_attn.o_proj.weight", f"{_PROJ}weight", rows, s.heads * s.head)
    yield from _rows("self_attn.o_proj.bias", f"{_PROJ}bias", rows, None)
    yield from _rows("input_layernorm.weight", f"{_QKV}layer_norm_weight", rows, None)
    yield from _rows("post_attention_layernorm.weight", f"{_FC1}layer_norm_weight", rows, None)
    for i, word in enumerate(("gate", "up")):
        parts = [(0, i * s.inner, s.inner)]
        yield from _rows(f"mlp.{word}_proj.weight", f"{_FC1}weight", parts, s.hidden)
        yield from _rows(f"mlp.{word}_proj.bias", f"{_FC1}bias", parts, None)
    yield from _rows("mlp.down_proj.weight", f"{_FC2}weight", rows, s.inner)
    yield from _rows("mlp.down_proj.bias", f"{_FC2}bias", rows, None)


def _gpt2(s: Sizes) -> Iterator[Place]:
    """A layer of GPT-2, whose matrices have inputs as rows."""
    size = s.heads * s.head
    for i, parts in enumerate(_queries(s)):
        parts = [(start + i * size, at, n) for start, at, n in parts]
        yield from _rows("attn.c_attn.weight", f"{_QKV}weight", parts, s.hidden, turned=True)
        yield from _rows("attn.c_attn.bias", f"{_QKV}bias", parts, None)
    rows, inner = [(0, 0, s.hidden)], [(0, 0, s.inner)]
    for kind in ("weight", "bias"):
        yield from _rows(f"ln_1.{kind}", f"{_QKV}layer_norm_{kind}", rows, None)
        yield from _rows(f"ln_2.{kind}", f"{_FC1}layer_norm_{kind}", rows, None)
    for name, key, parts, width in (
        ("attn.c_proj", _PROJ, rows, size),
        ("mlp.c_fc", _FC1, inner, s.hidden),
        ("mlp.c_proj", _FC2, rows, s.inner),
    ):
        yield from _rows(f"{name}.weight", f"{key}weight", parts, width, turned=True)
        yield from _rows(f"{name}.bias", f"{key}bias", parts, None)


def _around(embedding: str, norm: str, position: str = "") -> Any:
    """What a model has outside of layers: name, key, shape."""

    def tensors(s: Sizes) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        yield f"{embedding}.weight", "embedding.word_embeddings.weight", (s.words, s.hidden)
        yield "lm_head.weight", "output_layer.weight", (s.words, s.hidden)
        if position:
            yield f"{position}.weight", "embedding.position_embeddings.weight", (s.positions, s.hidden)
        for kind in ("weight", "bias"):
            yield f"{norm}.{kind}", f"decoder.final_layernorm.{kind}", (s.hidden,)

    return tensors


_QKV, _PROJ = "self_attention.linear_qkv.", "self_attention.linear_proj."
_FC1, _FC2 = "mlp.linear_fc1.", "mlp.linear_fc2."
# norms that are modules of their own there
_OLDER = {
    f"{linear}layer_norm_{kind}": (f"{norm}.{kind}",)
    for linear, norm in ((_QKV, "input_layernorm"), (_FC1, "pre_mlp_layernorm"))
    for kind in ("weight", "bias")
}
_LLAMA = _around("model.embed_tokens", "model.norm"), _llama, "model.layers."
_KINDS: dict[str, tuple[Any, Any, str]] = {
    "gpt2": (_around("transformer.wte", "transformer.ln_f", "transformer.wpe"), _gpt2, "transformer.h."),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
}


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
        return source
    if config is None or "model_type" not in config:
        raise FormatError(
            f"{source.path} is a checkpoint of Megatron's, whose tensors have other names and shapes: give "
            "a folder with the config.json of a model of transformers (--like), or load it into such a model."
        )
    weights = {key for key in source.entries if not key.startswith("optimizer.")}
    if routed := sorted(key for key in weights if ".mlp.experts." in key or ".mlp.router." in key):
        raise FormatError(
            f"{source.path} has experts ({routed[0]}, ...), which are not read here. Convert it to the hub's "
            "format first, by Megatron-Bridge's or Megatron's own converter, and load that folder."
        )
    stacked = not any(key.startswith(f"{_LAYERS}0.") for key in weights)
    table = [place for place in places(config, stacked=stacked) if place.key in weights]
    wrong = [f"{key} is not in it" for key in sorted(weights - {place.key for place in table})]
    wrong += _other_sizes(source, table)
    if wrong:
        raise FormatError(
            listed(f"{source.path} does not hold the weights of this {config['model_type']}:", wrong, 8)
            + "\nGive the config of the model that was saved."
        )
    kinds = _kinds_of(source, weights)
    parts: dict[str, list[_Part]] = defaultdict(list)
    for box, there, turned, name, key in ((p.box, p.there, p.turned, p.name, p.key) for p in table):
        master = next((f"{_STATE}{k}.{key}" for k in MASTERS if k in kinds), key)
        parts[f"model.{name}"].append(_Part(box, master, there, turned))
        for kind in (k for k in kinds if k not in MASTERS):
            parts[f"{_STATE}{name}.{kind}"].append(_Part(box, f"{_STATE}{kind}.{key}", there, turned))
    shapes = {name: len(parts[f"model.{name}"][0].box.sizes) for name in dict.fromkeys(p.name for p in table)}
    steps, values = _options(source, shapes) if kinds else ({}, {})
    composed = Composed(source, parts, steps)
    if not kinds and any("bucket_idx_" in key for key in source.entries):
        composed.without = (
            f"{source.path} has an optimizer in dp_reshardable buckets, which say no names. Load it under "
            "Megatron and save it with --dist-ckpt-optim-fully-reshardable"
        )
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
        kind, _, key = name.removeprefix(_STATE).partition(".")
        if name.startswith(_STATE) and key in weights:
            holders[kind].add(key)
            if source.entries[name].shape != source.entries[key].shape:
                raise FormatError(
                    f"{source.path}: {name} is flat, as megatron.core before 0.14 wrote it. Save it again by "
                    "a later one, with dist_ckpt_optim_fully_reshardable."
                )
    return [kind for kind, keys in holders.items() if len(keys) == len(weights)]


def _options(source: TensorSource, dims: Mapping[str, int]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Counts of steps, and what an optimizer keeps beside tensors, as torch's distributed checkpoint has it.

    Args:
        dims: of each weight, how many.
    """
    groups, step = _groups(source)
    steps: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for i, group in enumerate(groups):
        decayed = group.get("wd_mult", 1.0) != 0
        names = [n for n, d in dims.items() if _decays(n, d) is decayed or len(groups) == 1]
        values[f"optimizer.param_groups.{i}.params"] = names
        values |= {f"optimizer.param_groups.{i}.{k}": x for k, x in group.items() if k not in _BESIDE}
        count = group.get("step", step)
        if count is not None:
            steps |= {f"{_STATE}{n}.step": torch.tensor(float(count)) for n in names}
    return steps, values


def _groups(source: TensorSource) -> tuple[list[Mapping[str, Any]], Any]:
    """The options of groups, and the count of steps that they have in common."""
    common = load_records(source.path / COMMON, "what Megatron has in common.pt")
    saved = [common.get("optimizer")]
    saved += [
        source.values[key]
        for key in source.values
        if key.startswith("optimizer.distributed.") and ".optimizer/shard" in key
    ]
    groups, step = list[Mapping[str, Any]](), None
    while saved:
        x = saved.pop(0)
        if isinstance(x, Mapping):
            if isinstance(x.get("param_groups"), list):
                groups += [g for g in x["param_groups"] if isinstance(g, Mapping)]
            state = x.get("state")
            step = state.get("common_step", step) if isinstance(state, Mapping) else step
            saved += [y for key, y in x.items() if key not in ("param_groups", "state")]
        elif isinstance(x, list):
            saved += x
    kinds = [tuple(repr(group.get(key)) for key in _GROUPED) for group in groups]
    if len(groups) > 2 or (len(groups) == 2 and (kinds[0][0] == kinds[1][0] or kinds[0][1:] != kinds[1][1:])):
        raise FormatError(
            f"{source.path} has {len(groups)} groups of an optimizer, and does not say which parameters are "
            "in which: expected one, or two of which one has wd_mult = 0. Load without optimizer=True."
        )
    return groups, step


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
    """A model under the keys of Megatron's, layers stacked; its optimizer too, where it has options.

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
    older = {key for keys in _OLDER.values() for key in keys}
    table = [p for p in places(config, stacked=True) if p.key.removeprefix(_LAYERS) not in older]
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
        states = source.under(f"{_STATE}{place.name}.") if options else {}
        for kind, entry in states.items():
            name = f"{_STATE}{place.name}.{kind}"
            if kind == "step":
                steps.add(float(source.read(name)))
            elif entry.shape == source.entries[theirs].shape:
                parts[f"{_STATE}{kind}.{place.key}"].append(_Part(place.there, name, place.box, place.turned))
    if len(steps) > 1:
        raise FormatError(f"{source.path} has parameters of other counts of steps, which Megatron has not.")
    step = int(max(steps, default=0))
    common: dict[str, Any] = {"iteration": step, "checkpoint_version": 3.0}
    if options:
        common["optimizer"] = {"param_groups": _regrouped(source, options), "state": {"common_step": step}}
    buffer = io.BytesIO()
    torch.save(common, buffer)
    modules = {key.rpartition(".")[0] for key in parts if key.startswith(_LAYERS) and ".linear_" in key}
    modules |= {f"{_LAYERS}self_attention.core_attention"}
    layers = Sizes.of(config).layers
    return Outward(
        Composed(source, parts, {}),
        {f"{m}._extra_state/shard_{i}_{layers}": [None] for m in sorted(modules) for i in range(layers)},
        {COMMON: buffer.getvalue(), METADATA: json.dumps(_BACKENDS).encode()},
    )


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
