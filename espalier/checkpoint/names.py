"""Which name in a file is which name of a model."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from espalier.checkpoint.pickles import FormatError
from espalier.checkpoint.reading import open_any
from espalier.checkpoint.sources import Source
from espalier.layout.regions import Box

_TREES = ("", "model.", "module.", "state_dict.", "model_state_dict.")
"""What often stands before names in a file; others are found."""


def tied(model: nn.Module) -> dict[str, str]:
    """Names of a model's state dict whose tensor has another name too, to that name.

    That is the one that Hugging Face's models keep, else the first.
    """
    later = [re.compile(pattern) for pattern in getattr(model, "_tied_weights_keys", None) or ()]
    of: dict[int, list[str]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        of.setdefault(id(x), []).append(name)
    found = {}
    for names in of.values():
        kept = next((n for n in names if not any(p.search(n) for p in later)), names[0])
        found.update({name: kept for name in names if name != kept})
    return found


def load_into(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Take the weights of a plain model from files of any known format.

    Raises:
        FormatError: see :class:`Foreign`.
    """
    source = Foreign(open_any(path), model, None)
    with torch.no_grad():
        for name, x in model.state_dict(keep_vars=True).items():
            if f"model.{name}" in source.entries:
                x.copy_(source.read(f"model.{name}"))


class Foreign(Source):
    """A source under a model's names: ``model.NAME``, and ``optimizer.state.NAME.KEY`` for optimizer states.

    There names may have something before them (``model.``, ``module.``), or lack what Hugging Face's models
    with a head put before those of the model without (``transformer.``). One name of a tied tensor is enough.

    Args:
        model: whose names they are.
        optimizer: of the model; None to leave its states.

    Attributes:
        values: ``optimizer``: its ``groups`` (``names`` of parameters and ``options``), and ``states`` that
            are no tensors.

    Raises:
        FormatError: tensors are missing, have another shape, or are there and not in the model; there are no
            states, or those of another optimizer.
    """

    def __init__(self, source: Source, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__(source.path)
        self._source = source
        state = model.state_dict(keep_vars=True)
        ties = tied(model)
        wanted = {n: tuple(x.shape) for n, x in state.items() if hasattr(x, "shape")}
        cut, prefix = _rule(getattr(model, "base_model_prefix", "") or "", list(wanted), source.entries)
        held: dict[str, list[str]] = {name: [] for name in wanted if name not in ties}
        for name in wanted:
            theirs = prefix + name.removeprefix(cut)
            if theirs in source.entries:
                held[ties.get(name, name)].append(theirs)
        used = {theirs for names in held.values() for theirs in names}
        left = [n for n in source.entries if n.startswith(prefix) and n not in used]
        self._check(model, {name: (wanted[name], names) for name, names in held.items()}, left)
        self._names = {f"model.{name}": held[ties.get(name, name)] for name in wanted}
        if optimizer is not None:
            names = {id(x): name for name, x in reversed(state.items())}
            order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
            known = {name.removeprefix(cut): names[id(x)] for name, x in state.items() if id(x) in names}
            found = _Optimizer(source, order, known, optimizer)
            self._names |= {f"optimizer.state.{at}": [theirs] for at, theirs in found.tensors.items()}
            self.values = {"optimizer": {"groups": found.groups, "states": found.states}}
        self.entries = {name: source.entries[theirs[0]] for name, theirs in self._names.items()}

    def _check(
        self, model: nn.Module, held: Mapping[str, tuple[tuple[int, ...], list[str]]], left: Iterable[str]
    ) -> None:
        there = self._source.entries
        wrong = [f"{name} is missing" for name, (_, names) in held.items() if not names]
        for name, (shape, names) in held.items():
            shapes = {there[theirs].shape for theirs in names}
            wrong += [f"{name} is {list(shape)}, there {list(s)}" for s in shapes if s != shape]
        ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        wrong += [f"{name} is not in the model" for name in left if not any(p.search(name) for p in ignored)]
        if wrong:
            shown = wrong if len(wrong) <= 8 else [*wrong[:8], f"and {len(wrong) - 8} more"]
            first = f"{self.path} does not hold the weights of this {type(model).__name__}:"
            raise FormatError(
                "\n  ".join([first, *shown])
                + "\nBuild the model that the file was saved from, or give another file."
            )

    def _read(self, name: str, box: Box) -> torch.Tensor:
        first, *others = self._names[name]
        value = self._source.read(first, box)
        for other in others:
            if not torch.equal(self._source.read(other, box), value):
                raise FormatError(
                    f"{self.path}: {first} and {other} differ, and are one tensor in this model. Build the "
                    "model without the tie, or give another file."
                )
        return value


_GROUPS = re.compile(r"(?P<tree>(?:.*\.)?)param_groups\.")
_BESIDE = ("params", "param_names", "initial_lr")  # what lies among options, and is none


class _Optimizer:
    """What a source holds of an optimizer, as torch's ``get_state_dict`` or ``state_dict`` lay it out.

    Args:
        order: names of the parameters, as the optimizer holds them.
        known: names in the source, to those.

    Attributes:
        tensors: ``NAME.KEY`` to the name in the source.
        states: by name and key, those that are no tensors.
        groups: names and options.
    """

    def __init__(
        self,
        source: Source,
        order: Sequence[str],
        known: Mapping[str, str],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        every = [*source.entries, *source.values]
        trees = {found["tree"] for name in every if (found := _GROUPS.match(name))}
        if len(trees) != 1:
            raise FormatError(
                f"{source.path} holds {len(trees) or 'no'} optimizers: expected one beside the weights, as "
                "state and param_groups of get_state_dict or state_dict. Load without optimizer=True."
            )
        tree = trees.pop()
        self.tensors: dict[str, str] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.groups: list[dict[str, Any]] = []
        of = self._read_groups(source, f"{tree}param_groups.", order, known)
        for theirs in every:
            word, _, key = theirs.removeprefix(f"{tree}state.").rpartition(".")
            if not theirs.startswith(f"{tree}state.") or word not in of:
                continue
            if theirs in source.entries:
                self.tensors[f"{of[word]}.{key}"] = theirs
            else:
                self.states.setdefault(of[word], {})[key] = source.values[theirs]
        self._check(source, order, optimizer)

    def _read_groups(
        self, source: Source, start: str, order: Sequence[str], known: Mapping[str, str]
    ) -> dict[str, str]:
        """Options by groups; gives the name for each word by which states call a parameter."""
        options: dict[str, dict[str, Any]] = {}
        for name in [*source.values, *source.entries]:
            if name.startswith(start):
                group, _, key = name.removeprefix(start).rpartition(".")
                value = source.read(name) if name in source.entries else source.values[name]
                options.setdefault(group, {})[key] = value
        of: dict[str, str] = {}
        for group, given in options.items():
            words = given.get("params", [group])  # a group for each parameter, where they were flattened
            for word in words if isinstance(words, list | tuple) else [words]:
                if isinstance(word, int) and len(of) < len(order):
                    of[str(word)] = order[len(of)]  # numbered as they come
                elif str(word) in known:
                    of[str(word)] = known[str(word)]
            names = [of[str(word)] for word in words if str(word) in of]
            kept = {key: value for key, value in given.items() if key not in _BESIDE}
            self.groups.append({"names": names, "options": kept})
        return of

    def _check(self, source: Source, order: Sequence[str], optimizer: torch.optim.Optimizer) -> None:
        there = {name for group in self.groups for name in group["names"]}
        wrong = [f"{name} is not in it" for name in order if name not in there]
        own = {key for group in optimizer.param_groups for key in group}
        strange = {key for group in self.groups for key in group["options"]} - own
        wrong += [f"it has the option {key}, which this one has not" for key in sorted(strange)]
        if wrong:
            first = f"{source.path} does not hold the state of this {type(optimizer).__name__}:"
            raise FormatError(
                "\n  ".join([first, *wrong[:8]])
                + "\nBuild the optimizer that was saved, or load without optimizer=True."
            )


def _rule(base: str, wanted: Collection[str], there: Mapping[str, Any]) -> tuple[str, str]:
    """What to take from the beginning of each name, and what to put there, so that most are found."""
    cuts = ("", f"{base}.") if base else ("",)

    def rules() -> Iterable[tuple[str, str]]:
        for cut in cuts:
            prefixes = dict.fromkeys(_TREES)
            for name in [*wanted][:1] + [*wanted][-1:]:
                short = name.removeprefix(cut)
                ends = (other.removesuffix(short) for other in there if other.endswith(f".{short}"))
                prefixes.update(dict.fromkeys(ends))
            yield from ((cut, prefix) for prefix in prefixes)

    return max(rules(), key=lambda rule: sum(rule[1] + n.removeprefix(rule[0]) in there for n in wanted))


__all__ = ["Foreign", "load_into", "tied"]
