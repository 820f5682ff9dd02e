"""Mistakes in a job file, collected and told all at once."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from espalier.models import nearest

M = TypeVar("M", bound=BaseModel)


class MISSING:
    """Stands for the value of a key that was not given; a class, as these stay themselves when pickled."""


_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")


@dataclass(frozen=True)
class Mistake:
    """One mistake: the dotted key, what it was given, and what is expected or to be done."""

    key: str
    given: Any
    expected: str

    def text(self, overridden: Collection[str] = ()) -> str:
        """One line; keys in ``overridden`` are marked as given by --set."""
        source = " (from --set)" if self.key in overridden else ""
        value = "" if self.given is MISSING else f" = {_short(self.given)}"
        return f"{self.key}{value}{source}: {self.expected}"


class JobError(ValueError):
    """A job that cannot be run; the message lists every mistake in it."""

    def __init__(self, source: str, mistakes: Iterable[Mistake], overridden: Collection[str] = ()) -> None:
        self.source, self.mistakes, self.overridden = source, tuple(mistakes), frozenset(overridden)
        count = len(self.mistakes)
        head = f"{source}: {count} mistake{'s' if count != 1 else ''}"
        super().__init__("\n  ".join([head, *(m.text(overridden) for m in self.mistakes)]))

    def __reduce__(self) -> Any:
        return type(self), (self.source, self.mistakes, self.overridden)


def unknown_key(key: str, given: Any, known: Iterable[str]) -> Mistake:
    """The mistake of a dotted ``key`` whose last part is not among ``known``."""
    names = sorted(known)
    section, _, name = key.rpartition(".")
    close = nearest(name, names)
    prefix = f"{section}." if section else ""
    hint = f"did you mean {prefix}{close}?" if close else f"known keys here: {', '.join(names)}"
    return Mistake(key, given, f"unknown key; {hint}")


def read_section(
    section: str, model: type[M], values: Mapping[str, Any], mistakes: list[Mistake]
) -> M | None:
    """Validate ``values`` as ``model``; on failure add to ``mistakes`` and return None."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            key = ".".join([section, *map(str, item["loc"])])
            if item["type"] in _UNKNOWN_KEY:
                mistakes.append(unknown_key(key, item["input"], model.model_fields))
            elif item["type"] == "missing":
                mistakes.append(Mistake(key, MISSING, "is missing and has no default"))
            else:
                mistakes.append(Mistake(key, item["input"], _expected(item["msg"])))
        return None


def _expected(message: str) -> str:
    return message.replace("Input should be", "expected").replace("Value error, ", "")


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
