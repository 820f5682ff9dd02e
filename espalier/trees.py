"""Nested containers: what is in them, and the same containers with other things in them; graphs of autograd.

What a walk opens is the same everywhere: tuples, lists and dicts, of any class. ``torch.Size`` is one value.
More is opened where it is asked for: slices, dataclasses and torch's distributions (``sought``), objects of
other classes (``objects``), what torch's own functions open (:func:`flatten`).
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.distributions import Distribution

from espalier.torch_private import pytree

_CONTAINERS = (dict, tuple, list)
# in these there is nothing, whatever is looked for: most of what torch's operations are given beside tensors
ATOMS = frozenset(
    (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def tensors_in(tree: Any, objects: int = 0, kind: type = torch.Tensor) -> list[Any]:
    """All tensors in nested tuples, lists and dicts; or what else is of a kind.

    Args:
        tree: the containers.
        objects: how many objects of other classes, one within another, are looked into.
    """
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        if not objects:
            return []
        tree, objects = [*attributes(tree).values()], objects - 1
    found: list[Any] = []
    for x in tree:  # most are no containers: at once
        if type(x) in ATOMS:
            continue
        if isinstance(x, kind):
            found.append(x)
        else:
            found += tensors_in(x, objects, kind)
    return found


def attributes(x: Any) -> dict[str, Any]:
    """What an object has of its own by name, in slots too."""
    held = {**vars(x)} if hasattr(x, "__dict__") else {}
    for kind in type(x).__mro__[:-1]:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            at = (
                f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and name[-2:] != "__" else name
            )
            if name not in ("__dict__", "__weakref__") and hasattr(x, at):
                held[at] = getattr(x, at)
    return held


def object_map(fn: Callable[[Any], Any], tree: Any, kind: type, objects: int, left: tuple[type, ...]) -> Any:
    """:func:`tree_map` of all leaves of a kind, also those in objects of other classes, which are copied.

    Args:
        fn: what is done with a leaf of the kind.
        tree: the containers.
        kind: of what is sought.
        objects: how many objects of other classes, one within another, are opened.
        left: classes of which none is.
    """
    copies: dict[int, Any] = {}

    def opened(x: Any, objects: int) -> Any:
        if isinstance(x, kind):
            return fn(x)
        if id(x) in copies:
            return copies[id(x)]
        if not objects or isinstance(x, (type, ModuleType, *left)):
            return x
        held = attributes(x)
        if not tensors_in([*held.values()], objects - 1, kind):
            return x
        copies[id(x)] = other = copy.copy(x)
        for name, value in held.items():
            object.__setattr__(other, name, tree_map(partial(opened, objects=objects - 1), value))
        return other

    return tree_map(partial(opened, objects=objects), tree)


def tree_map(fn: Callable[[Any], Any], tree: Any, sought: tuple[type, ...] | None = None) -> Any:
    """``fn`` on every leaf of nested tuples, lists and dicts.

    A container of a class of its own (a named tuple, transformers' ``ModelOutput``) stays one of that class.

    Args:
        fn: what is done with a leaf.
        tree: the containers.
        sought: if given, slices are opened too, and those dataclasses in which one of these kinds is. What is
            of these kinds is a leaf, whatever it is besides.
    """
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([tree_map(fn, x, sought) for x in tree])
    if kind is dict:
        return {k: tree_map(fn, v, sought) for k, v in tree.items()}
    if kind in ATOMS or (sought is None and not isinstance(tree, _CONTAINERS)):
        return fn(tree)  # most leaves: at once
    if _inner(tree, sought) is None:
        return fn(tree)
    if isinstance(tree, dict):
        other = copy.copy(tree)
        for k, v in tree.items():
            other[k] = tree_map(fn, v, sought)
        return other
    if isinstance(tree, tuple | list):
        parts = [tree_map(fn, x, sought) for x in tree]
        if hasattr(kind, "_make"):  # past a class's own checks of what is not there yet (PackedSequence)
            return kind._make(parts)
        return kind(*parts) if hasattr(tree, "_fields") else kind(parts)
    if kind is slice:
        return slice(*[tree_map(fn, x, sought) for x in (tree.start, tree.stop, tree.step)])
    if isinstance(tree, Distribution):
        return _distribution_of(tree, {name: tree_map(fn, x, sought) for name, x in _arguments(tree).items()})
    other = copy.copy(tree)
    for field in dataclasses.fields(tree):
        object.__setattr__(other, field.name, tree_map(fn, getattr(tree, field.name), sought))
    return other


def leaves(
    tree: Any, kind: type | tuple[type, ...] = object, sought: tuple[type, ...] | None = None
) -> list[Any]:
    """The leaves of a kind, in the order of :func:`tree_map`."""
    inner = _inner(tree, sought)
    if inner is None:
        return [tree] if isinstance(tree, kind) else []
    found: list[Any] = []
    for part in inner:
        if type(part) not in ATOMS:
            found += leaves(part, kind, sought)
        elif isinstance(part, kind):
            found.append(part)
    return found


def _inner(tree: Any, sought: tuple[type, ...] | None) -> Iterable[Any] | None:
    """What is in a container; None of a leaf."""
    if sought is not None and isinstance(tree, sought):  # first: others may have an answer of their own to it
        return None
    if isinstance(tree, _CONTAINERS):
        if isinstance(tree, torch.Size):
            return None
        return tree.values() if isinstance(tree, dict) else tree
    if sought is None:
        return None
    if isinstance(tree, slice):
        return (tree.start, tree.stop, tree.step)
    return _fields(tree) if _is_record(tree) and _holds(_fields(tree), sought) else None


def _is_record(x: Any) -> bool:
    if isinstance(x, Distribution):
        return bool(_arguments(x))
    return dataclasses.is_dataclass(x) and not isinstance(x, type)


def _arguments(of: Distribution) -> dict[str, Any]:
    """What a distribution of torch is made of, by the names by which its attributes have it; {} if not known.

    Of several parameters that say the same (``probs``, ``logits``) the one that it was made of.
    """
    if not type(of).__module__.startswith("torch.distributions."):
        return {}
    held, found = vars(of), dict[str, Any]()
    for name, given in inspect.signature(type(of)).parameters.items():
        attribute = next((a for a in (name, f"_{name}", _RENAMED.get(name)) if a in held), None)
        if name == "validate_args":
            continue
        if attribute is not None:
            found[attribute] = held[attribute]
        elif given.default is given.empty:
            if not isinstance(getattr(type(of), name, None), property):
                return {}
            found[name] = getattr(of, name)
    for names in _ALIKE:
        among = [name for name in names if name in found]
        made_of = [name for name in among if found[name] is held.get("_param")] or among
        for name in among:
            if name != made_of[0]:
                del found[name]
    return found


def _distribution_of(like: Distribution, arguments: Mapping[str, Any]) -> Any:
    """The same distribution of others; what stands for one, where something stands for a tensor."""
    if all(map(_is_value, arguments.values())):
        named = {_NAMES.get(name, name.removeprefix("_")): x for name, x in arguments.items()}
        return type(like)(**named, validate_args=False)
    other = copy.copy(like)
    for name, x in arguments.items():
        if name in _ALIKE[0] and "_param" in vars(like):
            vars(other)["_param"] = x
        vars(other)[name] = x
    return other


def _is_value(x: Any) -> bool:
    if isinstance(x, Distribution):
        return all(map(_is_value, _arguments(x).values()))
    return isinstance(x, torch.Tensor | int | float | list)


_ALIKE = ("probs", "logits"), ("scale_tril", "covariance_matrix", "precision_matrix")
_RENAMED = {"base_distribution": "base_dist"}
_NAMES = {attribute: name for name, attribute in _RENAMED.items()}


def _fields(record: Any) -> list[Any]:
    if isinstance(record, Distribution):
        return [*_arguments(record).values()]
    return [getattr(record, field.name) for field in dataclasses.fields(record)]


def _holds(tree: Any, sought: tuple[type, ...]) -> bool:
    """Whether one of these kinds is in a tree whose dataclasses are all opened: in one pass."""
    if isinstance(tree, sought):
        return True
    inner = _fields(tree) if _is_record(tree) and not isinstance(tree, _CONTAINERS) else _inner(tree, sought)
    return inner is not None and any(_holds(x, sought) for x in inner)


def named_leaves(tree: Any, opened: Callable[[str, Any], bool], name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of mappings and sequences, each with its name: keys and places, joined by dots.

    Args:
        tree: the containers.
        opened: whether one of a name is opened.
        name: the tree's own.
    """
    if not opened(name, tree):
        yield name, tree
        return
    for key, x in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from named_leaves(x, opened, f"{name}.{key}" if name else str(key))


def nodes_from(roots: Iterable[Any], ends: Container[Any] = ()) -> Iterator[Any]:
    """The nodes of autograd's graph that these lead to, and they themselves, each once.

    Args:
        roots: as ``x.grad_fn`` gives them; Nones are left out.
        ends: nodes behind which no others are sought.
    """
    seen, stack = {None}, [*roots]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if node not in ends:
            stack += [beyond for beyond, _ in node.next_functions]


# ---- what torch's own functions open: also classes that are registered with torch.utils._pytree


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves, and the form of the containers: it can be hashed, printed and compared."""
    return pytree.tree_flatten(tree)


def unflatten(parts: Sequence[Any], form: Any) -> Any:
    """Containers of a form with these leaves."""
    return pytree.tree_unflatten(parts, form)


def flat_map(fn: Callable[[Any], Any], tree: Any, kind: type = object) -> Any:
    """``fn`` on every leaf of a kind, other leaves as they are."""
    parts, form = flatten(tree)
    return unflatten([fn(x) if isinstance(x, kind) else x for x in parts], form)


def instances_of(kind: type) -> list[Any]:
    """All objects of a class that the process has: each refers to its class, as few other things do."""
    kinds = [kind]
    for known in kinds:
        kinds += type.__subclasses__(known)
    ids = {*map(id, kinds)}  # some classes have no hash
    return [thing for thing in gc.get_referrers(*kinds) if id(type(thing)) in ids]
