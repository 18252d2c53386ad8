"""The chunk keys that loads failed for.

Owns how long a failed key counts as missing. Each kind of a chunk fails for itself, by its kind
key (:func:`kvshelf.format.kinds.kind_key`). It has no thread and does not call the storage; all
methods may be called from any thread, an engine's step thread too.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

#: How long a key stays failed at first, if its object is bad and if not; and at most.
_SECONDS: Final = {True: 300.0, False: 10.0}
_MOST_SECONDS: Final = 1800.0
#: Most keys that are remembered.
_LIMIT: Final = 65536


class FailedKeys:
    """Keys that a load failed for; lookups treat them as missing for a while.

    A *bad* key's object is damaged. The key stays failed until the object is replaced or
    five minutes are over; other failures (a missing object, a storage error) pass in ten seconds. A
    key that fails again soon after it was released stays failed for twice as long, half an hour at
    most, so that no object is tried again and again at a cost to every request. The oldest keys are
    forgotten first.
    """

    def __init__(self) -> None:
        #: Until when a key is failed, whether it is bad, and for how long it was failed.
        self._keys: OrderedDict[bytes, tuple[float, bool, float]] = OrderedDict()
        #: Until when any key is failed.
        self._until = 0.0
        self._lock = threading.Lock()
        self._listeners: list[Callable[[bytes], None]] = []

    @property
    def any(self) -> bool:
        """Whether any key may be failed."""
        return time.monotonic() < self._until

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self._get(key) is not None

    def leading(self, keys: Sequence[bytes]) -> int:
        """Return how many of `keys` come before the first that is failed."""
        failed = (n for n, key in enumerate(keys) if key in self._keys and key in self)
        return next(failed, len(keys)) if self.any else len(keys)

    def is_bad(self, key: bytes) -> bool:
        """Whether `key` failed because its object is damaged."""
        return self._get(key) is True

    def _get(self, key: bytes) -> bool | None:
        until, bad, _ = self._keys.get(key, (0.0, None, 0.0))
        return bad if time.monotonic() < until else None

    def refutes(self, key: bytes, seen_at: float) -> bool:
        """Whether `key` is failed, or has failed since it was seen, however long ago that was."""
        until, _, seconds = self._keys.get(key, (0.0, None, 0.0))
        return time.monotonic() < until or seen_at < until - seconds

    def subscribe(self, listener: Callable[[bytes], None]) -> None:
        """Call `listener` with each key that is added from now on. It must not block."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[bytes], None]) -> None:
        """Stop calling `listener`. Does nothing if it was not subscribed."""
        self._listeners = [registered for registered in self._listeners if registered != listener]

    def add(self, key: bytes, *, bad: bool) -> None:
        """Remember `key`."""
        for listener in self._listeners:
            listener(key)
        now = time.monotonic()
        with self._lock:
            seconds = _SECONDS[bad]
            entry = self._keys.get(key)
            if entry is not None and entry[0] <= now <= entry[0] + entry[2]:
                seconds = min(max(seconds, 2 * entry[2]), max(seconds, _MOST_SECONDS))
            elif entry is not None and now < entry[0]:
                # Several loads of the same object failed together.
                seconds, bad = max(seconds, entry[2]), bad or entry[1]
            self._keys[key] = (now + seconds, bad, seconds)
            self._keys.move_to_end(key)
            self._until = max(self._until, now + seconds)
            while len(self._keys) > _LIMIT:
                self._keys.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """Allow `key` again, since a good object has been published.

        A key that fails again after that waits: its objects are not the cause.
        """
        with self._lock:
            entry = self._keys.get(key)
            if entry is not None and entry[2] <= _SECONDS[entry[1]]:
                # The entry is kept for as long again, so that a second failure counts as one.
                self._keys[key] = (min(entry[0], time.monotonic()), entry[1], entry[2])

    def clear(self) -> None:
        """Forget all keys."""
        with self._lock:
            self._keys.clear()
