"""Texts for people: cells in columns, what is wrong with what was given, and what was meant instead."""

from __future__ import annotations

import difflib
import json
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from importlib.resources.abc import Traversable
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

T = TypeVar("T")
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
_LONGEST = 80  # characters of a value that is shown


def in_columns(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Rows of cells as lines, columns two spaces apart.

    Args:
        rows: all of one length.
        sides: ``"<"`` or ``">"`` for each column; the last holds for all further ones.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = sides.ljust(len(widths), sides[-1])
    return [
        "  ".join(f"{x:{side}{width}}" for x, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def dtype_name(dtype: object) -> str:
    """A dtype as plans, files and texts name it: ``"float32"`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def toml_key(name: str) -> str:
    """A name as a key of TOML: in quotes where it must be."""
    is_bare = name.replace("_", "").replace("-", "").isalnum() and name.isascii()
    return name if is_bare else json.dumps(name, ensure_ascii=False)


def toml_value(value: Any) -> str:
    """A plain value as TOML writes it, on one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(k)} = {toml_value(x)}" for k, x in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else repr(value)


def names_of_tables(folder: Traversable) -> tuple[str, ...]:
    """Of the files of TOML in a folder of the package."""
    names = (file.name for file in folder.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def listed(head: str, lines: Sequence[str], most: int | None = None) -> str:
    """A head, and below it lines, of which no more than so many are shown."""
    left = 0 if most is None else max(len(lines) - most, 0)
    more = [f"and {left} more"] if left else []
    return "\n  ".join([head, *lines[: len(lines) - left], *more])


def few(names: Collection[str], most: int = 3) -> str:
    """Names on one line, of which no more than so many are shown."""
    return ", ".join([*list(names)[:most], *(["..."] if len(names) > most else [])])


# ---- what was meant


def similar(word: str, names: Iterable[str], most: int = 1, least: float = 0.5) -> list[str]:
    """At most so many of the names that are spelled about like ``word``, the nearest first.

    Args:
        least: how alike they are, from 0 to 1; capital letters make no difference.
    """
    by_letters = {name.lower(): name for name in names}
    matches = difflib.get_close_matches(word.lower(), list(by_letters), most, least)
    return [by_letters[letters] for letters in matches]


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice spelled most like ``word``, or None where none comes close."""
    return next(iter(similar(word, choices)), None)


def did_you_mean(
    word: str, names: Iterable[str], otherwise: str = "", *, lead: str = "", show: Callable[[str], str] = repr
) -> str:
    """Whether the nearest of the names was meant, asked after ``lead``; ``otherwise`` if none is near."""
    close = nearest(word, names)
    return otherwise if close is None else f"{lead}did you mean {show(close)}?"


# ---- what is wrong


def shown(value: Any) -> str:
    """A value that was given, in a sentence: a plain one as it is written, another by its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    is_plain = value is None or isinstance(value, str | bool | int | float)
    return _short(value) if is_plain else f"of type {type(value).__name__}"


def expect(what: str, value: Any, kinds: Any, expected: str) -> None:
    """See that what was given for an argument is of a kind.

    Raises:
        TypeError: it is not; says what it is, and what is expected.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{what} is {shown(value)}, expected {expected}.")


def whole(what: str, value: Any, least: float = 0) -> int:
    """A whole number that was given for an argument, as Python counts.

    Raises:
        TypeError: it is none, and is not rounded.
        ValueError: it is below ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is {shown(value)}, expected a whole number.") from None
    if number < least:
        raise ValueError(f"{what} is {number}, expected {least} or more.")
    return number


class MISSING:
    """Stands for the value of a key that was not given; a class, as these stay themselves when pickled."""


class Mistake(NamedTuple):
    """One mistake.

    Attributes:
        key: dotted; ``""`` where it is one of several keys together.
        given: its value; :class:`MISSING` if there is none to show.
        expected: what is expected or to be done.
    """

    key: str
    given: Any
    expected: str

    def under(self, section: str) -> Mistake:
        """The same of a table that stands in another."""
        return self._replace(key=f"{section}.{self.key}" if self.key else section)

    def text(self, overridden: Collection[str] = ()) -> str:
        """One line; keys in ``overridden`` are marked as given by --set."""
        value = "" if self.given is MISSING else f" = {_short(self.given)}"
        source = " (from --set)" if self.key in overridden else ""
        key = self.key if self.key.isprintable() else repr(self.key)  # one line
        return f"{key}{value}{source}: {self.expected}" if key else self.expected


class MistakeError(ValueError):
    """What cannot be taken as it was given; the message lists every mistake in it.

    Attributes:
        owner: what was to be made of it.
        mistakes: all.
        overridden: keys that came from --set.
    """

    def __init__(
        self, owner: str, mistakes: Iterable[tuple[str, Any, str] | str], overridden: Collection[str] = ()
    ) -> None:
        every = [Mistake("", MISSING, m) if isinstance(m, str) else Mistake(*m) for m in mistakes]
        self.owner, self.mistakes, self.overridden = owner, tuple(every), frozenset(overridden)
        head = f"{owner}: {len(every)} mistake{'s' if len(every) != 1 else ''}"
        super().__init__(listed(head, [m.text(overridden) for m in every]))

    def __reduce__(self) -> Any:
        return type(self), (self.owner, self.mistakes, self.overridden)


def refuse(owner: str, mistakes: Iterable[tuple[str, Any, str]]) -> None:
    """Tell all that an interface takes and that cannot be done.

    Raises:
        MistakeError: there is something.
    """
    if listed := list(mistakes):
        raise MistakeError(owner, listed)


def unknown_key(key: str, value: Any, known: Iterable[str]) -> Mistake:
    """The mistake of a dotted ``key`` whose last part is not among ``known``."""
    names = list(known)
    section, dot, name = key.rpartition(".")
    hint = did_you_mean(name, names, f"known keys: {', '.join(names)}", show=lambda n: f"{section}{dot}{n}")
    return Mistake(key, value, f"unknown key; {hint}")


class Settings(BaseModel):
    """A table of plain values: no unknown keys, no guessed types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def read_table(kind: type[T], values: Mapping[str, Any], section: str = "") -> T:
    """A model of pydantic's, or a dataclass, made from plain values, without guessing types.

    Args:
        section: the table's own name, which stands before its keys in what is told.

    Raises:
        MistakeError: with every unknown key (and the nearest known one) and every wrong value.
    """
    mistakes: list[Mistake] = []
    try:
        if issubclass(kind, BaseModel):
            return kind.model_validate(values)
        known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
        strange = [key for key in values if key not in known]
        mistakes += [unknown_key(_dotted(section, key), values[key], known) for key in strange]
        # Pydantic's strict mode takes a dataclass from JSON but not from a dict.
        text = json.dumps({key: value for key, value in values.items() if key in known}, default=str)
        table: T = TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        mistakes += mistakes_in(error, kind, section)
    if mistakes:
        raise MistakeError(section or kind.__name__, mistakes)
    return table


def mistakes_in(error: ValidationError, kind: Any, section: str = "") -> list[Mistake]:
    """What pydantic found wrong with a table."""
    mistakes: list[Mistake] = []
    for item in error.errors(include_url=False):
        place = _place(kind, item["loc"])
        key = _dotted(section, *map(str, place))
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, MistakeError):
            mistakes += [mistake.under(key) if key else mistake for mistake in cause.mistakes]
        elif item["type"] in _UNKNOWN_KEY:
            mistakes.append(unknown_key(key, item["input"], _table(kind, place[:-1]).model_fields))
        elif item["type"] == "missing":
            mistakes.append(Mistake(key, MISSING, "is missing and has no default"))
        else:
            message = item["msg"].replace("Input should be", "expected").replace("Value error, ", "")
            keys = getattr(_table(kind, place), "model_fields", None)
            if item["type"] == "model_type" and keys is not None:
                message = f"expected a table of {', '.join(keys)}"
            elif item["type"] == "tuple_type":
                message = "expected a list"
            before = mistakes[-1] if mistakes else None
            if len(place) < len(item["loc"]) and before is not None and before.key == key:
                message = f"{mistakes.pop().expected} or {message.removeprefix('expected ')}"
            mistakes.append(Mistake(key, item["input"], message))
    return mistakes


def _table(kind: Any, place: Sequence[str | int]) -> Any:
    """What stands at a place of a table: its kind."""
    for name in place:
        if isinstance(name, int):  # a place in a list of tables
            within = get_args(kind)
            kind = within[0] if within else None
        else:
            fields_here = getattr(kind, "model_fields", {})
            kind = fields_here[name].annotation if name in fields_here else None
        if len(some := _kinds(kind)) == 1:
            (kind,) = some
    return kind


def _kinds(kind: Any) -> list[Any]:
    """Of which a value may be, but None; nothing where there is no choice."""
    is_choice = get_origin(kind) in (Union, UnionType)
    return [x for x in get_args(kind) if x is not type(None)] if is_choice else []


def _place(kind: Any, place: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """A place without which of several kinds a value was tried as, of which pydantic tells there."""
    for n in range(len(place)):
        if len(_kinds(_table(kind, place[:n]))) > 1:
            return place[:n]
    return place


def _dotted(*names: str) -> str:
    return ".".join(filter(None, names))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
