"""Known chunks: what was learned a short while ago of kinds of chunks, by their kind keys.

Owns for how long an answer of a high-latency storage, and the failure of a load, hold. Each kind of
a chunk is remembered for itself, by its kind key (:func:`kvshelf.format.kinds.kind_key`).

A chunk is *seen* if all its objects were, and *inferred* if it lies before a chunk that a search
found. Nothing is remembered of what a search has missed.

A *failed* chunk counts as missing for a while: a load failed for it. A *bad* one has a damaged
object; it stays failed until the object is replaced or five minutes are over. Other failures (a
missing object, a storage error) pass in ten seconds. A chunk that fails again soon after it was
released stays failed for twice as long, half an hour at most, so that no object is tried again and
again at a cost to every request.

Contracts
---------
* An answer counts from when it was asked for, and never replaces a newer one: neither what was seen
  since, nor that the chunk has gone.
* What notes something takes a lock for a moment. No method calls the storage. Any thread may call
  them, an engine's step thread too.
* The number of entries is bounded; the oldest are forgotten first.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final

#: Seconds for which an answer holds.
_ANSWER_SECONDS: Final = 60.0
#: Seconds for which a chunk stays failed at first, if its object is bad and if not; and at most.
_FAILED_SECONDS: Final = {True: 300.0, False: 10.0}
_MOST_FAILED_SECONDS: Final = 1800.0
#: Most answers, and most failures.
_LIMIT: Final = 65536


class _Answer(Enum):
    SEEN = "seen"
    INFERRED = "inferred"
    GONE = "gone"


_NEVER: Final = (float("-inf"), _Answer.GONE)


class KnownChunks:
    """What was learned of chunks, see the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: When an answer was asked for, and what it was. The newest stand last.
        self._answers: OrderedDict[bytes, tuple[float, _Answer]] = OrderedDict()
        self._cleared = _NEVER[0]
        #: Until when a chunk is failed, whether it is bad, and for how long it was failed.
        self._failures: OrderedDict[bytes, tuple[float, bool, float]] = OrderedDict()
        #: Until when any chunk is failed.
        self._any_failed_until = 0.0

    def clear(self) -> None:
        """Forget everything, and take no answer that was asked for before."""
        with self._lock:
            self._answers.clear()
            self._failures.clear()
            self._any_failed_until = 0.0
            self._cleared = time.monotonic()

    # ------------------------------------------------------------------------------- answers

    def note_present(self, keys: Iterable[bytes], asked: float, *, seen: bool = True) -> None:
        """Take an answer: these chunks are there.

        Parameters
        ----------
        keys : iterable of bytes
        asked : float
            ``time.monotonic()`` of before the probe was sent, or the search began.
        seen : bool
            All their objects were seen; else they are inferred.
        """
        for key in keys:
            self._note(key, asked, _Answer.SEEN if seen else _Answer.INFERRED)

    def note_appeared(self, keys: Iterable[bytes], asked: float) -> None:
        """Take an answer to a wait: these chunks have appeared, so earlier failures are over."""
        for key in keys:
            self.note_good(key)
            self._note(key, asked, _Answer.SEEN)

    def note_gone(self, key: bytes) -> None:
        """Note that a chunk is not there: a load failed, or it was removed."""
        self._note(key, time.monotonic(), _Answer.GONE)

    def _note(self, key: bytes, asked: float, answer: _Answer) -> None:
        with self._lock:
            if asked <= max(self._cleared, self._answers.get(key, _NEVER)[0]):
                return
            self._answers[key] = asked, answer
            self._answers.move_to_end(key)
            if len(self._answers) > _LIMIT:
                self._answers.popitem(last=False)

    def is_present(self, key: bytes, *, seen: bool) -> bool:
        """Whether a chunk is known to be there; with `seen`, not merely inferred."""
        asked, answer = self._answers.get(key, _NEVER)
        is_there = answer is _Answer.SEEN or (answer is _Answer.INFERRED and not seen)
        return is_there and time.monotonic() < asked + _ANSWER_SECONDS

    def leading_present(self, keys: Sequence[bytes]) -> int:
        """Return how many of `keys` come before the first that is not known to be there."""
        places = enumerate(keys)
        return next((n for n, key in places if not self.is_present(key, seen=False)), len(keys))

    # ------------------------------------------------------------------------------- failures

    def note_failed(self, key: bytes, *, bad: bool) -> None:
        """Note that a load failed for a chunk."""
        self.note_gone(key)
        now = time.monotonic()
        with self._lock:
            seconds = _FAILED_SECONDS[bad]
            before = self._failures.get(key)
            if before is not None and before[0] <= now <= before[0] + before[2]:
                seconds = min(max(seconds, 2 * before[2]), max(seconds, _MOST_FAILED_SECONDS))
            elif before is not None and now < before[0]:
                # Several loads of the same object failed together.
                seconds, bad = max(seconds, before[2]), bad or before[1]
            self._failures[key] = (now + seconds, bad, seconds)
            self._failures.move_to_end(key)
            self._any_failed_until = max(self._any_failed_until, now + seconds)
            if len(self._failures) > _LIMIT:
                self._failures.popitem(last=False)

    def note_good(self, key: bytes) -> None:
        """Allow a failed chunk again, since a good object has been published.

        A chunk that fails again after that waits: its objects are not the cause.
        """
        with self._lock:
            before = self._failures.get(key)
            if before is not None and before[2] <= _FAILED_SECONDS[before[1]]:
                # The entry is kept for as long again, so that a second failure counts as one.
                self._failures[key] = (min(before[0], time.monotonic()), before[1], before[2])

    @property
    def any_failed(self) -> bool:
        """Whether any chunk may be failed."""
        return time.monotonic() < self._any_failed_until

    def has_failed(self, key: bytes) -> bool:
        """Whether a chunk is failed."""
        return time.monotonic() < self._failures.get(key, (0.0,))[0]

    def leading_unfailed(self, keys: Sequence[bytes]) -> int:
        """Return how many of `keys` come before the first that is failed."""
        failed = (n for n, key in enumerate(keys) if self.has_failed(key))
        return next(failed, len(keys)) if self.any_failed else len(keys)

    def is_bad(self, key: bytes) -> bool:
        """Whether a chunk failed because its object is damaged."""
        until, bad, _ = self._failures.get(key, (0.0, False, 0.0))
        return bad and time.monotonic() < until

    def refutes(self, key: bytes, seen_at: float) -> bool:
        """Whether a chunk is failed, or has failed since ``time.monotonic()`` was `seen_at`."""
        until, _, seconds = self._failures.get(key, (0.0, False, 0.0))
        return time.monotonic() < until or seen_at < until - seconds
