"""What lies in one part of a shelf, and what of it is deleted.

Owns how a part of a shelf is listed (:class:`Lister`), the order of eviction (:func:`score`), the
rules (:class:`Rules`, :func:`reason_to_delete`) and the deletion (:func:`delete`). Keepers and
commands use them alike.

A shelf is listed in *slices* of its 256 fan-out folders (the first two hex digits of a key): what
lies in some of them is a fair sample of the whole. A namespace or a salt group of at most
:data:`PAGE` files is listed whole, in the slice that the digest of its name is in.

A *unit* is what is deleted together: the shards of one kind of one chunk, or of one tail. Nothing
is read but names, sizes and times: what stands in a file decides nothing.

The order of eviction
---------------------
The oldest first, by the time since the last use. What was never used since it was stored ages twice
as fast, because most chunks are never used. Of about the same age the end of a prompt goes before
its beginning: a chunk is of no use without those before it.

Contracts
---------
* Only what kvshelf writes is deleted: files with exactly the names of objects, in folders of
  namespaces, its temporaries, and what is in the reserved folders.
* A folder that cannot be listed is left out, and named (:attr:`Part.skipped`).
* Nothing is deleted because something else was not found.
* A unit of which an object was used or replaced since it was listed stays, where looking at each
  object is cheap. Elsewhere (S3) what is deleted was listed a moment ago.

Threads
-------
Everything but the pure functions blocks on the storage. A :class:`Lister` belongs to one thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final, NamedTuple

from kvshelf.backends import Backend, ObjectInfo
from kvshelf.capacity.parallel import in_parallel, threads_for_calls
from kvshelf.errors import NotRegularError, StorageError
from kvshelf.format.kinds import Kind
from kvshelf.format.names import DESCRIPTION, parse_namespace_folder, parse_object_name
from kvshelf.shelf.leftovers import RESERVED, TIER, is_temporary
from kvshelf.shelf.markers import MARKERS, is_attempt
from kvshelf.shelf.pins import PINS

FANS: Final = 256
#: Chunks of which a slice has at least so many.
SLICE: Final = 2048
#: Files of a namespace or a salt group that is listed whole.
PAGE: Final = 1000
HOUR: Final = 3600.0
DAY: Final = 86400.0
#: The folder of the markers of keepers, see :mod:`kvshelf.capacity.keepers`.
KEEPERS: Final = f"{RESERVED}/keepers"

#: No object of a model is larger; a file that says so is none.
_MOST_BYTES: Final = 64 << 30
#: Factor by which a unit that was never used since it was stored ages faster.
_NEVER_USED_AGES: Final = 2.0
#: An access time so much later than the modification time is a use.
_USE_SECONDS: Final = 2.0
#: Part of an age, and least seconds, within which ages count as equal.
_SAME_PART: Final = 1 / 32
_LEAST_SAME: Final = 1.0
#: The place in a prompt at which half of what a place counts for is reached.
_HALF_DEPTH: Final = 64
#: What the place counts for among equal ages, against the rest of the age.
_DEPTH_PART: Final = 0.95
#: A visit deletes at most so many times what it has to on average.
_MOST_PART: Final = 2.0
#: What the key adds to the place of a chunk at most.
_TIE_PART: Final = 1e-3
#: Width of a slice from which on it is cheaper to ask first which folders there are.
_WIDE: Final = 16
#: Deletions that fail, without one that does not, after which no more are tried.
_MOST_REFUSED: Final = 64
_MOST_STUCK: Final = 4096
#: Most units that are deleted together where each is looked at.
_AT_ONCE: Final = 32
#: Most units of a fan-out folder that are looked at; where there are more it is a sample of them.
_MOST_UNITS: Final = 4 * SLICE
_SAMPLES: Final = (1, 8, 64, 512, 4096)
#: Most files that are looked at beside the objects of a namespace, and of a shelf.
_MOST_BESIDE: Final = 16384
#: What lies in the folder of a namespace beside its description: temporaries, the reserved folder.
_HIDDEN: Final = (".0", ".~")


class Reason(Enum):
    """Why something is deleted."""

    TEMPORARY = "temporary"
    MARKER = "marker"
    TAIL = "tail"
    RESERVED = "reserved"
    EMPTY = "empty"
    AGE = "age"
    GROUP = "group"
    SIZE = "size"
    CHOSEN = "chosen"


@dataclass(slots=True)
class Total:
    """Number of files, and their bytes."""

    count: int = 0
    nbytes: int = 0

    def add(self, nbytes: int, count: int = 1) -> None:
        """Count more files."""
        self.count += count
        self.nbytes += nbytes


@dataclass(slots=True, eq=False)
class Unit:
    """The shards of one kind of one chunk or tail.

    Attributes
    ----------
    space, group : str
        Folder of its namespace; its salt group, ``_`` or 16 hex.
    key : bytes
        32 bytes.
    kind : Kind
    index : int
        Place of its chunk in the prompt.
    tail : bool
    used : float
        Last use of any of its objects, seconds since the epoch, by the storage's clock.
    hit : bool
        It was used since it was stored. True for all where the storage has no access times.
    nbytes : int
    names : list of str
        Of its objects, below the root.
    """

    space: str
    group: str
    key: bytes
    kind: Kind
    index: int
    tail: bool
    used: float = 0.0
    hit: bool = False
    nbytes: int = 0
    names: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        """The folder of its salt group."""
        return f"{self.space}/{self.group}"

    @property
    def place(self) -> float:
        """Its place in the order of eviction among units of one age: all may have the same time.

        The key breaks ties. The beginning of the key says in which slice the unit is.
        """
        return self.index + _TIE_PART * int.from_bytes(self.key[4:8], "big") / 2**32


class Leftover(NamedTuple):
    """A file that is no object, or an empty folder: what it is, and when it last changed."""

    name: str
    reason: Reason
    nbytes: int
    changed: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What a command deletes: units for which all conditions hold.

    Attributes
    ----------
    group : str or None
        Only of this salt group: ``_`` or 16 hex.
    unused_for : float or None
        Only what was neither stored nor used for so many seconds. Without it, uses do not matter,
        and what is chosen is not looked at again.
    pinned : bool
        Also what is pinned.
    leftovers : bool
        Also all markers.
    """

    group: str | None = None
    unused_for: float | None = None
    pinned: bool = False
    leftovers: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """Ages in seconds at which something is deleted; None: it is not.

    Attributes
    ----------
    leftovers : float or None
        Of temporaries, of markers, and of tails after their last use. No engine waits so long for a
        hand-over, and a tail serves one prompt only. Other files in reserved folders, and empty
        folders, go after a day at the earliest.
    max_age : float or None
        Of units after their last use.
    choice : Choice or None
    """

    leftovers: float | None = HOUR
    max_age: float | None = None
    choice: Choice | None = None


#: Scores from which on units are deleted: of the whole shelf by "", of a group by its folder.
Cuts = Mapping[str, float]


@dataclass(slots=True)
class Group:
    """What is known of a salt group, or of the whole shelf.

    Attributes
    ----------
    files, nbytes : float or None
        As estimated; None: it was not listed yet.
    cut : float or None
        The score from which on its units are deleted, smoothed over visits; None: none were.
    """

    files: float | None = None
    nbytes: float | None = None
    cut: float | None = None

    def move_cut(
        self, units: list[tuple[float, int]], low: float, high: float, weight: float
    ) -> float:
        """Return the score from which on units of a visit are deleted.

        Parameters
        ----------
        units : list of (float, int)
            Scores and bytes of the units that may be deleted, the largest score first.
        low, high : float
            Bytes to delete of them: on average over slices, and in any case.
        weight : float
            Of this visit against those before.
        """
        if low <= 0:
            return math.inf
        found = score_to_free(units, low)
        if found < math.inf:
            # A visit of the whole shelf sets exactly what it found: an ulp more deletes nothing.
            learned = found if self.cut is None else self.cut
            self.cut = learned * (1 - weight) + found * weight
        cut = math.inf if self.cut is None else self.cut
        # Where most units have about the same age, all of them may be older than what was learned.
        most = score_to_free(units, _MOST_PART * low)
        return max(min(cut, score_to_free(units, high)), most)


# ------------------------------------------------------------------------- pure functions


def last_use(info: ObjectInfo, now: float, *, shared: bool) -> float:
    """Return when an object was last used, in seconds since the epoch.

    That is the latest of its modification and its access time. The last change of its entry counts
    in the day after it (objects may be copied with their old times), and where users who may not
    set access times record uses by it (`shared`). Times more than a day in the future mean nothing;
    an object that has no other times counts as used now.
    """
    end = now + DAY
    best = info.mtime if 0 < info.mtime < end else 0.0
    atime, ctime = info.atime, info.ctime
    if atime is not None and best < atime < end:
        best = atime
    if ctime is not None and best < ctime < end and (shared or ctime > now - DAY or not best):
        best = ctime
    return best or now


def aged(unit: Unit, now: float) -> float:
    """Return by how much a unit has aged since its last use, in seconds."""
    return max(now - unit.used, 0.0) * (1.0 if unit.hit else _NEVER_USED_AGES)


def score(age: float, place: float, same: float) -> float:
    """Return the score of a unit, in seconds; a larger one is evicted first.

    Parameters
    ----------
    age : float
        By how much it has :func:`aged`.
    place : float
        See :attr:`Unit.place`.
    same : float
        Seconds within which ages count as equal, and the place in the prompt decides. Of equal
        places the older goes first, so that few units have the same score.
    """
    equal, rest = divmod(age, same)
    return same * (equal + _DEPTH_PART * place / (place + _HALF_DEPTH)) + (1 - _DEPTH_PART) * rest


def same_age(age: float, most: float) -> float:
    """Return the seconds within which ages count as equal where units have about `age` seconds.

    At most `most` seconds, and at least one: the uses of a hit are recorded one after the other.
    """
    return max(_LEAST_SAME, min(most, age * _SAME_PART))


def score_to_free(scored: Iterable[tuple[float, int]], free: float) -> float:
    """Return the score from which on units have at least `free` bytes; infinite if that is 0.

    Parameters
    ----------
    scored : Iterable of (float, int)
        Scores and bytes, the largest score first.
    free : float
        Where units have fewer bytes, all of them are included.
    """
    at = float("inf")
    for scored_at, nbytes in scored if free > 0 else ():
        at, free = scored_at, free - nbytes
        if free <= 0:
            break
    return at


def reason_to_delete(
    unit: Unit, rules: Rules, cuts: Cuts, scored: float, old_at: float, *, pinned: bool
) -> Reason | None:
    """Return why a unit is deleted; None: it stays.

    Parameters
    ----------
    unit : Unit
    rules : Rules
    cuts : Mapping of str to float
    scored : float
        Its score.
    old_at : float
        The time by which ages count, see :func:`kvshelf.capacity.keepers.time_for_ages`.
    pinned : bool
        Of a whole chunk: no rule but a choice of pinned ones deletes it.
    """
    choice = rules.choice
    if choice is not None:
        chosen = (
            (choice.group is None or unit.group == choice.group)
            and (choice.unused_for is None or unit.used < old_at - choice.unused_for)
            and (choice.pinned or not pinned)
        )
        return Reason.CHOSEN if chosen else None
    if unit.tail and rules.leftovers is not None and unit.used < old_at - rules.leftovers:
        return Reason.TAIL
    if pinned:
        return None
    if rules.max_age is not None and unit.used < old_at - rules.max_age:
        return Reason.AGE
    if scored >= cuts.get(unit.where, float("inf")):
        return Reason.GROUP
    return Reason.SIZE if scored >= cuts.get("", float("inf")) else None


def is_old(leftover: Leftover, rules: Rules, old_at: float) -> bool:
    """Whether a leftover is to be deleted."""
    if rules.choice is not None:
        return rules.choice.leftovers and leftover.reason is Reason.MARKER
    if rules.leftovers is None:
        return False
    least = DAY if leftover.reason in (Reason.RESERVED, Reason.EMPTY) else rules.leftovers
    return leftover.changed < old_at - least


def fan_of(name: str) -> int:
    """Return the fan-out folder in whose slice a small namespace or group is listed whole."""
    return hashlib.sha256(name.encode()).digest()[0]


# ------------------------------------------------------------------------- listing


@dataclass(slots=True)
class Part:
    """What lies in a part of a shelf.

    Attributes
    ----------
    units : list of Unit
    leftovers : list of Leftover
    others : dict of str and Total
        Files that are no objects, by what they are, for display.
    groups : dict of str and set of str
        The groups of each namespace that was listed.
    seen : dict of str and (float, int)
        By folders of groups, the part of each that was listed (1 is all), and the files in it.
    skipped : dict of str and StorageError
        Folders that could not be listed.
    files : int
    chunks : int
        As far as they were counted.
    share : float
        The part of a fan-out folder that was listed.
    """

    units: list[Unit] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    others: dict[str, Total] = field(default_factory=dict)
    groups: dict[str, set[str]] = field(default_factory=dict)
    seen: dict[str, tuple[float, int]] = field(default_factory=dict)
    skipped: dict[str, StorageError] = field(default_factory=dict)
    files: int = 0
    chunks: int = 0
    share: float = 1.0

    def join(self, other: Part) -> None:
        """Add what lies in another part."""
        self.units += other.units
        self.leftovers += other.leftovers
        self.files += other.files
        for space, groups in other.groups.items():
            self.groups.setdefault(space, set()).update(groups)
        for where, (seen, files) in other.seen.items():
            before = self.seen.get(where, (0.0, 0))
            self.seen[where] = before[0] + seen, before[1] + files
        self.skipped |= other.skipped
        for sort, total in other.others.items():
            self.others.setdefault(sort, Total()).add(total.nbytes, total.count)

    def add_rows(
        self, rows: Iterable[ObjectInfo], now: float, *, shared: bool, most: float = math.inf
    ) -> None:
        """Add what is listed in one fan-out folder, or in a reserved one, up to `most` units."""
        found: dict[tuple[str, bytes, Kind, int, int | None], Unit] = {}
        for info in rows:
            if len(found) > most:
                return
            self.files += 1
            space, _, inner = info.name.partition("/")
            parsed = parse_object_name(inner)
            if parsed is None or info.size > _MOST_BYTES:
                self._add_other(space, inner, info)
                continue
            # No name decides about the objects of another one.
            at = parsed.salt_group, parsed.key, parsed.kind, parsed.index, parsed.tail_tokens
            unit = found.get(at)
            if unit is None:
                tail = parsed.tail_tokens is not None
                unit = Unit(space, parsed.salt_group, parsed.key, parsed.kind, parsed.index, tail)
                found[at] = unit
                self.units.append(unit)
            used = last_use(info, now, shared=shared)
            unit.used = max(unit.used, used)
            # Where there are no access times, all units age alike.
            read = info.atime
            is_use = used > info.mtime + _USE_SECONDS and (shared or read == used)
            unit.hit |= read is None or is_use
            unit.nbytes += info.held
            unit.names.append(info.name)

    def _add_other(self, space: str, inner: str, info: ObjectInfo) -> None:
        changed = max(info.mtime, info.ctime or 0.0)
        folder, _, base = inner.rpartition("/")
        reason: Reason | None = None
        if is_temporary(info.name) or parse_object_name(inner) is not None:
            reason = Reason.TEMPORARY
        elif space == RESERVED:
            stays = info.name.startswith(f"{PINS}/") or info.name == TIER
            reason = None if stays else Reason.RESERVED
        elif folder == MARKERS and is_attempt(base) and not info.size:
            reason = Reason.MARKER
        elif inner.startswith(f"{RESERVED}/"):
            reason = Reason.RESERVED
        sort = reason.value if reason is not None else "foreign"
        if inner == DESCRIPTION:
            sort = "description"
        elif info.name.startswith(f"{PINS}/"):
            sort = "pin"
        self.others.setdefault(sort, Total()).add(info.held)
        if reason is not None:
            self.leftovers.append(Leftover(info.name, reason, info.held, changed))


class Lister:
    """Lists parts of one shelf, and remembers which of its namespaces and groups are small.

    Parameters
    ----------
    backend : Backend
    stop : Callable
        Called now and then; True ends a listing early.
    pace : Callable
        Called for each file and folder; may sleep.
    samples : bool
        Of a fan-out folder with very many units list a sample.

    Attributes
    ----------
    groups : dict of str and dict of str and Group
        By namespace. What the last listing did not name is not there.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        stop: Callable[[], bool] = lambda: False,
        pace: Callable[[], None] = lambda: None,
        samples: bool = False,
    ) -> None:
        self._backend = backend
        self._samples = samples
        self._stop = stop
        self._pace = pace
        self.groups: dict[str, dict[str, Group]] = {}

    def visit(self, first: int, width: int, chunks: int, now: float) -> tuple[Part, int]:
        """Return what lies in the next slice of the shelf, and how many fan-out folders it has.

        Parameters
        ----------
        first : int
            Number of its first folder; it goes on from 255 to 0.
        width : int
            Folders that are listed at once; as many again, until there are enough chunks.
        chunks : int
            How many are enough; all folders may have fewer.
        now : float
            By the storage's clock, seconds since the epoch.

        Raises
        ------
        StorageError
            If the shelf itself cannot be listed.
        """
        spaces = [name for name in self._backend.folders() if parse_namespace_folder(name)]
        self.groups = {space: self.groups[space] for space in spaces if space in self.groups}
        part, listed = Part(), 0
        while listed < FANS and part.chunks < chunks and not self._stop():
            begin = (first + listed) % FANS
            width = min(width, FANS - listed, FANS - begin)
            before = len(part.units)
            self._slice(spaces, begin, begin + width - 1, now, part)
            part.chunks += len({unit.key for unit in part.units[before:]})
            listed += width
            width = listed
        for space, names in part.groups.items():
            groups = self.groups.get(space, {})
            self.groups[space] = {name: groups.get(name, Group()) for name in names}
        for where, (seen, files) in part.seen.items():
            self.group(where).files = files / seen
        return part, listed

    def _slice(self, spaces: list[str], first: int, last: int, now: float, part: Part) -> None:
        """Add what lies in some fan-out folders of all namespaces."""
        due = [name for name in spaces if first <= fan_of(name) <= last or not self._is_small(name)]
        threads = threads_for_calls(self._backend) if len(due) > 1 else 0
        work = in_parallel(lambda name: self._space(name, first, last, now), due, threads)
        with closing(work) as found:
            for _, one in found:
                part.join(one)
                if self._stop():
                    return
        if first == 0:
            self._add_beside("", now, part)

    def whole(
        self, folders: Collection[str] | None, now: float, group: str | None = None
    ) -> Iterator[Part]:
        """Yield a part for each fan-out folder of some namespaces, or of all of the shelf.

        Parameters
        ----------
        folders : Collection of str or None
            Of namespaces; None: all, and the reserved folder of the root.
        now : float
        group : str, optional
            Only this salt group.

        Raises
        ------
        StorageError
            If the shelf itself cannot be listed.
        """
        if folders is None:
            part = Part()
            self._add_beside("", now, part)
            yield part
            folders = [name for name in self._backend.folders() if parse_namespace_folder(name)]
        for space in folders:
            part = Part()
            groups = self._groups(space, now, part, beside=True)
            yield part
            for one in groups:
                if group is None or group == one:
                    yield from self._fans(f"{space}/{one}", 0, FANS - 1, now)

    def _space(self, space: str, first: int, last: int, now: float) -> Part:
        """Return what lies in some fan-out folders of a namespace; called on any thread."""
        part = Part()
        small, mine = self._is_small(space), first <= fan_of(space) <= last
        for group in self._groups(space, now, part, beside=mine):
            where = f"{space}/{group}"
            small_group = self._is_small(space, group)
            whole = small or (small_group and first <= fan_of(where) <= last)
            if not whole and small_group:
                continue
            files, bad = 0, 0.0
            fans = (0, FANS - 1) if whole else (first, last)
            for one in self._fans(where, *fans, now):
                part.join(one)
                files += one.files
                bad += FANS if where in one.skipped else len(one.skipped) + 1 - one.share
            good = fans[1] - fans[0] + 1 - bad
            if good > 0:
                part.seen[where] = good / FANS, files
            else:
                # What came before a listing failed is no share of the group that is known.
                part.units = [unit for unit in part.units if unit.where != where]
        return part

    def _groups(self, space: str, now: float, part: Part, *, beside: bool) -> Sequence[str]:
        """Return the folders of a namespace's groups; add what lies `beside` them."""
        self._pace()
        if beside:
            self._add_beside(space, now, part)
        try:
            groups = self._backend.folders(space)
            part.groups[space] = set(groups)
            if beside and not groups:
                self._note_unused(space, part)
        except StorageError as error:
            part.skipped[space] = error
            return ()
        return groups

    def group(self, where: str) -> Group:
        """Return what is known of a group that was listed, by its folder."""
        space, _, name = where.partition("/")
        return self.groups[space][name]

    def _is_small(self, space: str, group: str | None = None) -> bool:
        """Whether a namespace, or one of its groups, is known to have few files."""
        groups = self.groups.get(space)
        if groups is None:
            return False
        if group is not None:
            return (groups.get(group, Group()).files or math.inf) <= PAGE
        return sum(known.files or 0.0 for known in groups.values()) <= PAGE

    def _add_beside(self, space: str, now: float, part: Part) -> None:
        """Add what lies beside the objects of a namespace; for "" beside all namespaces."""
        backend, reserved = self._backend, f"{space}/{RESERVED}".lstrip("/")
        places = [space or RESERVED]
        # Where there are folders each can fail, and what lies deeper is nobody's.
        flat = backend.properties.deletes_at_once == 1
        if flat:
            places += [reserved] if space else []
            with contextlib.suppress(StorageError):
                places += (f"{reserved}/{name}" for name in backend.folders(reserved))
        for place in places:
            start, end = _HIDDEN if place == space else (None, None)
            try:
                rows = backend.list(place, hidden=True, start=start, end=end, flat=flat)
                part.add_rows(itertools.islice(rows, _MOST_BESIDE), now, shared=False)
            except StorageError as error:
                part.skipped[place] = error

    def _note_unused(self, space: str, part: Part) -> None:
        """Note a namespace in which there is nothing but its description."""
        found = [self._backend.info(name) for name in (space, f"{space}/{DESCRIPTION}")]
        if any(found):
            changed = max(info.mtime for info in found if info is not None)
            part.leftovers.append(Leftover(space, Reason.EMPTY, 0, changed))

    def _note_empty(self, folder: str, part: Part) -> None:
        """Note a folder in which there is nothing, where the storage has folders."""
        with contextlib.suppress(StorageError):
            info = self._backend.info(folder)
            if info is not None:
                part.leftovers.append(Leftover(folder, Reason.EMPTY, 0, info.mtime))

    def _fans(self, where: str, first: int, last: int, now: float) -> Iterator[Part]:
        """Yield a part for each fan-out folder of a group that is there."""
        backend = self._backend
        if backend.properties.deletes_at_once > 1 and first < last:
            shared = backend.properties.shared
            rows = backend.list(where, hidden=True, start=f"{first:02x}", end=f"{last:02x}")
            part = Part()
            try:
                for _, some in itertools.groupby(rows, lambda row: row.name.rpartition("/")[0]):
                    part.add_rows(some, now, shared=shared)
                    yield part
                    part = Part()
                    if self._stop():
                        return
            except StorageError as error:
                yield Part(skipped={where: error})
            return
        fans: Iterable[str] = (f"{fan:02x}" for fan in range(first, last + 1))
        if last - first >= _WIDE:
            try:
                there = backend.folders(where)
            except StorageError as error:
                yield Part(skipped={where: error})
                return
            if not there:
                part = Part()
                self._note_empty(where, part)
                yield part
            fans = sorted(set(fans) & set(there))
        for fan in fans:
            self._pace()
            folder = f"{where}/{fan}"
            try:
                part = self._folder(where, fan, now)
            except StorageError as error:
                part = Part(skipped={folder: error})
            else:
                if not part.files:
                    self._note_empty(folder, part)
            yield part
            if self._stop():
                return

    def _folder(self, where: str, fan: str, now: float) -> Part:
        """Return what lies in a fan-out folder, or in a fair sample of it if that is too much."""
        shared, parts = self._backend.properties.shared, list[Part]()
        for count in _SAMPLES if self._samples else (1,):
            number, start, end = secrets.randbelow(count), None, None
            if count > 1:
                first, last = (0x10000 * at // count for at in (number, number + 1))
                # Temporaries come before all keys.
                start, end = f"{fan}{first:04x}" if number else ".", f"{fan}{last - 1:04x}~"
            rows = self._backend.list(
                f"{where}/{fan}", hidden=True, start=start, end=end, flat=True
            )
            part = Part(share=1 / count)
            most = _MOST_UNITS if self._samples else math.inf
            part.add_rows(self._paced(rows), now, shared=shared, most=most)
            # A fair sample has a share of what was too much. Keys that are no hashes have none.
            least = 0 if count == 1 else _MOST_UNITS // 32
            if least <= len(part.units) <= most:
                return part
            parts.append(part)
        # Deleting some makes progress.
        return parts[0]

    def _paced(self, rows: Iterable[ObjectInfo]) -> Iterator[ObjectInfo]:
        for row in rows:
            self._pace()
            yield row


# ------------------------------------------------------------------------- deletion


@dataclass(slots=True)
class Lost(Total):
    """Objects of a salt group that were deleted, and the last use of the one idle longest."""

    oldest: float = float("inf")


@dataclass(slots=True)
class Outcome:
    """The result of a deletion.

    Attributes
    ----------
    deleted : dict of Reason and Total
        Files that were deleted.
    lost : dict of (str, Reason) and Lost
        Objects that were deleted, by folder of the salt group (``namespace/group``), and reason.
    kept : Total
        Files that stay, because they were used, replaced or changed meanwhile.
    gone : Total
        Files that another process had deleted.
    failed : int
        Files that could not be deleted.
    error : StorageError or None
        Why the first of them could not.
    stuck : set of str
        Names of such files, at most :data:`_MOST_STUCK`.
    """

    deleted: dict[Reason, Total] = field(default_factory=dict)
    lost: dict[tuple[str, Reason], Lost] = field(default_factory=dict)
    kept: Total = field(default_factory=Total)
    gone: Total = field(default_factory=Total)
    failed: int = 0
    error: StorageError | None = None
    stuck: set[str] = field(default_factory=set)

    @property
    def is_refused(self) -> bool:
        """Whether many files could not be deleted, and none was: no more are tried."""
        return self.failed >= _MOST_REFUSED and not self.count

    @property
    def nbytes(self) -> int:
        """Bytes that were deleted."""
        return sum(total.nbytes for total in self.deleted.values())

    @property
    def count(self) -> int:
        """Number of files that were deleted."""
        return sum(total.count for total in self.deleted.values())

    @property
    def done(self) -> int:
        """Number of files that are finished."""
        return self.count + self.kept.count + self.gone.count + self.failed


#: What is to be deleted, and why.
Picked = tuple["Unit | Leftover", Reason]


def delete(
    backend: Backend,
    picked: Iterable[Picked],
    *,
    now: float,
    stop: Callable[[], bool] = lambda: False,
    pace: Callable[[], None] = lambda: None,
    on_progress: Callable[[Outcome], None] = lambda outcome: None,
    outcome: Outcome | None = None,
) -> Outcome:
    """Delete units and leftovers. A deletion that fails is that of its file alone.

    A process that is killed meanwhile leaves some objects of a unit at most, which costs a miss.

    Parameters
    ----------
    backend : Backend
    picked : Iterable of (Unit or Leftover, Reason)
        Consumed on the calling thread.
    now : float
        By the storage's clock, seconds since the epoch.
    stop : Callable
        Called after each request; True ends the deletion.
    pace : Callable
        Called for each look, on any thread; may sleep.
    on_progress : Callable
        Called after each request.
    outcome : Outcome, optional
        Updated meanwhile, so that it is available after an interruption.

    Returns
    -------
    Outcome
        No error of the storage is raised.
    """
    outcome = Outcome() if outcome is None else outcome
    work = partial(_delete_group, backend, now, pace)
    threads = threads_for_calls(backend)
    groups = _groups(picked, backend.properties.deletes_at_once)
    with closing(in_parallel(work, groups, threads)) as results:
        for group, files in results:
            for (what, reason), (deleted, kept, gone, problems) in zip(group, files, strict=True):
                if deleted.count:
                    total = outcome.deleted.setdefault(reason, Total())
                    total.add(deleted.nbytes, deleted.count)
                    if isinstance(what, Unit):
                        lost = outcome.lost.setdefault((what.where, reason), Lost())
                        lost.add(deleted.nbytes, deleted.count)
                        lost.oldest = min(lost.oldest, what.used)
                outcome.kept.add(kept.nbytes, kept.count)
                outcome.gone.add(gone.nbytes, gone.count)
                outcome.failed += len(problems)
                outcome.error = outcome.error or next(iter(problems.values()), None)
                if len(outcome.stuck) < _MOST_STUCK:
                    outcome.stuck |= problems.keys()
            on_progress(outcome)
            if outcome.is_refused or stop():
                return outcome
    return outcome


def _groups(picked: Iterable[Picked], at_once: int) -> Iterator[list[Picked]]:
    """Yield what is deleted together: as many files as one request deletes, or a few units."""
    most = max(at_once, _AT_ONCE)
    group: list[Picked] = []
    files = 0
    for one in picked:
        count = len(one[0].names) if isinstance(one[0], Unit) else 1
        if group and files + count > most:
            yield group
            group, files = [], 0
        group.append(one)
        files += count
    if group:
        yield group


class _Done(NamedTuple):
    """What became of the files of a unit, or of a leftover."""

    deleted: Total
    kept: Total
    gone: Total
    problems: dict[str, StorageError]


def _delete_group(
    backend: Backend, now: float, pace: Callable[[], None], group: Sequence[Picked]
) -> list[_Done]:
    """Look at some files, and delete them; return what became of each. Called on any thread."""
    done = [_Done(Total(), Total(), Total(), {}) for _ in group]
    files = [
        (number, name, nbytes)
        for number, (what, reason) in enumerate(group)
        for name, nbytes in _look(backend, now, pace, what, reason, done[number])
    ]
    answers = backend.delete([name for _, name, _ in files]) if files else []
    for (number, name, nbytes), answer in zip(files, answers, strict=True):
        if not isinstance(answer, StorageError):
            (done[number].deleted if answer else done[number].gone).add(nbytes)
        elif isinstance(answer, NotRegularError):
            # It was replaced, or is a folder in which there is something again.
            done[number].kept.add(nbytes)
        else:
            done[number].problems[name] = answer
    return done


def _look(
    backend: Backend,
    now: float,
    pace: Callable[[], None],
    what: Unit | Leftover,
    reason: Reason,
    done: _Done,
) -> Iterable[tuple[str, int]]:
    """Return names and bytes of the files to delete of a unit or a leftover."""
    # Where one request deletes many, a look at each would take a hundred times as long.
    looks = backend.properties.deletes_at_once == 1
    if isinstance(what, Leftover):
        if reason is not Reason.EMPTY or "/" in what.name:
            return [(what.name, what.nbytes)]
        # A namespace without objects: an engine that uses it describes it anew.
        inner = (DESCRIPTION, MARKERS, RESERVED) if looks else (DESCRIPTION,)
        names = [f"{what.name}/{name}" for name in inner]
        return [(name, 0) for name in ([*names, what.name] if looks else names)]
    each = what.nbytes // len(what.names)
    if not looks or reason is Reason.CHOSEN:
        return [(name, each) for name in what.names]
    found: list[tuple[str, int]] = []
    for name in what.names:
        pace()
        try:
            info = backend.info(name)
        except StorageError as error:
            done.problems[name] = error
            return []
        if info is None:
            done.gone.add(each)
        elif last_use(info, now, shared=backend.properties.shared) > what.used:
            done.kept.add(each, len(what.names))
            return []
        else:
            found.append((name, info.held))
    return found
