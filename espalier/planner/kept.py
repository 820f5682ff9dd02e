"""What is kept on disk between runs of the planner, each under a key of all that it hangs on.

A key is made of the program itself: the model with all that its modules hold, its optimizer, the batch's
shapes, the code that computes (this package's files, torch, the packages of the model's classes, the user's
own files), and what is set for the process. What cannot be told apart so is not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch

from espalier.device import attention_kernels
from espalier.torch_private import raw
from espalier.trees import attributes

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, range)
_LISTS = (tuple, list)
_SETS = (set, frozenset)


class Kept:
    """Answers in a folder, of programs whose key is known.

    Args:
        folder: None: nothing is kept.
        of: all that the answers hang on, beside their names; what cannot be told apart is not kept.
    """

    def __init__(self, folder: Path | None, *of: Any) -> None:
        key = None if folder is None else identity(*of)
        self._folder, self._key = (None, "") if key is None else (folder, key)

    def path(self, name: str) -> Path | None:
        """Where the answer of a name is kept; None: it is not."""
        if self._folder is None:
            return None
        return self._folder / f"{self._key}-{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"

    def lacks(self, name: str) -> bool:
        """Whether an answer would be kept, and is not there."""
        path = self.path(name)
        return path is not None and not path.is_file()

    def get(self, name: str) -> Any:
        """The answer, as JSON has it; None: there is none that can be read."""
        path = self.path(name)
        if path is None:
            return None
        try:
            return json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):  # it was never there, or is damaged: it is made again
            return None

    def put(self, name: str, answer: Any) -> None:
        """Keep an answer that JSON takes."""
        path = self.path(name)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(answer), "utf-8")
        part.replace(path)


class _UntoldError(Exception):
    """Something of which nothing tells what it is."""


def identity(*of: Any) -> str | None:
    """A key of values, with the code that computes; None: there is something that cannot be told apart."""
    walk = _Walk()
    try:
        for x in of:
            walk.add(x)
        for line in _process():
            walk.tell(line)
        for line in _code(walk.modules):
            walk.tell(line)
    except _UntoldError:
        return None
    return walk.hash.hexdigest()[:32]


class _Walk:
    """Hashes values, each object once.

    Attributes:
        modules: names of the modules in which classes and functions were defined.
    """

    def __init__(self) -> None:
        self.hash, self.modules = hashlib.sha256(), set[str]()
        # kept alive, so that an id never names two of them
        self._seen: dict[int, tuple[int, Any]] = {}

    def tell(self, text: str) -> None:
        """Add a text."""
        self.hash.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))

    def add(self, x: Any) -> None:
        """Add a value.

        Raises:
            _UntoldError: nothing tells what it is.
        """
        if isinstance(x, _PLAIN) and not isinstance(x, Enum):
            self.tell(f"{type(x).__name__} {x!r}")
            return
        if id(x) in self._seen:
            self.tell(f"seen {self._seen[id(x)][0]}")
            return
        self._seen[id(x)] = len(self._seen), x
        if isinstance(x, type):
            self._named(x)
        elif isinstance(x, torch.Tensor):
            self._tensor(x)
        elif isinstance(x, types.CodeType):
            self._code(x)
        elif isinstance(x, Mapping) and type(x).__module__ in ("builtins", "collections", "types"):
            self.tell(f"{type(x).__name__} {len(x)}")
            for key, value in x.items():
                self.add(key)
                self.add(value)
        elif isinstance(x, _LISTS):
            self._named(type(x))
            self.tell(f"{len(x)}")
            for value in x:
                self.add(value)
        elif isinstance(x, _SETS):
            self._set(x)
        elif isinstance(x, weakref.ReferenceType):
            self.tell("weakref")
        else:
            self._object(x)

    def _named(self, x: Any) -> None:
        module = str(getattr(x, "__module__", None) or "builtins")
        self.modules.add(module)
        self.tell(f"{type(x).__name__} {module}.{getattr(x, '__qualname__', x)}")
        if isinstance(x, type):
            self.modules.update(base.__module__ for base in x.__mro__)

    def _tensor(self, x: torch.Tensor) -> None:
        with raw():
            self._named(type(x))
            self.tell(f"{x.shape} {x.dtype} {x.layout} {x.device} {x.requires_grad}")
            if x.layout is not torch.strided:
                raise _UntoldError
            self.tell(f"{x.stride()}")
            if not x.is_meta:
                values = x.detach().cpu().contiguous().view(-1).view(torch.uint8)
                self.hash.update(values.numpy().tobytes())

    def _set(self, x: Iterable[Any]) -> None:
        """In any order: of plain values alone."""
        if not all(isinstance(value, _PLAIN) for value in x):
            raise _UntoldError
        self.tell(f"{type(x).__name__} {sorted(f'{type(value).__name__} {value!r}' for value in x)}")

    def _code(self, x: types.CodeType) -> None:
        self.tell(f"code {x.co_code.hex()} {x.co_names} {x.co_varnames} {x.co_freevars}")
        for value in x.co_consts:
            self.add(value)

    def _object(self, x: Any) -> None:
        """A function, a method, or what has attributes."""
        if isinstance(x, types.FunctionType):
            self._named(x)
            cells = []
            for cell in x.__closure__ or ():
                try:
                    cells.append(cell.cell_contents)
                except ValueError:  # it is empty so far
                    cells.append(None)
            self.add([x.__code__, x.__defaults__, x.__kwdefaults__, cells])
            return
        if isinstance(x, types.MethodType):
            self.tell("method")
            self.add(x.__func__)
            self.add(x.__self__)
            return
        if isinstance(x, types.BuiltinFunctionType | types.ModuleType):
            self._named(x)
            self.tell(str(getattr(x, "__name__", "")))
            return
        if isinstance(x, partial):
            self.add([x.func, x.args, x.keywords])
            return
        self._named(type(x))
        held = attributes(x)
        if isinstance(x, Mapping):
            held = {"items of": dict(x), **held}
        if not held:
            said = repr(x)
            if " at 0x" in said:
                if type(x).__init__ is object.__init__ and type(x).__module__ != "builtins":
                    return  # of a class whose objects have nothing
                raise _UntoldError
            self.tell(said)
        for name, value in held.items():
            if not str(name).endswith("_hash"):  # of texts: another one in each process
                self.tell(str(name))
                self.add(value)


def _process() -> Iterator[str]:
    """What is set for the process, and the machine's torch."""
    yield f"{sys.version_info} {torch.__version__} {torch.version.git_version}"
    yield f"{torch.get_default_dtype()} {torch.are_deterministic_algorithms_enabled()} {attention_kernels()}"


def _code(modules: Iterable[str]) -> Iterator[str]:
    """The code that computes: this package's, that of the classes seen, and the user's own.

    Raises:
        _UntoldError: a class stands in no file.
    """
    own = _PACKAGE
    for path in sorted(own.rglob("*.py")):
        yield f"{path.relative_to(own)} {_digest(path)}"
    for name in sorted(modules):
        if name.split(".")[0] in (*sys.stdlib_module_names, "espalier", "torch"):
            continue
        source = _file(sys.modules.get(name))
        if source is None:
            raise _UntoldError
        top = sys.modules.get(name.split(".")[0])
        yield f"{name} {getattr(top, '__version__', '')} {_digest(source)}"
    for name, module in sorted(sys.modules.items()):
        source = _file(module)
        if source is not None and not _is_installed(source) and own not in source.parents:
            yield f"{name} {_digest(source)}"


def _file(module: types.ModuleType | None) -> Path | None:
    """The source of a module; None: it has none that can be read."""
    name = getattr(module, "__file__", None)
    return Path(name) if isinstance(name, str) and name.endswith(".py") and os.path.isfile(name) else None


def _is_installed(path: Path) -> bool:
    """Whether a file is of Python or of a package that was installed."""
    return str(path).startswith(_ROOTS)


_PACKAGE = Path(__file__).parents[1]
_ROOTS = tuple(
    {
        str(root) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        for root in (Path(sysconfig.get_path(name)), Path(sysconfig.get_path(name)).resolve())
    }
)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
