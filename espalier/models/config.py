"""Configurations from dictionaries, with every mistake listed at once."""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

C = TypeVar("C")


class ConfigError(ValueError):
    """A configuration with mistakes.

    Attributes:
        mistakes: one line each; the message lists all of them.
    """

    def __init__(self, owner: str, mistakes: Iterable[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__(f"{owner}: " + "; ".join(self.mistakes))


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice spelled most like ``word``, or None where none comes close."""
    by_letters = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower(), list(by_letters), n=1, cutoff=0.5)
    return by_letters[found[0]] if found else None


def raise_if(owner: str, mistakes: Iterable[str]) -> None:
    """Raise `ConfigError` with all ``mistakes``, if there are any."""
    listed = list(mistakes)
    if listed:
        raise ConfigError(owner, listed)


def config_from_dict(config: type[C], values: Mapping[str, Any]) -> C:
    """Build the dataclass ``config`` from plain values, strictly.

    Raises:
        ConfigError: listing every unknown key (with the nearest known one)
            and every value of the wrong type.
    """
    known = [f.name for f in fields(config)]  # type: ignore[arg-type]
    mistakes = []
    for key in values:
        if key not in known:
            close = nearest(key, known)
            hint = f"did you mean {close!r}?" if close else f"known keys: {', '.join(known)}"
            mistakes.append(f"unknown key {key!r} ({hint})")
    try:
        # Pydantic's strict mode takes a dataclass from JSON but not from a dict.
        text = json.dumps({k: v for k, v in values.items() if k in known}, default=str)
        made = TypeAdapter(config).validate_json(text, strict=True)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            cause = item.get("ctx", {}).get("error")
            if isinstance(cause, ConfigError):
                mistakes.extend(cause.mistakes)
            else:
                where = ".".join(map(str, item["loc"]))
                mistakes.append(f"{where} = {item['input']!r}: {item['msg']}")
        raise ConfigError(config.__name__, mistakes) from None
    raise_if(config.__name__, mistakes)
    return made
