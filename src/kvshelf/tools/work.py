"""The work of a command on many objects: its retries, its counts, and how an error ends it.

Contracts
---------
* An error with one item that may pass is retried after pauses. If it remains although other items
  succeed, it is the item's. If nothing has succeeded yet, or nothing since the error of another
  item, it ends the work.

All methods may be called on any thread; the items are worked on by
:func:`kvshelf.capacity.parallel.in_parallel`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

from kvshelf.capacity.parallel import in_parallel
from kvshelf.errors import (
    BadObjectError,
    NoSpaceStorageError,
    ObjectMissingError,
    ReadOnlyStorageError,
    StorageError,
)

#: Seconds between the attempts for one item.
PAUSES: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)

_R = TypeVar("_R")


class Work(Generic[_R]):
    """Work of a command on many objects, counted in a report that its threads share.

    Parameters
    ----------
    report : object
        Has a number for each count, among them ``bad``, ``gone`` and ``failed``.
    on_progress : Callable
        Called with the report after each change.
    on_problem : Callable
        Called with an object's name and a description of the problem.
    pauses : Sequence of float, optional
        Seconds between the attempts.

    Attributes
    ----------
    report : object
    stop : threading.Event
        Ends all pauses; nothing is retried afterwards.
    """

    def __init__(
        self,
        report: _R,
        on_progress: Callable[[_R], None],
        on_problem: Callable[[str, str], None],
        pauses: Sequence[float] | None = None,
    ) -> None:
        self.report = report
        self.stop = threading.Event()
        self._on_progress = on_progress
        self._on_problem = on_problem
        self._lock = threading.Lock()
        self._pauses = PAUSES if pauses is None else pauses
        self._successes = 0
        #: Successes when an item failed last.
        self._failed_at = 0

    def count(self, **more: int) -> None:
        """Add to counts of the report, by name."""
        with self._lock:
            for name, number in more.items():
                setattr(self.report, name, getattr(self.report, name) + number)
            self._on_progress(self.report)

    def problem(self, kind: str, name: str, text: str) -> None:
        """Report what is wrong with something, and count it as one more of a kind."""
        with self._lock:
            setattr(self.report, kind, getattr(self.report, kind) + 1)
            self._on_problem(name, text)
            self._on_progress(self.report)

    def run_over(self, items: Iterable[Any], work: Callable[[Any], object], threads: int) -> None:
        """Call `work` for each item, again after errors that may pass; count what goes wrong.

        Objects that are missing count as ``gone``. Any other failure counts as ``bad`` or
        ``failed``, and is reported with the item's attribute ``name``.

        Raises
        ------
        StorageError
            If the storage answers no more, or takes no objects.
        """

        def attempt(item: Any) -> None:
            try:
                error = self.attempt(lambda: work(item))
            except ObjectMissingError:
                self.count(gone=1)
            except BadObjectError as bad:
                self.problem("bad", item.name, f"{bad.kind}: {bad}")
            else:
                if error is not None:
                    self.problem("failed", item.name, str(error))

        for _ in in_parallel(attempt, items, threads, self.stop):
            pass

    def attempt(self, call: Callable[[], object]) -> StorageError | None:
        """Make a call, again after errors that may pass; return the error that remains.

        Returns None also where `stop` is set before the call has succeeded.

        Raises
        ------
        ObjectMissingError, BadObjectError, ReadOnlyStorageError, NoSpaceStorageError
            At once.
        StorageError
            If the storage seems to answer no more: no call has succeeded yet, or none since another
            one failed finally.
        """
        pauses = iter(self._pauses)
        while True:
            try:
                call()
            except (
                ObjectMissingError,
                BadObjectError,
                ReadOnlyStorageError,
                NoSpaceStorageError,
            ):
                raise
            except StorageError as error:
                pause = next(pauses, None) if error.retryable else None
                if pause is not None and not self.stop.wait(pause):
                    continue
                if self.stop.is_set():
                    return None
                # A lost update only causes more retries.
                before, self._failed_at = self._failed_at, self._successes
                if self._successes == before and error.retryable:
                    raise
                return error
            self._successes += 1
            return None
