"""Configurations from dictionaries, with every mistake listed at once."""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

C = TypeVar("C")


class ConfigError(ValueError):
    """A configuration with mistakes.

    Attributes:
        owner: what was to be configured.
        mistakes: one line each; the message lists all of them.
    """

    def __init__(self, owner: str, mistakes: Iterable[str]) -> None:
        self.owner, self.mistakes = owner, tuple(mistakes)
        super().__init__(f"{owner}: " + "; ".join(self.mistakes))

    def __reduce__(self) -> Any:
        return type(self), (self.owner, self.mistakes)


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


def below_one(config: object, names: Iterable[str]) -> list[str]:
    """A mistake for each named size that is given and not at least 1."""
    given = {name: getattr(config, name) for name in names}
    return [
        f"{name} = {value} must be at least 1"
        for name, value in given.items()
        if not (value is None or value >= 1)
    ]


def no_probability(dropout: float) -> list[str]:
    """The mistake of a dropout that is none."""
    return [] if 0 <= dropout < 1 else [f"dropout = {dropout} must be at least 0 and below 1"]


def positions_in(input_ids: torch.Tensor, most: int) -> int:
    """The length of sequences [batch, sequence].

    Raises:
        ValueError: it is above ``most``.
    """
    s = input_ids.shape[1]
    if s > most:
        raise ValueError(
            f"a sequence of {s} tokens is longer than max_positions = {most}; "
            "shorten it or build the model with more positions"
        )
    return s


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
