"""Sizes, ages, numbers and names of weights, as users write them in options, files and commands.

Owns the texts that are accepted, and what they mean. A text is read as a whole, or it is an error
that says what was expected. Sizes and ages have a unit. Pure functions but for
:func:`names_a_path`.
"""

from __future__ import annotations

import os
import re
from decimal import Decimal
from typing import Final

#: Expected texts, for messages.
SIZES: Final = "a size such as 500MB, 20GiB or 2TiB"
AGES: Final = "an age such as 90s, 30m, 12h, 7d or 2w"

_NUMBER: Final = r"[0-9]{1,18}(?:\.[0-9]{1,18})?"
_SIZE: Final = re.compile(rf"({_NUMBER}) ?(?:([kmgtp])(i?))?b", re.ASCII | re.IGNORECASE)
_AGE: Final = re.compile(rf"({_NUMBER}) ?([smhdw])", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_NAME: Final = "name:"


def parse_size(text: str, least: int = 1) -> int:
    """Return the bytes that a text such as ``20GiB`` means; ``GB`` is a power of ten.

    Raises
    ------
    ValueError
        If it is no size, or less than `least` bytes.
    """
    if match := _SIZE.fullmatch(text):
        number, prefix, binary = match.groups()
        power = "kmgtp".index(prefix.lower()) + 1 if prefix else 0
        count = int(Decimal(number) * (1024 if binary else 1000) ** power)
        if count >= least:
            return count
    raise ValueError(f"expected {SIZES}{f', at least {least} bytes' if least > 1 else ''}")


def parse_age(text: str, least: float = 0.0) -> float:
    """Return the seconds that a text such as ``7d`` or ``90s`` means.

    Raises
    ------
    ValueError
        If it is no age, or less than `least` seconds.
    """
    if match := _AGE.fullmatch(text):
        seconds = float(match[1]) * _SECONDS[match[2]]
        if seconds >= least:
            return seconds
    raise ValueError(f"expected {AGES}{f', at least {least:g}s' if least else ''}")


def parse_number(text: str, least: float = 0.0) -> float:
    """Return a number that is written in digits, such as ``256`` or ``0.5``.

    Raises
    ------
    ValueError
        If it is none, or less than `least`.
    """
    if re.fullmatch(_NUMBER, text, re.ASCII) is not None and float(text) >= least:
        return float(text)
    more = f", at least {least:g}" if least else ""
    raise ValueError(f"expected a number such as 256 or 0.5{more}")


def weights_name(text: str) -> str | None:
    """Return what a text such as ``name:my-model-v1`` calls the weights; None for other texts.

    Raises
    ------
    ValueError
        If it begins so and holds no name.
    """
    if not text.startswith(_NAME):
        return None
    name = text.removeprefix(_NAME)
    if not name or name != name.strip() or not name.isprintable():
        raise ValueError("expected a text without blanks around it, as name:my-model-v1")
    if names_a_path(name):
        raise ValueError(
            "names a path, and a name does not say what lies there; expected content, which reads"
            " the files, or a name that is no path, as name:my-model-v1"
        )
    return name


def names_a_path(text: str) -> bool:
    """Whether a text is written like a path, or has a slash and names a file that exists."""
    return text.strip().startswith(("/", "~", "./", "../")) or (
        "/" in text and os.path.lexists(text)
    )
