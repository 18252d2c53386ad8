"""Values of a command's options: sizes, ages, numbers, JSON objects, files.

Owns the errors that name these options; :mod:`kvshelf.config` reads sizes, ages and numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar

from kvshelf.cli.common import option
from kvshelf.config import LEAST_MAX_AGE, parse_age, parse_number, parse_size
from kvshelf.errors import ConfigError
from kvshelf.urls import shown_url

#: Most characters of a file that an option names.
_MAX_FILE_TEXT: Final = 1 << 20

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


def read_text(file: Path, option: str) -> str:
    """Return the text of a file that the value of an option names; at most 1 MiB.

    Raises
    ------
    ConfigError
        If it cannot be read as such.
    """
    try:
        with open(file, encoding="utf-8", newline="") as opened:
            return opened.read(_MAX_FILE_TEXT)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{option}: {shown_url(file)} cannot be read: {reason}") from None


def json_object(text: str, option: str) -> dict[str, Any]:
    """Parse the JSON object that is the value of an option.

    Raises
    ------
    ConfigError
        If it is not a JSON object.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        # It may hold secrets, and is not shown.
        raise ConfigError(f'{option}: expected a JSON object, such as {{"name": "value"}}')
    return value


def _read(parse: Callable[[str, Any], _T], text: str | None, option: str, least: _T) -> _T | None:
    try:
        return None if text is None else parse(text, least)
    except ValueError as error:
        raise ConfigError(f"{option}: found {text!r}; {error}") from None
