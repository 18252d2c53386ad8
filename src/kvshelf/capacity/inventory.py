"""What is on a shelf, or on a part of it: one listing, in compact arrays.

Owns the listing (:class:`Scan`), which nothing else makes that bounds or cleans a shelf;
the sorts of files that a shelf has beside objects, the age of an object, and how objects join to
units, which are deleted together.

An object takes about 90 bytes, whatever the length of its name; :meth:`Inventory.name` makes the
name again. With parents, a unit takes 8 bytes more: the first of its parent's key, which are enough
to find it among the units of one salt group.

Contracts
---------
* Only folders of namespaces and the reserved folder of the root are listed. No link is followed.
* An object is a file with exactly the name of one, in a namespace whose record does not say that
  it is of another version of the format. All else is counted, and never among the objects.
* Links, pipes and folders with names of temporaries are temporaries; elsewhere they are nothing.
* A shelf may change while it is listed. A deletion checks each object again.
* What is more than a shelf has (2^24 objects, 2^20 salt groups) is counted only, or refused.

Threads
-------
A scan blocks on the storage, for minutes on a large shelf. An :class:`Inventory` does not change
after its scan, and may be read by any thread.
"""

from __future__ import annotations

import errno
import re
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvshelf.backends import Backend, ObjectInfo
from kvshelf.backends.base import time_for_ages
from kvshelf.capacity.eviction import Units
from kvshelf.capacity.files import (
    KIND_NUMBERS,
    NUMBER_BITS,
    Leftover,
    NamespaceFolder,
    Sort,
    Total,
    changed_at,
    last_use,
    time_of,
)
from kvshelf.capacity.marks import Marks
from kvshelf.capacity.parallel import in_parallel, threads_for_calls
from kvshelf.errors import (
    BadObjectError,
    ObjectMissingError,
    PermanentStorageError,
    StorageError,
)
from kvshelf.format.forest import GONE, UNKNOWN, Integers
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import KINDS, STATE_BIT, WINDOW_BIT
from kvshelf.format.names import (
    DESCRIPTION,
    object_name,
    parse_namespace_folder,
    parse_object_name,
)
from kvshelf.shelf.leftovers import (
    RESERVED,
    is_temporary,
    read_record,
)
from kvshelf.shelf.markers import MARKERS, is_attempt
from kvshelf.shelf.pins import Pins

Numbers: TypeAlias = "npt.NDArray[np.uint32]"
Floats: TypeAlias = "npt.NDArray[np.float64]"
Bytes: TypeAlias = "npt.NDArray[np.uint8]"

#: An access time that is later than the modification time by this is a use: writing takes time.
_HIT_SECONDS: Final = 1.0
#: Most files beside objects of which the names are remembered: the others are found again later.
_MOST_NAMED: Final = 65536
#: Most objects and salt groups of an inventory, and files of a listing: more may have no end.
_MOST_OBJECTS: Final = 1 << 24
_MOST_GROUPS: Final = 1 << 20
_MOST_FILES: Final = 1 << 27
#: Sizes above this are counted as this: sums of forged ones must not overflow.
_MOST_BYTES: Final = 1 << 46
#: Units that are worked on at the same time where that takes much memory for each.
_UNITS_AT_ONCE: Final = 1 << 16
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
#: The same with keys as numbers.
_KEYS: Final = np.dtype(
    {
        "names": ["key"],
        "formats": [("u8", 4)],
        "offsets": [26],
        "itemsize": _ROW.itemsize,
    }
)
#: The beginning of a header, up to the parent's key.
_HEADER: Final = re.compile(
    rb'\{"__metadata__":\{"format":"kvshelf/1","namespace":"([0-9a-f]{16})[0-9a-f]{48}",'
    rb'"key":"([0-9a-f]{64})","parent":"([0-9a-f]{64})"'
)
_HEADER_BYTES: Final = 288


@dataclass(frozen=True, eq=False, slots=True)
class Parents:
    """The parents of chunks that an inventory knows; all that is kept of it for the next one.

    Attributes
    ----------
    keys, parents : uint64 array [n]
        The first bytes of the keys, in order, and of their parents' keys.
    """

    keys: npt.NDArray[np.uint64]
    parents: npt.NDArray[np.uint64]


class Inventory:
    """What is on a shelf, see the module. Made by :class:`Scan`.

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
    unlisted : Total
        What was listed and did not fit: then this is a part of the shelf only.
    namespace, group : uint32 array [n]
        Index of each object in `namespaces`, and in `groups`.
    key : uint8 array [n, 32]
    index, tail : uint32 array [n]
        Chunk index; tokens of a tail, 0 for a whole chunk.
    shard, shards : uint32 array [n]
        The latter as each object's name states.
    kind : uint8 array [n]
        Its place in :data:`~kvshelf.format.kinds.KINDS`.
    size : int64 array [n]
        Bytes.
    used, born : float64 array [n]
        Last use by the object's own times, and when it was stored; seconds since the epoch.
    """

    def __init__(self) -> None:
        self.now = self.aged_at = 0.0
        self.unlisted = Total()
        self.namespaces: list[NamespaceFolder] = []
        self.groups: list[str] = []
        self.totals: dict[Sort, Total] = {sort: Total() for sort in Sort}
        self.leftovers: list[Leftover] = []
        self._hold(bytearray())

    def _hold(self, packed: bytearray) -> None:
        """Take the rows of all objects."""
        self._packed = packed
        self._rows = rows = np.frombuffer(packed, _ROW)
        self.namespace: Numbers = rows["namespace"]
        self.group: Numbers = rows["group"]
        self.index: Numbers = rows["index"]
        self.tail: Numbers = rows["tail"]
        self.shard: Numbers = rows["shard"]
        self.shards: Numbers = rows["shards"]
        self.kind: Bytes = rows["kind"]
        self.key: Bytes = rows["key"]
        self.size: Integers = rows["size"]
        self.used: Floats = rows["used"]
        self.born: Floats = rows["born"]
        self._join()

    # ---------------------------------------------------------------------------------- columns

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all files of kvshelf: they count against ``max_bytes``."""
        others = (total.nbytes for sort, total in self.totals.items() if sort is not Sort.FOREIGN)
        return int(self.size.sum()) + sum(others) + self.unlisted.nbytes

    @property
    def is_part(self) -> bool:
        """Whether there was more than fits."""
        return self.unlisted.count > 0

    def group_of(self, row: int) -> str:
        """Return the folder of an object's namespace and salt group, relative to the root."""
        return f"{self.namespaces[self.namespace[row]].name}/{self.groups[self.group[row]]}"

    def name(self, row: int) -> str:
        """Return the name of an object, relative to the root."""
        return self.found(row)[0]

    def found(self, row: int) -> tuple[str, int, float, bytes]:
        """Return name, bytes, last use by its own times, and chunk key of one object."""
        # Numpy takes ten times as long for the fields of one row.
        space, group, index, tail, shard, shards, kind, _, key, size, used, _ = _PACK.unpack_from(
            self._packed, row * _PACK.size
        )
        chunk = Chunk(key, b"", index, tail or 1, tail=tail > 0, salt_group=self.groups[group])
        inner = object_name(chunk, shard, shards, KINDS[kind])
        return f"{self.namespaces[space].name}/{inner}", size, used, key

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
        # Copies of one column at a time.
        keys = np.frombuffer(self._packed, _KEYS)["key"]
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
        count = self.unit_count
        if not count:
            return _no_units()
        kinds, several = self._kinds_of_spaces(), bool(self.kind.any())
        parent = None if self._parents is None else self._parent_units()
        columns: dict[str, npt.NDArray[Any]] = {}
        for begin in range(0, count, _UNITS_AT_ONCE):
            some = slice(begin, begin + _UNITS_AT_ONCE)
            units = self._some_units(some, kinds, several, marks, pins)
            if parent is not None:
                units.parent = parent[some]
            for column in fields(Units):
                values = getattr(units, column.name)
                if values is None:
                    continue
                if column.name not in columns:
                    columns[column.name] = np.zeros(count, values.dtype)
                # Zeros that are not written take no memory.
                if values.any():
                    columns[column.name][some] = values
        return Units(**columns)

    def _some_units(
        self, some: slice, kinds: Bytes, several: bool, marks: Marks | None, pins: Pins | None
    ) -> Units:
        """Return some units, of which no parent is known."""
        rows, starts = self._rows, self._starts[some]
        after = self._starts[some.stop : some.stop + 1].tolist() or [len(self)]
        order = self._order[starts[0] : after[0]]
        first, starts = self._order[starts].astype(np.int64), starts - starts[0]
        count = len(starts)
        born = np.maximum.reduceat(rows["born"][order], starts)
        used = np.maximum.reduceat(rows["used"][order], starts)
        hit = np.logical_or.reduceat(rows["hit"][order], starts)
        kind = rows["kind"][order]
        #: By kind, where there are several.
        marked = np.zeros((len(KINDS) if several else 1, count))
        if marks:
            for space, _, of_space in self.by_folder(first, by_group=False):
                keys = rows["key"][first[of_space]]
                for number, last in enumerate(marked):
                    asked = KINDS[number] if several else None
                    last[of_space] = marks.used(self.namespaces[space].name, keys, asked)
            hit |= marked.max(axis=0) > born
        pinned = np.zeros(count, np.bool_)
        if pins:
            for space, group, of_group in self.by_folder(first, by_group=True):
                keys = rows["key"][first[of_group]]
                name = self.namespaces[space].name
                pinned[of_group] = pins.covers(name, self.groups[group], keys)
        sizes, broken = [], np.zeros(count, np.uint8)
        uses: list[Floats] = []
        for number, bit in enumerate(NUMBER_BITS):
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
        index = rows["index"][first]
        return Units(
            used=np.maximum(np.maximum(used, marked.max(axis=0)), born),
            born=born,
            index=index,
            parent=np.where(index == 0, np.int32(GONE), np.int32(UNKNOWN)),
            full=sizes[0],
            window=sizes[1],
            state=sizes[2],
            hit=hit,
            pinned=pinned,
            needs=kinds[self.namespace[first]],
            broken=broken,
            window_used=uses[1] if several else None,
            state_used=uses[2] if several else None,
        )

    def reach(self) -> Integers:
        """Return how many last chunks' windows a hit needs in each unit's namespace, int64."""
        of_space = np.array([space.rule.reach for space in self.namespaces], np.int64)
        return of_space[self.namespace[self.first_rows]]

    def _kinds_of_spaces(self) -> Bytes:
        """Kinds of each namespace, by its record, else by its objects."""
        seen = np.zeros(len(self.namespaces), np.uint8)
        np.bitwise_or.at(seen, self.namespace, NUMBER_BITS[self.kind])
        said = np.array([space.rule.mask for space in self.namespaces], np.uint8)
        found: Bytes = np.where(said > 0, said, seen)
        return found

    def by_folder(self, first: Integers, *, by_group: bool) -> Iterator[tuple[int, int, Integers]]:
        """Yield namespace folder, group, and places in `first` of some of its rows there."""
        spaces, groups = self.namespace[first], self.group[first]
        place = spaces.astype(np.int64) * (len(self.groups) if by_group else 1)
        if by_group:
            place += groups
        order = np.argsort(place, kind="stable")
        cuts = np.flatnonzero(np.diff(place[order])) + 1
        for units in np.split(order, cuts):
            # A caller that asks for their keys makes a copy of them.
            for begin in range(0, len(units), _UNITS_AT_ONCE):
                some = units[begin : begin + _UNITS_AT_ONCE]
                yield int(spaces[some[0]]), int(groups[some[0]]), some

    # ----------------------------------------------------------------------------------- parents

    def _parent_units(self) -> Integers:
        """Return the unit before each one."""
        rows, first = self._rows, self.first_rows
        parent = np.where(rows["index"][first] == 0, np.int32(GONE), np.int32(UNKNOWN))
        assert self._parents is not None
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

    @property
    def parents(self) -> Parents | None:
        """The parents that are known; None if there are none."""
        if self._parents is None:
            return None
        known = np.flatnonzero(self._parents)
        return Parents(_beginnings(self, self.first_rows[known]), self._parents[known])

    def _remember_parents(self, before: Parents) -> None:
        """Use the parents that an earlier inventory knew."""
        if not len(before.keys) or not len(self):
            return
        new = _beginnings(self, self.first_rows)
        at = np.minimum(np.searchsorted(before.keys, new), len(before.keys) - 1)
        self._parents = np.where(before.keys[at] == new, before.parents[at], np.uint64(0))

    def _read_parents(
        self,
        backend: Backend,
        every: bool,
        stop: Callable[[], bool],
        pace: Callable[[], None],
    ) -> bool:
        """Read the parents that decide something; return whether all were read."""
        first = self.first_rows
        wanted = self.index[first] > 0
        if not every:
            kinds = self._kinds_of_spaces()[self.namespace[first]]
            wanted &= (kinds & (WINDOW_BIT | STATE_BIT)) != 0
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
                name, _, _, key = self.found(row)
                found = _read_parent(backend, name, key)
                if found is not None:
                    return found
            return None

        for unit, parent in in_parallel(read, map(int, units), threads_for_calls(backend)):
            if parent is not None:
                self._parents[unit] = np.frombuffer(parent, np.uint64, 1)[0]
            if stop():
                return False
        return True


@dataclass(eq=False)
class Scan:
    """A scan that can continue where it ended, if the storage failed or it was stopped.

    The rows of the folder that it was in are listed again, all others are kept.

    Parameters
    ----------
    backend : Backend
    folders : Collection of str, optional
        Only these: folders of namespaces, folders in them, the root's reserved folder.
    names : Collection of str
        Files to look at, one by one, also where `folders` is empty.
    wanted : Callable, optional
        Called with the name of each file and folder that is listed; what it refuses is not
        looked at, nor listed, see :meth:`kvshelf.backends.base.Backend.list`.
    before : Parents, optional
        What an earlier inventory knew: these parents are not read again.
    records : bool
        Read the namespaces' records. Without them, objects of other versions of the format are
        objects too, and the kinds of a namespace are those of its objects.
    parents : bool or None
        Read the parent of every chunk, from the beginning of one of its objects. False: only
        in namespaces with kinds other than full; None: nowhere.
    in_part : bool
        Of more than fits take a part, see :attr:`Inventory.is_part`.
    """

    backend: Backend
    _: KW_ONLY
    folders: Collection[str] | None = None
    names: Collection[str] = ()
    wanted: Callable[[str], bool] | None = None
    before: Parents | None = None
    records: bool = True
    parents: bool | None = False
    in_part: bool = False

    def __post_init__(self) -> None:
        self._inventory = Inventory()
        self._packed = bytearray()
        self._groups: dict[str, int] = {}
        self._files = 0
        #: What is left to list: names, and folders once they are known; in reverse order.
        self._names = list(self.names)[::-1]
        self._left: list[str] | None = None
        #: The last file before which all is complete, and the numbers of what was found there.
        self._after: str | None = None
        self._counts = self._count()
        self._is_listed = False

    def run(
        self, stop: Callable[[], bool] = lambda: False, pace: Callable[[], None] = lambda: None
    ) -> Inventory | None:
        """Scan, or continue.

        Parameters
        ----------
        stop : Callable
            Called often; True ends the scan.
        pace : Callable
            Called for each file, on any thread; may sleep.

        Returns
        -------
        Inventory or None
            None if `stop` ended it.

        Raises
        ------
        StorageError
            If the storage failed, does not allow listing, or lists more than fits.
        """
        found = self._inventory
        if not self._is_listed:
            self._go_back()
            for folder, info in self._rows(pace):
                if not self._add(folder, info):
                    break
                pace()
                if stop():
                    return None
            if stop():
                return None
            if not found.now:
                self._ask_time()
            found.groups = list(self._groups)
            found._hold(self._packed)
            if self.before is not None:
                found._remember_parents(self.before)
            self._is_listed = True
        parents = self.parents
        if parents is None or found._read_parents(self.backend, parents, stop, pace):
            return found
        return None

    def _count(self) -> tuple[int, ...]:
        found = self._inventory
        totals = (number for each in self._all_totals() for number in (each.count, each.nbytes))
        return self._files, len(self._packed), len(found.leftovers), *totals

    def _all_totals(self) -> list[Total]:
        return [self._inventory.unlisted, *self._inventory.totals.values()]

    def _go_back(self) -> None:
        """Forget what was found in the folder in which the scan ended."""
        self._files, packed, leftovers, *totals = self._counts
        del self._packed[packed:], self._inventory.leftovers[leftovers:]
        for total, count, nbytes in zip(self._all_totals(), totals[::2], totals[1::2], strict=True):
            total.count, total.nbytes = count, nbytes

    def _complete(self, after: str | None) -> None:
        """Note that all is complete up to the last file of a folder."""
        self._after, self._counts = after, self._count()

    def _rows(self, pace: Callable[[], None]) -> Iterator[tuple[int, ObjectInfo]]:
        """Yield the files with the numbers of their namespaces' folders; -1: it is in none."""
        backend, wanted = self.backend, self.wanted

        def paced(name: str) -> bool:
            pace()
            return wanted is None or wanted(name)

        while self._names:
            info = backend.info(self._names[-1])
            if info is not None:
                yield self._number(info.name.partition("/")[0]), info
            self._names.pop()
            self._complete(None)
        if self._left is None:
            self._left = self._find_folders()
        while self._left:
            folder = self._left[-1]
            space = folder.partition("/")[0]
            number = self._number(space)
            inside: str | None = None
            last = self._after
            for info in backend.list(
                folder,
                hidden=True,
                wanted=None if wanted is None else paced,
                after=self._after,
            ):
                now_in = info.name.rpartition("/")[0]
                if now_in != inside:
                    if inside is not None:
                        self._complete(last)
                    inside = now_in
                yield number, info
                last = info.name
            self._left.pop()
            self._complete(None)

    def _find_folders(self) -> list[str]:
        """Return the folders that are to be listed, the first one last."""
        folders = self.folders
        spaces: Collection[str] = ()
        if folders is None or any(parse_namespace_folder(folder) for folder in folders):
            spaces = [name for name in self.backend.folders() if parse_namespace_folder(name)]
        inner: Collection[str] = (RESERVED,)
        if folders is not None:
            spaces = [name for name in spaces if name in folders]
            inner = [name for name in folders if parse_namespace_folder(name) is None]
        return [*spaces, *inner][::-1]

    def _number(self, folder: str) -> int:
        """Return the number of a namespace's folder; -1 for others."""
        if parse_namespace_folder(folder) is None:
            return -1
        spaces = self._inventory.namespaces
        for number, space in enumerate(spaces):
            if space.name == folder:
                return number
        record = read_record(self.backend, folder) if self.records else {}
        spaces.append(NamespaceFolder(folder, folder[-16:], record))
        return len(spaces) - 1

    def _ask_time(self) -> None:
        self._inventory.now = now = time_of(self.backend)
        self._inventory.aged_at = time_for_ages(now, self.backend.url)

    def _add(self, number: int, info: ObjectInfo) -> bool:
        """Add a file; return whether the listing may continue.

        Raises
        ------
        PermanentStorageError
            If there are more files than fit.
        """
        inventory = self._inventory
        if not self._files:
            self._ask_time()
        self._files += 1
        if self._files > _MOST_FILES:
            self._overflow(info)
            return False
        if number < 0:
            sort = Sort.TEMPORARY if is_temporary(info.name) else Sort.RESERVED
            self._add_other(sort, info)
            return True
        space = inventory.namespaces[number]
        inner = info.name[len(space.name) + 1 :]
        if space.of_other_version:
            inventory.totals[Sort.OTHER_VERSION].add(info.size)
            return True
        parsed = parse_object_name(inner)
        if parsed is None:
            self._add_other(_sort_of(info, inner), info)
            return True
        group = self._groups.get(parsed.salt_group)
        if len(self._packed) >= _MOST_OBJECTS * _ROW.itemsize or (
            group is None and len(self._groups) >= _MOST_GROUPS
        ):
            self._overflow(info)
            return True
        if group is None:
            group = self._groups[parsed.salt_group] = len(self._groups)
        used = last_use(info, inventory.now)
        born = info.mtime if 0 < info.mtime <= used else used
        self._packed += _PACK.pack(
            number,
            group,
            parsed.index,
            parsed.tail_tokens or 0,
            parsed.shard,
            parsed.shards,
            KIND_NUMBERS[parsed.kind],
            info.atime is not None and info.atime > info.mtime + _HIT_SECONDS,
            parsed.key,
            min(info.size, _MOST_BYTES),
            used,
            born,
        )
        return True

    def _overflow(self, info: ObjectInfo) -> None:
        """Count a file for which there is no space."""
        if not self.in_part:
            raise PermanentStorageError(
                errno.EOVERFLOW,
                f"found more than {_MOST_OBJECTS} objects, or than {_MOST_GROUPS} salt groups:"
                " the listing may have no end",
                info.name,
            )
        self._inventory.unlisted.add(min(info.size, _MOST_BYTES))

    def _add_other(self, sort: Sort, info: ObjectInfo) -> None:
        inventory = self._inventory
        inventory.totals[sort].add(min(info.size, _MOST_BYTES))
        named = sort in (Sort.TEMPORARY, Sort.MARKER)
        if named and len(inventory.leftovers) < _MOST_NAMED:
            leftover = Leftover(info.name, sort, info.size, changed_at(info))
            inventory.leftovers.append(leftover)


def _sort_of(info: ObjectInfo, inner: str) -> Sort:
    """Return what a file in a namespace's folder is, if it is no object."""
    if inner == DESCRIPTION:
        return Sort.DESCRIPTION
    folder, _, base = inner.rpartition("/")
    if not info.size and folder == MARKERS and is_attempt(base):
        return Sort.MARKER
    if is_temporary(info.name):
        return Sort.TEMPORARY
    return Sort.RESERVED if inner.startswith(f"{RESERVED}/") else Sort.FOREIGN


def _beginnings(inventory: Inventory, rows: Integers) -> npt.NDArray[np.uint64]:
    """Return the first eight bytes of keys as numbers, in the order of units."""
    found: npt.NDArray[np.uint64] = np.frombuffer(inventory._packed, _KEYS)["key"][rows, 0]
    return found


def _no_units() -> Units:
    floats, sizes = np.empty(0), np.empty(0, np.int64)
    flags = np.empty(0, np.bool_)
    return Units(floats, floats, np.empty(0, np.uint32), sizes, sizes, sizes, sizes, flags, flags)


def _read_parent(backend: Backend, name: str, key: bytes) -> bytes | None:
    """Return the parent's key that an object names; None if that cannot be determined."""
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
