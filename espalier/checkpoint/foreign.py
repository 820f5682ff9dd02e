"""Which name in a file of others is which name of a model, and what of an optimizer lies beside it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from espalier.checkpoint.index import FormatError
from espalier.checkpoint.megatron import in_names_of
from espalier.checkpoint.sources import TREES, TensorSource, is_extra_state, open_any
from espalier.layout.layout import Box
from espalier.texts import listed


def tied(model: nn.Module) -> dict[str, str]:
    """Names of a model's state dict whose tensor has another name too, to that name.

    That is the one that Hugging Face's models keep, else the first.
    """
    later = [re.compile(pattern) for pattern in getattr(model, "_tied_weights_keys", None) or ()]
    of: dict[int, list[str]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        of.setdefault(id(x), []).append(name)
    first_names = {}
    for names in of.values():
        kept = next((n for n in names if not any(p.search(n) for p in later)), names[0])
        first_names.update({name: kept for name in names if name != kept})
    return first_names


def _config_of(model: nn.Module) -> Mapping[str, Any] | None:
    """A model's config as config.json has it, if it is one of transformers."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    return to_dict() if callable(to_dict) else None


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


_FLAT = "_flat_param"  # what FSDP's LOCAL_STATE_DICT has
# what peft puts into the names of weights that have an adapter, or a copy that is trained
_ADAPTED = re.compile(r"(?<=\.)(base_layer|original_module|modules_to_save\.default)\.")


class Foreign(TensorSource):
    """A source under a model's names: ``model.NAME``, and ``optimizer.state.NAME.KEY`` for optimizer states.

    There names may have something before them (``model.``, ``module.``), or lack what Hugging Face's models
    with a head put before those of the model without (``transformer.``). One name of a tied tensor is enough.
    What peft has put into a model stays as it is where the source lacks it: adapters; the weights they were
    put around have their names of before there.

    Args:
        model: whose names they are.
        optimizer: of the model; None to leave its states.

    Attributes:
        values: ``model``: what modules are to be given by ``set_extra_state``; ``optimizer``: its ``groups``
            (``names`` of parameters and ``options``), and ``states`` that are no tensors.

    Raises:
        FormatError: tensors are missing, have another shape, or are there and not in the model; there are no
            states, or those of another optimizer.
    """

    def __init__(
        self, source: TensorSource, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        super().__init__(source.path)
        source = in_names_of(source, _config_of(model))
        self._source = source
        state = model.state_dict(keep_vars=True)
        ties = tied(model)
        wanted = {
            n: tuple(x.shape) for n, x in state.items() if hasattr(x, "shape") and not is_extra_state(n)
        }
        before = {name: _ADAPTED.sub("", name) for name in wanted}
        base = getattr(model, "base_model_prefix", "") or ""
        cut, prefix = _rule(base, list(before.values()), source.entries)
        names_of: dict[str, list[str]] = {name: [] for name in wanted if name not in ties}
        for name in wanted:
            spelled = (prefix + n.removeprefix(cut) for n in (name, before[name]))
            theirs = next((n for n in spelled if n in source.entries), None)
            if theirs is not None:
                names_of[ties.get(name, name)].append(theirs)
        around = {name.partition(".base_layer.")[0] + "." for name in wanted if ".base_layer." in name}
        adapters = {
            name for name, names in names_of.items() if not names and any(name.startswith(a) for a in around)
        }
        adapters = {name for name in adapters if before[name] == name}
        self._kept = {f"model.{name}" for name in adapters}
        for name in adapters:
            del names_of[name]
        used = {theirs for names in names_of.values() for theirs in names}
        extra = {prefix + n.removeprefix(cut): n for n in state if is_extra_state(n)}
        # a file may have been written by what keeps none
        said = {n: source.values[theirs] for theirs, n in extra.items() if theirs in source.values}
        values: dict[str, Any] = {"model": said}
        every = *source.entries, *filter(is_extra_state, source.values)
        left = [n for n in every if n.startswith(prefix) and n not in used and n not in extra]
        self._check(model, {name: (wanted[name], names) for name, names in names_of.items()}, left)
        self._names = {f"model.{n}": names_of[ties.get(n, n)] for n in wanted if n not in adapters}
        if optimizer is not None:
            names = {id(x): name for name, x in reversed(state.items())}
            order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
            known = {name.removeprefix(cut): names[id(x)] for name, x in state.items() if id(x) in names}
            reader = StoredOptimizer(source, order, known)
            reader.check(order, optimizer)
            self._names |= {f"optimizer.state.{at}": [theirs] for at, theirs in reader.tensors.items()}
            values["optimizer"] = {"groups": reader.groups, "states": reader.states}
        self.values = values
        self.entries = {name: source.entries[theirs[0]] for name, theirs in self._names.items()}

    def _check(
        self,
        model: nn.Module,
        shapes_and_names: Mapping[str, tuple[tuple[int, ...], list[str]]],
        left: Iterable[str],
    ) -> None:
        there = self._source.entries
        wrong = [f"{name} is missing" for name, (_, names) in shapes_and_names.items() if not names]
        for name, (shape, names) in shapes_and_names.items():
            shapes = {there[theirs].shape for theirs in names}
            wrong += [f"{name} is {list(shape)}, there {list(s)}" for s in shapes if s != shape]
        ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        wrong += [f"{name} is not in the model" for name in left if not any(p.search(name) for p in ignored)]
        if wrong:
            first = f"{self.path} does not hold the weights of this {type(model).__name__}:"
            todo = "Build the model that the file was saved from, or give another file."
            if any(name.rpartition(".")[2] == _FLAT for name in there):
                todo = "Flat parameters have no names: save with SHARDED_STATE_DICT or FULL_STATE_DICT."
            raise FormatError(f"{listed(first, wrong, 8)}\n{todo}")

    def fill(self, name: str, local: torch.Tensor, box: Box) -> None:
        """See :meth:`TensorSource.fill`."""
        if name not in self._kept:
            super().fill(name, local, box)

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


class StoredOptimizer:
    """What a source holds of an optimizer, as torch's ``get_state_dict`` or ``state_dict`` lay it out.

    Args:
        order: names of the parameters, as the optimizer holds them; none, where that is not known.
        known: names in the source, to those.

    Attributes:
        tensors: ``NAME.KEY`` to the name in the source.
        states: by name and key, those that are no tensors.
        groups: names and options.

    Raises:
        FormatError: there is none, or more than one; its parameters have no names; states were lost.
    """

    def __init__(self, source: TensorSource, order: Sequence[str], known: Mapping[str, str]) -> None:
        self._source = source
        every = [*source.entries, *source.values]
        trees = {match["tree"] for name in every if (match := _GROUPS.match(name))}
        if len(trees) != 1:
            if source.without:
                raise FormatError(f"{source.without}. Or load without optimizer=True.")
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
        self._check_apart(source)

    def _read_groups(
        self, source: TensorSource, start: str, order: Sequence[str], known: Mapping[str, str]
    ) -> dict[str, str]:
        """Options by groups; gives the name for each word by which states call a parameter."""
        options: dict[str, dict[str, Any]] = {}
        for name in [*source.values, *source.entries]:
            if name.startswith(start):
                group, _, key = name.removeprefix(start).rpartition(".")
                value = source.read(name) if name in source.entries else source.values[name]
                options.setdefault(group, {})[key] = value
        of: dict[str, str] = {}
        for group, group_options in options.items():
            # a group for each parameter, where they were flattened
            words = group_options.get("params", [group])
            words = words if isinstance(words, list | tuple) else [words]
            for word in words:
                if isinstance(word, int) and len(of) < len(order):
                    of[str(word)] = order[len(of)]  # numbered as they come
                elif str(word) in known:
                    of[str(word)] = known[str(word)]
                elif isinstance(word, int) and not order:
                    raise FormatError(
                        f"{source.path} numbers the optimizer's parameters, and their names are not in it: "
                        "load it into the model, engine.load_weights(path, optimizer=True)."
                    )
            names = [of[str(word)] for word in words if str(word) in of]
            kept = {key: value for key, value in group_options.items() if key not in _BESIDE}
            self.groups.append({"names": names, "options": kept})
        return of

    def check(self, order: Sequence[str], optimizer: torch.optim.Optimizer) -> None:
        """See that it is of such an optimizer.

        Raises:
            FormatError: it is not.
        """
        there = {name for group in self.groups for name in group["names"]}
        wrong = [f"{name} is not in it" for name in order if name not in there]
        wrong += strange_options(self.groups, optimizer)
        names = iter(order)
        grouped = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
        wrong += mixed_options(self.groups, grouped)
        if wrong:
            first = f"{self._source.path} does not hold the state of this {type(optimizer).__name__}:"
            raise FormatError(
                listed(first, wrong, 8)
                + "\nBuild the optimizer that was saved, or load without optimizer=True."
            )

    def _check_apart(self, source: TensorSource) -> None:
        """See that a parameter's states are tensors of their own.

        ``FullyShardedDataParallel.optim_state_dict`` of torch 2.13 gathers all kinds of states in one buffer,
        and copies it out by ``.cpu()``: no copy is made on a CPU, so that each kind shows the last.
        """
        held: dict[tuple[str, Any], str] = {}
        for at, theirs in self.tensors.items():
            name, _, key = at.rpartition(".")
            if math.prod(source.entries[theirs].shape) < 2:
                continue
            other = held.setdefault((name, source.same(theirs)), key)
            if other != key:
                raise FormatError(
                    f"{source.path} holds one and the same tensor as {other} and {key} of {name}: what wrote "
                    "it lost one of them, as FSDP's full states do on a CPU where use_orig_params=True and "
                    "offload_to_cpu=True. Save them with FullOptimStateDictConfig(offload_to_cpu=False), or "
                    "sharded."
                )


def strange_options(groups: Iterable[Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> list[str]:
    """A line for each option that an optimizer has elsewhere, and not here."""
    keys = {key for group in optimizer.param_groups for key in group}
    strange = {key for group in groups for key in group["options"]} - keys
    return [f"it has the option {key}, which this one has not" for key in sorted(strange)]


def mixed_options(groups: Iterable[Mapping[str, Any]], grouped: Sequence[Sequence[str]]) -> list[str]:
    """A line for each option in which the parameters of one group differ elsewhere.

    Args:
        groups: ``names`` and ``options``, as they are there.
        grouped: names of each group here.
    """
    saved = {name: group["options"] for group in groups for name in group["names"]}
    lines = []
    for i, names in enumerate(grouped):
        options = [saved[name] for name in names if name in saved]
        differ = {key for o in options for key in o if repr(o[key]) != repr(options[0].get(key))}
        lines += [f"parameters of the optimizer's group {i} differ in {key} there" for key in sorted(differ)]
    return lines


def _rule(base: str, wanted: Collection[str], there: Mapping[str, Any]) -> tuple[str, str]:
    """What to take from the beginning of each name, and what to put there, so that most are found."""
    cuts = ("", f"{base}.") if base else ("",)

    def rules() -> Iterable[tuple[str, str]]:
        for cut in cuts:
            prefixes = dict.fromkeys(["", *(f"{tree}." for tree in TREES)])
            for name in [*wanted][:1] + [*wanted][-1:]:
                short = name.removeprefix(cut)
                ends = (other.removesuffix(short) for other in there if other.endswith(f".{short}"))
                prefixes.update(dict.fromkeys(ends))
            yield from ((cut, prefix) for prefix in prefixes)

    return max(rules(), key=lambda rule: sum(rule[1] + n.removeprefix(rule[0]) in there for n in wanted))
