"""The walker of nested containers: what it opens, and what it makes."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutput

from espalier.trees import flat_map, flatten, leaves, named_leaves, tensors_in, tree_map, unflatten

Pair = namedtuple("Pair", "first, second")
ONE, TWO, THREE = (torch.tensor(float(i)) for i in (1, 2, 3))


@dataclass
class Held:
    value: Any
    said: str = "said"
    inner: Any = None
    rest: list[Any] = field(default_factory=list)


class Own:
    def __init__(self, value: Any) -> None:
        self.value = value


def doubled(x: Any) -> Any:
    return 2 * x if isinstance(x, torch.Tensor) else x


def test_containers_keep_their_classes() -> None:
    top = torch.topk(torch.arange(4.0), 2)
    tree = {
        "list": [ONE, (TWO, "word", None)],
        "pair": Pair(ONE, {"deep": TWO}),
        "ordered": OrderedDict(b=ONE, a=TWO),
        "output": CausalLMOutput(loss=ONE, logits=TWO),
        "top": top,
        "size": torch.Size((2, 3)),
    }
    out = tree_map(doubled, tree)
    for key, x in tree.items():
        assert type(out[key]) is type(x), key
    assert out["list"] == [2, (4, "word", None)]
    assert out["pair"] == Pair(2, {"deep": 4})
    assert list(out["ordered"].items()) == [("b", 2), ("a", 4)]
    assert (out["output"].loss, out["output"].logits) == (2, 4) == (out["output"][0], out["output"]["logits"])
    assert out["top"].values.tolist() == [6, 4]
    assert out["size"] is tree["size"]
    assert tree["output"].loss is ONE and tree["ordered"]["b"] is ONE  # the one given is as it was


def test_slices_and_dataclasses_are_opened_where_something_is_sought() -> None:
    closed, slim = Held("text"), slice(ONE, None, TWO)
    nested = Held(ONE, inner=Held(TWO, rest=[closed]))
    tree = (nested, closed, slim, Pair(ONE, TWO))
    seen: list[Any] = []
    assert tree_map(lambda x: seen.append(x) or x, tree) == tree
    assert [type(x) for x in seen] == [Held, Held, slice, torch.Tensor, torch.Tensor]
    assert leaves(tree) == seen and leaves(tree, slice) == [slim]

    opened = tree_map(doubled, tree, (torch.Tensor, Pair))
    assert (opened[0].value, opened[0].inner.value, opened[0].said) == (2, 4, "said")
    assert (nested.value, nested.inner.value) == (1, 2)
    assert opened[0].inner.rest[0] is closed and opened[1] is closed  # nothing sought is in it
    assert opened[2] == slice(2, None, 4)
    assert opened[3] is tree[3]  # what is sought is a leaf, though a tuple
    assert leaves(tree, torch.Tensor, (torch.Tensor, Pair)) == [ONE, TWO, ONE, TWO]
    assert leaves(tree, str, (torch.Tensor,)) == ["said", "said"]
    assert leaves((slim, nested), sought=()) == [ONE, None, TWO, nested]  # slices alone


def test_tensors_are_found_in_order_and_in_objects_so_deep() -> None:
    assert tensors_in(({"a": [ONE], "b": TWO}, (THREE, "x", None, torch.Size((1,))))) == [ONE, TWO, THREE]
    tree = [Own([ONE, Own({"a": Own(TWO)})]), THREE, Own]
    found = [[float(x) for x in tensors_in(tree, objects=depth)] for depth in range(4)]
    assert found == [[3], [1, 3], [1, 3], [1, 2, 3]]
    round_trip = Own(ONE)
    round_trip.again = [round_trip]  # type: ignore[attr-defined]
    assert tensors_in(round_trip, objects=3) == [ONE] * 3


def test_leaves_have_names() -> None:
    tree = {"a": {1: "x", "b": ["y", "z"]}, "c": MappingProxyType({"d": ()}), "e": {}}
    assert dict(named_leaves(tree, lambda name, x: name != "e" and isinstance(x, Mapping))) == {
        "a.1": "x",
        "a.b": ["y", "z"],
        "c.d": (),
        "e": {},
    }
    in_lists = named_leaves(["y", ("z",)], lambda _, x: isinstance(x, list | tuple))
    assert list(in_lists) == [("0", "y"), ("1.0", "z")]
    assert list(named_leaves(ONE, lambda *_: False)) == [("", ONE)]


def test_registered_classes_are_opened_as_torch_opens_them() -> None:
    tree = (CausalLMOutput(loss=ONE, logits=TWO), [Held(THREE), None], {"b": 1})
    values, form = flatten(tree)
    assert [x for x in values if isinstance(x, torch.Tensor)] == [ONE, TWO]
    again = unflatten(values, form)
    assert type(again[0]) is CausalLMOutput and again[0].loss is ONE and again[1:] == tree[1:]
    assert flatten(flat_map(doubled, tree))[1] == form and hash(form) == hash(flatten(again)[1])
    assert flat_map(lambda x: x + 1, tree, int)[2] == {"b": 2}
