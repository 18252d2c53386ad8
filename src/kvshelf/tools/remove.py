"""Deletes chosen objects of a shelf: of namespaces, salt groups, prompts, or of an age.

Owns the choice (:class:`Choice`), what is deleted and in which order, and the counts.

Contracts
---------
* Only objects are deleted; of a whole namespace also its quarantine and its markers. Its
  description stays, because an engine that uses the namespace writes it once. Foreign files,
  temporaries, links, and namespaces of other versions of the format stay.
* Pinned chunks stay unless they are chosen too.
* An age counts by the earlier of the storage's clock and this machine's; while these are more than
  an hour apart, nothing has one.
* With an age, each object is looked at again before it is deleted: one that was used or written
  meanwhile stays.
* The ends of prompts go first: what an interrupt leaves are beginnings of prompts, which can be
  loaded.

Threads
-------
:func:`find_objects` and :func:`remove_objects` block on the storage. Objects are deleted on threads
of :mod:`kvshelf.tools.parallel`; `on_progress` and `on_problem` are called on any of them, one call
at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Final

import numpy as np
import numpy.typing as npt

from kvshelf.backends import Backend
from kvshelf.backends.base import time_for_ages
from kvshelf.capacity.inventory import Inventory, Leftover, Sort, last_use, time_of
from kvshelf.capacity.marks import Marks
from kvshelf.capacity.pins import Pins
from kvshelf.errors import NotRegularError, ReadOnlyStorageError
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.parallel import MOST_JOBS, Attempts, work_on
from kvshelf.tools.prompt_objects import PromptObject, known_format, prompt_objects
from kvshelf.tools.prompts import Prompt, TokenPrompt

_OF_A_NAMESPACE: Final = (Sort.QUARANTINED, Sort.MARKER)

_Flags = npt.NDArray[np.bool_]
_Floats = npt.NDArray[np.float64]
_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which objects of a shelf; the conditions that are given all have to hold.

    Attributes
    ----------
    folders : Collection of str or None
        Of these namespace folders.
    group : str or None
        Of this salt group: ``_`` or 16 hex.
    prompts : Sequence of Prompt or TokenPrompt, or None
        The chunks and tails of these prompts, which are token ids. Found by name: nothing is
        listed.
    unused_for : float or None
        Neither stored nor used for so many seconds.
    pinned : bool
        Also those that are pinned.
    """

    folders: Collection[str] | None = None
    group: str | None = None
    prompts: Sequence[Prompt | TokenPrompt] | None = None
    unused_for: float | None = None
    pinned: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether everything in the namespaces is chosen, so that leftovers are of no use."""
        return self.group is None and self.prompts is None and self.unused_for is None


@dataclass(frozen=True, slots=True)
class Part:
    """What was chosen in one salt group of one namespace folder.

    Attributes
    ----------
    folder, group : str
    objects, bytes : int
    last_used : float
        Latest use of any of the objects, seconds since the epoch.
    files : Callable
        Yields names below the root, and bytes, in the order in which they are to be deleted.
    """

    folder: str
    group: str
    objects: int
    bytes: int
    last_used: float
    files: Callable[[], Iterator[tuple[str, int]]]


@dataclass(slots=True)
class Found:
    """What was chosen on a shelf.

    Attributes
    ----------
    parts : list of Part
    leftovers : list of Leftover
        Quarantine and markers of whole namespaces.
    used_until : float or None
        Objects that were used later stay; seconds since the epoch, by the storage's clock.
    now : float
        The storage's time.
    pinned, pinned_bytes : int
        Objects that stay because they are pinned.
    unreadable_pins : dict of str and str
        Pins that pin nothing, by name, and why.
    """

    now: float
    parts: list[Part] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    used_until: float | None = None
    pinned: int = 0
    pinned_bytes: int = 0
    unreadable_pins: dict[str, str] = field(default_factory=dict)

    @property
    def objects(self) -> int:
        """Number of objects."""
        return sum(part.objects for part in self.parts)

    @property
    def bytes(self) -> int:
        """Bytes of the objects."""
        return sum(part.bytes for part in self.parts)


@dataclass(slots=True)
class RemoveReport:
    """The result of a removal; counts of files.

    Attributes
    ----------
    removed : int
    bytes : int
        Bytes of these, as they were found.
    kept : int
        Used or written meanwhile.
    gone : int
        Deleted by others meanwhile.
    failed : int
        The storage refused or failed.
    """

    removed: int = 0
    bytes: int = 0
    kept: int = 0
    gone: int = 0
    failed: int = 0

    @property
    def done(self) -> int:
        """Files that are finished."""
        return self.removed + self.kept + self.gone + self.failed


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Objects of one salt group of one namespace folder, those deepest in their prompts first."""

    folder: str
    group: str
    keys: npt.NDArray[np.uint8]
    sizes: _Integers
    used: _Floats
    name: Callable[[int], str]


def find_objects(
    shelf: Shelf, choice: Choice, *, on_listed: Callable[[], None] = lambda: None
) -> Found:
    """Find the objects that are chosen; change nothing.

    Parameters
    ----------
    shelf : Shelf
    choice : Choice
    on_listed : Callable
        Called for each file that is listed.

    Raises
    ------
    ConfigError
        If a chosen namespace has no usable description, and prompts are chosen.
    StorageError
        If the shelf, or its pins or marks, cannot be read.
    """
    backend = shelf.backend
    inventory = None
    if choice.prompts is None:
        inventory = Inventory.scan(backend, folders=choice.folders, parents=None, pace=on_listed)
        assert inventory is not None
        found, aged_at = Found(inventory.now), inventory.aged_at
        candidates = _listed(inventory, choice)
    else:
        found = Found(time_of(backend))
        aged_at = time_for_ages(found.now, backend.url)
        candidates = _of_prompts(shelf, choice, choice.prompts, found.now)
    pins = Pins.read(backend, aged_at)
    found.unreadable_pins = dict(pins.unreadable)
    marks = None
    if choice.unused_for is not None:
        found.used_until = aged_at - choice.unused_for
        marks = Marks.read(backend)
    for some in candidates:
        part = _part(some, choice, pins, marks, found)
        if part is not None:
            found.parts.append(part)
    if inventory is not None and choice.is_whole:
        found.leftovers = [left for left in inventory.leftovers if left.sort in _OF_A_NAMESPACE]
    return found


def _part(
    some: _Candidates, choice: Choice, pins: Pins, marks: Marks | None, found: Found
) -> Part | None:
    """Return what is chosen of some objects; count what stays because it is pinned."""
    used = some.used
    chosen = np.ones(len(used), np.bool_)
    if marks is not None and found.used_until is not None:
        used = np.maximum(used, marks.used(some.folder, some.keys))
        chosen = used < found.used_until
    if not choice.pinned:
        pinned = pins.covers(some.folder, some.group, some.keys) & chosen
        found.pinned += int(pinned.sum())
        found.pinned_bytes += int(some.sizes[pinned].sum())
        chosen &= ~pinned
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return None

    def files() -> Iterator[tuple[str, int]]:
        return ((some.name(int(row)), int(some.sizes[row])) for row in rows)

    nbytes, last = int(some.sizes[rows].sum()), float(used[rows].max())
    return Part(some.folder, some.group, len(rows), nbytes, last, files)


def _listed(inventory: Inventory, choice: Choice) -> Iterator[_Candidates]:
    place = inventory.namespace.astype(np.int64) * max(1, len(inventory.groups)) + inventory.group
    # Stable: the shards and kinds of a chunk stay together as they were listed.
    order = np.lexsort((-inventory.index.astype(np.int64), place))
    for rows in np.split(order, np.flatnonzero(np.diff(place[order])) + 1):
        if not len(rows):
            continue
        group = inventory.groups[inventory.group[rows[0]]]
        if choice.group in (None, group):
            yield _Candidates(
                inventory.namespaces[inventory.namespace[rows[0]]].name,
                group,
                np.ascontiguousarray(inventory.key[rows]),
                inventory.size[rows],
                inventory.used[rows],
                _namer(inventory, rows),
            )


def _namer(inventory: Inventory, rows: _Integers) -> Callable[[int], str]:
    return lambda row: inventory.name(int(rows[row]))


def _of_prompts(
    shelf: Shelf, choice: Choice, prompts: Sequence[Prompt | TokenPrompt], now: float
) -> Iterator[_Candidates]:
    for info in shelf.namespaces():
        if choice.folders is not None and info.folder not in choice.folders:
            continue
        fmt = known_format(info, required=choice.folders is not None)
        if fmt is None:
            continue
        objects = [
            each
            for each in prompt_objects(shelf.backend, info.folder, fmt, prompts, tails=True)
            if choice.group in (None, each.chunk.salt_group)
        ]
        objects.sort(key=lambda each: (each.chunk.salt_group, -each.chunk.index))
        for group, members in groupby(objects, key=lambda each: each.chunk.salt_group):
            some = list(members)
            yield _Candidates(
                info.folder,
                group,
                np.frombuffer(b"".join(each.chunk.key for each in some), np.uint8).reshape(-1, 32),
                np.array([each.size for each in some], np.int64),
                _uses(shelf.backend, some, now),
                _list_namer(some),
            )


def _list_namer(some: Sequence[PromptObject]) -> Callable[[int], str]:
    return lambda row: some[row].name


def _uses(backend: Backend, some: Sequence[PromptObject], now: float) -> _Floats:
    """Return the last uses of objects by their times; one that is gone was just used."""
    infos = [backend.info(each.name) for each in some]
    return np.array([now if info is None else last_use(info, now) for info in infos], np.float64)


def remove_objects(
    shelf: Shelf,
    found: Found,
    *,
    jobs: int | None = None,
    report: RemoveReport | None = None,
    on_progress: Callable[[RemoveReport], None] = lambda report: None,
    on_problem: Callable[[str, str], None] = lambda name, text: None,
) -> RemoveReport:
    """Delete what :func:`find_objects` has found.

    Parameters
    ----------
    shelf : Shelf
        Writable.
    found : Found
    jobs : int, optional
        Objects deleted at once; by default the useful concurrency of the storage, at most 16.
    report : RemoveReport, optional
        Updated meanwhile, so that it is available after an interruption.
    on_progress : Callable
        Called with the report after each file.
    on_problem : Callable
        Called with a name and a description.

    Raises
    ------
    StorageError
        If the shelf takes no changes, or does not answer any more.
    """
    report = RemoveReport() if report is None else report
    backend = shelf.backend
    if backend.properties.read_only:
        raise ReadOnlyStorageError(f"{shelf.url} is read-only: nothing can be deleted")
    stop, lock = threading.Event(), threading.Lock()
    attempts = Attempts(stop)

    def count(name: str, nbytes: int = 0) -> None:
        with lock:
            setattr(report, name, getattr(report, name) + 1)
            report.bytes += nbytes
            on_progress(report)

    def delete(name: str, nbytes: int) -> None:
        if found.used_until is not None:
            info = backend.info(name)
            if info is not None and last_use(info, found.now) >= found.used_until:
                return count("kept")
        if backend.delete(name):
            return count("removed", nbytes)
        return count("gone")

    def work(file: tuple[str, int]) -> None:
        name, nbytes = file
        try:
            error = attempts.make(lambda: delete(name, nbytes))
        except NotRegularError as not_ours:
            error = not_ours
        if error is not None:
            with lock:
                on_problem(name, str(error))
            count("failed")

    work_on(
        chain(
            *(part.files() for part in found.parts),
            ((left.name, left.size) for left in found.leftovers),
        ),
        work,
        jobs=jobs or max(1, min(MOST_JOBS, backend.properties.concurrency)),
        name="kvshelf-remove",
        stop=stop,
    )
    return report
