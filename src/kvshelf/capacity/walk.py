"""Walks through a shelf for what hand-overs and killed writers leave, and for what was set aside.

Owns when which folder is looked into, and the account of the tails and markers of this process. One
folder is listed at a time (:class:`~kvshelf.capacity.inventory.Inventory`), so that the load stays
low; :mod:`kvshelf.capacity.collect` chooses what is deleted. With or without bounds a process looks

* into the folders of the namespaces that it writes to, for temporaries, once an hour while it
  writes, and for tails and markers of hand-overs once in the age at which these are deleted. A walk
  through 256 folders takes about as long. Engines walk independently; each begins elsewhere;
* at the tails and markers that it wrote itself, when they have come to that age;
* into all folders of the shelf, at once, when the storage is full: for two seconds a minute.
  Nothing else frees space there without a loss.

Contracts
---------
* Nothing is followed or descended into that is not a folder of a namespace. Namespaces of other
  versions of the format stay as they are, temporaries included.
* Where the storage does not report its time, files of other processes stay.
* Deletes nothing more where the storage forbids it; one log line says so. Another error of the
  storage ends a piece of work, which is done later. It opens no circuit breaker, and while the one
  for reads is open the storage is left alone.
* :meth:`Walk.step` and :meth:`Walk.free_space` block on the storage; the owner of the thread calls
  them on it. All other methods may be called from any thread, and none waits for the storage.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from functools import partial
from operator import itemgetter
from typing import Final

from kvshelf.backends.guard import GuardedBackend
from kvshelf.capacity.collect import plan
from kvshelf.capacity.deletion import Outcome, carry_out
from kvshelf.capacity.files import Total
from kvshelf.capacity.inventory import Inventory, Scan
from kvshelf.capacity.rules import Rule, Rules
from kvshelf.errors import StorageError
from kvshelf.format.names import parse_namespace_folder, parse_path
from kvshelf.metrics import Counters
from kvshelf.shelf.leftovers import RESERVED, is_temporary
from kvshelf.shelf.markers import (
    MARKERS,
    is_attempt,
    marker_name,
)
from kvshelf.shelf.pacing import GilPace
from kvshelf.shelf.view import NamespaceView, ObjectRef, ShelfView

logger = logging.getLogger(__name__)

#: Seconds for a walk that looks for temporaries.
_PERIOD: Final = 3600.0
#: Folders with objects of one salt group: a walk through them takes about its period.
_FOLDERS: Final = 256
#: Least seconds from one folder of a walk to the next.
_LEAST_PAUSE: Final = 1.0
#: Pause after an error of the storage, in seconds.
_TROUBLE_SECONDS: Final = 30.0
#: Most of its own leftovers that a process remembers, and looks at in one piece of work; walks find
#: the others.
_MOST_OWN: Final = 65536
_OWN_AT_ONCE: Final = 256
#: On a full storage: seconds of work, to the next, and to the next when all was looked into.
_WORK_SECONDS: Final = 2.0
_FULL_SECONDS: Final = 60.0
_FULL_ROUND_SECONDS: Final = 600.0

#: A tail's object, or the attempt of a marker.
Left = ObjectRef | str


class Walk:
    """The walk of one process through one shelf.

    Parameters
    ----------
    guard : GuardedBackend
        The storage.
    counters : Counters
        Gets ``leftovers_deleted``.
    keep : float, optional
        Age in seconds at which tails and markers of the namespace that :meth:`begin` names are
        deleted.
    walks : bool
        Also delete what others left.

    Attributes
    ----------
    wake : Callable
        Called, on any thread, when :meth:`step` should be called soon. Must not block.
    """

    def __init__(
        self,
        guard: GuardedBackend,
        counters: Counters,
        *,
        keep: float | None = None,
        walks: bool = True,
    ) -> None:
        self.wake: Callable[[], object] = lambda: None
        self._guard = guard
        self._counters = counters
        self._keep = keep
        self._walks = walks
        self._lock = threading.Lock()
        self._closed = False
        #: When what this process wrote is old enough, the oldest first.
        self._own: OrderedDict[tuple[NamespaceView, Left], float] = OrderedDict()
        self._view: NamespaceView | None = None
        #: The namespace in which this walk looks for tails.
        self._with_tails: str | None = None
        #: The folders that are left of a walk, and of one through a full storage.
        self._left: Iterator[str] | None = None
        self._left_when_full: Iterator[str] | None = None
        self._next_folder = 0.0
        self._next_walk = 0.0
        self._is_full = False
        self._next_when_full = 0.0
        if walks:
            guard.on_full = self.found_full

    # ------------------------------------------------------------- any thread

    def begin(self, view: ShelfView) -> None:
        """Look for tails and markers in a namespace from now on."""
        if self._view is not view.on_storage:
            with self._lock:
                self._view = view.on_storage
                self._left = None
                # Engines that start at the same time walk at different times.
                self._next_folder = time.monotonic() + random.SystemRandom().uniform(0, self._pause)
                self._next_walk = 0.0
            self.wake()

    def wrote(self, view: ShelfView, left: Left) -> None:
        """Note what this process wrote, loaded, or found: it is to be deleted at its age."""
        if self._keep is None:
            return
        key = (view.on_storage, left)
        with self._lock:
            first = not self._own
            if len(self._own) < _MOST_OWN or key in self._own:
                self._own[key] = time.monotonic() + self._keep
                self._own.move_to_end(key)
        if first:
            # The thread has nothing that will be due yet.
            self.wake()

    def found_full(self) -> None:
        """Note that a write found the storage full."""
        self._is_full = True
        self.wake()

    def close(self) -> None:
        """Delete nothing more. Idempotent."""
        self._closed = True

    # ------------------------------------------------------------- its thread

    def step(self) -> float:
        """Do the due work; return the seconds until there is more, at the earliest."""
        if self._closed or not self._guard.reads.is_closed:
            return _TROUBLE_SECONDS
        try:
            self._delete_own()
            if self._is_full:
                self.free_space()
            self._look_around()
        except StorageError as error:
            # A listing that is forbidden is not tried again.
            self._walks = self._walks and error.retryable
            logger.debug("what was left behind was not deleted: %s", error)
            return _TROUBLE_SECONDS
        except Exception as error:
            logger.error("what was left behind is not deleted any more", exc_info=error)
            self._closed = True
        return self._pause_until_next()

    def _pause_until_next(self) -> float:
        now = time.monotonic()
        with self._lock:
            due = [now + _PERIOD]
            if self._own:
                due.append(next(iter(self._own.values())))
            if self._walks:
                due.append(self._next_folder)
            if self._is_full:
                due.append(self._next_when_full)
        return max(0.0, min(due) - now)

    def _stops(self) -> bool:
        return self._closed or not self._guard.reads.is_closed

    # ------------------------------------------------------------- its own leftovers

    def _delete_own(self) -> None:
        """Delete what this process wrote that is old enough."""
        while not self._stops():
            now = time.monotonic()
            with self._lock:
                due: list[tuple[tuple[NamespaceView, Left], float]] = []
                for key, at in self._own.items():
                    if at > now or len(due) == _OWN_AT_ONCE:
                        break
                    due.append((key, at))
            if not due:
                return
            later = self._delete_named({_name(*key): key for key, _ in due})
            if later is None:
                return
            with self._lock:
                for key, at in due:
                    if self._own.get(key) == at:
                        del self._own[key]
                        if key in later:
                            self._own[key] = now + later[key]
                if later:
                    # Tails that others used reach their age sooner than those written now.
                    self._own = OrderedDict(sorted(self._own.items(), key=itemgetter(1)))

    def _delete_named(
        self, names: dict[str, tuple[NamespaceView, Left]]
    ) -> dict[tuple[NamespaceView, Left], float] | None:
        """Delete files that are old enough; return the seconds until the others are.

        None if the process ends.
        """
        keep = self._keep
        assert keep is not None
        inventory = self._scan(folders=(), names=names)
        if inventory is None:
            return None
        used = {inventory.name(row): at for row, at in enumerate(inventory.used.tolist())}
        used |= {left.name: left.changed for left in inventory.leftovers}
        outcome = self._carry_out(inventory, Rules(tails=keep, markers=keep))
        if outcome.failed:
            self._keep = None
            self._own.clear()
            self._warn_refused(outcome, "of this engine")
        old = inventory.aged_at - keep
        return {
            names[name]: min(max(at - old, _LEAST_PAUSE), keep)
            for name, at in used.items()
            if at >= old
        }

    # ------------------------------------------------------------- the walk

    @property
    def _cleans(self) -> bool:
        """Whether there may be temporaries."""
        return self._guard.inner.properties.temporaries

    @property
    def _period(self) -> float:
        periods = [self._keep] if self._keep is not None and self._view is not None else []
        return min([*periods, _PERIOD] if self._cleans or not periods else periods)

    @property
    def _pause(self) -> float:
        return max(_LEAST_PAUSE, self._period / _FOLDERS)

    def _look_around(self) -> None:
        """Look into one folder, if it is time."""
        now = time.monotonic()
        with self._lock:
            if not self._walks or now < self._next_folder:
                return
            self._next_folder = now + self._pause * random.SystemRandom().uniform(0.5, 1.5)
            if self._left is None and now < self._next_walk:
                self._next_folder = self._next_walk
                return
            left, view = self._left, self._view
        if left is None:
            # Where nothing was written since the last walk began, others walk.
            spaces = {name for name in set(self._guard.written) if parse_namespace_folder(name)}
            self._guard.written.clear()
            if not self._cleans:
                spaces.clear()
            self._with_tails = view.folder() if view is not None and self._keep else None
            if self._with_tails is not None:
                spaces.add(self._with_tails)
            if not spaces:
                return
            self._next_walk = now + self._period
            left = self._folders(spaces)
        folder = next(left, None)
        with self._lock:
            if self._view is view:
                self._left = left if folder is not None else None
        if folder is not None:
            keep = self._keep if folder.partition("/")[0] == self._with_tails else None
            outcome = self._look_into(folder, Rules(tails=keep, markers=keep))
            if outcome.failed and not outcome.count:
                self._walks = False
                self._warn_refused(outcome, "that others left")

    def _folders(self, spaces: Collection[str]) -> Iterator[str]:
        """Yield the folders of some namespaces, and the reserved one of the root."""
        chance = random.SystemRandom()
        todo = [*spaces, *(f"{space}/{MARKERS}" for space in spaces)]
        if self._cleans and spaces:
            todo.append(RESERVED)
        # Engines that start at the same time begin at different folders.
        chance.shuffle(todo)
        while todo:
            folder = todo.pop()
            # Objects lie in <namespace>/<group>/<2 hex>.
            depth = folder.count("/")
            if depth == 2 or (depth == 0 and self._cleans):
                yield folder
            if depth < 2 and folder != RESERVED:
                inner = [f"{folder}/{name}" for name in self._guard.inner.folders(folder)]
                chance.shuffle(inner)
                todo += inner

    def _look_into(self, folder: str, rules: Rules) -> Outcome:
        """Delete what is old enough in one folder."""
        wanted = None if folder == RESERVED else partial(_is_left, rules.tails is not None)
        inventory = self._scan(folders=(folder,), wanted=wanted)
        if inventory is None or not (len(inventory) or inventory.leftovers):
            return Outcome()
        if self._guard.inner.now() is None:
            return Outcome()
        return self._carry_out(inventory, rules)

    # ------------------------------------------------------------- a full storage

    def free_space(self) -> int:
        """Delete unneeded files on a storage that is full, for about two seconds.

        The next call continues there. An error of the storage ends it, and is not raised.

        Returns
        -------
        int
            Number of files that were deleted. 0 also where that was tried within the last minute.
        """
        self._is_full = False
        begin = time.monotonic()
        if not (self._walks and self._cleans) or begin < self._next_when_full or self._stops():
            return 0
        deleted, pause = 0, _FULL_SECONDS
        rules = Rules(tails=None, markers=None)
        try:
            left = self._left_when_full or self._all_folders()
            self._left_when_full = left
            while time.monotonic() < begin + _WORK_SECONDS and not self._stops():
                folder = next(left, None)
                if folder is None:
                    self._left_when_full = None
                    pause = _FULL_ROUND_SECONDS
                    break
                deleted += self._look_into(folder, rules).count
        except StorageError as error:
            self._left_when_full = None
            logger.debug("no space was freed: %s", error)
        self._next_when_full = time.monotonic() + pause
        if deleted:
            logger.info("%s is full: %d leftover files were deleted", self._guard.url, deleted)
        return deleted

    def _all_folders(self) -> Iterator[str]:
        """Yield all folders of the shelf."""
        names = self._guard.inner.folders()
        spaces = [name for name in names if parse_namespace_folder(name) is not None]
        yield from self._folders(spaces)

    # ------------------------------------------------------------- each piece of work

    def _scan(
        self,
        *,
        folders: Collection[str],
        names: Collection[str] = (),
        wanted: Callable[[str], bool] | None = None,
    ) -> Inventory | None:
        scan = Scan(
            self._guard.inner,
            folders=folders,
            names=names,
            wanted=wanted,
            parents=None,
            in_part=True,
        )
        return scan.run(self._stops, GilPace().rest)

    def _carry_out(self, inventory: Inventory, rules: Rules) -> Outcome:
        """Delete what rules say; raise errors of the storage that may pass."""
        end = time.monotonic() + _WORK_SECONDS
        outcome = carry_out(
            self._guard.inner,
            plan(inventory, rules),
            stop=lambda: self._stops() or time.monotonic() > end,
            pace=GilPace().rest,
        )
        for reason in (Rule.TAIL, Rule.MARKER):
            deleted = outcome.deleted.get(reason, Total())
            self._counters.add("leftovers_deleted", deleted.count)
        if outcome.error is not None and outcome.error.retryable:
            raise outcome.error
        return outcome

    def _warn_refused(self, outcome: Outcome, whose: str) -> None:
        logger.warning(
            "tails, markers and temporaries %s are not deleted, here and later, because the storage"
            " does not allow it: %s. Delete them by age, with a rule of the storage or a program of"
            " your own, or allow kvshelf to delete",
            whose,
            outcome.error,
        )


def _name(view: NamespaceView, left: Left) -> str:
    if isinstance(left, str):
        return f"{view.folder()}/{marker_name(left)}"
    return view.name(left)


def _is_left(tails: bool, name: str) -> bool:
    """Whether a name is that of a temporary, or of a tail or a marker if they are wanted."""
    if is_temporary(name):
        return True
    if not tails:
        return False
    parsed = parse_path(name)
    if parsed is None:
        return is_attempt(name.rpartition("/")[2])
    return parsed.tail_tokens is not None
