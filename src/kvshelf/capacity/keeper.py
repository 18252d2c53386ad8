"""Keeps a shelf within its bounds, on a thread of its own (``kvshelf-capacity``).

Owns that thread, and what bounds the stores of one process (:class:`Keeper`). Every process that
stores to a shelf has a keeper, and each pays for what it stores: it may write a part of what is
left below ``max_bytes`` (its *credit*), and then visits the next slice of the shelf. A *visit*
lists the slice and deletes from it (:mod:`kvshelf.capacity.visit`). Nothing that a visit finds is
kept but a few numbers: how many bytes each group has, and at which age chunks are deleted. A write
without credit waits for the next visit. Where there is no room for a chunk of each keeper, they
take turns by the storage's clock, in the order of their names.

=================  =====================================================================
a visit is due     when
=================  =====================================================================
for ``max_bytes``  half of the credit is used up, or the shelf is above 97 % of its bound
for ages           a part of the least age has passed: all keepers together visit all of
                   the shelf in an eighth of ``max_age``, in an hour at most
for quotas         a twentieth of the slice's share of a quota was written, or a minute passed
for a full disk    a write found no space, for one round
to pay             stores are paid for, and one was refused or the next ones would be
for leftovers      a process stored within three hours: as for ages, all of it in an hour
=================  =====================================================================

Without ``max_bytes`` a directory of which little is free pays for a store by deleting as many bytes
as it writes, the oldest first, nothing used within an hour: the shelf stops growing, and does not
shrink because others write to the disk. Below half of the reserve that stores leave free, it pays
only with what the storage shows as free after the deletion. Where a write found no inode, or a
quota reached, stores are paid for during an hour, also below ``max_bytes``. A write that finds it
again although stores were paid for makes visits free four times as much, up to
:data:`_MOST_FREED_AT_ONCE`. A quota may count deletions late, or count more than a store's bytes.

Contracts
---------
* Visits take 1 % of a core; where stores have used up half of the credit, a quarter at most, and
  where they are refused nine tenths. Each takes as long as a slice with :data:`SLICE` chunks needs.
* Nothing is deleted because of its age while the storage's clock, by the time of the keeper's own
  marker, and this machine's differ by more than an hour.
* Threads that write wait for this one, for a few seconds, and so does :meth:`Keeper.close`, for
  half a second. It calls the storage without the deadlines of loads and stores: its errors open
  no circuit breaker. While the one for reads is open it leaves the storage alone.
* :meth:`Keeper.allows` and :meth:`Keeper.end` may be called on any thread, and never block.
* An error ends a visit, is logged, and the next begins later. Where deleting is not allowed, one
  log line an hour says so.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from kvshelf.backends.base import Space
from kvshelf.backends.guard import GuardedBackend
from kvshelf.background import Background
from kvshelf.capacity import keepers
from kvshelf.capacity.keepers import NEVER_OLD, time_for_ages
from kvshelf.capacity.parallel import PatientBackend
from kvshelf.capacity.uses import resolution
from kvshelf.capacity.visit import (
    FANS,
    HOUR,
    KEEPERS,
    SLICE,
    Cuts,
    Group,
    Lister,
    Outcome,
    Part,
    Picked,
    Reason,
    Rules,
    aged,
    delete,
    is_old,
    reason_to_delete,
    same_age,
    score,
)
from kvshelf.config import CapacityConfig
from kvshelf.errors import NoSpaceStorageError, StorageError, printable
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.shelf.pacing import GilPace
from kvshelf.shelf.pins import PINS, Pins

logger = logging.getLogger(__name__)

#: Shares of a bound: above the first a visit deletes chunks down to it, on average over slices;
#: down to the second in any case.
LOW: Final = 0.92
HIGH: Final = 0.97
#: Part of a slice's share of the bound that is written from one visit to the next.
_STEP: Final = 0.05
#: Those that begin together do not know each other yet: at the first look at the markers so many
#: keepers are assumed, and at each later one a part of them.
_MOST_UNKNOWN: Final = 256
_KNOWN_PART: Final = 16
#: Most keepers that share the visits for ages.
_MOST_SHARING: Final = 64
#: Seconds for which a credit counts, and of a turn where there is no room for all.
_CREDIT_SECONDS: Final = 30.0
_TURN_SECONDS: Final = 0.25
#: Seconds that a write waits for a visit to make room.
_WAIT_SECONDS: Final = 5.0
#: Seconds in which all pins are read.
_PINS_SECONDS: Final = 60.0
#: Of a storage that says nothing.
_UNKNOWN: Final = Space(free=1 << 62, total=0)
#: Slices over which numbers are smoothed.
_SMOOTH: Final = 5
#: What stores leave free: a part of the storage, at most this many bytes; of a filesystem in
#: memory a part whatever its size.
_FREE_PART: Final = 0.05
_FREE_BYTES: Final = 20 << 30
_FREE_PART_IN_MEMORY: Final = 0.10
#: Seconds from one look at the free space to the next while stores come, and otherwise.
_LOOK_SECONDS: Final = 1.0
_IDLE_SECONDS: Final = 60.0
#: Seconds for which the time of the own marker counts.
_HEARTBEAT_SECONDS: Final = 30.0
#: Processes that begin together know each other once they say so at this pace.
_FIRST_HEARTBEATS_SECONDS: Final = 1.0
#: Seconds of rest for each second of work; where stores need it soon, and where they were refused.
_REST: Final = 99.0
_HURRY: Final = 3.0
_RUSH: Final = 0.1
#: Seconds after its last store for which a process looks for leftovers of an hour.
_LEAVES_SECONDS: Final = 3 * HOUR
#: Least pause of the thread, and the pauses after an error and after a refusal.
_LEAST_PAUSE: Final = 0.02
_TROUBLE_SECONDS: Final = 30.0
_REFUSED_SECONDS: Final = 3600.0
#: Seconds from one round for leftovers on a full disk to the next.
_FULL_SECONDS: Final = 600.0
#: Times the largest store that a visit frees at once, and at most where a quota is reached again.
_FREED_AT_ONCE: Final = 4.0
_MOST_FREED_AT_ONCE: Final = 256.0
#: Most groups that lost objects of which a log line tells.
_MOST_GROUPS: Final = 32
_JOIN_SECONDS: Final = 0.5
_WHY: Final = {
    Reason.AGE: "max_age",
    Reason.GROUP: "group_max_bytes",
    Reason.SIZE: "max_bytes",
    Reason.TAIL: "tail",
}


def least_free(space: Space) -> int:
    """Return the bytes that stores leave free on a storage."""
    if space.memory:
        return int(space.total * _FREE_PART_IN_MEMORY)
    return min(int(space.total * _FREE_PART), _FREE_BYTES)


class Keeper:
    """One process's part in keeping a shelf within its bounds.

    Parameters
    ----------
    guard : GuardedBackend
        Of the shelf. Its writes ask the keeper from :meth:`start` on.
    capacity : CapacityConfig
    counters : Counters
        Gets ``visits``, ``visit_seconds``, ``visit_errors``, ``shelf_evicted_objects``,
        ``shelf_evicted_bytes``, ``leftovers_deleted``, and the gauges ``shelf_used_bytes``,
        ``shelf_limit_bytes``, ``storage_free_bytes``, ``unlisted_folders`` and
        ``clock_difference_seconds``.
    on_thread_start : Callable, optional
        Called first on the thread, to set its processors.
    """

    def __init__(
        self,
        guard: GuardedBackend,
        capacity: CapacityConfig,
        counters: Counters,
        *,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self._guard = guard
        self._counters = counters
        self._max_bytes = capacity.max_bytes
        self._group_max_bytes = capacity.group_max_bytes
        self._rules = Rules(max_age=capacity.max_age)
        self._resolution = resolution(capacity.max_age)
        self._log = RateLimitedLog(logger, seconds=HOUR)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread = Background("kvshelf-capacity", self._turn, on_start=on_thread_start)
        self._end: threading.Event | None = None
        self._name = secrets.token_hex(8)
        self._storage = PatientBackend(guard.inner)
        pace = GilPace().rest
        self._lister = Lister(self._storage, stop=self._stops, pace=pace, samples=True)
        self._next = secrets.randbelow(FANS)
        #: Folders of a slice, as the last visit had them.
        self._width = 1
        #: The bytes used on the storage, and what is known of the shelf.
        self._storage_used = math.inf
        self._shelf = Group(nbytes=0.0)
        #: Estimated bytes written since the last listing, if all keepers write as much as this one.
        self._bytes_since_listed = 0.0
        #: The number of keepers, the place of this one, how many there may be; what the storage's
        #: clock is ahead of the monotonic one, and when that was learned.
        self._keepers = 1
        self._rank, self._unknown = 0, _MOST_UNKNOWN * _KNOWN_PART
        self._clock_ahead = 0.0
        self._heartbeat_at = -math.inf
        self._heartbeat_seconds = 0.1
        self._knows_time = False
        #: When visits are possible again, the last one ended, and the seconds that it worked.
        self._trouble_until = 0.0
        self._ended = 0.0
        self._cost = self._wall = 0.0
        self._visited_for_ages_at = 0.0
        self._looked_at = -math.inf
        #: What may be written for the bound, and because of free space; what is under way.
        self._granted = self._credit = math.inf
        self._free = math.inf
        #: Until when the credit counts, and how many keepers have one at a time.
        self._credit_until = math.inf
        self._at_once = self._unknown
        #: Whether the last visit left room for a store of one of them.
        self._has_room = True
        self._begun = self._written = self._largest = 0
        self._asked = self._refused = False
        self._why = ("", "")
        #: Whether stores are paid for, and when that may be tried again; bytes that are free on the
        #: storage, and that stores leave free.
        self._frees_disk_space = False
        self._frees_again_at = -math.inf
        #: What is used up beside bytes, and until when stores are paid for because of it.
        self._short_of = ""
        self._short_until = -math.inf
        self._freed_at_once = _FREED_AT_ONCE
        self._storage_free = self._reserve = 0
        #: Slices to visit because a write found no space, and when that may be tried again.
        self._full_left = 0
        self._full_at = 0.0
        #: Folders that were visited in vain: stores have no room, and nothing could be deleted.
        self._folders_without_gain = 0
        self._pins: Pins | None = None
        #: Names of files that could not be deleted, and until when that is not tried again.
        self._stuck: set[str] = set()
        self._stuck_until = 0.0
        #: Until when there may be leftovers of this process.
        self._leaves_until = -math.inf
        if self._max_bytes is not None:
            # Nothing is stored before the first visit.
            self._granted = self._credit = 0.0
            text = "a store is dropped: the first visit has not ended; loads continue"
            self._why = "max_bytes", text
            counters.set_gauge("shelf_limit_bytes", self._max_bytes)

    def start(self) -> None:
        """Begin. Never blocks. Idempotent."""
        # Where the system allows no thread now, the next call tries again.
        if self._thread.start():
            self._guard.bound = self
            self._guard.on_full = self.found_full

    def close(self) -> None:
        """Lift the bounds, and end the thread, unless it waits for the storage. Idempotent."""
        if self._guard.bound is self:
            self._guard.bound = None
        if self._thread.running and self._end is None:
            self._end = threading.Event()
            self._thread.wake()
            self._end.wait(_JOIN_SECONDS)
        # A thread that is inside compiled code when Python ends would crash the process.
        self._thread.close(_JOIN_SECONDS)

    # ------------------------------------------------------------- stores

    def allows(self, nbytes: int) -> bool:
        """Whether `nbytes` may be stored now, or once the next visit has made room. Never blocks.

        The log says why not, once an hour for each cause.
        """
        return self._ask(nbytes, take=False)

    def begin(self, nbytes: int) -> bool:
        """Reserve space for a write that begins now, and wait for it if visits may make room.

        Returns False, and reserves nothing, where there is none.
        """
        return self._ask(nbytes, take=True)

    def end(self, nbytes: int, written: bool) -> None:
        """Note that a write has ended, and whether it wrote anything."""
        with self._lock:
            self._begun -= nbytes
            if written:
                self._written += nbytes
            else:
                self._credit += nbytes
                self._free += nbytes

    def found_full(self, error: NoSpaceStorageError) -> None:
        """Note that a write found the storage full, and of what."""
        with self._lock:
            if error.short_of != "bytes":
                now = time.monotonic()
                if now >= self._short_until:
                    self._freed_at_once = _FREED_AT_ONCE
                elif self._free > 0 and self._freed_at_once < _MOST_FREED_AT_ONCE:
                    self._freed_at_once *= 4
                elif self._free > 0 and not self._written:
                    # What is deleted frees nothing.
                    self._frees_again_at = now + _FULL_SECONDS
                self._short_of, self._short_until = error.short_of, now + HOUR
                # Others may have taken what was paid for.
                self._free, self._refused = 0.0, True
            if not self._full_left and time.monotonic() >= self._full_at:
                self._full_left = FANS
        self._looked_at = -math.inf
        self._thread.wake()

    def hands_over(self) -> None:
        """Note that tails and markers of hand-overs are stored: they are to be deleted."""
        now = time.monotonic()
        if self._leaves_until < now + _LEAVES_SECONDS - _IDLE_SECONDS:
            self._leaves_until = now + _LEAVES_SECONDS
            self._thread.wake()

    def _ask(self, nbytes: int, take: bool) -> bool:
        end = time.monotonic() + _WAIT_SECONDS
        with self._changed:
            self._asked = True
            # Nothing is deleted for what will never fit.
            if self._largest < nbytes <= (self._max_bytes or math.inf):
                self._largest = nbytes
            while not (allowed := nbytes <= min(self._usable_credit(), self._free)):
                # Each visit begins anew with what was refused.
                self._refused = True
                self._thread.wake()
                left, soon = end - time.monotonic(), self._may_make_room(nbytes)
                if not (soon and take and left > 0):
                    break
                self._changed.wait(min(left, _LOOK_SECONDS))
            if allowed and take:
                self._begun += nbytes
                self._credit -= nbytes
                self._free -= nbytes
            pays_ahead = self._frees_disk_space and self._free < 2 * self._largest
            if pays_ahead or self._credit < self._granted / 2:
                self._thread.wake()
            why, text = self._why
        if allowed or (soon and not take):
            return True
        if why:
            self._warn(why, text)
        return False

    def _usable_credit(self) -> float:
        return self._credit if time.monotonic() < self._credit_until else 0.0

    def _may_make_room(self, nbytes: int) -> bool:
        """Whether visits may soon make room for `nbytes`. Holds the lock."""
        fits = nbytes <= (self._max_bytes or math.inf) and (
            self._frees_disk_space or nbytes <= self._free
        )
        works = self._end is None and time.monotonic() >= self._trouble_until
        return fits and works and self._folders_without_gain < FANS

    # ------------------------------------------------------------- its thread

    def _stops(self) -> bool:
        return self._end is not None or not self._guard.reads.is_closed

    def _turn(self) -> float | None:
        """Do what is due; return the seconds to the next call."""
        if self._end is not None:
            if self._heartbeat_at > -math.inf:
                with suppress(StorageError):
                    self._storage.delete([f"{KEEPERS}/{self._name}"])
            self._end.set()
            return None
        if self._stops():
            return _TROUBLE_SECONDS
        try:
            self._update_free_space()
            self._renew_heartbeat()
            while (pause := self._seconds_to_visit()) <= 0 and not self._stops():
                self._visit()
                self._update_free_space()
        except StorageError as error:
            self._counters.add("visit_errors")
            logger.debug("%s: a visit failed: %s", self._guard.url, error)
            pause = _TROUBLE_SECONDS if error.retryable else _REFUSED_SECONDS
            if not error.retryable:
                self._warn(
                    "refused",
                    f"the storage does not allow to list or to delete ({error}): its bounds are not"
                    " kept by this process, which tries again in an hour. Allow it, or run"
                    " `kvshelf gc` as a user who may",
                )
        except Exception as error:  # noqa: BLE001  no file on a shelf may lift its bounds
            self._counters.add("visit_errors")
            self._log.error("%s: a visit failed", self._guard.url, exc_info=error)
            pause = _REFUSED_SECONDS
        else:
            return max(_LEAST_PAUSE, min(pause, self._seconds_to_look(), self._renew_heartbeat()))
        self._trouble_until = time.monotonic() + pause
        return self._seconds_to_look()

    def _warn(self, about: str, text: str) -> None:
        """Log a warning, one an hour about each subject."""
        self._log.warning("%s: %s", self._guard.url, text, about=about)

    # ------------------------------------------------------------- free space

    def _seconds_to_look(self) -> float:
        """Return the seconds to the next look at the free space."""
        seconds = _LOOK_SECONDS if self._asked else _IDLE_SECONDS
        return max(0.0, self._looked_at + seconds - time.monotonic())

    def _update_free_space(self, *, at_once: bool = False) -> None:
        """Update what stores may write because of free space, if it is time."""
        if self._seconds_to_look() > 0 and not at_once:
            return
        self._asked, self._looked_at = False, time.monotonic()
        try:
            space = self._storage.make("", self._guard.inner.space) or _UNKNOWN
        except StorageError as error:
            logger.debug("%s: its free space is not known: %s", self._guard.url, error)
            return
        kept = least_free(space)
        if space.total:
            self._counters.set_gauge("storage_free_bytes", space.free)
        self._storage_used = space.total - space.free if space.total else math.inf
        self._storage_free, self._reserve = space.free, kept
        with self._lock:
            left = space.free - kept - self._begun
            paid = self._free if self._frees_disk_space else 0.0
            # All processes see the same free space.
            least = self._largest if left >= self._largest else 0
            self._free = max(left / 2, least, 0.0) if kept else math.inf
            short = time.monotonic() < self._short_until
            full = short or self._free < max(self._largest, 1) or self._full_left > 0
            pays = short or (full and self._max_bytes is None and kept > 0)
            self._frees_disk_space = pays and time.monotonic() >= self._frees_again_at
            if self._frees_disk_space:
                self._free = max(0.0, min(paid, space.free))
            pays = self._frees_disk_space
            if not full and self._why[0] == "free":
                self._why = ("", "")
            elif full and kept and not self._frees_disk_space:
                self._why = (
                    "free",
                    f"{space.free} bytes are free, and stores leave {kept} free: nothing is stored"
                    " until more is free; loads continue",
                )
        if pays:
            why = f"{space.free} bytes are free, and stores leave {kept} free"
            if short:
                why = f"its {self._short_of} ran out, which is looked at again in an hour"
            self._warn(
                "pays",
                f"{why}: each store deletes as many bytes of the chunks that were used longest ago."
                " capacity.max_bytes bounds the shelf",
            )

    # ------------------------------------------------------------- when a visit is due

    def _seconds_to_visit(self) -> float:
        """Return the seconds until the next visit; 0 or less: it is due."""
        now = time.monotonic()
        if self._guard.written:
            self._guard.written.clear()
            if self._guard.inner.properties.temporaries:
                self._leaves_until = now + _LEAVES_SECONDS
        with self._lock:
            # What is written while a visit takes place must fit as well.
            written_during_visit = self._written / max(now - self._ended, _LEAST_PAUSE) * self._wall
            credit_is_low = self._credit < max(self._granted / 2, written_during_visit) or (
                self._refused and self._usable_credit() < self._largest
            )
            pays_ahead = self._written and self._free < 2 * self._largest
            pays_for_stores = self._frees_disk_space and (self._refused or pays_ahead)
        used_bytes, bound = self._used(), self._max_bytes
        earliest_visit_in = self._ended + self._cost * _REST - now
        # Where whole rounds found nothing to delete for stores, they wait for ages and for others,
        # longer with each round.
        urgent_visit_in = self._ended + self._cost * (_HURRY if not self._refused else _RUSH) - now
        if self._folders_without_gain >= FANS:
            pause = min(self._folders_without_gain / FANS, _IDLE_SECONDS)
            urgent_visit_in = max(earliest_visit_in, self._ended + pause - now)
        next_visit_in = math.inf
        if bound is not None and (not self._ended or used_bytes > HIGH * bound):
            next_visit_in = earliest_visit_in
        if bound is not None and credit_is_low:
            next_visit_in = max(urgent_visit_in, -self._turn_left())
        if pays_for_stores or self._full_left:
            next_visit_in = min(next_visit_in, urgent_visit_in)
        age = self._rules.max_age
        if age is not None or now < self._leaves_until:
            # All keepers together visit all of the shelf in a period.
            period = HOUR if age is None else min(HOUR, max(age / 8, 60.0))
            pause = period * self._width / FANS * min(self._keepers, _MOST_SHARING)
            next_visit_in = min(
                next_visit_in, max(earliest_visit_in, self._visited_for_ages_at + pause - now)
            )
        quota = self._group_max_bytes
        if quota is not None:
            if self._written >= _STEP * quota * self._width / FANS:
                next_visit_in = min(next_visit_in, earliest_visit_in)
            elif self._written:
                next_visit_in = min(
                    next_visit_in, max(earliest_visit_in, self._ended + _IDLE_SECONDS - now)
                )
        return max(next_visit_in, self._trouble_until - now)

    def _turn_left(self) -> float:
        """Return the seconds for which this keeper may have a credit; below 0: until it may.

        Where there is no room for a store of each keeper, some have a turn, and then the next ones.
        """
        now, count = time.monotonic() + self._clock_ahead, max(self._keepers, self._unknown)
        turns, passed = (self._rank - int(now // _TURN_SECONDS)) % count, now % _TURN_SECONDS
        if count <= self._at_once:
            return _CREDIT_SECONDS
        if turns < self._at_once:
            return min((turns + 1) * _TURN_SECONDS - passed, _CREDIT_SECONDS)
        return passed - (turns - self._at_once + 1) * _TURN_SECONDS

    # ------------------------------------------------------------- a visit

    def _heartbeat(self) -> float:
        """Return the storage's time; write this keeper's marker if that was not done lately."""
        if time.monotonic() >= self._heartbeat_at + self._heartbeat_seconds:
            # Those that begin together soon know each other.
            self._heartbeat_seconds = min(2 * self._heartbeat_seconds, _HEARTBEAT_SECONDS)
            said = {
                "by": f"{socket.gethostname()[:80]} {os.getpid()}",
                "bytes": int(self._used()),
                "max_bytes": self._max_bytes,
                "max_age": self._rules.max_age,
                "group_max_bytes": self._group_max_bytes,
                "evicts_after": self._evicts_after(),
            }
            self._heartbeat_at, self._knows_time = time.monotonic(), True
            try:
                say = partial(keepers.say, self._guard.inner, self._name, said)
                at, self._rank, self._keepers = self._storage.make(KEEPERS, say)
            except StorageError as error:
                at = time.time()
                self._knows_time = bool(self._guard.inner.properties.local_path)
                if not self._knows_time:
                    refused = isinstance(error, PermissionError)
                    advice = f". Allow this user to write below {KEEPERS}" if refused else ""
                    self._warn(
                        "time",
                        "the time of the storage is not known, and nothing is deleted because of"
                        f" its age: {error}{advice}",
                    )
            self._unknown //= _KNOWN_PART
            self._clock_ahead = at - self._heartbeat_at
            self._counters.set_gauge("clock_difference_seconds", round(abs(at - time.time())))
        return time.monotonic() + self._clock_ahead

    def _renew_heartbeat(self) -> float:
        """Write the marker if it is time, where no visit did; return the seconds until it is."""
        begins = self._heartbeat_seconds < _FIRST_HEARTBEATS_SECONDS
        if not self._ended or not (begins or self._written):
            return math.inf
        pause = self._heartbeat_seconds if begins else keepers.ALIVE_SECONDS / 2
        left = self._heartbeat_at + pause - time.monotonic()
        if left <= 0:
            self._heartbeat()
        return max(left, _LEAST_PAUSE)

    def _evicts_after(self) -> float | None:
        """Return the age at which chunks that were used are deleted."""
        return None if self._shelf.cut is None else max(self._shelf.cut, 1.0)

    def _visit(self) -> None:
        """List the next slice, and delete from it."""
        begin = time.thread_time() + self._storage.cpu_seconds
        begun = time.monotonic()
        try:
            self._visit_next()
        finally:
            self._cost = time.thread_time() + self._storage.cpu_seconds - begin
            self._ended = time.monotonic()
            self._wall = self._ended - begun
            self._counters.add("visit_seconds", self._cost)
        self._counters.add("visits")

    def _visit_next(self) -> None:
        now = self._heartbeat()
        if time.monotonic() >= self._stuck_until:
            self._stuck, self._stuck_until = set(), time.monotonic() + HOUR
        with self._lock:
            self._refused, largest = False, self._largest
            self._bytes_since_listed += self._keepers * self._written
            self._written = 0
        first = self._next
        # What fails is not met again at once.
        self._next = (first + self._width) % FANS
        part, listed = self._lister.visit(first, self._width, SLICE, now)
        self._next = (first + listed) % FANS
        if self._stops():
            return
        self._width = min(FANS, max(1, -(-listed * SLICE // max(part.chunks, 1))))
        self._visited_for_ages_at = time.monotonic()
        self._full_left = max(0, self._full_left - listed)
        if not self._full_left:
            self._full_at = time.monotonic() + _FULL_SECONDS
        self._counters.set_gauge("unlisted_folders", len(part.skipped))
        for folder, error in list(part.skipped.items())[:1]:
            text = f"the folder {printable(folder)} cannot be listed, and nothing in it is deleted"
            self._warn(folder, f"{text}: {error}")
        # What the storage says is used lacks what was written since it was asked.
        self._update_free_space(at_once=True)
        self._note_held(part, listed / FANS)
        # Stores need not wait for the deletion.
        self._grant()
        outcome = self._delete_from(part, now, listed / FANS, largest)
        self._grant()
        # No visit gives back what others took of the storage.
        has_room = self._free >= self._largest if self._frees_disk_space else self._has_room
        self._folders_without_gain = (
            0 if has_room or outcome.nbytes else self._folders_without_gain + listed
        )
        if outcome.count:
            self._log_deletions(outcome)
        if outcome.error is not None:
            if outcome.is_refused:
                raise outcome.error
            text = f"{outcome.failed} files could not be deleted, which is tried again in an hour"
            self._warn("stuck", f"{text}: {outcome.error}")

    def _used(self) -> float:
        """Return the estimated bytes of all objects: never more than the storage says is used."""
        return max(
            0.0, min((self._shelf.nbytes or 0.0) + self._bytes_since_listed, self._storage_used)
        )

    def _note_held(self, part: Part, share: float) -> None:
        """Update the estimated bytes of each group by what a share of the shelf has."""
        found = dict.fromkeys(part.seen, 0)
        for unit in part.units:
            found[unit.where] += unit.nbytes
        for where, nbytes in found.items():
            seen, _ = part.seen[where]
            group, now = self._lister.group(where), nbytes / seen
            before = now if group.nbytes is None else group.nbytes
            group.nbytes = before + (now - before) * max(seen, 1 / _SMOOTH)
        if found:
            self._bytes_since_listed *= 1 - max(share, 1 / _SMOOTH)
        spaces = self._lister.groups.values()
        self._shelf.nbytes = sum(
            group.nbytes or 0.0 for space in spaces for group in space.values()
        )

    def _delete_from(self, part: Part, now: float, share: float, largest: int) -> Outcome:
        """Delete what the rules say from a slice."""
        storage, rules = self._storage, self._rules
        old_at = time_for_ages(now, self._guard.url) if self._knows_time else NEVER_OLD
        # Without the pins nothing may be deleted but leftovers.
        pins_at = old_at if old_at != NEVER_OLD else now
        load = partial(Pins.load, self._guard.inner, pins_at, self._pins)
        pins = self._pins = storage.make(PINS, load, _PINS_SECONDS)
        if pins.problem is not None:
            self._warn("pins", pins.problem)
        # Where the oldest cannot be deleted, the next ones are.
        part.units = [unit for unit in part.units if self._stuck.isdisjoint(unit.names)]
        kept = [bool(pins) and pins.covers(u.space, u.group, u.key) for u in part.units]
        same = same_age(self._evicts_after() or HOUR, self._resolution)
        scores = [score(aged(unit, now), unit.place, same) for unit in part.units]
        cuts = self._update_thresholds(part, scores, kept, now, max(share, 1 / _SMOOTH), largest)
        picked: list[Picked] = []
        for unit, scored, pinned in zip(part.units, scores, kept, strict=True):
            why = reason_to_delete(unit, rules, cuts, scored, old_at, pinned=pinned)
            # What pays for stores was not used within an hour.
            pays = why is Reason.SIZE and self._max_bytes is None
            if why is not None and not (pays and unit.used >= now - HOUR):
                picked.append((unit, why))
        picked += (
            (leftover, leftover.reason)
            for leftover in part.leftovers
            if is_old(leftover, rules, old_at) and leftover.name not in self._stuck
        )
        outcome = delete(storage, picked, now=now, stop=self._stops, pace=GilPace().rest)
        self._stuck |= outcome.stuck
        self._count(outcome)
        return outcome

    def _update_thresholds(
        self,
        part: Part,
        scores: list[float],
        kept: list[bool],
        now: float,
        weight: float,
        largest: int,
    ) -> Cuts:
        """Update the scores from which on units are deleted; return them by group."""
        cuts: dict[str, float] = {}
        oldest_first = sorted(
            (i for i, pinned in enumerate(kept) if not pinned), key=scores.__getitem__, reverse=True
        )
        if self._group_max_bytes is not None:
            groups: dict[str, list[int]] = {}
            for i in oldest_first:
                unit = part.units[i]
                if unit.group != "_":
                    groups.setdefault(unit.where, []).append(i)
            for where, group_units in groups.items():
                (sampled_fraction, _), group = part.seen[where], self._lister.group(where)
                estimated_bytes = group.nbytes or 0.0
                units = [(scores[i], part.units[i].nbytes) for i in group_units]
                low, high = (
                    (estimated_bytes - share * self._group_max_bytes) * sampled_fraction
                    for share in (LOW, HIGH)
                )
                cuts[where] = group.move_cut(units, low, high, weight)
        bytes_to_free = (
            max(self._freed_at_once * largest - self._free, 0.0) if self._frees_disk_space else 0.0
        )
        low = high = bytes_to_free
        if self._max_bytes is None:
            oldest_first = [i for i in oldest_first if part.units[i].used < now - HOUR]
        else:
            estimated_bytes = self._used()
            # There must be room for one more store, also below a small bound.
            room = min(2 * largest, self._max_bytes / 2)
            low = estimated_bytes - min(LOW * self._max_bytes, self._max_bytes - room)
            high = estimated_bytes - min(HIGH * self._max_bytes, self._max_bytes - room / 2)
            sampled_fraction = sum(unit.nbytes for unit in part.units) / max(estimated_bytes, 1.0)
            low, high = (
                max(low * sampled_fraction, bytes_to_free),
                max(high * sampled_fraction, bytes_to_free),
            )
        units = [(scores[i], part.units[i].nbytes) for i in oldest_first]
        cuts[""] = self._shelf.move_cut(units, low, high, weight)
        return cuts

    def _count(self, outcome: Outcome) -> None:
        """Count what was deleted, and what is left."""
        chunks = [Reason.AGE, Reason.GROUP, Reason.SIZE]
        for reason, total in outcome.deleted.items():
            if reason in chunks:
                self._counters.add("shelf_evicted_objects", total.count)
                self._counters.add("shelf_evicted_bytes", total.nbytes)
            else:
                self._counters.add("leftovers_deleted", total.count)
        self._bytes_since_listed -= sum(lost.nbytes for lost in outcome.lost.values())
        if self._frees_disk_space and outcome.nbytes:
            before = self._storage_free
            self._update_free_space(at_once=True)
            paid = float(outcome.nbytes)
            if before < self._reserve / 2:
                # What was deleted may free nothing: a backup may link to it, a snapshot have it.
                paid = max(0.0, min(paid, self._storage_free - before))
                self._frees_again_at = time.monotonic() + (0.0 if paid else _FULL_SECONDS)
            with self._lock:
                self._free += paid
                self._changed.notify_all()

    def _grant(self) -> None:
        """Say how much may be written until the next visit."""
        held, bound = self._used(), self._max_bytes
        self._counters.set_gauge("shelf_used_bytes", held)
        if bound is None:
            return
        with self._lock:
            count = max(self._keepers, self._unknown)
            left = max(0.0, bound - held - self._begun)
            if left < count * self._largest:
                # Those whose turn it is do not know what the last ones still write.
                left /= 2
            self._has_room = left >= max(self._largest, 1)
            self._at_once = min(count, max(1, int(left // max(self._largest, 1))))
            far = min(LOW * bound - held, _STEP * bound) / count
            step = max(_STEP * bound * self._width / FANS, far, self._largest)
            seconds = self._turn_left()
            self._granted = min(left / self._at_once, step) if seconds > 0 else 0.0
            self._credit_until = time.monotonic() + seconds
            # `held` lacks what was written since the last visit began.
            self._credit = max(0.0, self._granted - self._written)
            self._changed.notify_all()
            if self._why[0] != "free":
                self._why = (
                    "max_bytes",
                    f"a store is dropped: it holds about {held:.0f} bytes of max_bytes {bound}, and"
                    " this process has written what it may until its next visit; loads continue",
                )

    def _log_deletions(self, outcome: Outcome) -> None:
        """Log what was deleted."""
        now, groups = time.monotonic() + self._clock_ahead, []
        for (where, reason), lost in list(outcome.lost.items())[:_MOST_GROUPS]:
            idle = max(0.0, now - lost.oldest)
            groups.append(
                f"{where}: {lost.count} objects, {lost.nbytes} bytes, the oldest unused for"
                f" {idle:.0f} s ({_WHY.get(reason, reason.value)})"
            )
        logger.info(
            "%s: deleted %d files, %d bytes; about %.0f bytes are left; %s",
            self._guard.url,
            outcome.count,
            outcome.nbytes,
            self._used(),
            "; ".join(groups),
        )
