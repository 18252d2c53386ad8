"""Sizes, ages and numbers as values of a command's options.

Owns these options, and the errors that name them; :mod:`kvshelf.config` reads the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, TypeVar

from kvshelf.cli.common import option
from kvshelf.config import LEAST_MAX_AGE, parse_age, parse_number, parse_size
from kvshelf.errors import ConfigError

_T = TypeVar("_T", int, float)

MaxBytesOption: TypeAlias = Annotated[
    str | None,
    option(
        "--max-bytes",
        "SIZE",
        "Most bytes of the shelf, such as 2TiB: above it what was used longest ago is deleted.",
    ),
]
MaxAgeOption: TypeAlias = Annotated[
    str | None,
    option("--max-age", "AGE", "Time after its last use at which a chunk is deleted, such as 7d."),
]


def size(text: str | None, option: str, *, least: int = 1) -> int | None:
    """Return the bytes that the value of an option means, such as ``20GiB``; None for None.

    Raises
    ------
    ConfigError
        If `text` is no size with a unit, or less than `least`.
    """
    return _read(parse_size, text, option, least)


def age(text: str | None, option: str, *, least: float = 0.0) -> float | None:
    """Return the seconds that the value of an option means, such as ``90s``; None for None.

    Raises
    ------
    ConfigError
        If `text` is no age with a unit, or less than `least`.
    """
    return _read(parse_age, text, option, least)


def seconds(text: str, option: str) -> float:
    """Return a number of seconds, at least a tenth, that the value of an option is.

    Raises
    ------
    ConfigError
        If `text` is no number that is written in digits, or less.
    """
    return _read(parse_number, text, option, 0.1) or 0.0


def max_age(text: str | None) -> float | None:
    """Return the seconds of ``--max-age``: uses that are more recent may not be recorded yet."""
    return age(text, "--max-age", least=LEAST_MAX_AGE)


def _read(parse: Callable[[str, Any], _T], text: str | None, option: str, least: _T) -> _T | None:
    try:
        return None if text is None else parse(text, least)
    except ValueError as error:
        raise ConfigError(f"{option}: found {text!r}; {error}") from None
