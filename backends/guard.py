"""Deadlines and circuit breakers around any backend.

Owns the clock of every call that is in the storage, the two circuit breakers of a storage and the
trials that close them. :class:`GuardedBackend` wraps a backend and is a backend itself; every
:class:`~kvshelf.shelf.shelf.Shelf` works through one.

A blocking call cannot be interrupted, so a thread that is stuck in the storage stays stuck. A
*deadline* is the moment after which everyone else stops waiting for the call. The guard's own
thread notices a late call, notifies the watchers (:class:`Watcher`), and counts it. The caller's
buffer belongs to the call until it returns, if it ever does.

There are two breakers (:mod:`kvshelf.backends.breaker`), because a storage that refuses writes can
still be read:

========  =====================================  ==========================================
breaker   failures counted                       while it is open
========  =====================================  ==========================================
reads     probes, reads and listings             every call fails at once
writes    writes, deletions and moves            these fail at once, other calls are made
                                                 (after a refused write: deletions
                                                 and touches too)
========  =====================================  ==========================================

A failure is an error that may pass by itself (retryable) or a missed deadline; a late call counts
as two. A missing or damaged object is not a failure. Besides the rule of every breaker,

* a breaker opens when a watcher reports too many stuck threads (``on_late_call``);
* the write breaker opens when the storage *takes no stores*: it refused one (no space, read-only),
  or several in a row with an error that does not pass by itself (a mount that cannot rename, a
  server that does not know a request). It then stays open for at least :data:`REFUSED_SECONDS`, and
  nothing is gathered for stores. Meanwhile deletions are made all the same, because they
  free space on a full storage, and uses are recorded, because they decide what is deleted. Neither
  a deletion that is refused nor one that succeeds says anything about writes: many users may write
  and not delete.

That this process has no more files or memory (ProcessLimitError) says nothing about the storage,
and counts neither as a failure nor as a success. Nor does a late call count while the process is
out of files: some clients then try to connect for a long time.

In the half-open state the read breaker is closed by a *trial* (:mod:`kvshelf.backends.trials`): a
thread repeats the call that failed last. If that fails too, it reads the object that was read last,
or lists the root. The half-open write breaker allows the next writes, which delay no
request; the first success closes it.

Contracts
---------
* The guard's thread never calls the storage.
* One log line when a breaker opens, and one when it closes.
* All threads are daemons.
* In a forked child every call of a guard that was made before fails at once.
* Watchers are called on whatever thread notices, without a lock of the guard.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar, cast

from kvshelf.backends.base import (
    Backend,
    BytesLike,
    Checked,
    Deadlines,
    DeleteResults,
    ObjectInfo,
    Properties,
    Reader,
    Space,
    StatResults,
    Touched,
    Whole,
    WriteMode,
    WriteResult,
)
from kvshelf.backends.breaker import DEFAULT_BACKOFF, Backoff, Breaker, BreakerState
from kvshelf.backends.oserrors import is_out_of_files
from kvshelf.backends.trials import LIST, PROBE, READ, Trials
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.background import try_to_start
from kvshelf.errors import (
    BoundReachedError,
    NoSpaceStorageError,
    NotRegularError,
    ObjectMissingError,
    PermanentStorageError,
    ProcessLimitError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
    UnavailableStorageError,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_Answers = TypeVar("_Answers", StatResults, DeleteResults)

LATE_WEIGHT: Final = 2
#: Seconds for which the write breaker stays open at least when a write was refused.
REFUSED_SECONDS: Final = 30.0
_LONGEST_TICK: Final = 0.25
#: A call that returns this many times its allowed time after its deadline shows that a stuck
#: storage answers again.
_STUCK_FACTOR: Final = 3

#: Rows of a listing that have a deadline together: one for each would take as long as the row.
_ROWS: Final = 16
#: Names for which a probe has the deadline once: a distant mount answers 4,000 a second.
_NAMES: Final = 256
#: One entry for each fork between the first import and this process.
_forks: Final[list[None]] = []

#: Kinds of calls.
_WRITE, _DELETE, _TOUCH = "write", "deletion", "touch"


class Watcher(Protocol):
    """Receives what the guard notices. Its methods must not block."""

    def on_late_call(self, thread: int) -> bool:
        """Handle a thread whose call missed its deadline; return whether too many are stuck."""

    def on_reads_open(self) -> None:
        """Handle that the read breaker opened: every call now fails at once."""


class StoreBound(Protocol):
    """What bounds how much is stored. No other method than :meth:`begin` may block."""

    def allows(self, nbytes: int) -> bool:
        """Whether `nbytes` may be written now or soon."""

    def begin(self, nbytes: int) -> bool:
        """Reserve space for a write, and wait some seconds for it; False if there is none."""

    def end(self, nbytes: int, written: bool) -> None:
        """Note that a write which has begun is over, and whether it wrote anything."""


@dataclass(eq=False, slots=True)
class GuardedCall:
    """One call in the storage, as a context: it has a deadline, and its outcome is counted.

    Made by :meth:`GuardedBackend.call`. A context that is entered again has the same deadline.

    Attributes
    ----------
    counts : bool
        Whether the outcome says something about the storage. A late call counts in any case.
    error : StorageError or None
        An error that the call returned and did not raise.
    late : bool
        Whether the deadline has passed before the call returned.
    """

    guard: GuardedBackend
    kind: str
    name: str
    seconds: float
    deadline: float
    counts: bool = True
    error: StorageError | None = None
    late: bool = False

    def __enter__(self) -> GuardedCall:
        self.guard._enter(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.guard._leave(self, self.error or error)


class GuardedBackend(WrappedBackend):
    """A backend whose calls have deadlines and circuit breakers.

    Parameters
    ----------
    inner : Backend
    deadlines : Deadlines, optional
        Default: the deadlines in the backend's properties.
    backoff : Backoff
        How long a breaker stays open.

    Attributes
    ----------
    deadlines : Deadlines
    reads, writes : Breaker
    bound : StoreBound or None
        Bounds what is written; None: nothing does.
    written : set of str
        The first parts of the names that were written, until a caller clears it.
    on_full : Callable
        Called with the error of a write that found the storage full. It must not block.
    """

    #: Effect of an open breaker, for the log.
    without_reads = (
        "no lookups, loads or stores until the storage answers again; it is retried in the"
        " background"
    )
    without_writes = "no stores until a write succeeds again; loads continue"

    def __init__(
        self,
        inner: Backend,
        deadlines: Deadlines | None = None,
        backoff: Backoff = DEFAULT_BACKOFF,
    ) -> None:
        super().__init__(inner)
        self.deadlines = inner.properties.deadlines if deadlines is None else deadlines
        self.reads = Breaker((PROBE, READ, LIST), backoff, self._changed)
        self.writes = Breaker((_WRITE, _DELETE, _TOUCH), backoff, self._changed)
        self._breakers = {PROBE: self.reads, READ: self.reads, LIST: self.reads}
        self._breakers |= {_WRITE: self.writes, _DELETE: self.writes, _TOUCH: self.writes}
        self.bound: StoreBound | None = None
        self.written: set[str] = set()
        self.on_full: Callable[[NoSpaceStorageError], None] = _do_nothing
        self._calls: dict[int, GuardedCall] = {}
        self._watchers: list[Watcher] = []
        self._count: Callable[[str], None] = _do_nothing
        #: The error because of which a breaker opened first.
        self._first_error = ""
        self._trials = Trials(self, self.reads, self.deadlines)
        #: Whether the write breaker opened because the storage refused a write, not for failures.
        self._refused = False
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._idle = True
        self._made_after = len(_forks)
        self._closing = threading.Event()
        shortest = min(self.deadlines.probe, self.deadlines.read, self.deadlines.write)
        self._tick = min(_LONGEST_TICK, max(shortest, 0.01) / 4, backoff.first / 4)

    # ------------------------------------------------------------------------ for its users

    @property
    def properties(self) -> Properties:
        """The properties of the wrapped backend, adjusted to the state of the breakers."""
        properties = self.inner.properties
        if not self.reads.is_closed:
            return replace(properties, available=False)
        if not self.writes.allows():
            return replace(properties, read_only=True)
        return properties

    @property
    def takes_no_stores(self) -> bool:
        """Whether the storage refuses stores, so that none is tried at present."""
        return self._refused and not self.writes.is_closed

    @property
    def late_calls(self) -> int:
        """Number of calls past their deadline that have not returned."""
        return sum(call.late for call in list(self._calls.values()))

    def allows(self, nbytes: int) -> bool:
        """Whether the bound on writes allows `nbytes` now or soon. Never blocks."""
        bound = self.bound
        return bound is None or bound.allows(nbytes)

    def count_into(self, count: Callable[[str], None]) -> None:
        """GuardedCall `count` with the name of a counter for each event."""
        self._count = count

    @property
    def watchers(self) -> Sequence[Watcher]:
        """The registered watchers."""
        return self._watchers

    def watch(self, watcher: Watcher) -> None:
        """Register `watcher`."""
        with self._lock:
            self._watchers = [*self._watchers, watcher]

    def unwatch(self, watcher: Watcher) -> None:
        """Remove `watcher`."""
        with self._lock:
            self._watchers = [entry for entry in self._watchers if entry is not watcher]

    def close(self) -> None:
        """Stop the guard's thread, close the wrapped backend."""
        self._closing.set()
        self._wake.set()
        super().close()

    # ------------------------------------------------------------------------ calls

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe many names at once; all answers are errors while the read breaker is open."""
        return self.probe_by(names, lambda: self.inner.stat(names))

    def probe_by(self, names: Sequence[str], ask: Callable[[], StatResults]) -> StatResults:
        """Have `ask` probe many names; all answers are errors while the read breaker is open."""
        seconds = self.deadlines.probe * max(1, -(-len(names) // _NAMES))
        return self._answers(PROBE, names, seconds, ask)

    def _answers(
        self, kind: str, names: Sequence[str], seconds: float, ask: Callable[[], _Answers]
    ) -> _Answers:
        """Make one call for many names, which fails with the first error among its answers."""
        try:
            with self.call(kind, names[0] if names else "", seconds) as call:
                answers = ask()
                # Faster than testing each answer: nearly all are sizes.
                if not _PLAIN_ANSWERS.issuperset(map(type, answers)):
                    errors = (answer for answer in answers if isinstance(answer, StorageError))
                    call.error = next(errors, None)
                return answers
        except UnavailableStorageError as error:
            return cast(_Answers, [error] * len(names))

    def info(self, name: str) -> ObjectInfo | None:
        with self.call(PROBE, name, self.deadlines.probe):
            return self.inner.info(name)

    def open(self, name: str) -> GuardedReader:
        """Open one object; one deadline covers all reads of it."""
        begin = time.monotonic()
        with self.call(READ, name, self.deadlines.read):
            reader = self.inner.open(name)
        return GuardedReader(self, reader, name, begin)

    @property
    def reads_whole(self) -> bool:
        return self.inner.reads_whole

    def read_whole(
        self,
        start: str,
        text: bytes,
        wholes: Sequence[Whole],
        buffers: Sequence[memoryview],
        seconds: float = math.inf,
    ) -> Checked | None:
        """Read and check objects, with the deadline of reading all their bytes.

        Each object that was read counts as a success. That the backend did not is no evidence.

        Raises
        ------
        TransientStorageError
            If the deadline has passed and not all were read.
        """
        allowed = self.deadlines.to_read(sum([buffer.nbytes for buffer in buffers]))
        with self.call(READ, start + wholes[0].end, allowed) as call:
            checked = self.inner.read_whole(start, text, wholes, buffers, min(seconds, allowed))
            objects_read = sum(checked.done) if checked is not None else 0
            call.counts = objects_read > 0
        if call.late and objects_read < len(wholes):
            raise self._too_late(call)
        if checked is not None and objects_read:
            self.reads.record_success(READ, objects_read - 1)
            self._trials.worked = start + wholes[list(checked.done).index(True)].end
        return checked

    def _too_late(self, call: GuardedCall) -> TransientStorageError:
        return TransientStorageError(
            errno.ETIMEDOUT,
            f"reading took longer than {call.seconds:.3g} s",
            f"{self.url}/{call.name}",
        )

    def read_by(self, name: str, nbytes: int, read: Callable[[], _T | None]) -> _T | None:
        """Have `read` get one object, with the deadline of reading it.

        None is no evidence that the storage works.

        Raises
        ------
        UnavailableStorageError
            If the read breaker is open.
        """
        with self.call(READ, name, self.deadlines.to_read(nbytes)) as call:
            result = read()
            call.counts = result is not None
        if result is not None:
            self._trials.worked = name
        return result

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish one object, unless the bound on writes forbids it; wait some seconds until not.

        An empty one is written even while the write breaker is open, since a full disk may take it,
        and is neither bound nor counted, unless it is late.

        Raises
        ------
        BoundReachedError
            If it does. Nothing was written, and this says nothing about the storage.
        """
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if not size:
            seconds = self.deadlines.write
            with self.call(PROBE, name, seconds, counts=False):
                return self.inner.write(name, buffers, mode)
        bound = self.bound
        if bound is not None and not bound.begin(size):
            raise BoundReachedError(
                errno.ENOSPC, "not written: a bound of the shelf is reached", f"{self.url}/{name}"
            )
        result: WriteResult | None = None
        try:
            with self.call(_WRITE, name, self.deadlines.to_write(size)):
                result = self.inner.write(name, buffers, mode)
        except NoSpaceStorageError as error:
            self.on_full(error)
            raise
        finally:
            if bound is not None:
                bound.end(size, result not in (None, WriteResult.EXISTED))
        self.written.add(name.partition("/")[0])
        return result

    def list(
        self,
        prefix: str = "",
        *,
        hidden: bool = False,
        start: str | None = None,
        end: str | None = None,
        flat: bool = False,
    ) -> Iterator[ObjectInfo]:
        """Stream the objects below a folder; every few of them have a deadline of their own."""
        with self.call(LIST, prefix, self.deadlines.read):
            rows = self.inner.list(prefix, hidden=hidden, start=start, end=end, flat=flat)
        while True:
            with self.call(LIST, prefix, self.deadlines.read):
                some = [*itertools.islice(rows, _ROWS)]
            if not some:
                return
            yield from some

    def folders(self, prefix: str = "") -> Sequence[str]:
        with self.call(LIST, prefix, self.deadlines.read):
            return self.inner.folders(prefix)

    def delete(self, names: Sequence[str]) -> DeleteResults:
        """Remove objects, with one deadline for each request that this takes."""
        requests = 1
        if len(names) > 1:
            requests = -(-len(names) // self.inner.properties.deletes_at_once)
        seconds = self.deadlines.write * requests
        return self._answers(_DELETE, names, seconds, lambda: self.inner.delete(names))

    def set_aside(self, name: str) -> bool:
        with self.call(_WRITE, name, self.deadlines.write):
            return self.inner.set_aside(name)

    @property
    def touches(self) -> bool:
        """Whether uses are recorded at present: also while the storage refuses writes."""
        return self.reads.is_closed and (self._refused or self.writes.is_closed)

    def touch(self, name: str, before: float = math.inf) -> Touched:
        """Record a use of an object unless a breaker is open. Best effort."""
        if self.touches:
            with self.call(_TOUCH, name, self.deadlines.write):
                return self.inner.touch(name, before)
        return Touched.TOUCHED

    def space(self) -> Space | None:
        with self.call(PROBE, "", self.deadlines.probe):
            return self.inner.space()

    # ------------------------------------------------------------------------ bookkeeping

    def call(self, kind: str, name: str, seconds: float, *, counts: bool = True) -> GuardedCall:
        """Return the context of one call that may take so many seconds from now on.

        Entering it raises UnavailableStorageError while a breaker is open.
        """
        return GuardedCall(self, kind, name, seconds, time.monotonic() + seconds, counts)

    def _enter(self, call: GuardedCall) -> None:
        """Register that the calling thread enters the storage."""
        if self._made_after != len(_forks):
            # Neither the guard's thread nor those of libraries live in the child.
            why = "opened before a fork of the process; open it again in the child"
            raise self._unavailable(call.name, why)
        thread = threading.get_ident()
        if not self.reads.is_closed and thread not in self._trials:
            if self._idle:
                self._start_watching()
            raise self._unavailable(call.name)
        needs_no_space = call.kind is not _WRITE and self._refused
        if self._breakers[call.kind] is self.writes and not (
            needs_no_space or self.writes.allows()
        ):
            raise self._unavailable(call.name)
        self._calls[thread] = call
        if self._idle and not self._start_watching():
            del self._calls[thread]
            raise self._unavailable(call.name, "no thread could be started to supervise the call")

    def _unavailable(self, name: str, why: str = "circuit breaker open") -> UnavailableStorageError:
        error = UnavailableStorageError(errno.EAGAIN, f"not tried: {why}", f"{self.url}/{name}")
        error.reason = self._first_error
        return error

    def _leave(self, call: GuardedCall, error: BaseException | None = None) -> None:
        """Register that a call returned, and count its outcome."""
        thread, now = threading.get_ident(), time.monotonic()
        self._calls.pop(thread, None)
        kind, breaker = call.kind, self._breakers[call.kind]
        if call.late:
            # Its failure has been counted. A call that was stuck and returned is a good sign.
            if now > call.deadline + _STUCK_FACTOR * call.seconds:
                breaker.retry_soon()
        elif now > call.deadline:
            self._count_late(thread, call)
        elif not call.counts or isinstance(error, ProcessLimitError | BoundReachedError):
            pass
        elif isinstance(error, ReadOnlyStorageError | NoSpaceStorageError) and kind is _WRITE:
            self._refused = True
            self.writes.trip(str(error), REFUSED_SECONDS)
        elif isinstance(error, PermanentStorageError) and kind is _WRITE:
            self._refused = True
            self.writes.record_failure(kind, str(error), least=REFUSED_SECONDS)
        elif isinstance(error, StorageError) and error.retryable:
            self._count_failure(thread, call, str(error))
        elif error is None or isinstance(error, ObjectMissingError | NotRegularError):
            breaker.record_success(kind)
            if kind is _WRITE and breaker.state is BreakerState.HALF_OPEN:
                breaker.close()

    def _count_late(self, thread: int, call: GuardedCall) -> None:
        call.late = True
        self._count("late_calls")
        if not is_out_of_files():
            reason = f"a {call.kind} took longer than {call.seconds:.3g} s"
            self._count_failure(thread, call, reason, LATE_WEIGHT)

    def _count_failure(self, thread: int, call: GuardedCall, reason: str, weight: int = 1) -> None:
        breaker = self._breakers[call.kind]
        if thread in self._trials:
            # A trial repeats a call that failed: that it fails again is no further evidence. It
            # says itself when all of its calls have failed, unless one of them hangs.
            if call.late:
                breaker.trip(reason, trial=True)
            return
        if breaker is self.writes:
            self._refused = False
        else:
            self._trials.failed = call.kind, call.name
        breaker.record_failure(call.kind, reason, weight)

    def _changed(self, breaker: Breaker, reason: str) -> None:
        self._first_error = self._first_error or reason
        reads = breaker is self.reads
        name = f"{self.url}: {'circuit breaker' if reads else 'write circuit breaker'}"
        if reason and self._refused and not reads:
            line = "%s: takes no stores: %s. Tried again every minute; loads continue"
            logger.warning(line, self.url, reason)
        elif reason:
            effect = self.without_reads if reads else self.without_writes
            logger.warning("%s open (%s): %s", name, reason, effect)
        else:
            works = "the storage answers again" if reads else "the storage accepts writes again"
            logger.warning("%s closed: %s", name, works)
        self._count("breaker_opens" if reason else "breaker_closes")
        if not (reads and reason):
            return
        for watcher in self._watchers:
            watcher.on_reads_open()
        self._start_watching()

    # ------------------------------------------------------------------------ its thread

    def _start_watching(self) -> bool:
        """Wake the guard's thread; return False if there is none and none can be started."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                thread = threading.Thread(target=self._watch, name="kvshelf-guard", daemon=True)
                if not try_to_start(thread):
                    return False
                self._thread = thread
            self._idle = False
        self._wake.set()
        return True

    def _watch(self) -> None:
        expected = time.monotonic()
        while not self._closing.is_set():
            busy = bool(self._calls) or not self.reads.is_closed
            if not busy:
                self._wake.clear()
                self._idle = True
                # A call or the close may have come between the test and the assignment.
                busy = bool(self._calls) or not self.reads.is_closed or self._closing.is_set()
            if not busy:
                self._wake.wait()
                expected = time.monotonic()
                continue
            self._idle = False
            self._closing.wait(self._tick)
            now = time.monotonic()
            asleep = now - expected - self._tick
            expected = now
            if asleep > _LONGEST_TICK:
                # The process itself was stopped (SIGSTOP, suspend): the calls are not late.
                for call in list(self._calls.values()):
                    call.deadline += asleep
            try:
                self._check_calls(now)
            except Exception as error:
                # An exception in a watcher must not end this thread.
                logger.error("handling a late call failed", exc_info=error)

    def _check_calls(self, now: float) -> None:
        for thread, call in list(self._calls.items()):
            if call.late or now < call.deadline or self._calls.get(thread) is not call:
                continue
            self._count_late(thread, call)
            exhausted = [watcher.on_late_call(thread) for watcher in self._watchers]
            if any(exhausted):
                self._breakers[call.kind].trip(
                    f"too many threads are stuck, one of them in a {call.kind} for more than"
                    f" {call.seconds:.3g} s"
                )
        self._trials.check(now)


os.register_at_fork(after_in_child=lambda: _forks.append(None))


def _do_nothing(_: object) -> None:
    """Ignore what happens: the default of callbacks."""


_PLAIN_ANSWERS: Final = frozenset((int, bool, type(None)))


class GuardedReader(Reader):
    """A reader with one deadline for all reads of its object; it also times them.

    Attributes
    ----------
    seconds : float
        Seconds spent waiting for the storage: to open the object and to read it.
    """

    def __init__(self, guard: GuardedBackend, inner: Reader, name: str, begin: float) -> None:
        self.size = inner.size
        self.seconds = time.monotonic() - begin
        self._guard = guard
        self._inner = inner
        allowed = guard.deadlines.to_read(inner.size)
        self._call = GuardedCall(guard, READ, name, allowed, begin + allowed)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Read bytes at `offset`, unless the deadline has passed."""
        begin = time.monotonic()
        if begin > self._call.deadline:
            raise self._guard._too_late(self._call)
        with self._call:
            count = self._inner.read_into(buffer, offset)
        self.seconds += time.monotonic() - begin
        # Not when it was opened: that does not show that its bytes can be read.
        self._guard._trials.worked = self._call.name
        return count

    def __enter__(self) -> GuardedReader:
        return self

    def close(self) -> None:
        """Close the object. Idempotent."""
        # Closing a file may contact the server of a mount. It is done even while the breaker is
        # open, and its success is not counted: it does not show that bytes can be read.
        guard = self._guard
        call = guard.call(READ, self._call.name, guard.deadlines.read, counts=False)
        guard._calls[threading.get_ident()] = call
        if guard._idle:
            guard._start_watching()
        try:
            self._inner.close()
        finally:
            guard._leave(call)
