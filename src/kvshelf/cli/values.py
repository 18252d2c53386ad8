"""Sizes, ages and times as values of options: what is accepted, and what is said of the rest.

Owns the forms and the messages. Ages have the units of the configuration's; without one, a number
is seconds only where the configuration has the same option.
"""

from __future__ import annotations

import math
import os
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, TypeAlias

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from kvshelf.config import LEAST_MAX_AGE, parse_duration
from kvshelf.errors import ConfigError

#: What is said of a value that is none.
SIZES: Final = "a size such as 500MB, 20GiB or 2TiB"
AGES: Final = "an age such as 90s, 30m, 12h, 7d or 2w"
DATES: Final = "a date such as 2026-01-31 or 2026-01-31T12:00"

MaxBytesOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Most bytes of the whole shelf, such as 2TiB: above it the chunks that were used"
        " longest ago are deleted; default: the configured capacity.",
        show_default=False,
    ),
]
MaxAgeOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="AGE",
        help="Time after its last use at which a chunk is deleted, such as 7d or 12h; default:"
        " the configured capacity.",
        show_default=False,
    ),
]

_SIZE: Final = TypeAdapter(ByteSize)


def size(text: str, option: str, *, least: int = 1) -> int:
    """Return the bytes that the value of an option means, such as ``20GiB``.

    Raises
    ------
    ConfigError
        If `text` is no size, or less than `least`.
    """
    try:
        found = int(_SIZE.validate_python(text))
    except (ValidationError, OverflowError):
        found = -1
    if found < least:
        raise ConfigError(f"{option}: found {text!r}; expected {SIZES}")
    return found


def age(text: str, option: str, *, least: float = 0.0, plain: bool = False) -> float:
    """Return the seconds that the value of an option means, such as ``90s``, ``12h`` or ``7d``.

    Parameters
    ----------
    text, option : str
        The value; the option's name, for messages.
    least : float
        Fewest seconds.
    plain : bool
        Take a number without a unit for seconds.

    Raises
    ------
    ConfigError
        If `text` is no age, or less than `least`.
    """
    try:
        found = parse_duration(text)
        seconds = math.nan if found is text and not plain else float(str(found))
    except ValueError:
        seconds = math.nan
    if not least <= seconds < math.inf:
        more = f", at least {least:g}s" if least else ""
        raise ConfigError(f"{option}: found {text!r}; expected {AGES}{more}")
    return seconds


def moment(text: str, option: str, *, ahead: bool = False) -> float:
    """Return the seconds since the epoch that the value of an option means.

    Parameters
    ----------
    text : str
        An age such as ``12h`` or ``7d``, or a date such as ``2026-01-31``, in local time.
    option : str
        Its name, for messages.
    ahead : bool
        An age is in the future, not in the past.

    Raises
    ------
    ConfigError
        If `text` is neither.
    """
    try:
        seconds = parse_duration(text)
        if isinstance(seconds, float) and seconds >= 0:
            found = datetime.now(UTC) + timedelta(seconds=seconds if ahead else -seconds)
            return found.timestamp()
        # Without a time zone it is local time, as in listings.
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        raise ConfigError(f"{option}: found {text!r}; expected {AGES}, or {DATES}") from None


def bounds_given_by() -> str:
    """Return the environment variable that gives the configured ``capacity``, if anything does."""
    return "KVSHELF_CAPACITY" if os.environ.get("KVSHELF_CAPACITY") else "KVSHELF_CONFIG"


def bounds(**given: str | None) -> dict[str, Any]:
    """Return the options of ``capacity`` that the command line gives, by name.

    Raises
    ------
    ConfigError
        If one of them cannot be used.
    """
    found: dict[str, Any] = {}
    for name, text in given.items():
        option = f"--{name.replace('_', '-')}"
        if text is not None and name == "max_age":
            found[name] = age(text, option, least=LEAST_MAX_AGE, plain=True)
        elif text is not None:
            found[name] = size(text, option, least=1)
    return found
