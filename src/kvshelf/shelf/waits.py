"""Waits: requests that wait until named objects are on the shelf.

One engine stores the KV of a prompt while another waits for it. The waiting side names the
*pieces* that it needs, in their order: one kind of KV of one chunk or tail each. Owns the thread
that probes the storage for the pieces of all waits, and how often it does.

A piece is there when its objects of all shards have the right sizes. Nothing is remembered but
which pieces were seen: no misses, and no failed loads. A piece that vanishes after it was seen
still counts as seen; the load finds out.

What is probed
--------------
* Of each wait only the next missing piece, and of that only the object that was missing last. When
  it appears, one probe covers the rest of the piece and more and more of the pieces behind it.
* All due waits share one probe per object.
* Now and then the marker of a producer that gave up.

When it is probed
-----------------
Where the storage gives notices (:mod:`kvshelf.backends.notices`), when a missing object appears
in the folder that the shelf writes to, and now and then. Elsewhere, and where the system refuses a
watch, at intervals that follow from the cost of a round: probes take a bounded share of one core, a
smaller one when no piece has appeared for a while.

Contracts
---------
* :class:`Wait` and :class:`WaitService` are used on an engine's step thread: their calls take
  microseconds and never touch the storage. A wait's state is written by the background thread.
* A storage error or an open circuit breaker means "not yet": the pieces are probed again, less and
  less often. Only its caller ends a wait that takes too long (:meth:`Wait.cancel`).
* A thread that is stuck in the storage is replaced (:mod:`kvshelf.shelf.threads`). The new thread
  continues all waits.
* Folders are watched only while a wait needs an object in them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.notices import Notices
from kvshelf.errors import StorageError
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import Kind, kind_key
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.shelf.pacing import GilPace
from kvshelf.shelf.threads import StorageThreads
from kvshelf.shelf.view import ObjectRef, Presence, ShelfView, find_together

logger = logging.getLogger(__name__)

#: One kind of KV of one chunk or tail.
Piece: TypeAlias = "tuple[Kind, Chunk]"
#: One object: the kind key of its piece, and the shard.
_Object: TypeAlias = "tuple[bytes, int]"

#: Share of one core that probes may take; the smaller one when no piece has appeared for a while.
_SHARE: Final = 0.1
_QUIET_SHARE: Final = 0.03
_QUIET_SECONDS: Final = 1.0
#: Shortest time from one round to the next. On a high-latency storage also that of a round.
_SHORTEST: Final = 2e-3
_SHORTEST_HIGH_LATENCY: Final = 20e-3
_LONGEST: Final = 1.0
#: Least cost of one probe of a high-latency storage: other threads and a server work on it as well.
_HIGH_LATENCY_COST: Final = 0.2e-3
#: Time to the next probe after a storage error, doubled with each further one.
_FIRST_BACKOFF: Final = 50e-3
_LONGEST_BACKOFF: Final = 0.5
#: Pause of the thread after notices of objects that no wait needs, so that it reads several at
#: once.
_NOTICE_REST: Final = 0.5e-3
#: Time between two looks for a marker, and for an object whose folder is watched.
_MARKER_SECONDS: Final = 0.5
_MARKER_SECONDS_HIGH_LATENCY: Final = 2.0
#: Most pieces of one wait in one round.
_MOST_AHEAD: Final = 64
#: Probes of a low-latency storage between two pauses.
_BATCH: Final = 32


@dataclass(eq=False, repr=False)
class Wait:
    """One request that waits; made by :meth:`WaitService.submit`.

    Attributes
    ----------
    complete : bool
        All pieces were seen.
    gave_up : bool
        The producer's marker was seen, and not all pieces were.
    seen : int
        Number of leading pieces that were seen.
    """

    _service: WaitService
    _pieces: Sequence[Piece]
    _attempt: str
    complete: bool = False
    gave_up: bool = False
    seen: int = 0
    #: The objects to probe next; empty for a moment, while others are chosen.
    _questions: list[tuple[_Object, Kind, ObjectRef]] = field(default_factory=list)
    #: The shard of the next piece that was missing last; None: probe all shards.
    _missing: int | None = 0
    #: Pieces to probe where no shard is known to be missing.
    _ahead: int = 1
    _due: float = 0.0
    _marker_due: float = 0.0
    #: Name of the next object, once its folder was to be watched, and whether it is watched.
    _name: str | None = None
    _watched: bool = False
    #: Whether the storage failed to answer for the next object, and how long it then pauses.
    _failed: bool = False
    _backoff: float = 0.0
    #: Whether the marker was seen: it counts if the pieces, probed once more, are missing.
    _lost: bool = False

    @property
    def ended(self) -> bool:
        """Whether the wait is complete or failed."""
        return self.complete or self.gave_up

    def cancel(self) -> None:
        """Wait no longer; the state stays what it is."""
        self._service._forget(self)

    def _plan(self, shards: Mapping[Kind, int]) -> None:
        """Choose what to probe next."""
        self._name, self._watched = None, False
        count = self._ahead if self._missing is None else 1
        self._questions = [
            ((kind_key(chunk.key, kind), shard), kind, ObjectRef(chunk, shard))
            for kind, chunk in self._pieces[self.seen : self.seen + count]
            for shard in (range(shards[kind]) if self._missing is None else (self._missing,))
        ]

    def _take(self, answers: Mapping[_Object, Presence], shards: Mapping[Kind, int]) -> list[bytes]:
        """Use the answers to the probes; return the kind keys of the pieces that are there.

        As many leading pieces as are returned are not in :attr:`seen` yet.
        """
        missing: int | None = None
        there: list[bytes] = []
        self._failed = False
        for name, kind, ref in self._questions:
            answer = answers[name]
            if answer is not Presence.PRESENT:
                self._failed = answer is Presence.ERROR
                if ref.shard == self._missing:
                    return []
                missing = ref.shard
                break
            last = ref.shard == shards[kind] - 1
            if last and (self._missing is None or not ref.shard):
                there.append(name[0])
        self._missing = missing
        self._ahead = min(2 * self._ahead, _MOST_AHEAD) if missing is None else 1
        self._questions = []
        return there


class WaitService:
    """Probes one shelf for the pieces of all waits.

    Parameters
    ----------
    views : Mapping[Kind, ShelfView]
        The objects of each kind of one namespace.
    counters : Counters
    on_seen : Callable, optional
        Called on a background thread with the kind keys
        (:func:`~kvshelf.format.kinds.kind_key`) of pieces that were just seen, before their waits
        show it. Must not block.
    on_thread_start : Callable, optional
        Called first on each thread, to set its processors.

    Raises
    ------
    RuntimeError
        If the system allows no thread.
    OSError
        If it allows no further files.
    """

    def __init__(
        self,
        views: Mapping[Kind, ShelfView],
        *,
        counters: Counters,
        on_seen: Callable[[Sequence[bytes]], None] | None = None,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self._views = dict(views)
        self._shards = {kind: view.fmt.shards for kind, view in self._views.items()}
        self._backend = next(iter(self._views.values())).backend
        self._counters = counters
        self._on_seen = on_seen
        self._log = RateLimitedLog(logger)
        self._lock = threading.Lock()
        self._waits: dict[Wait, None] = {}
        self._closed = False
        #: Wakes the thread that probes.
        self._waker = _Waker()
        #: Wakes sleeping steps.
        self._progress = threading.Event()
        #: Seconds of processor time for one probe, and when a piece was seen last.
        self._cost = 0.0
        #: Seconds from the last round to the next.
        self._paused = 0.0
        self._progress_at = time.monotonic()
        self._threads = StorageThreads(
            "kvshelf-wait",
            1,
            self._run,
            self._backend,
            count_stuck=lambda: counters.add("stuck_threads"),
            on_thread_start=on_thread_start,
        )
        self._threads.start()

    # ------------------------------------------------------------------------ on the step thread

    def submit(self, pieces: Sequence[Piece], attempt: str) -> Wait:
        """Begin to wait; returns at once.

        Parameters
        ----------
        pieces : Sequence of (Kind, Chunk)
            What to wait for, in the order in which it is needed. Must not be changed afterwards.
        attempt : str
            Id of the producer's attempt, 32 hex digits, whose marker ends the wait; empty: none.

        Returns
        -------
        Wait
            Complete if there are no pieces. After :meth:`close` it never ends.

        Raises
        ------
        ValueError
            If a piece is of a kind that the namespace does not have.
        """
        unknown = {kind for kind, _ in pieces} - self._views.keys()
        if unknown:
            raise ValueError(
                f"pieces of kind {', '.join(sorted(unknown))}: the namespace has"
                f" {', '.join(self._views)}"
            )
        wait = Wait(self, pieces, attempt, complete=not pieces)
        if pieces:
            wait._plan(self._shards)
            with self._lock:
                if not self._closed:
                    self._waits[wait] = None
            self._threads.ready()
            self._waker.wake()
        return wait

    def sleep(self, seconds: float) -> bool:
        """Sleep until any wait makes progress, for at most `seconds`.

        Returns
        -------
        bool
            Whether a piece was seen, or a wait has ended, since the last call that returned True.
        """
        # A thread that could not be started before may start now.
        self._threads.ready()
        if not self._progress.wait(seconds):
            return False
        self._progress.clear()
        return True

    @property
    def waiting(self) -> int:
        """Number of waits that neither have ended nor were cancelled."""
        return len(self._waits)

    def close(self) -> None:
        """Forget all waits, and stop the threads. Idempotent."""
        self._threads.close()
        with self._lock:
            self._closed = True
            self._waits.clear()
        self._waker.wake()

    def _forget(self, wait: Wait) -> None:
        with self._lock:
            self._waits.pop(wait, None)
            last = not self._waits
        if last:
            # Its folder is not to be watched any longer.
            self._waker.wake()

    # ---------------------------------------------------------------------- on background threads

    def _run(self) -> None:
        with contextlib.closing(_Watcher(self._backend, self._views)) as watcher:
            while not self._closed and not self._threads.replaced():
                with self._lock:
                    waits = list(self._waits)
                now = time.monotonic()
                # Waits that are due soon are probed now, so that there are fewer rounds.
                due = [wait for wait in waits if wait._due <= now + self._paused / 2]
                if due:
                    self._try_round(due, sum(not wait._watched for wait in waits))
                watcher.follow(waits)
                if due:
                    continue
                self._sleep(min((wait._due for wait in waits), default=None), watcher)

    def _sleep(self, until: float | None, watcher: _Watcher) -> None:
        """Sleep until a time, a wake-up, or the notice of an object that a wait needs."""
        while True:
            seconds = None if until is None else max(0.0, until - time.monotonic())
            woken, noticed = self._waker.wait(seconds, watcher.fileno())
            if woken or not noticed or watcher.read() or seconds == 0.0:
                return
            time.sleep(_NOTICE_REST)

    def _try_round(self, waits: list[Wait], polled: int) -> None:
        try:
            self._round(waits, polled)
        except Exception as error:  # noqa: BLE001 - cache trouble never ends an engine
            self._counters.add("probe_errors")
            self._log.error("waiting for objects failed; it is tried again", exc_info=error)
            now = time.monotonic()
            for wait in waits:
                self._back_off(wait, now)

    def _round(self, waits: list[Wait], polled: int) -> None:
        """Probe what these waits need next, and look for markers.

        Parameters
        ----------
        waits : list of Wait
        polled : int
            Number of all waits, these or others, of which no notice is expected.
        """
        begin, used = time.monotonic(), time.thread_time()
        questions = {name: (kind, ref) for wait in waits for name, kind, ref in wait._questions}
        answers = self._ask(questions)
        if self._threads.replaced():
            # Another thread probes the same.
            return
        found = [(wait, wait._take(answers, self._shards)) for wait in waits]
        self._report([key for _, seen in found for key in seen])
        self._finish(found)
        now = time.monotonic()
        pause = self._pause(polled, len(questions), time.thread_time() - used, now - begin)
        markers: list[Wait] = []
        for wait in waits:
            if wait._failed:
                self._back_off(wait, now)
                continue
            wait._backoff = 0.0
            if wait._missing is None:
                wait._due = now
            else:
                wait._due = now + (_MARKER_SECONDS if wait._watched else pause)
            looks = wait._marker_due <= now + self._paused / 2
            if wait._missing is not None and wait._attempt and looks:
                markers.append(wait)
        if markers:
            self._look_for_markers(markers, now)

    def _ask(self, questions: Mapping[_Object, tuple[Kind, ObjectRef]]) -> dict[_Object, Presence]:
        """Look for objects of all kinds: in one call of a high-latency storage, else in batches."""
        names = list(questions)
        answers: dict[_Object, Presence] = {}
        step = len(names) if self._backend.properties.high_latency else _BATCH
        pace = GilPace()
        for begin in range(0, len(names), step):
            by_kind: dict[Kind, list[_Object]] = {}
            for name in names[begin : begin + step]:
                by_kind.setdefault(questions[name][0], []).append(name)
            found = find_together(
                [
                    (self._views[kind], [questions[name][1] for name in of_kind])
                    for kind, of_kind in by_kind.items()
                ]
            )
            for of_kind, there in zip(by_kind.values(), found, strict=True):
                answers.update(zip(of_kind, there, strict=True))
            pace.rest()
        self._counters.add("probes", len(names))
        errors = sum(answer is Presence.ERROR for answer in answers.values())
        if errors:
            self._counters.add("probe_errors", errors)
        return answers

    def _report(self, seen: Sequence[bytes]) -> None:
        if seen and self._on_seen is not None:
            try:
                self._on_seen(list(dict.fromkeys(seen)))
            except Exception as error:  # noqa: BLE001 - the thread must go on
                self._log.error("a callback for objects that appeared raised", exc_info=error)

    def _finish(self, found: Sequence[tuple[Wait, list[bytes]]]) -> None:
        """Pass the pieces that are there to the waits; end waits that are complete or failed."""
        progress = False
        with self._lock:
            for wait, there in found:
                if wait not in self._waits:
                    continue
                wait.seen += len(there)
                wait.complete = wait.seen == len(wait._pieces)
                wait.gave_up = wait._lost and wait._missing is not None
                progress |= bool(there) or wait.ended
                if wait.ended:
                    del self._waits[wait]
                elif not wait._questions:
                    wait._plan(self._shards)
        if progress:
            self._progress_at = time.monotonic()
            self._progress.set()

    def _pause(self, polled: int, asked: int, used: float, passed: float) -> float:
        """Return the time to the next round, in seconds.

        Parameters
        ----------
        polled : int
            Number of waits that are probed at such intervals.
        asked : int
            Number of objects that this round has probed.
        used, passed : float
            Its processor time and its duration, in seconds.
        """
        shortest, cost = _SHORTEST, used / max(1, asked)
        if self._backend.properties.high_latency:
            shortest, cost = max(_SHORTEST_HIGH_LATENCY, passed), max(cost, _HIGH_LATENCY_COST)
        self._cost += (cost - self._cost) / 4 if self._cost else cost
        quiet = time.monotonic() - self._progress_at > _QUIET_SECONDS
        seconds = self._cost * polled / (_QUIET_SHARE if quiet else _SHARE)
        self._paused = min(max(shortest, seconds), _LONGEST)
        return self._paused

    @staticmethod
    def _back_off(wait: Wait, now: float) -> None:
        wait._backoff = min(max(2 * wait._backoff, _FIRST_BACKOFF), _LONGEST_BACKOFF)
        wait._due = now + wait._backoff

    # ------------------------------------------------------------------------------------ markers

    def _look_for_markers(self, waits: Sequence[Wait], now: float) -> None:
        high_latency = self._backend.properties.high_latency
        period = _MARKER_SECONDS_HIGH_LATENCY if high_latency else _MARKER_SECONDS
        step = len(waits) if high_latency else _BATCH
        view = next(iter(self._views.values()))
        pace = GilPace()
        for begin in range(0, len(waits), step):
            group = waits[begin : begin + step]
            found = view.gave_up([wait._attempt for wait in group])
            for wait, lost in zip(group, found, strict=True):
                wait._marker_due = now + period
                if lost:
                    # A piece may have appeared before the marker: probed once more, pieces win.
                    wait._lost, wait._due = True, 0.0
            pace.rest()


class _Waker:
    """Wakes one thread that waits for it or for a file descriptor."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end).atexit = False

    def wake(self) -> None:
        """Wake the thread, now or when it waits next."""
        # If the pipe is full, the thread is signalled already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_end, b"\0")

    def wait(self, seconds: float | None, other: int | None) -> tuple[bool, bool]:
        """Wait for :meth:`wake` or until `other` is readable; return whether each is true.

        Parameters
        ----------
        seconds : float or None
            Longest time; None: for ever.
        other : int or None
            A file descriptor.
        """
        poll = select.poll()
        poll.register(self._read_end, select.POLLIN)
        if other is not None:
            poll.register(other, select.POLLIN)
        ready = dict(poll.poll(None if seconds is None else seconds * 1e3))
        woken = self._read_end in ready
        if woken:
            with contextlib.suppress(BlockingIOError):
                os.read(self._read_end, 1 << 16)
        return woken, other in ready


class _Watcher:
    """Watches the folders of the objects that waits need next; belongs to one thread."""

    def __init__(self, backend: GuardedBackend, views: Mapping[Kind, ShelfView]) -> None:
        self._backend = backend
        self._views = views
        self._notices: Notices | None = None
        #: The waits for each object.
        self._names: dict[str, list[Wait]] = {}
        self._count = 0

    def fileno(self) -> int | None:
        """Return the descriptor that is readable when :meth:`read` has work, if there is one."""
        return None if self._notices is None else self._notices.fileno()

    def follow(self, waits: Sequence[Wait]) -> None:
        """Watch what these waits need next, and nothing else.

        Parameters
        ----------
        waits : Sequence of Wait
            All waits. Those whose folders were not watched before become due once more, since their
            objects may have appeared meanwhile.
        """
        if not waits:
            self.close()
            return
        if len(waits) == self._count and not any(wait._name is None for wait in waits):
            return
        try:
            if self._notices is None and self._backend.properties.notifications:
                self._notices = self._backend.notices()
            if self._notices is not None:
                self._watch(self._notices, [w for w in waits if w._questions and not w.ended])
                self._count = len(waits)
        except (StorageError, OSError) as error:
            # They are probed at short intervals.
            logger.debug("folders could not be watched: %s", error)
            for wait in waits:
                wait._watched = False
            self.close()

    def _watch(self, notices: Notices, waits: Sequence[Wait]) -> None:
        self._names = {}
        folders: dict[str, list[Wait]] = {}
        for wait in waits:
            if wait._name is None:
                _, kind, ref = wait._questions[0]
                wait._name = self._views[kind].on_storage.name(ref)
            self._names.setdefault(wait._name, []).append(wait)
            folders.setdefault(wait._name.rpartition("/")[0], []).append(wait)
        if not folders:
            return
        with self._backend.tracked_probe(next(iter(self._names))):
            fresh, unwatched = notices.watch(folders)
        for folder, there in folders.items():
            for wait in there:
                wait._watched = folder not in unwatched
                if folder in fresh:
                    wait._due = 0.0

    def read(self) -> bool:
        """Make waits due whose objects have appeared; return whether there are any."""
        appeared = None if self._notices is None else self._notices.appeared()
        if appeared is None:
            found = [wait for waits in self._names.values() for wait in waits]
            # Notices of folders may be lost too.
            self._count = 0
        else:
            found = [wait for name in appeared for wait in self._names.get(name, ())]
            places = tuple(name for name in appeared if name.endswith("/"))
            if places:
                inside = [name for name in self._names if name.startswith(places)]
                found += [wait for name in inside for wait in self._names[name]]
                # Other folders are to be watched now.
                self._count = 0
        for wait in found:
            wait._due = 0.0
        return bool(found)

    def close(self) -> None:
        """Watch nothing."""
        self._names, self._count = {}, 0
        if self._notices is not None:
            self._notices.close()
            self._notices = None
