"""Trials: repeats of failed calls, by which an open circuit breaker of reads is closed.

Owns which call of a storage failed last, which object was read last, and the thread that repeats
these calls. One success closes the breaker.

Contracts
---------
* A trial makes its calls through the guard, on a daemon thread of its own, `kvshelf-trial`.
* There is one trial at a time. One that is stuck is replaced in the next round, by one that does
  not repeat the call that is stuck: it may hang for ever although the storage works again. At most
  8 are stuck.
* :meth:`Trials.check` is called on the guard's thread and calls no storage. Any thread may set the
  attributes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Final

from kvshelf.backends.base import Backend, Deadlines, probe
from kvshelf.backends.breaker import Breaker, BreakerState
from kvshelf.background import try_to_start
from kvshelf.errors import NotRegularError, ObjectMissingError

logger = logging.getLogger(__name__)

#: Kinds of calls that fail with the storage: those that only look.
PROBE, READ, LIST = "probe", "read", "list"
#: Most bytes that one trial reads.
TRIAL_BYTES: Final = 16 << 20
_PIECE: Final = 1 << 20
_MOST: Final = 8


class Trials:
    """The trials of one storage.

    Parameters
    ----------
    guarded : Backend
        Through which calls are repeated.
    breaker : Breaker
        Of its reads.
    deadlines : Deadlines
        A trial without a result has failed after the time for two reads.

    Attributes
    ----------
    failed : (str, str)
        Kind and name of the call that failed last; a listing of the root at first.
    worked : str or None
        The object that was read last.
    """

    def __init__(self, guarded: Backend, breaker: Breaker, deadlines: Deadlines) -> None:
        self._guarded = guarded
        self._breaker = breaker
        self._deadlines = deadlines
        self.failed = LIST, ""
        self.worked: str | None = None
        self._running: set[int] = set()
        self._until = 0.0

    def __contains__(self, thread: int) -> bool:
        """Whether a thread, by its identity, is a trial."""
        return thread in self._running

    def check(self, now: float) -> None:
        """Start a trial, or end one without a result, when it is time."""
        if self._breaker.try_half_open():
            self._until = now + 2 * self._deadlines.to_read(TRIAL_BYTES)
            self._start()
        elif self._breaker.state is BreakerState.HALF_OPEN and now > self._until:
            # A trial may end, or get stuck, outside of any call that could be late.
            self._breaker.trip("no trial succeeded")

    def _start(self) -> None:
        """Start the trial of one round."""
        # Something else as well: the call that failed may be the only one that does. Where that is
        # a read, a listing does not show that bytes can be read.
        is_read = self.failed[0] == READ and self.worked is not None
        fallback = (READ, self.worked or "") if is_read else (LIST, "")
        calls = [fallback] if self._running else list(dict.fromkeys([self.failed, fallback]))
        thread = threading.Thread(
            target=self._run, args=(calls,), name="kvshelf-trial", daemon=True
        )
        if len(self._running) >= _MOST:
            self._breaker.trip("no trial succeeded")
        elif not try_to_start(thread):
            self._breaker.trip("no thread could be started for a trial")

    def _run(self, calls: Iterable[tuple[str, str]]) -> None:
        thread = threading.get_ident()
        self._running.add(thread)
        reason = ""
        try:
            for kind, name in calls:
                try:
                    self._call(kind, name)
                except (ObjectMissingError, NotRegularError):
                    pass
                except BaseException as error:  # noqa: BLE001 - a panic of a Rust library fails too
                    reason = str(error)
                    continue
                self._breaker.close()
                return
            self._breaker.trip(reason, trial=True)
        finally:
            self._running.discard(thread)

    def _call(self, kind: str, name: str) -> None:
        if kind == PROBE:
            probe(self._guarded, name)
        elif kind == LIST:
            self._guarded.folders(name)
        else:
            piece = memoryview(bytearray(_PIECE))
            with self._guarded.open(name) as reader:
                for offset in range(0, min(reader.size, TRIAL_BYTES), _PIECE):
                    reader.read_into(piece[: reader.size - offset], offset)
