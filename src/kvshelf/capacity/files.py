"""What the files of a shelf are, beside objects, and how old.

Owns the sorts of files, what the record of a namespace says about what its hits need, and the ages
of files. Pure, but for :func:`time_of`, which asks the storage; any thread may call.

Ages
----
The last use of an object is the latest of its access time and its modification time. The time of
the last change of its entry counts too, in the first day after that: objects that were copied to a
shelf with their old times are not the first to be deleted. Times more than a day in the future mean
nothing; an object that has no other times counts as used now.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np

from kvshelf.backends import Backend, ObjectInfo
from kvshelf.backends.clock import StorageClock
from kvshelf.errors import StorageError
from kvshelf.format.hit_rule import HitRule
from kvshelf.format.kinds import KIND_BITS, KINDS
from kvshelf.shelf.leftovers import is_of_other_version

DAY: Final = 86400.0
#: Numbers of the kinds in rows.
KIND_NUMBERS: Final = {kind: number for number, kind in enumerate(KINDS)}
#: The bits of the kinds, by their numbers.
NUMBER_BITS: Final = np.array(list(KIND_BITS.values()), np.uint8)


class Sort(Enum):
    """The class of a file below a root that is no object."""

    TEMPORARY = "temporaries"
    MARKER = "markers"
    DESCRIPTION = "descriptions"
    RESERVED = "reserved"
    OTHER_VERSION = "other versions"
    FOREIGN = "foreign"


@dataclass(slots=True)
class Total:
    """Number of files, and their bytes."""

    count: int = 0
    nbytes: int = 0

    def add(self, nbytes: int, count: int = 1) -> None:
        """Count more files."""
        self.count += count
        self.nbytes += nbytes


@dataclass(frozen=True, slots=True)
class Leftover:
    """A temporary, marker, or object that says how long tails are kept.

    Attributes
    ----------
    name : str
    sort : Sort
    size : int
        Bytes.
    changed : float
        When it last changed, seconds since the epoch.
    """

    name: str
    sort: Sort
    size: int
    changed: float


@dataclass(frozen=True, slots=True)
class NamespaceFolder:
    """A namespace's folder.

    Attributes
    ----------
    name : str
    tag : str
        The 16 hex digits at the end of its name. Folders with the same tag hold one namespace.
    record : Mapping
        The namespace's record, as far as it can be read; else empty. Nothing in it is checked.
    """

    name: str
    tag: str
    record: Mapping[str, object] = field(default_factory=dict)

    @property
    def of_other_version(self) -> bool:
        """Whether the record says that it is of another version of the format."""
        return is_of_other_version(self.record)

    @property
    def rule(self) -> HitRule:
        """What hits need, as far as the record says."""
        return HitRule.of(self.record)


def last_use(info: ObjectInfo, now: float) -> float:
    """Return when an object was last used, see the module; seconds since the epoch.

    Parameters
    ----------
    info : ObjectInfo
    now : float
        By the clock of the storage.
    """
    end = now + DAY
    best = info.mtime if 0 < info.mtime < end else 0.0
    atime, ctime = info.atime, info.ctime
    if atime is not None and best < atime < end:
        best = atime
    if ctime is not None and best < ctime < end and (ctime > now - DAY or not best):
        best = ctime
    return best or now


def changed_at(info: ObjectInfo) -> float:
    """Return when a file was last written, linked or moved; seconds since the epoch."""
    # Linked or moved files keep their modification time.
    return max(info.mtime, info.ctime or 0.0)


def time_of(backend: Backend) -> float:
    """Return the storage's time; this machine's where it has none."""
    with contextlib.suppress(StorageError):
        return StorageClock(backend.now).ask()
    return time.time()
