"""Optimizer states of Megatron's distributed optimizer that lie in buckets (``dp_reshardable``).

Such a state is a flat tensor for each bucket of each group of model-parallel ranks, without names: parameters
stand in it from the last to the first of a model, each at a multiple of 64 elements. The order is that of
modules, which is known but for a few that stand otherwise by the layers' implementation; and each bucket has
the weights in float32 beside the states, of which the weights of the checkpoint are the rounded values. So
each parameter is found by the order, and shown to be the one by its values.

An older form (``dp_zero_gather_scatter``) has the buckets of a buffer in one tensor, one after the other
without the space at their ends.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from espalier.checkpoint.index import FormatError, TensorInfo
from espalier.checkpoint.sources import TensorSource
from espalier.layout.layout import Box, overlap

STATE = "optimizer.state."
_CHAINED = re.compile(r"chained_\d+\.(?=optimizer\.)")
_BUCKET = re.compile(
    r"((?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.(.*)\.bucket_idx_(\d+|joined)\.(\w+)"
)
_GATHERED = re.compile(r"((?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.param_state/shard_0_1")
_JOINED = "joined"  # in place of the number of a bucket
_ALIGNED = 64  # elements at multiples of which parameters begin
_COMPARED = 256  # of a parameter's beginning and end
_COLUMNS = ("linear_qkv", "linear_fc1", "word_embeddings", "output_layer")
_ROWS = ("linear_proj.weight", "linear_fc2.weight")
_ORDER = tuple(
    "embedding.word_embeddings embedding.position_embeddings input_layernorm "
    "self_attention.linear_proj self_attention.linear_qkv.layer_norm self_attention.linear_qkv "
    "self_attention.q_layernorm self_attention.k_layernorm pre_mlp_layernorm "
    "mlp.linear_fc1.layer_norm mlp.router mlp.experts mlp.shared_experts mlp.linear_fc1 "
    "mlp.linear_fc2 final_layernorm output_layer".split()
)
"""Modules as a model of Megatron's has them, within a layer and around all."""
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.*)")
_EXPERT = re.compile(r"experts\.experts\.(\d+)\.")


class _Run(NamedTuple):
    """A box of a tensor whose values stand one after the other, row by row."""

    key: str
    box: Box


class _Parameter(NamedTuple):
    """What one rank of those that share its tensors holds of a parameter, in the order of its elements."""

    layer: int | None
    runs: tuple[_Run, ...]


class _Segment(NamedTuple):
    """A box, and where its values begin in a flat tensor."""

    box: Box
    bucket: str
    start: int


class Unpacked(TensorSource):
    """A checkpoint of Megatron's with each state under ``optimizer.state.KIND.KEY``, however it was kept.

    Args:
        weights: keys of the model.
        gated: whether the first matrix of an MLP is gate and up, one after the other.

    Attributes:
        without: says so, if the weights do not lie in the buckets as Megatron lays them out.
    """

    def __init__(self, source: TensorSource, weights: Collection[str], gated: bool) -> None:
        super().__init__(source.path)
        source = _Gathered(source)
        self._source, self.values, self.trees = source, source.values, source.trees
        self._names = {_CHAINED.sub("", name): name for name in source.entries}
        self.entries = {name: source.entries[theirs] for name, theirs in self._names.items()}
        self._segments: dict[str, list[_Segment]] = {}
        buckets = _buckets_in(source)
        if not buckets:
            return
        search = _Search(source, weights, gated)
        segments: dict[str, dict[Box, _Segment]] = defaultdict(dict)
        try:
            for groups in buckets.values():
                for key, segment in search.segments(groups):
                    segments[key].setdefault(segment.box, segment)  # what is not cut, every rank has
            self._take(segments, weights)
        except FormatError as error:
            self.without = str(error)

    def _take(self, segments: Mapping[str, Mapping[Box, _Segment]], weights: Collection[str]) -> None:
        source = self._source
        kinds = sorted({match[6] for name in source.entries if (match := _BUCKET.fullmatch(name))})
        any_bucket = next(name for name in source.entries if _BUCKET.fullmatch(name)).rpartition(".")[0]
        for key in sorted(weights):  # all ranks have them in one order
            shape = source.entries[key].shape
            if sum(math.prod(box.sizes) for box in segments.get(key, ())) != math.prod(shape):
                raise FormatError(f"{self.path}: the optimizer's buckets hold {key} in part, or not at all")
            for kind in kinds:
                dtype = source.entries[f"{any_bucket}.{kind}"].dtype
                name = f"{STATE}{kind}.{key}"
                self.entries[name] = TensorInfo(shape, dtype)
                self._segments[name] = [
                    each._replace(bucket=f"{each.bucket}.{kind}") for each in segments[key].values()
                ]

    def same(self, name: str) -> object:
        if name in self._segments:
            return name
        return self._source.same(self._names[name])

    def _read(self, name: str, box: Box) -> torch.Tensor:
        if name not in self._segments:
            return self._source.read(self._names[name], box)
        out = torch.empty(box.sizes, dtype=self.entries[name].dtype)
        for segment in self._segments[name]:
            common = overlap(segment.box, box)
            if common is not None:
                out[common.within(box)] = _flat(self._source, segment, common)
        return out


class _Gathered(TensorSource):
    """A source with what is kept as one value of all buckets, as a tensor for each buffer."""

    def __init__(self, source: TensorSource) -> None:
        super().__init__(source.path)
        self._source, self.values, self.trees = source, source.values, source.trees
        self._tensors: dict[str, torch.Tensor] = {}
        for name in source.values:
            if match := _GATHERED.fullmatch(name):
                for buffer, types in _one(source.values[name]).items():
                    for dtype, kinds in _one(types).items():
                        start = f"{match[1]}.gbuf_idx_{buffer}.dtype_{dtype}.bucket_idx_{_JOINED}"
                        flat = {f"{start}.{k}": x for k, x in _one(kinds).items()}
                        self._tensors |= {k: x for k, x in flat.items() if isinstance(x, torch.Tensor)}
        infos = {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in self._tensors.items()}
        self.entries = source.entries | infos

    def same(self, name: str) -> object:
        return name if name in self._tensors else self._source.same(name)

    def _read(self, name: str, box: Box) -> torch.Tensor:
        if name in self._tensors:
            return self._tensors[name][box.slices]
        return self._source.read(name, box)


def _one(value: Any) -> Mapping[Any, Any]:
    """A dict, by itself or in a list of one; what is neither is as empty."""
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return value if isinstance(value, Mapping) else {}


def _flat(source: TensorSource, segment: _Segment, box: Box) -> torch.Tensor:
    """A part of a segment's box."""
    strides = [math.prod(segment.box.sizes[i + 1 :]) for i in range(len(box.sizes))]
    rows = zip(box.offsets, segment.box.offsets, box.sizes, strides, strict=True)
    parts = [((at - start) * stride, (n - 1) * stride) for at, start, n, stride in rows]
    first, length = sum(at for at, _ in parts), sum(more for _, more in parts) + 1
    values = source.read(segment.bucket, Box((segment.start + first,), (length,)))
    return values.as_strided(box.sizes, strides)


def _buckets_in(source: TensorSource) -> dict[str, dict[int, list[list[str]]]]:
    """Buckets by optimizer and group of ranks: of each buffer, names without the kind, as they come."""
    order: dict[str, dict[int, set[tuple[int, str, int, str]]]] = defaultdict(lambda: defaultdict(set))
    for name in source.entries:
        if match := _BUCKET.fullmatch(name):
            chain, group, buffer, dtype, bucket, _ = match.groups()
            number = 0 if bucket == _JOINED else int(bucket)
            order[chain][int(group)].add((int(buffer), dtype, number, name.rpartition(".")[0]))
    return {
        chain: {
            group: [
                [name for *of, _, name in sorted(named) if of == [buffer, dtype]]
                for buffer, dtype in sorted({(each[0], each[1]) for each in named})
            ]
            for group, named in groups.items()
        }
        for chain, groups in order.items()
    }


class _Search:
    """Looks for the parameters of a model in the buckets of one optimizer."""

    def __init__(self, source: TensorSource, weights: Collection[str], gated: bool) -> None:
        self._source, self._gated = source, gated
        self._keys: dict[str, list[str]] = defaultdict(list)
        for key in sorted(weights, key=lambda key: (key.removesuffix("_v"), key.endswith("_v"))):
            self._keys[re.sub(r"_[wv]$", "", key)].append(key)

    def segments(self, groups: Mapping[int, Sequence[Sequence[str]]]) -> list[tuple[str, _Segment]]:
        """Keys, and where their values stand.

        Args:
            groups: buckets of each buffer of each group of ranks.

        Raises:
            FormatError: the values of the weights are in no place where parameters may begin.
        """
        n, farthest, why = len(groups), -1, ""
        for ranks in (k for k in range(1, n + 1) if n % k == 0):  # that share a tensor: not said anywhere
            parameters = [self._parameters(ranks, rank) for rank in range(ranks)]
            placed: list[tuple[str, _Segment]] = []
            try:
                for group, buffers in sorted(groups.items()):
                    for buckets in buffers:
                        placed.extend(self._in_buffer(parameters[group % ranks], buckets))
                return placed
            except LookupError as error:
                if len(placed) > farthest:
                    farthest, why = len(placed), str(error.args[0])
        raise FormatError(
            f"{self._source.path} has an optimizer in dp_reshardable buckets, of which {why}. Load it under "
            "Megatron and save it with --dist-ckpt-optim-fully-reshardable"
        )

    def _parameters(self, ranks: int, rank: int) -> list[_Parameter]:
        """Those of one of the ranks that share tensors, as buckets have them: the last comes first."""
        ordered: list[tuple[tuple[object, ...], _Parameter]] = []
        for name, keys in self._keys.items():
            shape = self._source.entries[keys[0]].shape
            match = _LAYER.fullmatch(name)
            rest = match[2] if match else name
            lead = (match is not None and match[1] is None) + ("experts.experts.linear" in rest)
            which = next((i for i, start in enumerate(_ORDER) if start in rest), len(_ORDER))
            for index in product(*map(range, shape[:lead])):
                layer = None if match is None else int(match[1] or index[0])
                expert = int(of[1]) if (of := _EXPERT.search(rest)) else (index[-1] if lead else 0)
                place = (which if match is None else 2.5, layer, which, expert, rest.rpartition(".")[0])
                runs = [run for key in keys for run in self._runs(key, rest, index, ranks, rank)]
                if runs:
                    ordered.append(((*place, rest.endswith("bias")), _Parameter(layer, tuple(runs))))
        ordered.sort(key=lambda each: each[0], reverse=True)
        return [parameter for _, parameter in ordered]

    def _runs(self, key: str, rest: str, index: tuple[int, ...], ranks: int, rank: int) -> Iterator[_Run]:
        """What a rank holds of one of the tensors of a key; nothing, if that cannot be cut into so many."""
        shape = self._source.entries[key].shape[len(index) :]
        parts, dim = 1, -1
        if any(word in rest for word in _COLUMNS) and "layer_norm" not in rest:
            dim, parts = 0, 2 if self._gated and "linear_fc1" in rest and key[-2:] not in ("_w", "_v") else 1
        elif rest.endswith(_ROWS):
            dim = 1
        if dim < 0:
            yield _Run(key, Box((*index, *(0,) * len(shape)), (*(1,) * len(index), *shape)))
            return
        length = shape[dim] // parts // ranks
        if length * ranks * parts != shape[dim]:
            return
        for part in range(parts):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = (part * ranks + rank) * length, length
            yield _Run(key, Box((*index, *offsets), (*(1,) * len(index), *sizes)))

    def _in_buffer(
        self, parameters: Sequence[_Parameter], buckets: Sequence[str]
    ) -> Iterator[tuple[str, _Segment]]:
        left = dict(enumerate(parameters))
        last = -1
        for bucket in buckets:
            end = self._source.entries[f"{bucket}.param"].shape[0]
            base = at = 0  # where this bucket begins, and where the last parameter ended
            while at < end:
                start = base + -(-(at - base) // _ALIGNED) * _ALIGNED
                joined = bucket.endswith(_JOINED) and start > at
                if start >= end and not joined:
                    break
                try:
                    last = self._at(left, last, parameters, bucket, start)
                except LookupError:
                    if not joined:
                        raise
                    last, base, start = self._at(left, last, parameters, bucket, at), at, at
                at = start
                for run in left.pop(last).runs:
                    yield run.key, _Segment(run.box, bucket, at)
                    at += math.prod(run.box.sizes)

    def _at(
        self,
        left: Mapping[int, _Parameter],
        last: int,
        parameters: Sequence[_Parameter],
        bucket: str,
        start: int,
    ) -> int:
        """Which parameter stands at a place: the next, else one of this layer that was passed by, else the
        one that alone has these values.
        """
        following = next((i for i in left if i > last), None)
        layer = parameters[last].layer if last >= 0 else None
        passed = [i for i in left if i < last and left[i].layer == layer]
        for index in (following, *passed):
            if index is not None and self._equal(left[index], bucket, start):
                return index
        fitting = [i for i, parameter in left.items() if self._equal(parameter, bucket, start)]
        if len(fitting) != 1:
            have = f"{len(fitting)} weights have" if fitting else "no weight has"
            raise LookupError(f"{have} the values that stand at {start} of {bucket}.param")
        return fitting[0]

    def _equal(self, parameter: _Parameter, bucket: str, start: int) -> bool:
        """Whether rounded values at a place are a parameter's, at its beginning and end."""
        stored = f"{bucket}.param"
        end = start + sum(math.prod(run.box.sizes) for run in parameter.runs)
        if end > self._source.entries[stored].shape[0]:
            return False
        for run, first in ((parameter.runs[0], True), (parameter.runs[-1], False)):
            offsets, sizes = run.box
            n = min(sizes[-1], _COMPARED)
            ends = [o + s - 1 for o, s in zip(offsets[:-1], sizes[:-1], strict=True)]
            at = offsets if first else (*ends, offsets[-1] + sizes[-1] - n)
            weight = self._source.read(run.key, Box(tuple(at), (*(1,) * (len(sizes) - 1), n))).flatten()
            master = self._source.read(stored, Box((start if first else end - n,), (n,)))
            kept = max(weight.dtype, master.dtype, key=lambda dtype: torch.finfo(dtype).eps)
            if not torch.equal(master.to(kept), weight.to(kept)):
                return False
        return True
