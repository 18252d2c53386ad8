"""The names of empty objects by which engines inform others of hand-overs.

Owns the form of an attempt's id and of a marker's name. An attempt is one try of an engine to hand
a request over to another. If the engine cannot store a chunk that it promised, it writes an empty
object under the marker's name, and waiting consumers stop waiting for the chunk.

Contracts
---------
* An attempt's id may come from any client. Only 32 lowercase hex digits become part of a name.
* A marker says nothing about any chunk: one that is missing, late or forged costs time only.
* No storage is called here. Everything is safe to call from any thread.
"""

from __future__ import annotations

import re
from typing import Final

from kvshelf.errors import ObjectNameError

#: The folder of markers inside a namespace folder.
MARKERS: Final = ".kvshelf/gave-up"
_ATTEMPT: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


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


def is_marker(name: str) -> bool:
    """Whether a name on the storage is that of a marker."""
    folder, _, attempt = name.partition("/")[2].rpartition("/")
    return folder == MARKERS and is_attempt(attempt)
