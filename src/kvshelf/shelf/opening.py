"""Opens things on a storage without letting the storage hold up the caller.

Owns the thread that opens a shelf, a storage or a tier and, while the storage does not answer,
tries again (:class:`Opening`), and a storage that may be used before it is open
(:class:`LateBackend`).

Contracts
---------
* A configuration that cannot work raises in :meth:`Opening.first`, or is logged when that has
  returned already. A storage that does not answer is only logged, and used as soon as it answers.
* :meth:`Opening.get` never blocks. The maker runs on a daemon thread, so that a storage which
  never answers does not keep the process alive.
* What opens after :meth:`Opening.close` is closed at once, and never returned.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from kvshelf.backends import Backend, Deadlines, Properties
from kvshelf.backends.base import StatResults
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.errors import StorageError, UnavailableStorageError

logger = logging.getLogger(__name__)

#: How long the start of an engine waits for its shelf.
START_SECONDS: Final = 5.0
#: Longest wait for a shelf and its disk tier, together. Less than the start waits, so that the
#: objects in the tier can be loaded from the start even if the shelf does not answer.
TIERED_SECONDS: Final = 4.0
_RETRY_SECONDS = 10.0


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


def may_pass(error: Exception) -> bool:
    """Whether the cause of `error` may pass by itself, so that a later attempt can succeed."""
    return isinstance(error, StorageError) and error.retryable


class Opening(Generic[T]):
    """Something that is open, or will be when its storage answers.

    Parameters
    ----------
    name : str
        For log lines; without secrets.
    make : Callable[[], T]
        Opens it; called on a thread of its own.
    passes : Callable[[Exception], bool]
        Whether to try again after an exception of `make`.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], T],
        *,
        passes: Callable[[Exception], bool] = may_pass,
    ) -> None:
        self.name = name
        self._make = make
        self._passes = passes
        self._lock = threading.Lock()
        self._opened: T | None = None
        self._error: Exception | None = None
        self._awaited = True
        self._tried = threading.Event()
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="kvshelf-open", daemon=True).start()

    def first(self, seconds: float, meanwhile: str) -> T | None:
        """Wait for the first attempt; return what it opened, None when it is not open.

        Parameters
        ----------
        seconds : float
        meanwhile : str
            What happens while it is not open, for the log.

        Raises
        ------
        Exception
            What `make` raised, if another attempt is useless.
        """
        self._tried.wait(seconds)
        with self._lock:
            self._awaited = False
            opened, error = self._opened, self._error
        if opened is not None:
            return opened
        if error is None:
            logger.warning(
                "%s has not answered yet; it is used as soon as it does, until then %s",
                self.name,
                meanwhile,
            )
        elif self._passes(error):
            logger.warning(
                "%s cannot be opened now (%s); it is tried again every %g s, until then %s",
                self.name,
                error,
                _RETRY_SECONDS,
                meanwhile,
            )
        else:
            raise error
        return None

    def get(self) -> T | None:
        """Return what was opened, None while it is not open."""
        return self._opened

    def close(self) -> None:
        """Close what was opened, and stop trying. Idempotent."""
        with self._lock:
            self._closing.set()
            opened = self._opened
        if opened is not None:
            opened.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                opened = self._make()
            except Exception as error:  # noqa: BLE001 - raised by `first`, or logged
                with self._lock:
                    self._error = error
                    late = not self._awaited
                    self._tried.set()
                if not self._passes(error):
                    if late:
                        logger.error("%s cannot be used: %s", self.name, error)
                    return
                self._closing.wait(_RETRY_SECONDS)
            else:
                with self._lock:
                    late, closed = not self._awaited, self._closing.is_set()
                    if not closed:
                        self._opened = opened
                    self._tried.set()
                if closed:
                    opened.close()
                    return
                if late:
                    logger.info("%s is open", self.name)
                return


class LateBackend(WrappedBackend):
    """A storage that may not be open yet.

    Until it is, all calls fail with UnavailableStorageError, and it counts as a storage of high
    latency.

    Parameters
    ----------
    opening : Opening[Backend]
        Closed together with the backend.
    """

    def __init__(self, opening: Opening[Backend]) -> None:
        self.url = opening.name
        self._opening = opening

    @property
    def inner(self) -> Backend:  # type: ignore[override]
        """The storage.

        Raises
        ------
        UnavailableStorageError
            If it is not open.
        """
        opened = self._opening.get()
        if opened is None:
            raise UnavailableStorageError(errno.EAGAIN, "it has not answered yet", self.url)
        return opened

    @property
    def properties(self) -> Properties:
        """The properties of the storage, or while it is not open those of a typical remote one."""
        opened = self._opening.get()
        if opened is not None:
            return opened.properties
        return Properties(
            filesystem="unknown",
            probe_cost=20e-3,
            concurrency=32,
            deadlines=Deadlines(probe=5.0, read=15.0, write=15.0),
        )

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe many names at once."""
        try:
            return self.inner.stat(names)
        except UnavailableStorageError as error:
            return [error] * len(names)

    @property
    def reads_whole(self) -> bool:
        """Whether the storage is open, and reads whole objects."""
        opened = self._opening.get()
        return opened is not None and opened.reads_whole

    def close(self) -> None:
        """Stop trying, close the storage."""
        self._opening.close()
