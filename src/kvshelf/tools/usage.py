"""What takes the space of a shelf: counts of objects and bytes, as users name them.

Owns the breakdowns.

Contracts
---------
* Nothing is read but names, sizes and times.
* Each object is in exactly one row. Bytes are those that bounds of a shelf are compared with.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from kvshelf.backends import Backend, Space
from kvshelf.capacity.limits import DAY, HOUR
from kvshelf.capacity.sweep import Total, Unit
from kvshelf.errors import StorageError
from kvshelf.tools.listing import list_parts

#: Ends of the ages of a row, in seconds since the last use, and names of the rows.
_AGES: Final = (HOUR, DAY, 7 * DAY, 30 * DAY)
_AGE_NAMES: Final = ("under 1 hour", "1 to 24 hours", "1 to 7 days", "7 to 30 days", "over 30 days")


@dataclass(slots=True)
class Row:
    """One row of a breakdown.

    Attributes
    ----------
    name : str
    objects, bytes : int
    last_used : float
        Latest use of any of the objects, seconds since the epoch.
    """

    name: str
    objects: int = 0
    bytes: int = 0
    last_used: float = 0.0

    def add(self, unit: Unit) -> None:
        """Count the objects of a unit."""
        self.objects += len(unit.names)
        self.bytes += unit.nbytes
        self.last_used = max(self.last_used, unit.used)


@dataclass(slots=True)
class Usage:
    """The space that a shelf takes.

    Attributes
    ----------
    by : str
        A breakdown, of :data:`BREAKDOWNS`.
    rows : list of Row
    objects, bytes : int
        All objects.
    others : dict of str and Total
        What lies beside objects, by sort.
    space : Space or None
        Of the storage; None where it does not report it.
    skipped : dict of str and StorageError
        Folders that could not be listed.
    """

    by: str
    rows: list[Row] = field(default_factory=list)
    objects: int = 0
    bytes: int = 0
    others: dict[str, Total] = field(default_factory=dict)
    space: Space | None = None
    skipped: dict[str, StorageError] = field(default_factory=dict)


def _age_name(unit: Unit, now: float) -> str:
    return _AGE_NAMES[bisect(_AGES, now - unit.used)]


#: From a unit, and the time, to the name of its row.
BREAKDOWNS: Final[dict[str, Callable[[Unit, float], str]]] = {
    "namespace": lambda unit, now: unit.space,
    "group": lambda unit, now: unit.where,
    "age": _age_name,
}


def measure(
    backend: Backend,
    folders: Collection[str] | None = None,
    *,
    by: str = "namespace",
    on_listed: Callable[[int], None] = lambda files: None,
) -> Usage:
    """List a shelf, and count.

    Parameters
    ----------
    backend : Backend
    folders : Collection of str, optional
        Only these namespace folders; all when absent.
    by : str
        A breakdown, of :data:`BREAKDOWNS`.
    on_listed : Callable
        Called with numbers of files that were listed.

    Raises
    ------
    StorageError
        If the shelf cannot be listed.
    """
    usage, now, name_of = Usage(by), time.time(), BREAKDOWNS[by]
    rows: dict[str, Row] = {}
    for part in list_parts(backend, folders, now, usage.skipped, on_listed=on_listed):
        for unit in part.units:
            name = name_of(unit, now)
            rows.setdefault(name, Row(name)).add(unit)
        for sort, total in part.others.items():
            usage.others.setdefault(sort, Total()).add(total.nbytes, total.count)
    if by == "age":
        usage.rows = [rows[name] for name in _AGE_NAMES if name in rows]
    else:
        usage.rows = sorted(rows.values(), key=lambda row: (-row.bytes, row.name))
    usage.objects = sum(row.objects for row in usage.rows)
    usage.bytes = sum(row.bytes for row in usage.rows)
    with contextlib.suppress(StorageError):
        usage.space = backend.space()
    return usage
