"""Notices: whoever waits for a file of a local directory is woken when it appears.

Owns this process' only observer of directories (watchdog), and which folders it watches: those in
which somebody waits for a file, without the folders below them.

Contracts
---------
* A notice may fail to come: the system drops events, and folders are moved away. So the waiting
  side also probes for its file, less often.
* The thread that makes or closes a notice may wait for the filesystem.
* :mod:`kvshelf.shelf.waits` imports this module for local directories only.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable

from watchdog.events import (
    FileCreatedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch

# watchdog's threads may log it as an error that they are told to end.
logging.getLogger("watchdog.observers.inotify").setLevel(logging.CRITICAL)

#: Guards the two below. The observer's threads never take it.
_lock = threading.Lock()
_observers: list[BaseObserver] = []
_watches: Counter[ObservedWatch] = Counter()


def _running_observer() -> BaseObserver:
    """Return the observer; start one for the first notice, and anew in a forked process."""
    if not (_observers and _observers[0].is_alive()):
        observer = Observer()
        observer.name = "kvshelf-notices"
        observer.start()
        _watches.clear()
        _observers[:] = [observer]
    return _observers[0]


class Notice(FileSystemEventHandler):
    """Wakes whoever waits for one file, if the file appears from now on. Its owner closes it.

    Parameters
    ----------
    path : str
        Absolute, without symbolic links, in a folder that exists.
    wake : Callable
        Called on the observer's thread when the file has appeared. It must not block.

    Attributes
    ----------
    came : bool
        The file has appeared since the notice was made.

    Raises
    ------
    OSError
        If the folder does not exist, or the system lets this user watch no more folders.
    RuntimeError
        If the system allows no more threads.
    """

    def __init__(self, path: str, wake: Callable[[], object]) -> None:
        self._path, self._wake, self.came = path, wake, False
        with _lock:
            self._observer = _running_observer()
            self._watch = self._observer.schedule(
                self, os.path.dirname(path), event_filter=[FileCreatedEvent, FileMovedEvent]
            )
            _watches[self._watch] += 1

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Wake the owner if the file was made, linked or renamed."""
        if self._path == (event.dest_path or event.src_path):
            self.came = True
            self._wake()

    def close(self) -> None:
        """Watch the folder no longer, unless another notice needs it."""
        with _lock:
            _watches[self._watch] -= 1
            if _watches[self._watch] > 0:
                self._observer.remove_handler_for_watch(self, self._watch)
            else:
                del _watches[self._watch]
                self._observer.unschedule(self._watch)
