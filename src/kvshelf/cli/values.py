"""Sizes and ages as values of options: what is accepted, and what is said of the rest.

Owns the forms and the messages. Each size and each age has a unit.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from pydantic import ByteSize, TypeAdapter, ValidationError

from kvshelf.cli.common import option
from kvshelf.config import LEAST_MAX_AGE, parse_duration
from kvshelf.errors import ConfigError

#: What is said of a value that is none.
SIZES: Final = "a size such as 500MB, 20GiB or 2TiB"
AGES: Final = "an age such as 90s, 30m, 12h, 7d or 2w"

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

_SIZE: Final = TypeAdapter(ByteSize)


def size(text: str | None, option: str, *, least: int = 1) -> int | None:
    """Return the bytes that the value of an option means, such as ``20GiB``; None for None.

    Raises
    ------
    ConfigError
        If `text` is no size with a unit, or less than `least`.
    """
    if text is None:
        return None
    try:
        found = int(_SIZE.validate_python(text)) if text.strip()[-1:].isalpha() else -1
    except (ValidationError, OverflowError):
        found = -1
    if found < least:
        more = f", at least {least} bytes" if least > 1 else ""
        raise ConfigError(f"{option}: found {text!r}; expected {SIZES}{more}")
    return found


def age(text: str | None, option: str, *, least: float = 0.0) -> float | None:
    """Return the seconds that the value of an option means, such as ``90s``; None for None.

    Raises
    ------
    ConfigError
        If `text` is no age with a unit, or less than `least`.
    """
    if text is None:
        return None
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = None
    if not isinstance(seconds, float) or seconds < least:
        more = f", at least {least:g}s" if least else ""
        raise ConfigError(f"{option}: found {text!r}; expected {AGES}{more}")
    return seconds


def max_age(text: str | None) -> float | None:
    """Return the seconds of ``--max-age``: uses that are more recent may not be recorded yet."""
    return age(text, "--max-age", least=LEAST_MAX_AGE)
