"""What lies in one part of a shelf, and what of it is deleted.

Owns how a part of a shelf is listed (:class:`Lister`), the rules (:class:`Rules`,
:func:`reason_to_delete`) and the deletion (:func:`delete`). The evictor and commands use them
alike.

A shelf is listed in *slices* of its 256 fan-out folders (the first two hex digits of a key): what
lies in some of them is a fair sample of the whole. A namespace or a salt group of at most
:data:`~kvshelf.capacity.limits.PAGE` files is listed whole, in the slice that the digest of its
name is in.

A *unit* is what is deleted together: the shards of one kind of one chunk, or of one tail. Nothing
is read but names, sizes and times: what stands in a file decides nothing.

Contracts
---------
* Only what kvshelf writes is deleted: files with exactly the names of objects, in folders of
  namespaces, its temporaries, and what is in the reserved folders.
* A folder that cannot be listed is left out, and named (:attr:`Part.skipped`).
* A missing file never causes a deletion.
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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final, NamedTuple

from kvshelf.backends import Backend, ObjectInfo
from kvshelf.capacity import limits
from kvshelf.capacity.limits import DAY, FANS, HOUR
from kvshelf.capacity.parallel import in_parallel, threads_for_calls
from kvshelf.errors import NotRegularError, StorageError
from kvshelf.format.kinds import Kind
from kvshelf.format.names import DESCRIPTION, parse_namespace_folder, parse_object_name
from kvshelf.shelf.leftovers import RESERVED, TIER, is_temporary
from kvshelf.shelf.markers import MARKERS, is_attempt
from kvshelf.shelf.pins import PINS

#: The folder of the heartbeats of keepers, see :mod:`kvshelf.capacity.keepers`.
KEEPERS: Final = f"{RESERVED}/keepers"
#: Shares of a fan-out folder that a sample may have.
_SAMPLES: Final = (1, 8, 64, 512, 4096)
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


#: Reasons for which units are deleted; the others are of stale files.
REASONS_OF_UNITS: Final = frozenset(
    (Reason.TAIL, Reason.AGE, Reason.GROUP, Reason.SIZE, Reason.CHOSEN)
)


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
        return self.index + limits.TIE_PART * int.from_bytes(self.key[4:8], "big") / 2**32


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
    if scored >= cuts.get(unit.where, math.inf):
        return Reason.GROUP
    return Reason.SIZE if scored >= cuts.get("", math.inf) else None


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
    """

    units: list[Unit] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    others: dict[str, Total] = field(default_factory=dict)
    groups: dict[str, set[str]] = field(default_factory=dict)
    seen: dict[str, tuple[float, int]] = field(default_factory=dict)
    skipped: dict[str, StorageError] = field(default_factory=dict)
    files: int = 0
    chunks: int = 0

    def join(self, other: Part) -> None:
        """Add what lies in another part."""
        self.units += other.units
        self.leftovers += other.leftovers
        self.files += other.files
        for space, groups in other.groups.items():
            self.groups.setdefault(space, set()).update(groups)
        for folder, (share, files) in other.seen.items():
            self.note_seen(folder, share, files)
        self.skipped |= other.skipped
        for sort, total in other.others.items():
            self.others.setdefault(sort, Total()).add(total.nbytes, total.count)

    def note_seen(self, where: str, share: float, files: int = 0) -> None:
        """Note that so much more of a group was listed, and the files in it."""
        shares, counts = self.seen.get(where, (0.0, 0))
        self.seen[where] = shares + share, counts + files

    def add_rows(
        self, rows: Iterable[ObjectInfo], now: float, *, shared: bool, most: float = math.inf
    ) -> None:
        """Add what is listed in one fan-out folder, or in a reserved one, up to `most` units."""
        units: dict[tuple[str, bytes, Kind, int, int | None], Unit] = {}
        for info in rows:
            if len(units) > most:
                return
            self.files += 1
            space, _, inner = info.name.partition("/")
            parsed = parse_object_name(inner)
            if parsed is None or info.size > limits.MOST_BYTES:
                self._add_other(space, inner, info)
                continue
            # No name decides about the objects of another one.
            at = parsed.salt_group, parsed.key, parsed.kind, parsed.index, parsed.tail_tokens
            unit = units.get(at)
            if unit is None:
                tail = parsed.tail_tokens is not None
                unit = Unit(space, parsed.salt_group, parsed.key, parsed.kind, parsed.index, tail)
                units[at] = unit
                self.units.append(unit)
            used = last_use(info, now, shared=shared)
            unit.used = max(unit.used, used)
            # Where there are no access times, all units age alike.
            read = info.atime
            is_use = used > info.mtime + limits.USE_SECONDS and (shared or read == used)
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
    groups : dict of str and dict of str and float
        By namespace, the estimated files of each group; infinite until it was listed. What the last
        listing did not name is not there.
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
        #: Each folder can fail, and a request deletes one file.
        self._has_folders = backend.properties.deletes_at_once == 1
        self.groups: dict[str, dict[str, float]] = {}

    def sweep(self, first: int, width: int, chunks: int, now: float) -> tuple[Part, int]:
        """Return what lies in the next slice of the shelf, and how many fan-out folders it has.

        Parameters
        ----------
        first : int
            Number of its first folder; it goes on from 255 to 0.
        width : int
            Folders that are listed together; as many again, until there are enough chunks.
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
            units_before = len(part.units)
            self._slice(spaces, begin, begin + width - 1, now, part)
            part.chunks += len({unit.key for unit in part.units[units_before:]})
            listed += width
            width = listed
        for space, names in part.groups.items():
            groups = self.groups.get(space, {})
            self.groups[space] = {name: groups.get(name, math.inf) for name in names}
        # Of a group whose folders could not be listed nothing is known.
        part.seen = {
            folder: share_and_files
            for folder, share_and_files in part.seen.items()
            if share_and_files[0] > 0
        }
        for folder, (share, files) in part.seen.items():
            space, _, name = folder.partition("/")
            self.groups[space][name] = files / share
        # What came before a listing failed is no share of the group that is known.
        part.units = [unit for unit in part.units if unit.where in part.seen]
        return part, listed

    def _slice(self, spaces: list[str], first: int, last: int, now: float, part: Part) -> None:
        """Add what lies in some fan-out folders of all namespaces."""
        namespaces = [
            name for name in spaces if first <= fan_of(name) <= last or not self._is_small(name)
        ]
        threads = threads_for_calls(self._backend) if len(namespaces) > 1 else 0

        def list_space(space: str) -> Part:
            joined = Part()
            for piece in self._space(space, first, last, now):
                joined.join(piece)
            return joined

        with closing(in_parallel(list_space, namespaces, threads)) as results:
            for _, part_of_folder in results:
                part.join(part_of_folder)
                if self._stop():
                    return
        if first == 0:
            part.join(self._beside("", now))

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
            yield self._beside("", now)
            folders = [name for name in self._backend.folders() if parse_namespace_folder(name)]
        for space in folders:
            yield from self._space(space, 0, FANS - 1, now, group)

    def _space(
        self, space: str, first: int, last: int, now: float, only: str | None = None
    ) -> Iterator[Part]:
        """Yield what lies in some fan-out folders of a namespace; called on any thread."""
        self._pace()
        is_small, is_mine = self._is_small(space), first <= fan_of(space) <= last
        part = self._beside(space, now) if is_mine or last - first == FANS - 1 else Part()
        groups: Sequence[str] = ()
        try:
            groups = self._backend.folders(space)
            part.groups[space] = set(groups)
        except StorageError as error:
            part.skipped[space] = error
        else:
            if is_mine and not groups:
                self._note_empty(part, space, DESCRIPTION)
        yield part
        for group in groups:
            folder = f"{space}/{group}"
            is_small_group = self._is_small(space, group)
            listed_whole = is_small or (is_small_group and first <= fan_of(folder) <= last)
            if only in (None, group) and (listed_whole or not is_small_group):
                fans = (0, FANS - 1) if listed_whole else (first, last)
                yield from self._fans(folder, *fans, now)

    def _is_small(self, space: str, group: str | None = None) -> bool:
        """Whether a namespace, or one of its groups, is known to have few files."""
        groups = self.groups.get(space, {"": math.inf})
        files = sum(groups.values()) if group is None else groups.get(group, math.inf)
        return files <= limits.PAGE

    def _beside(self, space: str, now: float) -> Part:
        """Return what lies beside the objects of a namespace; for "" beside all namespaces."""
        part, reserved = Part(), f"{space}/{RESERVED}".lstrip("/")
        places = [space or RESERVED]
        if self._has_folders:
            # What lies deeper is nobody's.
            places += [reserved] if space else []
            with contextlib.suppress(StorageError):
                places += (f"{reserved}/{name}" for name in self._backend.folders(reserved))
        for folder in places:
            start, end = _HIDDEN if folder == space else (None, None)
            try:
                rows = self._backend.list(
                    folder, hidden=True, start=start, end=end, flat=self._has_folders
                )
                part.add_rows(itertools.islice(rows, limits.MOST_BESIDE), now, shared=False)
            except StorageError as error:
                part.skipped[folder] = error
        return part

    def _note_empty(self, part: Part, folder: str, *inside: str) -> None:
        """Note a folder in which there is nothing but some files, where the storage has folders."""
        names = (folder, *(f"{folder}/{name}" for name in inside))
        with contextlib.suppress(StorageError):
            infos = [info for name in names if (info := self._backend.info(name)) is not None]
            if infos:
                changed = max(info.mtime for info in infos)
                part.leftovers.append(Leftover(folder, Reason.EMPTY, 0, changed))

    def _fans(self, where: str, first: int, last: int, now: float) -> Iterator[Part]:
        """Yield a part for each fan-out folder of a group that is there."""
        backend, share, part = self._backend, (last - first + 1) / FANS, Part()
        names, pieces = [f"{fan:02x}" for fan in range(first, last + 1)], list[Part]()
        try:
            if not self._has_folders and first < last:
                rows = backend.list(where, hidden=True, start=names[0], end=names[-1])
                part.note_seen(where, share)
                for _, some in itertools.groupby(rows, lambda row: row.name.rpartition("/")[0]):
                    piece = Part()
                    piece.add_rows(some, now, shared=backend.properties.shared)
                    part.note_seen(where, 0.0, piece.files)
                    pieces.append(piece)
                    if self._stop():
                        return
                names = []
            elif last - first >= limits.WIDE:
                there = backend.folders(where)
                if not there:
                    self._note_empty(part, where)
                names = sorted(set(names) & set(there))
                part.note_seen(where, share - len(names) / FANS)
        except StorageError as error:
            # What came before says nothing of how much there is.
            yield Part(skipped={where: error})
            return
        yield part
        yield from pieces
        for fan in names:
            self._pace()
            folder = f"{where}/{fan}"
            try:
                part = self._folder(where, fan, now)
                if not part.files:
                    self._note_empty(part, folder)
            except StorageError as error:
                part = Part(skipped={folder: error})
            yield part
            if self._stop():
                return

    def _folder(self, where: str, fan: str, now: float) -> Part:
        """Return what lies in a fan-out folder, or in a fair sample of it if that is too much."""
        most_units = limits.MOST_UNITS if self._samples else math.inf
        parts = list[Part]()
        for count in _SAMPLES if self._samples else (1,):
            number, start, end = secrets.randbelow(count), None, None
            if count > 1:
                first, last = (0x10000 * at // count for at in (number, number + 1))
                # Temporaries come before all keys.
                start, end = f"{fan}{first:04x}" if number else ".", f"{fan}{last - 1:04x}~"
            rows = self._backend.list(
                f"{where}/{fan}", hidden=True, start=start, end=end, flat=True
            )
            part = Part()
            paced = (row for row in rows if self._pace() is None)
            part.add_rows(paced, now, shared=self._backend.properties.shared, most=most_units)
            part.note_seen(where, 1 / count / FANS, part.files)
            parts.append(part)
            # A fair sample has a share of what was too much. Keys that are no hashes have none.
            least = 0 if count == 1 else limits.MOST_UNITS // 32
            if least <= len(part.units) <= most_units:
                return part
        # Deleting some makes progress.
        return parts[0]


# ------------------------------------------------------------------------- deletion


@dataclass(slots=True)
class Outcome:
    """The result of a deletion.

    Attributes
    ----------
    deleted, nbytes : Counter of Reason
        Files that were deleted, and their bytes.
    kept : int
        Files that stay, because they were used, replaced or changed meanwhile.
    gone : int
        Files that another process had deleted.
    failed : int
        Files that could not be deleted.
    error : StorageError or None
        Why the first of them could not.
    stuck : set of str
        Names of such files, at most :data:`~kvshelf.capacity.limits.MOST_STUCK`.
    """

    deleted: Counter[Reason] = field(default_factory=Counter)
    nbytes: Counter[Reason] = field(default_factory=Counter)
    kept: int = 0
    gone: int = 0
    failed: int = 0
    error: StorageError | None = None
    stuck: set[str] = field(default_factory=set)

    @property
    def is_refused(self) -> bool:
        """Whether many files could not be deleted, and none was: no more are tried."""
        return self.failed >= limits.MOST_REFUSED and not self.deleted

    @property
    def done(self) -> int:
        """Number of files that are finished."""
        return self.deleted.total() + self.kept + self.gone + self.failed

    def fail(self, name: str, error: StorageError) -> None:
        """Note that a file could not be deleted."""
        self.failed += 1
        self.error = self.error or error
        self.stuck.add(name)

    def join(self, other: Outcome) -> None:
        """Add what became of other files."""
        self.deleted.update(other.deleted)
        self.nbytes.update(other.nbytes)
        self.kept += other.kept
        self.gone += other.gone
        self.failed += other.failed
        self.error = self.error or other.error
        if len(self.stuck) < limits.MOST_STUCK:
            self.stuck |= other.stuck


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
    """Delete units and leftovers. A deletion that fails is that of its file alone: none is retried.

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
    batch_size, iterator = max(backend.properties.deletes_at_once, limits.AT_ONCE), iter(picked)
    groups = iter(lambda: list(itertools.islice(iterator, batch_size)), [])
    with closing(in_parallel(work, groups, threads_for_calls(backend))) as results:
        for _, of_group in results:
            outcome.join(of_group)
            on_progress(outcome)
            if outcome.is_refused or stop():
                break
    return outcome


def _delete_group(
    backend: Backend, now: float, pace: Callable[[], None], group: Sequence[Picked]
) -> Outcome:
    """Look at some files, and delete them. Called on any thread."""
    outcome = Outcome()
    # Where one request deletes many, a look at each would take a hundred times as long.
    looks = backend.properties.deletes_at_once == 1
    files: list[tuple[str, int, Reason]] = []
    for unit, reason in group:
        if isinstance(unit, Unit) and looks and reason is not Reason.CHOSEN:
            pairs = _look(backend, now, pace, unit, outcome)
        elif isinstance(unit, Unit):
            pairs = [(name, unit.nbytes // len(unit.names)) for name in unit.names]
        elif reason is Reason.EMPTY and "/" not in unit.name:
            # A namespace without objects: an engine that uses it describes it anew.
            inner = (DESCRIPTION, MARKERS, RESERVED) if looks else (DESCRIPTION,)
            pairs = [(f"{unit.name}/{name}", 0) for name in inner]
            pairs += [(unit.name, 0)] if looks else []
        else:
            pairs = [(unit.name, unit.nbytes)]
        files += ((name, nbytes, reason) for name, nbytes in pairs)
    answers = backend.delete([name for name, _, _ in files]) if files else []
    for (name, nbytes, reason), answer in zip(files, answers, strict=True):
        if isinstance(answer, NotRegularError):
            # It was replaced, or is a folder in which there is something again.
            outcome.kept += 1
        elif isinstance(answer, StorageError):
            outcome.fail(name, answer)
        elif answer:
            outcome.deleted[reason] += 1
            outcome.nbytes[reason] += nbytes
        else:
            outcome.gone += 1
    return outcome


def _look(
    backend: Backend, now: float, pace: Callable[[], None], unit: Unit, outcome: Outcome
) -> list[tuple[str, int]]:
    """Return names and bytes of a unit's files; none if one was used or replaced meanwhile."""
    files: list[tuple[str, int]] = []
    for name in unit.names:
        pace()
        try:
            info = backend.info(name)
        except StorageError as error:
            outcome.fail(name, error)
            return []
        if info is None:
            outcome.gone += 1
        elif last_use(info, now, shared=backend.properties.shared) > unit.used:
            outcome.kept += len(unit.names)
            return []
        else:
            files.append((name, info.held))
    return files
