"""Deadlines and circuit breaking around any backend.

Owns the clock of every call that is in the storage now, and the decision to give a storage
that fails a rest. :class:`GuardedBackend` wraps a backend and is one itself; every
:class:`~kvshelf.shelf.Shelf` works through one.

A call cannot be broken off: a thread that the storage keeps stays where it is. So a
*deadline* is the moment at which the others stop to reckon with it. The guard's own thread
notices it, tells those who wait (:class:`Watcher`), and counts it. The caller's buffer stays
with the call until it returns, if ever.

There are two breakers, since a storage that takes no writes may still be read:

========  =====================================  ==========================================
breaker   opened by                              while it is open
========  =====================================  ==========================================
reads     probes, reads and listings             every call fails at once
writes    writes, deletions and moves            these fail at once, the others go on
========  =====================================  ==========================================

*Closed*, calls go through. A breaker *opens* when, since the first failure within the last
10 s, at least four failures were counted and no more successes than failures, for probes,
reads and writes each on their own; a late call counts as two failures. It also opens when
more threads are kept than may be (``thread_late`` of a watcher says so), and that of writes
when the storage refuses one (no space, read-only). Failures are errors that may pass by
themselves and missed deadlines; a missing or damaged object is none.

After a back-off, 1 s at first, doubled up to a minute and shortened at random so that many
engines do not come back at once, a breaker is *half open*. That of reads then asks again, on
threads of its own, for a few things that failed and one that was well; one good answer closes
it, and what the other trials find then says nothing of the storage. That of writes lets the next
writes through, which cost no request anything; the first that succeeds closes it. A refused write
is not tried again for half a minute.

Contracts
---------
* Whatever a storage does, the guard's thread never calls it.
* One log line when a breaker opens and one when it closes.
* All threads are daemons. At most 32 of them wait for a storage that never answers.
* Watchers are called on whatever thread notices, with no lock of the guard held.
"""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from types import TracebackType
from typing import Final, Protocol

from kvshelf.backends.base import (
    Backend,
    Buffer,
    Deadlines,
    ObjectInfo,
    Properties,
    Reader,
    StatResults,
    WriteMode,
    WriteResult,
)
from kvshelf.backends.wrappers import WrappedBackend

from kvshelf.errors import (
    NoSpaceStorageError,
    NotRegularError,
    ObjectMissingError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
    UnavailableStorageError,
)

logger = logging.getLogger(__name__)

WINDOW_SECONDS: Final = 10.0
LEAST_FAILURES: Final = 4
LATE_WEIGHT: Final = 2
REFUSED_SECONDS: Final = 30.0
_LONGEST_TICK: Final = 0.25
#: A call that is over its deadline by so many times its length seemed lost.
_LOST: Final = 3
_SUSPECTS: Final = 2
_MOST_TRIALS: Final = 32
_TRIAL_BYTES: Final = 16 << 20
_TRIAL_PIECE: Final = 1 << 20

#: What a call is about, and which breaker it concerns.
_PROBE, _READ, _LIST, _WRITE = "probe", "read", "list", "write"


class BreakerState(Enum):
    """State of a :class:`Breaker`."""

    CLOSED = "closed"
    HALF_OPEN = "half open"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a breaker stays open: seconds at first, and at most."""

    first: float = 1.0
    most: float = 60.0


class _Window:
    """Outcomes of calls of one kind since the first failure of late."""

    __slots__ = ("bad", "began", "good")

    def __init__(self) -> None:
        self.began = 0.0
        self.bad = 0
        # Counted without a lock: a lost success makes no difference.
        self.good = 0


class Breaker:
    """Decides whether calls of some kinds may be made, see the module.

    Parameters
    ----------
    kinds : Sequence of str
        Kinds of calls whose failures are weighed each on their own.
    backoff : Backoff
    on_change : Callable
        Called with the breaker and a reason after each change of its state.

    Attributes
    ----------
    stopped : bool
        Whether calls fail at once; cheap to read.
    opened, closed : int
        How often it did so.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        backoff: Backoff,
        on_change: Callable[[Breaker, str], None],
    ) -> None:
        self.stopped = False
        self.opened = self.closed = 0
        self.retry_at = 0.0
        #: Rests since it opened.
        self.rests = 0
        self._windows = {kind: _Window() for kind in kinds}
        self._backoff = backoff
        self._delay = backoff.first
        self._state = BreakerState.CLOSED
        self._closed_at = 0.0
        self._on_change = on_change
        self._lock = threading.Lock()

    @property
    def state(self) -> BreakerState:
        """The present state."""
        return self._state

    def window(self, kind: str) -> _Window:
        """Return what counts the outcomes of calls of one kind; always the same."""
        return self._windows[kind]

    def good(self, kind: str) -> None:
        """Count a call that the storage answered."""
        self._windows[kind].good += 1

    def bad(self, kind: str, reason: str, weight: int = 1) -> None:
        """Count a call that failed, and open when there are too many."""
        now = time.monotonic()
        window = self._windows[kind]
        with self._lock:
            if self._state is BreakerState.CLOSED:
                if now - window.began > WINDOW_SECONDS:
                    window.began, window.bad, window.good = now, 0, 0
                window.bad += weight
                if window.bad < LEAST_FAILURES or window.good > window.bad:
                    return
            elif self._state is BreakerState.OPEN:
                return
        self.trip(reason)

    def trip(self, reason: str, least: float = 0.0, *, trial: bool = False) -> None:
        """Open, for at least so many seconds. An open breaker stays as it is.

        So does a closed one for a trial that failed: another one was well.
        """
        now = time.monotonic()
        with self._lock:
            was = self._state
            if was is BreakerState.OPEN or (trial and was is BreakerState.CLOSED):
                return
            if was is BreakerState.CLOSED:
                self.rests = 0
                self.opened += 1
                if now - self._closed_at > self._backoff.most:
                    self._delay = self._backoff.first
            self._state = BreakerState.OPEN
            self.stopped = True
            self.rests += 1
            # Many engines meet the same trouble at the same time.
            self.retry_at = now + max(least, self._delay * random.uniform(0.5, 1.0))  # noqa: S311
            self._delay = min(2 * self._delay, self._backoff.most)
        if was is BreakerState.CLOSED:
            self._on_change(self, reason)

    def due(self) -> bool:
        """Become half open when it is time; whether that happened now."""
        with self._lock:
            if self._state is not BreakerState.OPEN or time.monotonic() < self.retry_at:
                return False
            self._state = BreakerState.HALF_OPEN
            return True

    def lets_through(self) -> bool:
        """Whether calls may be made: closed, or half open."""
        return not self.stopped or self.due() or self._state is not BreakerState.OPEN

    def hurry(self) -> None:
        """Try again soon: something spoke for the storage."""
        with self._lock:
            self.retry_at = min(self.retry_at, time.monotonic() + self._backoff.first)

    def close(self) -> None:
        """Let all calls through again."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return
            self._state = BreakerState.CLOSED
            self.stopped = False
            self.closed += 1
            self._closed_at = time.monotonic()
            for window in self._windows.values():
                window.began = 0.0
        self._on_change(self, "")


class Watcher(Protocol):
    """Who wants to know what the guard notices. Its methods must not block."""

    def thread_late(self, thread: int) -> bool:
        """Hear that a thread's call missed its deadline; whether too many are kept by now."""

    def reads_stopped(self) -> None:
        """Hear that from now on every call fails at once."""


@dataclass(eq=False, slots=True)
class _Call:
    deadline: float
    kind: str
    name: str
    seconds: float
    late: bool = False


class GuardedBackend(WrappedBackend):
    """A backend whose calls have deadlines, and which is left alone while it fails.

    Parameters
    ----------
    inner : Backend
    deadlines : Deadlines, optional
        Those of the backend's properties when absent.
    backoff : Backoff
        For how long a breaker stays open.

    Attributes
    ----------
    deadlines : Deadlines
    reads, writes : Breaker
    """

    #: What it means that reads, or writes, are stopped: for the log.
    without_reads = (
        "nothing is looked up, loaded or stored; it is asked again now and then, and used as soon"
        " as it answers"
    )
    without_writes = "nothing is stored, loads go on; it is tried again now and then"

    def __init__(
        self,
        inner: Backend,
        deadlines: Deadlines | None = None,
        backoff: Backoff = Backoff(),
    ) -> None:
        super().__init__(inner)
        self.deadlines = inner.properties.deadlines if deadlines is None else deadlines
        self.reads = Breaker((_PROBE, _READ, _LIST), backoff, self._changed)
        self.writes = Breaker((_WRITE,), backoff, self._changed)
        self._breakers = {_PROBE: self.reads, _READ: self.reads, _LIST: self.reads}
        self._breakers[_WRITE] = self.writes
        self._calls: dict[int, _Call] = {}
        self._watchers: list[Watcher] = []
        self._count: Callable[[str], None] = _count_nothing
        self._suspects: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._well: dict[str, str] = {}
        self._trials: set[int] = set()
        #: When trials that said nothing count as failed.
        self._answer_by = 0.0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._resting = True
        self._closing = threading.Event()
        shortest = min(self.deadlines.probe, self.deadlines.read, self.deadlines.write)
        self._tick = min(_LONGEST_TICK, max(shortest, 0.01) / 4, backoff.first / 4)

    # ------------------------------------------------------------------------ for its users

    @property
    def properties(self) -> Properties:
        """Those of the wrapped backend, and what is known of its health."""
        found = self.inner.properties
        if self.reads.stopped:
            return replace(found, available=False)
        if not self.writes.lets_through():
            return replace(found, read_only=True)
        return found

    @property
    def late_calls(self) -> int:
        """Number of calls that are past their deadline and have not returned."""
        return sum(call.late for call in list(self._calls.values()))

    def count_into(self, count: Callable[[str], None]) -> None:
        """Count what happens by calling `count` with names of counters."""
        self._count = count

    @property
    def watchers(self) -> Sequence[Watcher]:
        """Who is told what is noticed."""
        return self._watchers

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` what is noticed from now on."""
        with self._lock:
            self._watchers = [*self._watchers, watcher]

    def unwatch(self, watcher: Watcher) -> None:
        """Tell `watcher` nothing any more."""
        with self._lock:
            self._watchers = [known for known in self._watchers if known is not watcher]

    def close(self) -> None:
        """Stop the guard's thread, close the wrapped backend."""
        self._closing.set()
        self._wake.set()
        super().close()

    # ------------------------------------------------------------------------ calls

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe many names at once; all answers are errors while reads are stopped."""
        try:
            call = self._enter(_PROBE, names[0] if names else "", self.deadlines.probe)
        except UnavailableStorageError as error:
            return [error] * len(names)
        failure: StorageError | None = None
        try:
            answers = self.inner.stat(names)
            # Cheaper than a look at each: the answers are sizes but for few.
            if not _PLAIN_ANSWERS.issuperset(map(type, answers)):
                failure = next((a for a in answers if isinstance(a, StorageError)), None)
            return answers
        finally:
            self._leave(call, failure)

    def info(self, name: str) -> ObjectInfo | None:
        """Size and times of one object."""
        with _Guarded(self, _PROBE, name, self.deadlines.probe):
            return self.inner.info(name)

    def open(self, name: str) -> GuardedReader:
        """Open one object; the deadline is for all that is read of it."""
        begin = time.monotonic()
        with _Guarded(self, _READ, name, self.deadlines.read):
            reader = self.inner.open(name)
        return GuardedReader(self, reader, name, begin)

    def open_large(self, name: str, size: int) -> GuardedReader:
        """Open one large object; the deadline is for all that is read of it."""
        begin = time.monotonic()
        # Parts of it may be waited for already.
        with _Guarded(self, _READ, name, self.deadlines.to_read(size)):
            reader = self.inner.open_large(name, size)
        return GuardedReader(self, reader, name, begin)

    def write(
        self, name: str, buffers: Sequence[Buffer], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish one object."""
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        with _Guarded(self, _WRITE, name, self.deadlines.to_write(size)):
            return self.inner.write(name, buffers, mode)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Stream the objects below a folder; each step has the deadline of its own."""
        with _Guarded(self, _LIST, prefix, self.deadlines.read):
            rows = iter(self.inner.list(prefix))
        while True:
            with _Guarded(self, _LIST, prefix, self.deadlines.read):
                row = next(rows, None)
            if row is None:
                return
            yield row

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders directly below `prefix`."""
        with _Guarded(self, _LIST, prefix, self.deadlines.read):
            return self.inner.folders(prefix)

    def delete(self, name: str) -> bool:
        """Remove one object."""
        with _Guarded(self, _WRITE, name, self.deadlines.write):
            return self.inner.delete(name)

    def set_aside(self, name: str, target: str) -> bool:
        """Move whatever stands at `name`."""
        with _Guarded(self, _WRITE, name, self.deadlines.write):
            return self.inner.set_aside(name, target)

    def trim(self, folder: str, max_count: int, max_bytes: int) -> None:
        """Bound what was set aside."""
        with _Guarded(self, _WRITE, folder, self.deadlines.write):
            self.inner.trim(folder, max_count, max_bytes)

    def sweep(self, folder: str, older_than: float, is_ours: Callable[[str], bool]) -> int:
        """Remove old temporaries."""
        with _Guarded(self, _WRITE, folder, self.deadlines.write):
            return self.inner.sweep(folder, older_than, is_ours)

    def touch(self, name: str) -> None:
        """Note a use of an object, unless the storage is given a rest: best effort."""
        if not self.reads.stopped and not self.writes.stopped:
            with _Guarded(self, _WRITE, name, self.deadlines.write):
                self.inner.touch(name)

    @contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Watch over what a writer does in the storage by itself, beside its writes.

        A failure counts as one of a write. Success says nothing of whether writes are taken.

        Raises
        ------
        UnavailableStorageError
            If writes are stopped.
        """
        call = self._enter(_WRITE, name, self.deadlines.write)
        try:
            yield
        except BaseException as error:
            self._leave(call, error)
            raise
        if call.late or time.monotonic() > call.deadline:
            self._leave(call)
        else:
            self._calls.pop(threading.get_ident(), None)

    # ------------------------------------------------------------------------ bookkeeping

    def _enter(self, kind: str, name: str, seconds: float) -> _Call:
        """Note that the calling thread goes into the storage.

        Raises
        ------
        UnavailableStorageError
            If it is given a rest.
        """
        call = _Call(time.monotonic() + seconds, kind, name, seconds)
        self._note(threading.get_ident(), call)
        return call

    def _note(self, thread: int, call: _Call) -> None:
        """Do what :meth:`_enter` does, for a call that was made before."""
        if self.reads.stopped and thread not in self._trials:
            if self._resting:
                self._start_watching()
            raise self._unavailable(call.name)
        if call.kind is _WRITE and not self.writes.lets_through():
            raise self._unavailable(call.name)
        self._calls[thread] = call
        if self._resting and not self._start_watching():
            del self._calls[thread]
            raise self._unavailable(call.name, "no thread can be started to watch over it")

    def _unavailable(
        self, name: str, why: str = "the storage failed a moment ago"
    ) -> UnavailableStorageError:
        return UnavailableStorageError(errno.EAGAIN, f"not tried: {why}", f"{self.url}/{name}")

    def _leave(self, call: _Call, error: BaseException | None = None) -> None:
        """Note that a call came back, and what its outcome says of the storage."""
        self._calls.pop(threading.get_ident(), None)
        kind = call.kind
        breaker = self._breakers[kind]
        now = time.monotonic()
        if call.late:
            # It has been counted. That a call which seemed lost came back is a good sign.
            if now > call.deadline + _LOST * call.seconds:
                breaker.hurry()
            return
        if now > call.deadline:
            self._count_late(threading.get_ident(), call)
            return
        if isinstance(error, ReadOnlyStorageError | NoSpaceStorageError) and kind is _WRITE:
            self.writes.trip(str(error), REFUSED_SECONDS)
        elif isinstance(error, StorageError) and error.retryable:
            self._note_suspect(call)
            self._count_bad(threading.get_ident(), call, str(error))
        elif error is None or isinstance(error, ObjectMissingError | NotRegularError):
            breaker.good(kind)
            if kind is not _READ:
                self._well[kind] = call.name
            if kind is _WRITE and breaker.state is BreakerState.HALF_OPEN:
                breaker.close()

    def _note_suspect(self, call: _Call) -> None:
        if call.kind is _WRITE:
            return
        with self._lock:
            self._suspects[call.kind, call.name] = None
            self._suspects.move_to_end((call.kind, call.name))
            while len(self._suspects) > _SUSPECTS:
                self._suspects.popitem(last=False)

    def _count_late(self, thread: int, call: _Call) -> None:
        self._count("late_calls")
        self._note_suspect(call)
        reason = f"a {call.kind} took longer than {call.seconds:.3g} s"
        self._count_bad(thread, call, reason, LATE_WEIGHT)

    def _count_bad(self, thread: int, call: _Call, reason: str, weight: int = 1) -> None:
        breaker = self._breakers[call.kind]
        if thread in self._trials:
            # Trials ask for what is ill: that a few of them fail is no evidence by itself.
            breaker.trip(reason, trial=True)
        else:
            breaker.bad(call.kind, reason, weight)

    def _changed(self, breaker: Breaker, reason: str) -> None:
        if breaker is self.reads:
            if reason:
                logger.warning(
                    "%s fails (%s): from now on %s", self.url, reason, self.without_reads
                )
            else:
                with self._lock:
                    self._suspects.clear()
                logger.warning("%s answers again and is used", self.url)
        elif reason:
            logger.warning(
                "%s takes no writes (%s): from now on %s", self.url, reason, self.without_writes
            )
        else:
            logger.warning("%s takes writes again", self.url)
        self._count("breaker_opened" if reason else "breaker_closed")
        if breaker is self.reads and reason:
            for watcher in self._watchers:
                watcher.reads_stopped()
            self._start_watching()

    # ------------------------------------------------------------------------ its thread

    def _start_watching(self) -> bool:
        """Wake the guard's thread; False when there is none, and none can be started."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                thread = threading.Thread(target=self._watch, name="kvshelf-guard", daemon=True)
                if not try_to_start(thread):
                    return False
                self._thread = thread
            self._resting = False
        self._wake.set()
        return True

    def _watch(self) -> None:
        expected = time.monotonic()
        while not self._closing.is_set():
            busy = bool(self._calls) or self.reads.stopped
            if not busy:
                self._wake.clear()
                self._resting = True
                # A call, or the end, may have come between the look and the note.
                busy = bool(self._calls) or self.reads.stopped or self._closing.is_set()
            if not busy:
                self._wake.wait()
                expected = time.monotonic()
                continue
            self._resting = False
            self._closing.wait(self._tick)
            now = time.monotonic()
            asleep = now - expected - self._tick
            expected = now
            if asleep > _LONGEST_TICK:
                # A process that was stopped says nothing about the storage.
                for call in list(self._calls.values()):
                    call.deadline += asleep
            try:
                self._look(now)
            except Exception as error:
                # A watcher's mistake must not end the watch.
                logger.error("what a late call demands was not done", exc_info=error)

    def _look(self, now: float) -> None:
        for thread, call in list(self._calls.items()):
            if call.late or now < call.deadline or self._calls.get(thread) is not call:
                continue
            call.late = True
            self._count_late(thread, call)
            exhausted = [watcher.thread_late(thread) for watcher in self._watchers]
            if any(exhausted):
                self._breakers[call.kind].trip(
                    f"too many threads wait for it, one with a {call.kind} for more than"
                    f" {call.seconds:.3g} s"
                )
        if self.reads.due():
            self._answer_by = now + 2 * self.deadlines.to_read(_TRIAL_BYTES)
            self._try_again()
        elif self.reads.state is BreakerState.HALF_OPEN and now > self._answer_by:
            # A trial may end, or be kept, where no call of it can be late.
            self.reads.trip("it does not answer")

    def _try_again(self) -> None:
        """Ask again for what failed, each on a thread of its own; the first answer counts."""
        with self._lock:
            asked = list(self._suspects)
        asked += [(kind, self._well[kind]) for kind in {kind for kind, _ in asked} & {*self._well}]
        # What was well last may be what fails now.
        asked = list(dict.fromkeys(asked))
        if not asked or (self.reads.rests > 2 and len(asked) == 1):
            # What failed may be the only thing that is ill.
            asked.append((_LIST, ""))
        if len(self._trials) + len(asked) > _MOST_TRIALS:
            # Those that wait for an answer are all that can be done.
            self.reads.trip("it does not answer")
            return
        trials = [
            threading.Thread(
                target=self._trial, args=(kind, name), name="kvshelf-trial", daemon=True
            )
            for kind, name in asked
        ]
        if not sum(map(try_to_start, trials)):
            self.reads.trip("no thread can be started to ask it")

    def _trial(self, kind: str, name: str) -> None:
        thread = threading.get_ident()
        self._trials.add(thread)
        try:
            self._ask(kind, name)
        except (ObjectMissingError, NotRegularError):
            self.reads.close()
        except BaseException as error:  # noqa: BLE001 - of Rust's panics too: it is not well
            self.reads.trip(str(error), trial=True)
        else:
            self.reads.close()
        finally:
            self._trials.discard(thread)

    def _ask(self, kind: str, name: str) -> None:
        if kind is _PROBE:
            answer = self.stat([name])[0]
            if isinstance(answer, StorageError):
                raise answer
        elif kind is _LIST:
            self.folders(name)
        else:
            piece = memoryview(bytearray(_TRIAL_PIECE))
            with self.open(name) as reader:
                for offset in range(0, min(reader.size, _TRIAL_BYTES), _TRIAL_PIECE):
                    reader.read_into(piece[: reader.size - offset], offset)


#: Why no thread can be started, and what to look at: for messages.
THREAD_LIMIT: Final = "the limit of threads is reached (ulimit -u, or pids.max of the container)"


def try_to_start(thread: threading.Thread) -> bool:
    """Start a thread; False when the system allows no further ones now."""
    try:
        thread.start()
    except RuntimeError as error:
        logger.debug("%s: %s", thread.name, error)
        return False
    return True


def _count_nothing(name: str) -> None:
    """Stand for counters until there are some."""


_PLAIN_ANSWERS: Final = frozenset((int, type(None)))


class _Guarded:
    """The time that one call spends in the storage."""

    __slots__ = ("_call", "_guard", "_kind", "_name", "_seconds")

    def __init__(self, guard: GuardedBackend, kind: str, name: str, seconds: float) -> None:
        self._guard = guard
        self._kind = kind
        self._name = name
        self._seconds = seconds

    def __enter__(self) -> None:
        self._call = self._guard._enter(self._kind, self._name, self._seconds)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._guard._leave(self._call, exc)


class GuardedReader(Reader):
    """A reader of whose object all reads together have one deadline, and which times them.

    Attributes
    ----------
    seconds : float
        Seconds for which the storage was waited for: to open the object, and to read it.
    """

    def __init__(self, guard: GuardedBackend, inner: Reader, name: str, begin: float) -> None:
        self.size = inner.size
        self.seconds = time.monotonic() - begin
        self._guard = guard
        self._inner = inner
        self._read_into = inner.read_into
        allowed = guard.deadlines.to_read(inner.size)
        self._call = _Call(begin + allowed, _READ, name, allowed)
        self._window = guard.reads.window(_READ)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Read a piece, unless the object's time is up."""
        # An object is read in many pieces, so a piece costs little: the call is noted by hand,
        # and always the same one.
        guard, call = self._guard, self._call
        begin = time.monotonic()
        if begin > call.deadline:
            raise TransientStorageError(
                errno.ETIMEDOUT,
                f"reading took longer than {call.seconds:.3g} s",
                f"{guard.url}/{call.name}",
            )
        thread = threading.get_ident()
        guard._note(thread, call)
        try:
            count = self._read_into(buffer, offset)
        except BaseException as error:
            guard._leave(call, error)
            raise
        end = time.monotonic()
        self.seconds += end - begin
        if call.late or end > call.deadline:
            guard._leave(call)
        else:
            guard._calls.pop(thread, None)
            self._window.good += 1
        # Not already when it could be opened, which says little of its bytes.
        guard._well[_READ] = call.name
        return count

    def __enter__(self) -> GuardedReader:
        return self

    def close(self) -> None:
        """Release what the reader holds. Idempotent."""
        # A mount may ask its server when a file is closed. It is closed also while the storage is
        # given a rest, and that it could be says nothing of its bytes.
        guard, thread = self._guard, threading.get_ident()
        seconds = guard.deadlines.read
        call = _Call(time.monotonic() + seconds, _READ, self._call.name, seconds)
        guard._calls[thread] = call
        if guard._resting:
            guard._start_watching()
        try:
            self._inner.close()
        finally:
            if call.late or time.monotonic() > call.deadline:
                guard._leave(call)
            else:
                guard._calls.pop(thread, None)
