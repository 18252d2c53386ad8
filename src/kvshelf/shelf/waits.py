"""Waits: requests that wait until named objects are on the shelf.

One engine stores the KV of a prompt while another waits for it. The waiting side names the
*pieces* that it needs, in their order: one kind of KV of one chunk or tail each. Owns the thread
that asks the storage for the pieces of all who wait, and how often it asks.

A piece is there when its objects of all shards have the right sizes. Nothing is remembered but
which pieces were seen: no misses, and no failed loads. A piece that vanishes after it was seen
still counts as seen; the load finds out.

What is asked
-------------
* Of each wait only the next missing piece, and of that only the object that was missing last. When
  it appears, the rest of the piece and more and more of the pieces behind it are asked for at once.
* All who are due are asked for together, each object once.
* Now and then the marker by which the producer of the pieces says that it gave up.

The time from one round of questions to the next follows from what a round costs: asking takes a
bounded share of one core, a smaller one when no piece has come for a while.

Contracts
---------
* :class:`Wait` and :class:`WaitService` are used on an engine's step thread: their calls take
  microseconds and never touch the storage. A wait's state is written by the background thread.
* A storage error or an open circuit breaker means "not yet": the pieces are asked for again, less
  and less often. Only its caller ends a wait that takes too long (:meth:`Wait.cancel`).
* A thread that is stuck in the storage is replaced (:mod:`kvshelf.shelf.threads`). The other thread
  goes on with all waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

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

#: Share of one core that asking may take; the smaller one when no piece has come for a while.
_SHARE: Final = 0.1
_QUIET_SHARE: Final = 0.03
_QUIET_SECONDS: Final = 1.0
#: Shortest time from one round to the next. On a high-latency storage also that of a round.
_SHORTEST: Final = 2e-3
_SHORTEST_HIGH_LATENCY: Final = 20e-3
_LONGEST: Final = 1.0
#: What one question of a high-latency storage costs at least: other threads and a server work on
#: it as well.
_HIGH_LATENCY_COST: Final = 0.2e-3
#: Time to the next question after a storage error, doubled with each further one.
_FIRST_BACKOFF: Final = 50e-3
_LONGEST_BACKOFF: Final = 0.5
#: Time between two looks for a marker.
_MARKER_SECONDS: Final = 0.5
_MARKER_SECONDS_HIGH_LATENCY: Final = 2.0
#: Most pieces of one wait in one round.
_MOST_AHEAD: Final = 64
#: Questions of a low-latency storage between two rests.
_BATCH: Final = 32


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

    __slots__ = (
        "_ahead",
        "_attempt",
        "_backoff",
        "_due",
        "_lost",
        "_marker_due",
        "_missing",
        "_pieces",
        "_service",
        "complete",
        "gave_up",
        "seen",
    )

    def __init__(self, service: WaitService, pieces: Sequence[Piece], attempt: str) -> None:
        self.complete = not pieces
        self.gave_up = False
        self.seen = 0
        self._service = service
        self._pieces = pieces
        self._attempt = attempt
        #: The shard of the next piece that was missing last; None: ask for all shards.
        self._missing: int | None = 0
        #: Pieces to ask for where no shard is known to be missing.
        self._ahead = 1
        self._due = self._marker_due = 0.0
        self._backoff = 0.0
        #: Whether the marker was seen: it counts when the pieces, asked for once more, are missing.
        self._lost = False

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be expected."""
        return self.complete or self.gave_up

    def cancel(self) -> None:
        """Wait no longer; the state stays what it is."""
        self._service._forget(self)

    def _next(self) -> Sequence[Piece]:
        """Return the pieces to ask for."""
        count = self._ahead if self._missing is None else 1
        return self._pieces[self.seen : self.seen + count]

    def _take(
        self,
        pieces: Sequence[Piece],
        answers: Mapping[_Object, Presence],
        shards: Mapping[Kind, int],
    ) -> int:
        """Use the answers for `pieces`, which :meth:`_next` returned; return how many are there."""
        asked_for = self._missing
        self._missing = None
        for count, (kind, chunk) in enumerate(pieces):
            key = kind_key(chunk.key, kind)
            for shard in range(shards[kind]) if asked_for is None else (asked_for,):
                if answers[key, shard] is not Presence.PRESENT:
                    self._missing, self._ahead = shard, 1
                    return count
        if asked_for is None:
            self._ahead = min(2 * self._ahead, _MOST_AHEAD)
        elif shards[pieces[0][0]] > 1:
            # The object that was missing is there. The others are asked for next.
            return 0
        return len(pieces)


class WaitService:
    """Asks one shelf for the pieces of all who wait.

    Parameters
    ----------
    views : Mapping[Kind, ShelfView]
        The objects of each kind of one namespace.
    counters : Counters
    on_seen : Callable, optional
        Called on a background thread with the kind keys
        (:func:`~kvshelf.format.kinds.kind_key`) of pieces that were just seen, before their waits
        tell of them. Must not block.
    on_thread_start : Callable, optional
        Called first on each thread, to set its processors.

    Raises
    ------
    RuntimeError
        If the system allows no thread.
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
        #: Wakes the thread that asks, and those who sleep.
        self._wake = threading.Event()
        self._progress = threading.Event()
        #: Seconds of processor time for one question, and when a piece was seen last.
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
            What to wait for, in the order in which it is of use. Must not be changed afterwards.
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
        strange = {kind for kind, _ in pieces} - self._views.keys()
        if strange:
            raise ValueError(
                f"pieces of kind {', '.join(sorted(strange))}: the namespace has"
                f" {', '.join(self._views)}"
            )
        wait = Wait(self, pieces, attempt)
        if not wait.complete:
            with self._lock:
                if not self._closed:
                    self._waits[wait] = None
            self._threads.ready()
            self._wake.set()
        return wait

    def sleep(self, seconds: float) -> bool:
        """Sleep until any wait makes progress, for at most `seconds`.

        Returns
        -------
        bool
            Whether a piece was seen, or a wait has ended, since the last call that returned True.
        """
        # A thread that could not be started may be by now.
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
        self._wake.set()

    def _forget(self, wait: Wait) -> None:
        with self._lock:
            self._waits.pop(wait, None)

    # ---------------------------------------------------------------------- on background threads

    def _run(self) -> None:
        while not self._closed and not self._threads.replaced():
            # Those who come from now on wake the thread.
            self._wake.clear()
            with self._lock:
                waits = list(self._waits)
            now = time.monotonic()
            # Those who are due soon are asked for at once, so that rounds are few.
            due = [wait for wait in waits if wait._due <= now + self._paused / 2]
            if due:
                self._try_round(due)
            else:
                first = min((wait._due for wait in waits), default=None)
                self._wake.wait(None if first is None else first - now)

    def _try_round(self, waits: list[Wait]) -> None:
        try:
            self._round(waits)
        except Exception as error:  # noqa: BLE001 - cache trouble never ends an engine
            self._counters.add("probe_errors")
            self._log.error("waiting for objects failed; it is tried again", exc_info=error)
            now = time.monotonic()
            for wait in waits:
                self._back_off(wait, now)

    def _round(self, waits: list[Wait]) -> None:
        """Ask for what these waits need next, and look for markers."""
        begin, used = time.monotonic(), time.thread_time()
        asked = [(wait, wait._next()) for wait in waits]
        questions: dict[_Object, tuple[Kind, ObjectRef]] = {}
        for wait, pieces in asked:
            for kind, chunk in pieces:
                key, only = kind_key(chunk.key, kind), wait._missing
                for shard in range(self._shards[kind]) if only is None else (only,):
                    questions[key, shard] = kind, ObjectRef(chunk, shard)
        answers = self._ask(questions)
        if self._threads.replaced():
            # Another thread asks for the same.
            return
        failed = {key for (key, _), found in answers.items() if found is Presence.ERROR}
        seen: list[bytes] = []
        found: list[tuple[Wait, int]] = []
        for wait, pieces in asked:
            count = wait._take(pieces, answers, self._shards)
            found.append((wait, count))
            seen += [kind_key(chunk.key, kind) for kind, chunk in pieces[:count]]
        if seen:
            self._tell(seen)
        self._finish(found)
        now = time.monotonic()
        markers: list[Wait] = []
        pause = self._pause(len(questions), time.thread_time() - used, now - begin)
        for wait, pieces in asked:
            if not failed.isdisjoint(kind_key(chunk.key, kind) for kind, chunk in pieces):
                self._back_off(wait, now)
                continue
            wait._backoff = 0.0
            wait._due = now + pause if wait._missing is not None else now
            if wait._missing is not None and wait._attempt and wait._marker_due <= now:
                markers.append(wait)
        if markers:
            self._look_for_markers(markers)

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

    def _tell(self, seen: Sequence[bytes]) -> None:
        if self._on_seen is not None:
            try:
                self._on_seen(list(dict.fromkeys(seen)))
            except Exception as error:  # noqa: BLE001 - the thread must go on
                self._log.error("a callback for objects that appeared raised", exc_info=error)

    def _finish(self, found: Sequence[tuple[Wait, int]]) -> None:
        """Show the waits how many of their pieces are there, and end those that are over."""
        progress = False
        with self._lock:
            for wait, count in found:
                if wait not in self._waits:
                    continue
                wait.seen += count
                wait.complete = wait.seen == len(wait._pieces)
                wait.gave_up = wait._lost and wait._missing is not None
                progress |= count > 0 or wait.ended
                if wait.ended:
                    del self._waits[wait]
        if progress:
            self._progress_at = time.monotonic()
            self._progress.set()

    def _pause(self, asked: int, used: float, passed: float) -> float:
        """Return the time to the next round, in seconds.

        Parameters
        ----------
        asked : int
            Number of objects that this round has asked for.
        used, passed : float
            Its processor time and its duration, in seconds.
        """
        shortest, cost = _SHORTEST, used / max(1, asked)
        if self._backend.properties.high_latency:
            shortest, cost = max(_SHORTEST_HIGH_LATENCY, passed), max(cost, _HIGH_LATENCY_COST)
        self._cost += (cost - self._cost) / 4 if self._cost else cost
        quiet = time.monotonic() - self._progress_at > _QUIET_SECONDS
        seconds = self._cost * len(self._waits) / (_QUIET_SHARE if quiet else _SHARE)
        self._paused = min(max(shortest, seconds), _LONGEST)
        return self._paused

    @staticmethod
    def _back_off(wait: Wait, now: float) -> None:
        wait._backoff = min(max(2 * wait._backoff, _FIRST_BACKOFF), _LONGEST_BACKOFF)
        wait._due = now + wait._backoff

    # ------------------------------------------------------------------------------------ markers

    def _look_for_markers(self, waits: Sequence[Wait]) -> None:
        high_latency = self._backend.properties.high_latency
        period = _MARKER_SECONDS_HIGH_LATENCY if high_latency else _MARKER_SECONDS
        step = len(waits) if high_latency else _BATCH
        pace = GilPace()
        for begin in range(0, len(waits), step):
            group = waits[begin : begin + step]
            for wait, lost in zip(group, self._gave_up(group), strict=True):
                wait._marker_due = time.monotonic() + period
                if lost:
                    # A piece may have come before the marker: asked for once more, pieces win.
                    wait._lost, wait._due = True, 0.0
            pace.rest()

    def _gave_up(self, waits: Sequence[Wait]) -> list[bool]:
        """Tell of each wait whether its producer's marker is there."""
        kind, chunk = waits[0]._pieces[0]
        folder = self._views[kind].on_storage.name(ObjectRef(chunk, 0)).partition("/")[0]
        names = [f"{folder}/.kvshelf/gave-up/{wait._attempt}" for wait in waits]
        return [isinstance(answer, int) for answer in self._backend.stat(names)]
