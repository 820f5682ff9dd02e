"""Which name in a file is which name of a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from espalier.checkpoint.pickles import FormatError
from espalier.checkpoint.sources import Source

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


def matched(model: nn.Module, source: Source) -> dict[str, tuple[str, ...]]:
    """For each tensor of a model's state dict, the names that hold its values in a source.

    There names may have something before them (``model.``, ``module.``), or lack what Hugging Face's models
    with a head put before those of the model without (``transformer.``). One name of a tied tensor is enough.

    Raises:
        FormatError: tensors are missing, have another shape, or are there and not in the model.
    """
    ties = tied(model)
    wanted = {n: tuple(x.shape) for n, x in model.state_dict(keep_vars=True).items() if hasattr(x, "shape")}
    cut, prefix = _rule(getattr(model, "base_model_prefix", "") or "", list(wanted), source.entries)
    found: dict[str, list[str]] = {name: [] for name in wanted if name not in ties}
    for name in wanted:
        theirs = prefix + name.removeprefix(cut)
        if theirs in source.entries:
            found[ties.get(name, name)].append(theirs)
    wrong = [f"{name} is missing" for name, held in found.items() if not held]
    for name, held in found.items():
        shapes = {source.entries[theirs].shape for theirs in held}
        wrong += [f"{name} is {list(wanted[name])}, there {list(s)}" for s in shapes if s != wanted[name]]
    used = {theirs for held in found.values() for theirs in held}
    ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    wrong += [
        f"{name} is not in the model"
        for name in source.entries
        if name.startswith(prefix) and name not in used and not any(p.search(name) for p in ignored)
    ]
    if wrong:
        shown = wrong if len(wrong) <= 8 else [*wrong[:8], f"and {len(wrong) - 8} more"]
        raise FormatError(
            "\n  ".join([f"{source.path} does not hold the weights of this {type(model).__name__}:", *shown])
            + "\nBuild the model that the file was saved from, or give another file."
        )
    return {name: tuple(held) for name, held in found.items()}


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


__all__ = ["matched", "tied"]
