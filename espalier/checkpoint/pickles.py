"""What others pickled, read without executing any of it.

``torch.distributed.checkpoint`` pickles its metadata, and a pickle may call whatever it names. Here it is
given records without behaviour in place of the classes that such a file has, made anew for each file, and
nothing else. Values come from ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")


class FormatError(ValueError):
    """A file that cannot be read as what it should be; the message says which, why, and what to do."""


class Record:
    """What stands for an object of a pickle.

    Attributes:
        kind: the name of its class.
        args: with which it was made.
        state: that was set on it: a dict of attributes, as a rule.
    """

    kind = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        """One of the attributes."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def read_metadata(path: Path) -> Record:
    """The metadata of a distributed checkpoint, as records.

    Raises:
        FormatError: it cannot be read, or asks for something that such a file has no use for.
    """
    with told(path, "the metadata of a distributed checkpoint"):
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(found, Record) or found.kind != "Metadata":
            raise FormatError(
                f"{path} holds no metadata of a distributed checkpoint, but something else. Use another copy."
            )
        return found


def read_value(path: Path, offset: int, length: int) -> Any:
    """What ``torch.save`` wrote into part of a file: tensors and plain values, and nothing else."""
    with told(path, "what torch.save writes"), path.open("rb") as file:
        file.seek(offset)
        found = file.read(length)
        if len(found) < length:
            raise FormatError(
                f"{path} ends at byte {offset + len(found):,}, expected {offset + length:,}: it is cut off. "
                "Use another copy."
            )
        return torch.load(io.BytesIO(found), map_location="cpu", weights_only=True)


@contextmanager
def told(path: Path, what: str) -> Iterator[None]:
    """Tell whatever goes wrong while a file is read as ``what`` in one sentence."""
    try:
        yield
    except FormatError:
        raise
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}.") from None
    # a broken file makes its readers fail in any way
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise FormatError(
            f"{path} cannot be read as {what}: {first}. It is damaged, of another format, or holds "
            "objects of classes, which are not loaded, for they could run any code. Save tensors and plain "
            "values only, or use another copy."
        ) from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._known: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = module, name
        if key not in self._known:
            self._known[key] = _stand_in(module, name)
        return self._known[key]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside of it")


def _stand_in(module: str, name: str) -> Callable[..., Any] | type | torch.dtype:
    """What a pickle gets for a name; nothing that outlives it can be changed through that."""
    if (module, name) in _RECORDS:
        return type(name, (Record,), {"kind": name})
    if (module, name) == ("torch", "Size"):
        return tuple
    if (module, name) == ("collections", "OrderedDict"):
        return type(name, (dict,), {})
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        found: torch.dtype = getattr(torch, name)
        return found
    if module.split(".")[0] == "pathlib" and name in _PATHS:
        return lambda *parts: "/".join(map(str, parts))
    if (module, name) in (("torch.serialization", "_get_layout"), ("builtins", "getattr")):
        return lambda *named: str(named[-1])  # of a tensor's layout, of an enumeration: of no use here
    raise pickle.UnpicklingError(f"it asks for {module}.{name}, which metadata has no use for"[:180])


__all__ = ["FormatError", "Record", "read_metadata", "read_value", "told"]
