"""What takes the space of a shelf: counts of objects and bytes, as users name them.

Owns the breakdowns. The listing is an :class:`~kvshelf.capacity.inventory.Inventory`, so the counts
are those that bounds of a shelf are compared with.

Contracts
---------
* Nothing is read but names, sizes, times and, for times of use, marks.
* Each object is in exactly one row of each breakdown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvshelf.backends import Backend
from kvshelf.capacity.inventory import Inventory, Scan
from kvshelf.capacity.marks import Marks
from kvshelf.errors import StorageError

_HOUR: Final = 3600.0
_DAY: Final = 86400.0
#: Ends of the ages of a row, in seconds since the last use, and names of the rows.
_AGES: Final = (_HOUR, _DAY, 7 * _DAY, 30 * _DAY)
_AGE_NAMES: Final = ("under 1 hour", "1 to 24 hours", "1 to 7 days", "7 to 30 days", "over 30 days")
_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
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
    objects: int
    bytes: int
    last_used: float


@dataclass(frozen=True, slots=True)
class Files:
    """Number and bytes of files of one sort."""

    files: int
    bytes: int


@dataclass(slots=True)
class Usage:
    """The space that a shelf takes.

    Attributes
    ----------
    objects, bytes : int
        All objects.
    counted_bytes : int
        Bytes of all that is kvshelf's: what counts against ``max_bytes``.
    by : dict of str and list of Row
        The breakdown.
    others : dict of str and Files
        What lies beside objects, by sort.
    free, total : int or None
        Bytes of the storage; None where it does not report it.
    """

    objects: int
    bytes: int
    counted_bytes: int
    by: dict[str, list[Row]] = field(default_factory=dict)
    others: dict[str, Files] = field(default_factory=dict)
    free: int | None = None
    total: int | None = None


def measure(
    backend: Backend,
    folders: Collection[str] | None = None,
    *,
    by: str = "namespace",
    on_listed: Callable[[], None] = lambda: None,
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
        Called for each file.

    Raises
    ------
    StorageError
        If the shelf cannot be listed.
    """
    inventory = Scan(backend, folders=folders, parents=None).run(pace=on_listed)
    assert inventory is not None
    used = _last_uses(backend, inventory)
    usage = Usage(len(inventory), int(inventory.size.sum()), inventory.nbytes)
    code, names = BREAKDOWNS[by](inventory, used)
    usage.by[by] = _rows(inventory, used, code, names)
    for sort, total in inventory.totals.items():
        usage.others[sort.value] = Files(total.count, total.nbytes)
    with contextlib.suppress(StorageError):
        space = backend.space()
        if space is not None:
            usage.free, usage.total = space.free, space.total
    return usage


def _last_uses(backend: Backend, inventory: Inventory) -> npt.NDArray[np.float64]:
    """Return when each object was used last, by its times and by marks."""
    used: npt.NDArray[np.float64] = inventory.used.copy()
    try:
        marks = Marks.read(backend)
    except StorageError:
        return used
    if len(marks):
        for number, folder in enumerate(inventory.namespaces):
            rows = np.flatnonzero(inventory.namespace == number)
            marked = marks.used(folder.name, np.ascontiguousarray(inventory.key[rows]))
            used[rows] = np.maximum(used[rows], marked)
    return used


def _rows(
    inventory: Inventory,
    used: npt.NDArray[np.float64],
    code: _Numbers,
    names: Sequence[str] | Callable[[int], str],
) -> list[Row]:
    """Return the rows of a breakdown by the number of each object's row.

    `names` of a fixed breakdown are a sequence, which is its order; other rows are ordered by size.
    """
    if not len(code):
        return []
    present, place, objects = np.unique(code, return_inverse=True, return_counts=True)
    sizes = np.zeros(len(present), np.int64)
    np.add.at(sizes, place, inventory.size)
    last = np.full(len(present), -np.inf)
    np.maximum.at(last, place, used)
    rows = [
        Row(
            names[number] if isinstance(names, Sequence) else names(number),
            int(count),
            int(size),
            float(when),
        )
        for number, count, size, when in zip(present.tolist(), objects, sizes, last, strict=True)
    ]
    if not isinstance(names, Sequence):
        rows.sort(key=lambda row: (-row.bytes, row.name))
    return rows


_Breakdown = tuple[_Numbers, "Sequence[str] | Callable[[int], str]"]


def _by_namespace(inventory: Inventory, used: npt.NDArray[np.float64]) -> _Breakdown:
    folders = inventory.namespaces
    return inventory.namespace.astype(np.int64), lambda number: folders[number].name


def _by_group(inventory: Inventory, used: npt.NDArray[np.float64]) -> _Breakdown:
    folders, groups = inventory.namespaces, inventory.groups
    count = max(1, len(groups))
    code = inventory.namespace.astype(np.int64) * count + inventory.group
    return code, lambda number: f"{folders[number // count].name}/{groups[number % count]}"


def _by_age(inventory: Inventory, used: npt.NDArray[np.float64]) -> _Breakdown:
    age = inventory.now - used
    return np.searchsorted(np.array(_AGES), age, side="right").astype(np.int64), _AGE_NAMES


#: From an inventory and last uses to the number of each object's row, and the names of the rows.
BREAKDOWNS: Final[dict[str, Callable[[Inventory, npt.NDArray[np.float64]], _Breakdown]]] = {
    "namespace": _by_namespace,
    "group": _by_group,
    "age": _by_age,
}
