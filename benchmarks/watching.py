"""watchdog in the place of kvshelf's own reader of inotify, for the comparison of the two.

Owns the watches of one reader. Each is a thread of watchdog's, so there are only so many; the other
folders, and those that do not exist, count as not watched. Folders that are gone, and notices that
the system dropped, are not told: watchdog does not say so.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from typing import Final

from watchdog.events import (
    DirCreatedEvent,
    DirMovedEvent,
    FileCreatedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers.api import ObservedWatch
from watchdog.observers.inotify import InotifyObserver

#: A link, and a rename from another folder, are creations; a rename in one folder is a move.
_EVENTS: Final[list[type[FileSystemEvent]]] = [
    FileCreatedEvent,
    DirCreatedEvent,
    FileMovedEvent,
    DirMovedEvent,
]


class WatchdogNotices(FileSystemEventHandler):
    """Says what appears in some folders of a local directory.

    See :class:`kvshelf.backends.notices.Notices`.

    Parameters
    ----------
    root : str
        Absolute path that the names of folders and files begin at.
    most : int
        Number of folders that are watched.
    """

    def __init__(self, root: str, most: int = 32) -> None:
        self._base = root.rstrip("/") + "/"
        self._most = most
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._watches: dict[str, ObservedWatch] = {}
        self._observer = InotifyObserver()
        self._observer.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when something has appeared."""
        return self._fd

    def watch(self, folders: Iterable[str]) -> tuple[set[str], set[str]]:
        """Watch these folders, and no others any more."""
        wanted = set(folders)
        for folder in self._watches.keys() - wanted:
            self._observer.unschedule(self._watches.pop(folder))
        fresh: set[str] = set()
        for folder in sorted(wanted - self._watches.keys()):
            if len(self._watches) == self._most:
                break
            with contextlib.suppress(OSError):
                path = self._base + folder
                self._watches[folder] = self._observer.schedule(self, path, event_filter=_EVENTS)
                fresh.add(folder)
        return fresh, wanted - self._watches.keys()

    def dispatch(self, event: FileSystemEvent) -> None:
        """Note what has appeared, on a thread of watchdog's."""
        name = os.fsdecode(event.dest_path or event.src_path)[len(self._base) :]
        if name.rpartition("/")[2].startswith("."):
            return
        with self._lock:
            self._names.add(f"{name}/" if event.is_directory else name)
            os.eventfd_write(self._fd, 1)

    def appeared(self) -> set[str]:
        """Return what has appeared since the last call."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._fd)
            names, self._names = self._names, set()
        return names

    def close(self) -> None:
        """Watch nothing any more. Idempotent."""
        if self._observer.is_alive():
            self._observer.stop()
            self._observer.join()
            os.close(self._fd)
