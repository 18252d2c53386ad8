"""The names of empty objects by which engines inform others of hand-overs and tails.

Owns the form of an attempt's id, of a marker's name, and of the name that says how long tails are
kept. An attempt is one try of an engine to hand a request over to another. If the engine cannot
store a chunk that it promised, it writes an empty object under the marker's name, and waiting
consumers stop waiting for the chunk.

Every process that deletes tails keeps those of a namespace for as long as its engines do. An engine
that keeps them for longer than the default says so by an empty object, whose name is the number of
seconds. The engine writes it again while it runs. It is valid for these seconds and a day: by then
no tail of the engine is left.

Contracts
---------
* An attempt's id may come from any client. Only 32 lowercase hex digits become part of a name.
* A marker says nothing about any chunk: one that is missing, late or forged costs time only.
* Names about tails can only make tails and markers stay for longer.
* No storage is called here. Everything is safe to call from any thread.
"""

from __future__ import annotations

import math
import re
from typing import Final

from kvshelf.errors import ObjectNameError

#: The folder of markers inside a namespace folder.
MARKERS: Final = ".kvshelf/gave-up"
_ATTEMPT: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
#: The folder inside a namespace folder in which engines say how long they keep tails.
KEEPS: Final = ".kvshelf/keeps-tails"
_SECONDS: Final = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_MOST_SECONDS: Final = 999_999_999


def is_attempt(text: str) -> bool:
    """Whether `text` is the id of an attempt: 32 lowercase hex digits."""
    return _ATTEMPT.fullmatch(text) is not None


def marker_name(attempt: str) -> str:
    """Return the name of an attempt's marker inside its namespace folder.

    Raises
    ------
    ObjectNameError
        If `attempt` is not the id of an attempt.
    """
    if not is_attempt(attempt):
        raise ObjectNameError(
            f"{attempt[:40]!r} is not the id of an attempt: expected 32 lowercase hex digits"
        )
    return f"{MARKERS}/{attempt}"


def keep_name(seconds: float) -> str:
    """Return the name, inside a namespace folder, that says how long tails are kept."""
    return f"{KEEPS}/{min(math.ceil(seconds), _MOST_SECONDS)}"


def said_seconds(name: str) -> int | None:
    """Return the seconds for which tails are kept by the name of an object; None: it is another."""
    folder, _, base = name.rpartition("/")
    if folder.partition("/")[2] != KEEPS or _SECONDS.fullmatch(base) is None:
        return None
    return int(base)
