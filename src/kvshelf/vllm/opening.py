"""Opens the shelf of an engine without letting storage hold up the engine's start.

Owns the thread that opens a shelf and, while the storage does not answer, tries again.

Contracts
---------
* A configuration that cannot work stops the start; a storage that does not answer does
  not: the engine then starts without a shelf and gets it when the storage is back.
* :meth:`OpeningShelf.get` never blocks.
* A shelf that opens after :meth:`OpeningShelf.close` is closed at once, and nobody gets it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvshelf.errors import StorageError
from kvshelf.shelf import Shelf
from kvshelf.urls import shown_url

logger = logging.getLogger(__name__)

_START_SECONDS = 5.0
_RETRY_SECONDS = 10.0


class OpeningShelf:
    """A shelf that is open, or will be when its storage answers.

    Parameters
    ----------
    url : str
        For log lines, which show no secrets of it.
    make : Callable[[], Shelf]
        Opens the shelf; called on a thread of its own.
    start_seconds : float
        How long the constructor waits.
    retry_seconds : float
        Time between two attempts.

    Raises
    ------
    KVShelfError
        What `make` raised, where waiting would not help.
    """

    def __init__(
        self,
        url: str,
        make: Callable[[], Shelf],
        *,
        start_seconds: float = _START_SECONDS,
        retry_seconds: float = _RETRY_SECONDS,
    ) -> None:
        url = self._url = shown_url(url)
        self._make = make
        self._retry_seconds = retry_seconds
        self._shelf: Shelf | None = None
        self._error: Exception | None = None
        self._tried = threading.Event()
        self._opened = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        # A daemon: a mount that never answers must not keep the process alive.
        threading.Thread(target=self._run, name="kvshelf-open", daemon=True).start()
        if not self._tried.wait(start_seconds):
            logger.warning(
                "%s has not answered for %g s; the engine starts without it, and uses it as soon"
                " as it answers",
                url,
                start_seconds,
            )
            return
        error = self._first_error()
        if error is not None:
            if not _passes(error):
                raise error
            logger.warning(
                "%s cannot be opened now (%s); the engine starts without it and tries again"
                " every %g s",
                url,
                error,
                retry_seconds,
            )

    def _first_error(self) -> Exception | None:
        return self._error

    def get(self) -> Shelf | None:
        """Return the shelf, None while it is not open."""
        return self._shelf

    def wait(self, seconds: float) -> bool:
        """Wait for the shelf to be open; return whether it is."""
        return self._opened.wait(seconds)

    def close(self) -> None:
        """Close the shelf and try no more. Idempotent."""
        with self._lock:
            self._closed.set()
            shelf = self._shelf
        if shelf is not None:
            shelf.close()

    def _run(self) -> None:
        first = True
        while not self._closed.is_set():
            try:
                shelf = self._make()
            except Exception as error:  # noqa: BLE001 - handed to the constructor, or logged
                self._error = error
                late = not first or self._tried.is_set()
                self._tried.set()
                first = False
                if not _passes(error):
                    if late:
                        logger.error("%s cannot be used: %s", self._url, error)
                    return
                self._closed.wait(self._retry_seconds)
            else:
                with self._lock:
                    closed = self._closed.is_set()
                    if not closed:
                        self._shelf = shelf
                if closed:
                    shelf.close()
                    return
                self._opened.set()
                if not first or self._tried.is_set():
                    logger.info("%s is open", self._url)
                self._tried.set()
                return


def _passes(error: Exception) -> bool:
    """Whether the trouble may pass by itself."""
    return isinstance(error, StorageError) and error.retryable
