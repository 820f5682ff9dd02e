"""What the code of a model's modules finds by name beside their attributes."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

from espalier.parallel.pipeline.stand_ins import Marks, equal
from espalier.tensor.names import Reads, is_known
from espalier.tensor.observers import tell
from espalier.trees import tensors_in


class Outside:
    """What the code of a model's modules finds by name, as it is now: globals, attributes of classes."""

    def __init__(self, model: nn.Module) -> None:
        by_kind: dict[Any, Reads] = {}
        self._read: dict[str, Reads] = {}
        for name, module in model.named_modules():
            has_own = any(isinstance(x, FunctionType) for x in vars(module).values())
            if has_own or not is_known(type(module)):
                kind = module if has_own else type(module)
                self._read[name] = by_kind.setdefault(kind, Reads([module]))
        self._then = self._now()

    def _now(self) -> dict[tuple[int, str], Any]:
        marks = Marks()
        found = {}
        for read in dict.fromkeys(self._read.values()):
            values = zip(read.places, read.now(), strict=True)
            some = [at for at in values if not isinstance(at[1], torch.Generator)]  # see Trace.drawing
            found.update({(id(owner), name): marks.of(x) for (owner, _, name), x in some})
        return found

    def tell_of_tensors(self, changed: Mapping[str, set[str]]) -> None:
        """Tell of what a forward has put there for a loss to take: it comes too late."""
        for key in changed:
            reads = (self._read[name] for name in changed[key])
            values = [table[name] for of in reads for _, table, name in of.places if name == key]
            if any(x.is_floating_point() for x in tensors_in(values, objects=2)):
                tell(
                    f"The model's forward puts tensors into {key!r}, which is none of its attributes. In a "
                    "pipeline the forward runs with loss.backward(): they are not there when the loss is "
                    "made. What belongs to the loss let the forward return, and make the loss of its output."
                )

    def changes(self) -> dict[str, set[str]]:
        """By names of what is another now, the modules whose code finds it."""
        now = self._now()
        changed = {key for key, was in self._then.items() if not equal(was, now.get(key))}
        found: dict[str, set[str]] = {}
        for module, read in self._read.items() if changed else ():
            for _, name in read.keys & changed:
                found.setdefault(name, set()).add(module)
        return found
