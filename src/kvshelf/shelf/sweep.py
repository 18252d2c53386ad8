"""Deletes old tails, and the markers of old hand-overs.

Owns the thread that does it (``kvshelf-sweep``), and the account of what this process has written.
A hand-over leaves the tail of its prompt, which few other requests can use, and perhaps a marker.
Tails may also be stored as a cache. All are deleted at a certain age:

* what this process wrote, when it has seen so much time pass;
* what others left, by a walk through the folder of the namespace: one of the folders with objects
  at a time, so that a walk through 256 of them takes about as long as the age. Engines walk
  independently; each begins elsewhere.

Contracts
---------
* Deletes only objects whose names are those of tails, and empty ones whose names are those of
  markers. A tail or a marker that is gone costs time only.
* The age of what others left is the time from its last modification, or of a tail its last use, to
  now by the storage's own clock; that of this machine does not matter. A storage that does not tell
  its time is not walked through. What this process wrote also stays as long as others use it. Uses
  are recorded where the storage has access times, for each tail a few times in an age.
* Deletes nothing more where the storage forbids it; one log line says so. Other trouble of the
  storage ends a piece of work, which is done later.
* No thread is started before the first tail or hand-over (:meth:`Sweep.begin`, :meth:`Sweep.used`).
  All methods may be called
  from any thread, and none waits for the storage.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from kvshelf.backends.base import MOST_APART, NEVER_OLD, time_for_ages
from kvshelf.backends.trials import try_to_start
from kvshelf.errors import NotRegularError, StorageError
from kvshelf.format.names import parse_path
from kvshelf.metrics import Counters
from kvshelf.shelf.markers import MARKERS, is_attempt, marker_name
from kvshelf.shelf.pacing import GilPace
from kvshelf.shelf.view import NamespaceView, ObjectRef, ShelfView

logger = logging.getLogger(__name__)

#: Folders with objects of one salt group: a walk through them takes about :attr:`Sweep.keep`.
_FOLDERS: Final = 256
#: Least seconds from one folder of a walk to the next.
_LEAST_PAUSE: Final = 1.0
#: Seconds after trouble of the storage.
_TROUBLE_SECONDS: Final = 30.0
#: Most of its own leftovers, and most uses, that a process remembers; a walk finds the others.
_MOST_OWN: Final = 65536
#: Most rows of one folder that are looked at: a listing may have no end.
_MOST_ROWS: Final = 1 << 20
#: Uses of a tail that are recorded in an age.
_USES: Final = 4

#: A tail's object, or the attempt of a marker.
Leftover = ObjectRef | str


class Sweep:
    """The sweep of one process.

    Parameters
    ----------
    keep : float
        Age in seconds at which tails and markers are deleted; above 0.
    counters : Counters
        Gets ``leftovers_deleted``.
    walks : bool
        Also delete what others left.
    on_thread_start : Callable, optional
        Called first on the thread, to set its processors.

    Attributes
    ----------
    keep : float
    """

    def __init__(
        self,
        keep: float,
        counters: Counters,
        *,
        walks: bool = True,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self.keep = keep
        self._counters = counters
        self._walks = walks
        self._on_thread_start = on_thread_start
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        #: When what this process wrote is old enough, the oldest first.
        self._own: OrderedDict[tuple[NamespaceView, Leftover], float] = OrderedDict()
        #: Tails whose use is to be recorded, and when that was last asked for, the oldest first.
        self._uses: deque[tuple[NamespaceView, ObjectRef]] = deque()
        self._used: OrderedDict[tuple[NamespaceView, ObjectRef], float] = OrderedDict()
        self._view: NamespaceView | None = None
        #: Folders of the walk that are left; taken from the end.
        self._left: list[str] = []
        self._next_folder = 0.0
        self._next_walk = 0.0

    # ------------------------------------------------------------- any thread

    def begin(self, view: ShelfView) -> None:
        """Sweep a namespace from now on: there are tails in it, or markers."""
        if self._view is not view.on_storage:
            with self._lock:
                self._view = view.on_storage
                self._left.clear()
                # Engines that start together do not walk together.
                self._next_folder = time.monotonic() + random.SystemRandom().uniform(0, self._pause)
                self._next_walk = 0.0
            # The thread may run already, for uses of tails.
            self._wake.set()
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._closed:
                return
            thread = threading.Thread(target=self._run, name="kvshelf-sweep", daemon=True)
            # Where the system allows no thread now, the next hand-over tries again.
            if try_to_start(thread):
                self._thread = thread

    def wrote(self, view: ShelfView, leftover: Leftover) -> None:
        """Note what this process wrote, or found in its place, so that it goes at its age."""
        key = (view.on_storage, leftover)
        with self._lock:
            first = not self._own
            if len(self._own) < _MOST_OWN or key in self._own:
                self._own[key] = time.monotonic() + self.keep
                self._own.move_to_end(key)
        if first:
            # The thread knows nothing yet that will be due.
            self._wake.set()

    def used(self, view: ShelfView, tail: ObjectRef) -> None:
        """Note that a tail was loaded: its age counts from now on."""
        key, now = (view.on_storage, tail), time.monotonic()
        with self._lock:
            if key in self._own:
                self._own[key] = now + self.keep
                self._own.move_to_end(key)
            if now < self._used.get(key, -math.inf) + self.keep / _USES:
                return
            self._used[key] = now
            self._used.move_to_end(key)
            if len(self._used) > _MOST_OWN:
                self._used.popitem(last=False)
            if len(self._uses) < _MOST_OWN:
                self._uses.append(key)
        self._wake.set()
        if self._thread is None:
            self._start()

    def close(self) -> None:
        """End the thread, unless it waits for the storage. Idempotent."""
        self._closed = True
        self._wake.set()

    # ------------------------------------------------------------- its thread

    @property
    def _pause(self) -> float:
        return max(_LEAST_PAUSE, self.keep / _FOLDERS)

    def _run(self) -> None:
        if self._on_thread_start is not None:
            self._on_thread_start()
        while not self._closed:
            self._wake.clear()
            pause = self.step()
            if not self._closed:
                self._wake.wait(pause)

    def step(self) -> float:
        """Do what is to be done now; return the seconds until there is more, at the earliest."""
        try:
            self._record_uses()
            self._delete_own()
            self._walk()
        except StorageError as error:
            # A listing that is forbidden is not tried again.
            self._walks = self._walks and error.retryable
            logger.debug("tails and markers were not deleted: %s", error)
            return _TROUBLE_SECONDS
        except Exception as error:
            logger.error("tails and markers are not deleted any more", exc_info=error)
            self._closed = True
        with self._lock:
            due = [next(iter(self._own.values()))] if self._own else []
            if self._walks and self._view is not None:
                due.append(self._next_folder)
        return max(0.0, min(due, default=time.monotonic() + self.keep) - time.monotonic())

    def _record_uses(self) -> None:
        while self._uses and not self._closed:
            view, tail = self._uses.popleft()
            with contextlib.suppress(StorageError):
                view.backend.touch(view.name(tail))

    def _is_used(self, view: NamespaceView, name: str) -> bool:
        """Whether anybody has used a tail within its age."""
        found = view.backend.info(name)
        if found is None or found.atime is None or found.atime <= found.mtime:
            return False
        now = time_for_ages(view.backend.now(), view.backend.url)
        if now is None or now == NEVER_OLD:
            return True
        # What claims to come from the future was not used.
        return -MOST_APART - self.keep < now - found.atime < self.keep

    def _delete_own(self) -> None:
        """Delete what this process wrote that is old enough."""
        while not self._closed:
            with self._lock:
                if not self._own:
                    return
                (view, leftover), due = next(iter(self._own.items()))
                if due > time.monotonic():
                    return
            if isinstance(leftover, str):
                name = f"{view.folder()}/{marker_name(leftover)}"
            else:
                name = view.name(leftover)
                if self._is_used(view, name):
                    self.wrote(view, leftover)
                    continue
            if not self._delete(view, name, "of this engine"):
                self._closed = True
                return
            with self._lock:
                if self._own.get((view, leftover)) == due:
                    del self._own[view, leftover]

    def _walk(self) -> None:
        """Look into one folder, if it is time."""
        now = time.monotonic()
        with self._lock:
            view = self._view
            if view is None or not self._walks or now < self._next_folder:
                return
            self._next_folder = now + self._pause * random.SystemRandom().uniform(0.5, 1.5)
            begins = not self._left
            if begins:
                if now < self._next_walk:
                    self._next_folder = self._next_walk
                    return
                self._next_walk = now + self.keep
        if begins:
            self._begin_walk(view)
        with self._lock:
            folder = self._left.pop() if self._left and self._view is view else None
        if folder is not None:
            self._look_into(view, folder)

    def _begin_walk(self, view: NamespaceView) -> None:
        folder = view.folder()
        inner = [f"{folder}/{group}" for group in view.backend.folders(folder)]
        folders = [f"{group}/{name}" for group in inner for name in view.backend.folders(group)]
        folders.append(f"{folder}/{MARKERS}")
        random.SystemRandom().shuffle(folders)
        with self._lock:
            if self._view is view:
                self._left = folders

    def _look_into(self, view: NamespaceView, folder: str) -> None:
        """Delete what is old enough in one folder."""
        found: list[tuple[str, float]] = []
        pace = GilPace()
        for row in islice(view.backend.list(folder), _MOST_ROWS):
            pace.rest()
            if _is_leftover(row.name, row.size):
                found.append((row.name, max(row.mtime, row.atime or 0.0)))
        now = time_for_ages(view.backend.now(), view.backend.url) if found else None
        for name, used in found:
            # A filesystem that reports no times says 0.
            if now is None or not 0 < used <= now - self.keep or self._closed:
                continue
            if not self._delete(view, name, "that other engines left"):
                self._walks = False
                return

    def _delete(self, view: NamespaceView, name: str, whose: str) -> bool:
        """Delete one object; return whether deleting is allowed."""
        try:
            deleted = view.backend.delete(name)
        except NotRegularError:
            return True
        except StorageError as error:
            if error.retryable:
                raise
            logger.warning(
                "tails and markers %s are not deleted, here and later, because the storage does"
                " not allow it: %s. Delete them by age, with a rule of the storage or a program of"
                " your own, or allow kvshelf to delete",
                whose,
                error,
            )
            return False
        if deleted:
            self._counters.add("leftovers_deleted")
        return True


def _is_leftover(name: str, size: int) -> bool:
    """Whether an object in a listing is a tail or a marker."""
    parsed = parse_path(name)
    if parsed is not None:
        return parsed.tail_tokens is not None
    return not size and is_attempt(name.rpartition("/")[2])
