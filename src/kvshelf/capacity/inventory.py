"""What is on a whole shelf: one listing of all its namespaces, in compact arrays.

Owns the listing (:meth:`Inventory.scan`), the sorts of files that a shelf has beside objects, the
age of an object, and how objects join to units, which are deleted together.

An object takes about 90 bytes, whatever the length of its name; :meth:`Inventory.name` makes the
name again. With parents, a unit takes 8 bytes more: the first of its parent's key, which are enough
to find it among the units of one salt group.

Ages
----
The last use of an object is the latest of its access time and its modification time. The time of
the last change of its entry counts too, in the first day after that: objects that were copied to a
shelf with their old times are not the first to go. Times more than a day in the future mean
nothing; an object that has no other times counts as used now.

Contracts
---------
* Only folders of namespaces and the reserved folder of the root are listed. No link is followed.
* An object is a file with exactly the name of one, in a namespace whose record does not say that
  it is of another version of the format. All else is counted, and never among the objects.
* A shelf may change while it is listed. Who deletes looks at each object again.

Threads
-------
A scan blocks on the storage, for minutes on a large shelf. An :class:`Inventory` does not change
after its scan, and may be read by any thread.
"""

from __future__ import annotations

import contextlib
import errno
import re
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvshelf.backends import Backend, ObjectInfo
from kvshelf.backends.base import time_for_ages
from kvshelf.capacity.marks import Marks
from kvshelf.capacity.parallel import in_parallel, threads_for
from kvshelf.capacity.pins import Pins
from kvshelf.errors import (
    BadObjectError,
    ObjectMissingError,
    PermanentStorageError,
    StorageError,
)
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import KINDS, WINDOW
from kvshelf.format.names import (
    DESCRIPTION,
    object_name,
    parse_namespace_folder,
    parse_object_name,
)
from kvshelf.shelf.eviction import GONE, STATE_BIT, UNKNOWN, WINDOW_BIT, Units
from kvshelf.shelf.hits import UNLIMITED, window_chunks
from kvshelf.shelf.markers import MARKERS, is_attempt
from kvshelf.shelf.orphans import (
    QUARANTINE,
    RESERVED,
    is_of_other_version,
    is_temporary,
    read_record,
)

Integers: TypeAlias = "npt.NDArray[np.int64]"
Floats: TypeAlias = "npt.NDArray[np.float64]"
Bytes: TypeAlias = "npt.NDArray[np.uint8]"
Masks: TypeAlias = "npt.NDArray[np.uint8]"
Flags: TypeAlias = "npt.NDArray[np.bool_]"

_DAY: Final = 86400.0
#: An access time that is later than the modification time by this is a use: writing takes time.
_HIT_SECONDS: Final = 1.0
#: Most files beside objects of which the names are remembered: the others are found again later.
_MOST_NAMED: Final = 65536
#: More objects, or salt groups, than a shelf has: a listing of more may have no end.
_MOST_OBJECTS: Final = 1 << 24
_MOST_GROUPS: Final = 1 << 20
#: Sizes above this are counted as this: sums of forged ones must not overflow.
_MOST_BYTES: Final = 1 << 46
#: Units that are worked on at the same time where that takes much memory for each.
_UNITS_AT_ONCE: Final = 1 << 16
#: Numbers of the kinds in rows.
_KIND_NUMBERS: Final = {kind: number for number, kind in enumerate(KINDS)}
#: Bits of masks of kinds, see :mod:`kvshelf.shelf.eviction`, by the number of the kind.
_KIND_BITS: Final = np.array([1, 2, 4], np.uint8)

_ROW: Final = np.dtype(
    [
        ("namespace", "u4"),
        ("group", "u4"),
        ("index", "u4"),
        ("tail", "u4"),
        ("shard", "u4"),
        ("shards", "u4"),
        ("kind", "u1"),
        ("hit", "?"),
        ("key", "u1", 32),
        ("size", "i8"),
        ("used", "f8"),
        ("born", "f8"),
    ]
)
_PACK: Final = struct.Struct("=IIIIIIB?32sqdd")
#: The beginning of a header, up to the parent's key.
_HEADER: Final = re.compile(
    rb'\{"__metadata__":\{"format":"kvshelf/1","namespace":"([0-9a-f]{16})[0-9a-f]{48}",'
    rb'"key":"([0-9a-f]{64})","parent":"([0-9a-f]{64})"'
)
_HEADER_BYTES: Final = 288


class Sort(Enum):
    """What a file below a root is, if it is no object."""

    TEMPORARY = "temporaries"
    QUARANTINED = "quarantine"
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
    """A temporary, a bad object in quarantine, or a marker.

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
    def kinds(self) -> int:
        """The kinds of KV of the namespace, as bits; 0: unknown."""
        said = self.record.get("kinds")
        if said is None and self.record:
            return int(_KIND_BITS[0])
        kinds = said if isinstance(said, list) else ()
        return sum(int(_KIND_BITS[n]) for kind, n in _KIND_NUMBERS.items() if kind in kinds)

    @property
    def window_chunks(self) -> int:
        """Number of last chunks whose window objects a hit needs."""
        kinds, windows = self.record.get("kinds"), self.record.get("sliding_windows")
        size = self.record.get("chunk_size")
        if not self.kinds & WINDOW_BIT:
            return 0
        if not (isinstance(kinds, list) and isinstance(windows, list) and isinstance(size, int)):
            return UNLIMITED
        reach = [w for w, k in zip(windows, kinds, strict=False) if k == WINDOW]
        if (
            size < 1
            or not reach
            or not all(isinstance(w, int) and 0 < w < UNLIMITED for w in reach)
        ):
            return UNLIMITED
        return len(window_chunks(UNLIMITED, max(reach), size))


def last_use(info: ObjectInfo, now: float) -> float:
    """Return when an object was last used, see the module; seconds since the epoch.

    Parameters
    ----------
    info : ObjectInfo
    now : float
        By the clock of the storage.
    """
    end = now + _DAY
    best = info.mtime if 0 < info.mtime < end else 0.0
    atime, ctime = info.atime, info.ctime
    if atime is not None and best < atime < end:
        best = atime
    if ctime is not None and best < ctime < end and (ctime > now - _DAY or not best):
        best = ctime
    return best or now


def changed_at(info: ObjectInfo) -> float:
    """Return when a file was last written, linked or moved; seconds since the epoch."""
    # What is linked or moved keeps its modification time.
    return max(info.mtime, info.ctime or 0.0)


def _never() -> bool:
    return False


def _do_nothing() -> None:
    pass


class Inventory:
    """All that is on a shelf, see the module. Made by :meth:`scan`.

    Attributes
    ----------
    now : float
        Time of the scan by the clock of the storage, seconds since the epoch.
    aged_at : float
        The time by which things are old, see :func:`kvshelf.backends.base.time_for_ages`.
    namespaces : list of NamespaceFolder
    groups : list of str
        Names of salt groups.
    totals : dict of Sort and Total
        Files beside objects, by sort.
    leftovers : list of Leftover
        Those of them that may be deleted at some age; the first 65,536 that were found.
    """

    def __init__(self, now: float, aged_at: float | None = None) -> None:
        self.now = now
        self.aged_at = now if aged_at is None else aged_at
        self.namespaces: list[NamespaceFolder] = []
        self.groups: list[str] = []
        self.totals: dict[Sort, Total] = {sort: Total() for sort in Sort}
        self.leftovers: list[Leftover] = []
        self._hold(bytearray())

    def _hold(self, packed: bytearray) -> None:
        """Take the rows of all objects."""
        self._packed = packed
        self._rows = np.frombuffer(packed, _ROW)
        self._join()

    # ---------------------------------------------------------------------------------- columns

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def namespace(self) -> npt.NDArray[np.uint32]:
        """Index in `namespaces` of each object, uint32 [n]."""
        return self._column("namespace")

    @property
    def group(self) -> npt.NDArray[np.uint32]:
        """Index in `groups` of each object, uint32 [n]."""
        return self._column("group")

    @property
    def key(self) -> Bytes:
        """Chunk key of each object, uint8 [n, 32]."""
        found: Bytes = self._rows["key"]
        return found

    @property
    def index(self) -> npt.NDArray[np.uint32]:
        """Chunk index of each object, uint32 [n]."""
        return self._column("index")

    @property
    def tail(self) -> npt.NDArray[np.uint32]:
        """Tokens of the tail of each object, uint32 [n]; 0 of a whole chunk."""
        return self._column("tail")

    @property
    def kind(self) -> Bytes:
        """Kind of each object, uint8 [n]: its place in :data:`~kvshelf.format.kinds.KINDS`."""
        found: Bytes = self._rows["kind"]
        return found

    @property
    def shard(self) -> npt.NDArray[np.uint32]:
        """Shard of each object, uint32 [n]."""
        return self._column("shard")

    @property
    def shards(self) -> npt.NDArray[np.uint32]:
        """Number of shards that each object's name states, uint32 [n]."""
        return self._column("shards")

    @property
    def size(self) -> Integers:
        """Bytes of each object, int64 [n]."""
        found: Integers = self._rows["size"]
        return found

    @property
    def used(self) -> Floats:
        """Last use of each object by its own times, float64 [n], seconds since the epoch."""
        found: Floats = self._rows["used"]
        return found

    @property
    def born(self) -> Floats:
        """When each object was stored, float64 [n], seconds since the epoch."""
        found: Floats = self._rows["born"]
        return found

    def _column(self, name: str) -> npt.NDArray[np.uint32]:
        found: npt.NDArray[np.uint32] = self._rows[name]
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kvshelf's: what counts against ``max_bytes``."""
        others = (total.nbytes for sort, total in self.totals.items() if sort is not Sort.FOREIGN)
        return int(self.size.sum()) + sum(others)

    def name(self, row: int) -> str:
        """Return the name of an object, relative to the root."""
        return self._name_and_key(row)[0]

    def _name_and_key(self, row: int) -> tuple[str, bytes]:
        # Numpy takes ten times as long for the fields of one row.
        space, group, index, tail, shard, shards, kind, _, key, *_ = _PACK.unpack_from(
            self._packed, row * _PACK.size
        )
        chunk = Chunk(key, b"", index, tail or 1, tail=tail > 0, salt_group=self.groups[group])
        inner = object_name(chunk, shard, shards, KINDS[kind])
        return f"{self.namespaces[space].name}/{inner}", key

    # ------------------------------------------------------------------------------------- units

    @property
    def unit_count(self) -> int:
        """Number of units: chunks and tails, each with all its shards and kinds."""
        return len(self._starts)

    @property
    def first_rows(self) -> Integers:
        """One object of each unit, int64 [units]: its namespace, group, key and index."""
        return self._order[self._starts].astype(np.int64)

    def members(self, unit: int) -> Integers:
        """Return the objects of a unit, as an int64 array."""
        end = self._starts[unit + 1] if unit + 1 < len(self._starts) else len(self._order)
        return self._order[self._starts[unit] : end].astype(np.int64)

    def object_counts(self) -> Integers:
        """Return how many objects of each kind each unit has, int64 [units, kinds]."""
        kind = self.kind[self._order]
        counts = np.zeros((self.unit_count, len(KINDS)), np.int64)
        for number in range(len(KINDS)) if self.unit_count else ():
            counts[:, number] = np.add.reduceat((kind == number).astype(np.int64), self._starts)
        return counts

    def _join(self) -> None:
        """Find which objects are of one unit."""
        tags = {tag: n for n, tag in enumerate({space.tag: None for space in self.namespaces})}
        #: Number of the namespace of each folder: those with the same tag have the same.
        self._tags = np.array([tags[space.tag] for space in self.namespaces], np.uint32)
        rows = self._rows
        keys = np.ascontiguousarray(rows["key"]).view(np.uint64)
        columns = [rows["group"], self._tags[rows["namespace"]], *keys.T[::-1]]
        order = np.lexsort(columns) if len(rows) else np.empty(0, np.int64)
        first = np.ones(len(rows), np.bool_)
        if len(rows):
            first[1:] = False
            for column in columns:
                ordered = column[order]
                first[1:] |= ordered[1:] != ordered[:-1]
        self._order = order.astype(np.uint32)
        self._starts = np.flatnonzero(first).astype(np.uint32)
        #: The first bytes of the parent's key of each unit, uint64 [units]; 0: not known.
        self._parents: npt.NDArray[np.uint64] | None = None

    def unit_tags(self) -> npt.NDArray[np.uint32]:
        """Return a number for the namespace of each unit, uint32 [units]."""
        found: npt.NDArray[np.uint32] = self._tags[self.namespace[self.first_rows]]
        return found

    def units(self, *, marks: Marks | None = None, pins: Pins | None = None) -> Units:
        """Return all units, in the order of their numbers.

        Parameters
        ----------
        marks : Marks, optional
            Uses that the objects' times do not show.
        pins : Pins, optional
        """
        rows, order, starts, first = self._rows, self._order, self._starts, self.first_rows
        count = len(starts)
        if not count:
            return _no_units()
        needs, parent = self._needs(first), self._parent_units()
        born = np.maximum.reduceat(rows["born"][order], starts)
        used = np.maximum.reduceat(rows["used"][order], starts)
        hit = np.logical_or.reduceat(rows["hit"][order], starts)
        kind = rows["kind"][order]
        several = bool(kind.any())
        #: By kind, where there are several.
        marked = np.zeros((len(KINDS) if several else 1, count))
        if marks:
            for space, _, of_space in self._by_folder(first, by_group=False):
                keys = rows["key"][first[of_space]]
                for number, last in enumerate(marked):
                    asked = KINDS[number] if several else None
                    last[of_space] = marks.used(self.namespaces[space].name, keys, asked)
            hit |= marked.max(axis=0) > born
        pinned = np.zeros(count, np.bool_)
        if pins:
            for space, group, of_group in self._by_folder(first, by_group=True):
                keys = rows["key"][first[of_group]]
                name = self.namespaces[space].name
                pinned[of_group] = pins.covers(name, self.groups[group], keys)
        sizes, broken = [], np.zeros(count, np.uint8)
        uses: list[Floats] = []
        for number, bit in enumerate(_KIND_BITS):
            if number and not several:
                sizes.append(np.zeros(count, np.int64))
                continue
            of_kind = kind == number
            held = np.where(of_kind, rows["size"][order], 0)
            sizes.append(np.add.reduceat(held, starts))
            there = np.add.reduceat(of_kind.astype(np.uint32), starts)
            said = np.maximum.reduceat(np.where(of_kind, rows["shards"][order], 0), starts)
            broken |= np.where((there > 0) & (there < said), bit, 0).astype(np.uint8)
            if several:
                of_use = np.maximum.reduceat(np.where(of_kind, rows["used"][order], 0.0), starts)
                uses.append(np.maximum(of_use, marked[number]))
        return Units(
            used=np.maximum(np.maximum(used, marked.max(axis=0)), born),
            born=born,
            index=rows["index"][first],
            parent=parent,
            full=sizes[0],
            window=sizes[1],
            state=sizes[2],
            hit=hit,
            pinned=pinned,
            needs=needs,
            broken=broken,
            window_used=uses[1] if several else None,
            state_used=uses[2] if several else None,
        )

    def window_chunks(self) -> Integers:
        """Return how many last chunks' windows a hit needs in each unit's namespace, int64."""
        of_space = np.array([space.window_chunks for space in self.namespaces], np.int64)
        return of_space[self.namespace[self.first_rows]]

    def _needs(self, first: Integers) -> Bytes:
        """Kinds of each unit's namespace, by its record, else by its objects."""
        seen = np.zeros(len(self.namespaces), np.uint8)
        np.bitwise_or.at(seen, self.namespace, _KIND_BITS[self.kind])
        said = np.array([space.kinds for space in self.namespaces], np.uint8)
        needs: Bytes = np.where(said > 0, said, seen)[self.namespace[first]]
        return needs

    def _by_folder(self, first: Integers, *, by_group: bool) -> Iterator[tuple[int, int, Integers]]:
        """Yield namespace folder, group, and some of the units there."""
        spaces, groups = self.namespace[first], self.group[first]
        place = spaces.astype(np.int64) * (len(self.groups) if by_group else 1)
        if by_group:
            place += groups
        order = np.argsort(place, kind="stable")
        cuts = np.flatnonzero(np.diff(place[order])) + 1
        for units in np.split(order, cuts):
            # Whoever asks for their keys makes a copy of them.
            for begin in range(0, len(units), _UNITS_AT_ONCE):
                some = units[begin : begin + _UNITS_AT_ONCE]
                yield int(spaces[some[0]]), int(groups[some[0]]), some

    # ----------------------------------------------------------------------------------- parents

    def _parent_units(self) -> Integers:
        """Return the unit before each one."""
        rows, first = self._rows, self.first_rows
        parent = np.where(rows["index"][first] == 0, np.int64(GONE), np.int64(UNKNOWN))
        if self._parents is None:
            return parent
        asked = np.flatnonzero((self._parents != 0) & (parent == UNKNOWN))
        keys = _beginnings(self, first)
        tags, groups, index = self.unit_tags(), rows["group"][first], rows["index"][first]
        whole = rows["tail"][first] == 0
        parent[asked] = GONE
        # Units are sorted by the beginnings of their keys. Several units have the same key only if
        # it is in several salt groups.
        for begin in range(0, len(asked), _UNITS_AT_ONCE):
            units = asked[begin : begin + _UNITS_AT_ONCE]
            wanted = self._parents[units]
            at = np.searchsorted(keys, wanted)
            while len(units):
                inside = (at < len(keys)) & (keys[np.minimum(at, len(keys) - 1)] == wanted)
                units, at, wanted = units[inside], at[inside], wanted[inside]
                # A tail is the parent of nothing. Headers say anything, also that chunks are each
                # other's parents: a parent is the chunk before, so that no circle is one.
                same = (tags[at] == tags[units]) & (groups[at] == groups[units]) & whole[at]
                same &= index[at] == index[units] - 1
                parent[units[same]] = at[same]
                units, at, wanted = units[~same], at[~same] + 1, wanted[~same]
        return parent

    def _remember_parents(self, before: Inventory) -> None:
        """Take over the parents that an earlier inventory knows."""
        if before._parents is None or not len(before) or not len(self):
            return
        old, new = (_beginnings(one, one.first_rows) for one in (before, self))
        at = np.minimum(np.searchsorted(old, new), len(old) - 1)
        self._parents = np.where(old[at] == new, before._parents[at], np.uint64(0))

    def _read_parents(
        self,
        backend: Backend,
        every: bool,
        stop: Callable[[], bool],
        pace: Callable[[], None],
    ) -> bool:
        """Read the parents that something hangs on; whether it came to an end."""
        first = self.first_rows
        wanted = self.index[first] > 0
        if not every:
            wanted &= (self._needs(first) & (WINDOW_BIT | STATE_BIT)) != 0
        if self._parents is not None:
            wanted &= self._parents == 0
        units = np.flatnonzero(wanted)
        if not len(units):
            return True
        if self._parents is None:
            self._parents = np.zeros(self.unit_count, np.uint64)

        def read(unit: int) -> bytes | None:
            pace()
            for row in self.members(unit).tolist():
                found = _read_parent(backend, *self._name_and_key(row))
                if found is not None:
                    return found
            return None

        for unit, parent in in_parallel(read, map(int, units), threads_for(backend)):
            if parent is not None:
                self._parents[unit] = np.frombuffer(parent, np.uint64, 1)[0]
            if stop():
                return False
        return True

    # -------------------------------------------------------------------------------------- scan

    @classmethod
    def scan(
        cls,
        backend: Backend,
        *,
        before: Inventory | None = None,
        folders: Collection[str] | None = None,
        parents: bool | None = False,
        stop: Callable[[], bool] = _never,
        pace: Callable[[], None] = _do_nothing,
    ) -> Inventory | None:
        """List a whole shelf, or some of its namespace folders.

        Parameters
        ----------
        backend : Backend
        before : Inventory, optional
            An earlier inventory of the shelf: the parents that it knows are not read again.
        folders : Collection of str, optional
            Only these namespace folders, and not the root's reserved folder.
        parents : bool or None
            Read the parent of every chunk, from the beginning of one of its objects. False: only
            in namespaces with kinds other than full; None: nowhere.
        stop : Callable
            Asked often; True ends the scan.
        pace : Callable
            Called for each file, on any thread; may sleep.

        Returns
        -------
        Inventory or None
            None if `stop` ended it.

        Raises
        ------
        StorageError
            If the storage failed, does not allow listing, or lists more than any shelf has.
        """
        now = time_of(backend)
        found = cls(now, time_for_ages(now, backend.url))
        listing = _Listing(found)
        for name in backend.folders():
            if parse_namespace_folder(name) is None or (
                folders is not None and name not in folders
            ):
                continue
            space = NamespaceFolder(name, name[-16:], read_record(backend, name))
            number = len(found.namespaces)
            found.namespaces.append(space)
            for info in backend.list(name, hidden=True):
                listing.add(number, info)
                pace()
                if stop():
                    return None
        for info in backend.list(RESERVED, hidden=True) if folders is None else ():
            listing.add_reserved(info)
            pace()
        found.groups = list(listing.groups)
        found._hold(listing.packed)
        if before is not None:
            found._remember_parents(before)
        if parents is None or found._read_parents(backend, parents, stop, pace):
            return found
        return None


class _Listing:
    """Sorts the rows of a listing into an inventory that is being made."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self.packed = bytearray()
        self.groups: dict[str, int] = {}

    def add(self, number: int, info: ObjectInfo) -> None:
        """Add a file below a namespace's folder.

        Raises
        ------
        PermanentStorageError
            If there are more files than any shelf has: the listing may have no end.
        """
        inventory = self._inventory
        if len(self.packed) >= _MOST_OBJECTS * _ROW.itemsize or len(self.groups) > _MOST_GROUPS:
            raise PermanentStorageError(
                errno.EOVERFLOW,
                f"found more than {_MOST_OBJECTS} objects, or than {_MOST_GROUPS} salt groups:"
                " the listing may have no end",
                info.name,
            )
        space = inventory.namespaces[number]
        inner = info.name[len(space.name) + 1 :]
        if space.of_other_version:
            inventory.totals[Sort.OTHER_VERSION].add(info.size)
            return
        parsed = parse_object_name(inner)
        if parsed is None:
            self._add_other(_sort_of(info, inner), info)
            return
        used = last_use(info, inventory.now)
        born = info.mtime if 0 < info.mtime <= used else used
        self.packed += _PACK.pack(
            number,
            self.groups.setdefault(parsed.salt_group, len(self.groups)),
            parsed.index,
            parsed.tail_tokens or 0,
            parsed.shard,
            parsed.shards,
            _KIND_NUMBERS[parsed.kind],
            info.atime is not None and info.atime > info.mtime + _HIT_SECONDS,
            parsed.key,
            min(info.size, _MOST_BYTES),
            used,
            born,
        )

    def add_reserved(self, info: ObjectInfo) -> None:
        """Add a file in the reserved folder of the root."""
        sort = Sort.TEMPORARY if is_temporary(info.name) else Sort.RESERVED
        self._add_other(sort, info)

    def _add_other(self, sort: Sort, info: ObjectInfo) -> None:
        inventory = self._inventory
        inventory.totals[sort].add(min(info.size, _MOST_BYTES))
        named = sort in (Sort.TEMPORARY, Sort.QUARANTINED, Sort.MARKER)
        if named and len(inventory.leftovers) < _MOST_NAMED:
            leftover = Leftover(info.name, sort, info.size, changed_at(info))
            inventory.leftovers.append(leftover)


def _sort_of(info: ObjectInfo, inner: str) -> Sort:
    """Return what a file in a namespace's folder is, if it is no object."""
    if inner == DESCRIPTION:
        return Sort.DESCRIPTION
    folder, _, base = inner.rpartition("/")
    if folder == QUARANTINE:
        return Sort.QUARANTINED
    if folder == MARKERS and not info.size and is_attempt(base):
        return Sort.MARKER
    if is_temporary(info.name):
        return Sort.TEMPORARY
    return Sort.RESERVED if inner.startswith(f"{RESERVED}/") else Sort.FOREIGN


def _beginnings(inventory: Inventory, rows: Integers) -> npt.NDArray[np.uint64]:
    """Return the first eight bytes of keys as numbers, in the order of units."""
    return np.ascontiguousarray(inventory.key[:, :8][rows]).view(np.uint64)[:, 0]


def _no_units() -> Units:
    floats, sizes = np.empty(0), np.empty(0, np.int64)
    flags = np.empty(0, np.bool_)
    return Units(floats, floats, np.empty(0, np.uint32), sizes, sizes, sizes, sizes, flags, flags)


def time_of(backend: Backend) -> float:
    """Return the storage's time; this machine's where it does not tell."""
    with contextlib.suppress(StorageError):
        now = backend.now()
        if now is not None:
            return now
    return time.time()


def _read_parent(backend: Backend, name: str, key: bytes) -> bytes | None:
    """Return the parent's key that an object names; None if that cannot be told."""
    data = bytearray(_HEADER_BYTES)
    try:
        count = backend.read_into(name, memoryview(data))
    except (ObjectMissingError, BadObjectError):
        return None
    except StorageError as error:
        if error.retryable:
            raise
        # One file that may not be read ends no scan.
        return None
    found = _HEADER.match(data, 8, count)
    tag = name.partition("/")[0][-16:]
    if found is None or found[1] != tag.encode() or found[2] != key.hex().encode():
        return None
    return bytes.fromhex(found[3].decode())
