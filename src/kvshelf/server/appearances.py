"""Notices of objects that appear in folders which clients watch.

Owns which client watches which folders, and the thread that asks the storage for notices where it
has them (:mod:`kvshelf.backends.notices`). Objects that are published through this server are
reported at once, on any storage; those of others only where the storage gives notices.

Contracts
---------
* An object is reported after it is there. Some are reported twice, and of some a client learns only
  that something may have appeared.
* :meth:`Appearances.watch` blocks on the storage: a folder that it returns as fresh or as watched
  is watched by then. The other methods do not block. Any thread may call all of them.
* `notify` is called on any thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.notices import Notices
from kvshelf.background import try_to_start
from kvshelf.errors import StorageError, TransientStorageError

logger = logging.getLogger(__name__)

#: Called with a client, a folder, and the names that appeared there; no names: anything may have.
Notify: TypeAlias = Callable[[bytes, str, Sequence[str]], None]

#: Most folders of one client.
MAX_FOLDERS: Final = 8192
#: How often the thread looks whether it is still needed.
_POLL_SECONDS: Final = 0.5


class Appearances:
    """The folders that all clients watch.

    Parameters
    ----------
    backend : GuardedBackend
    notify : Callable
    """

    def __init__(self, backend: GuardedBackend, notify: Notify) -> None:
        self._backend = backend
        self._notify = notify
        #: Held while the storage's watches change or are read.
        self._watching = threading.Lock()
        self._notices: Notices | None = None
        self._unwatched: set[str] = set()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._folders: dict[bytes, frozenset[str]] = {}
        self._closed = False

    def watch(self, client: bytes, folders: Iterable[str]) -> tuple[list[str], list[str]]:
        """Watch these folders for a client, and none of its others any more.

        Parameters
        ----------
        client : bytes
        folders : iterable of str
            Names relative to the shelf's root.

        Returns
        -------
        fresh : list of str
            Those that this client did not watch before.
        unwatched : list of str
            Those in which only what is published through this server is noticed.

        Raises
        ------
        StorageError
            If the storage failed.
        """
        wanted = frozenset(folders)
        with self._lock:
            before = self._folders.get(client, frozenset())
            if wanted:
                self._folders[client] = wanted
            else:
                self._folders.pop(client, None)
        self._follow()
        with self._alone():
            unwatched = wanted if self._notices is None else wanted & self._unwatched
        return sorted(wanted - before), sorted(unwatched)

    def forget(self, client: bytes) -> None:
        """Watch nothing for a client that is gone."""
        with self._lock:
            self._folders.pop(client, None)

    def published(self, name: str) -> None:
        """Report an object that this server has published."""
        self._appeared({name})

    def close(self) -> None:
        """Watch nothing. Idempotent."""
        with self._lock:
            self._closed = True
            self._folders.clear()

    # ---------------------------------------------------------------------------- the storage's own

    def _follow(self) -> None:
        """Have the storage watch the folders that clients watch now."""
        with self._alone():
            with self._lock:
                wanted = frozenset[str]().union(*self._folders.values())
            try:
                if wanted and self._notices is None and self._backend.properties.notifications:
                    self._notices = self._backend.notices()
                if self._notices is None:
                    return
                with self._backend.tracked_probe(next(iter(wanted), "")):
                    fresh, self._unwatched = self._notices.watch(wanted)
            except (StorageError, OSError) as error:
                logger.debug("folders could not be watched: %s", error)
                self._stop()
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._listen, name="kvshelf-notices", daemon=True
                )
                if not try_to_start(self._thread):
                    self._stop()
                    return
        # Clients that watched them until now got no notice of what is in them already.
        self._may_have_appeared(fresh)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for other threads, but not for one that is stuck in the storage."""
        if not self._watching.acquire(timeout=self._backend.deadlines.probe):
            raise TransientStorageError(
                errno.ETIMEDOUT, "another watch of folders has not ended", self._backend.url
            )
        try:
            yield
        finally:
            self._watching.release()

    def _stop(self) -> None:
        notices, self._notices, self._thread = self._notices, None, None
        if notices is not None:
            notices.close()

    def _listen(self) -> None:
        while True:
            with self._watching:
                notices = self._notices
                with self._lock:
                    over = self._closed or not self._folders
                if notices is None or over:
                    if self._thread is threading.current_thread():
                        self._stop()
                    return
                descriptor = notices.fileno()
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(_POLL_SECONDS * 1e3):
                continue
            with self._watching:
                if self._notices is not notices:
                    return
                appeared = notices.appeared()
            if appeared is None:
                with self._lock:
                    everything = frozenset[str]().union(*self._folders.values())
                self._follow_again()
                self._may_have_appeared(everything)
                continue
            self._appeared({name for name in appeared if not name.endswith("/")})
            if any(name.endswith("/") for name in appeared):
                # A watched folder may have been made, or is gone.
                self._follow_again()

    def _follow_again(self) -> None:
        # Another thread may be about to do it.
        with contextlib.suppress(StorageError):
            self._follow()

    # ------------------------------------------------------------------------------------- clients

    def _appeared(self, names: Iterable[str]) -> None:
        by_folder: dict[str, list[str]] = {}
        for name in names:
            by_folder.setdefault(name.rpartition("/")[0], []).append(name)
        self._notify_watchers(by_folder)

    def _may_have_appeared(self, folders: Iterable[str]) -> None:
        self._notify_watchers({folder: [] for folder in folders})

    def _notify_watchers(self, appeared: dict[str, list[str]]) -> None:
        if not appeared or not self._folders:
            return
        with self._lock:
            watchers = [
                (client, folder, names)
                for client, watched in self._folders.items()
                for folder, names in appeared.items()
                if folder in watched
            ]
        for client, folder, names in watchers:
            with contextlib.suppress(Exception):
                self._notify(client, folder, names)
