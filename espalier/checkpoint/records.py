"""What others pickled by ``torch.save``, read without executing any of it: objects become records."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from espalier.checkpoint.index import FormatError

_PLAIN = {
    "collections": ("OrderedDict",),
    "builtins": ("set", "frozenset", "slice", "complex", "bytearray", "range"),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_parameter_with_state"),
    "torch._tensor": ("_rebuild_from_type_v2",),
    "torch.nn.parameter": ("Parameter",),
    "torch": ("Size", "Tensor"),
}


class Record:
    """Stands for an object of a class of theirs."""

    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Whatever theirs takes: what an object holds is its state."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = name in _PLAIN.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        )
        return super().find_class(module, name) if known else Record


def load_records(path: Path, what: str) -> dict[str, Any]:
    """The dict in a file: tensors, plain values, and records of what is neither.

    Raises:
        FormatError: it cannot be read as ``what``.
    """
    module: Any = SimpleNamespace(Unpickler=_Unpickler, load=None, __name__="espalier")
    try:
        loaded = torch.load(path, map_location="cpu", pickle_module=module, weights_only=False)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise FormatError(f"{path} cannot be read as {what}: {error}") from None
    if not isinstance(loaded, dict):
        raise FormatError(f"{path} holds a {type(loaded).__name__}, expected a dict. Give another folder.")
    return loaded
