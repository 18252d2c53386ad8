"""What a worker knows of chunks that it stored or dropped.

Owns the memory of which chunks of one kind were dropped, published and repaired here, for all
requests that share them. Each has a bound: the youngest are remembered.

A lookup never finds a chunk of kind full whose parent is missing from the shelf. So after such a
chunk was dropped or its store failed, its children are dropped as well: memory is better used for
prefixes that begin. Windows and states have no such rule: a hit needs them near its end only. A
chunk counts as dropped until it is stored here. A request whose lookup came after the drop ignores
it: the lookup has seen what is before its first chunk, perhaps stored by another engine, and the
request itself stores the dropped chunk if it is still missing.

Contracts
---------
* Any thread may call all methods; none calls the storage.
* One lock, of its own: nothing else is called with it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, Kind, kind_key

_PUBLISHED_MEMORY = 65536
_DROPPED_MEMORY = 16384
#: Scheduler and worker exchange times as ages, which grow in transit.
_AGE_SLACK_SECONDS = 0.1


class StoreHistory:
    """The chunks of one kind that were stored or dropped.

    Parameters
    ----------
    kind : Kind
    """

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._dropped_at: OrderedDict[bytes, float] = OrderedDict()
        self._published_at: OrderedDict[bytes, float] = OrderedDict()
        #: Since the last call that took them; perhaps no caller ever takes them.
        self._repaired: deque[bytes] = deque(maxlen=_PUBLISHED_MEMORY)

    def note_dropped(self, key: bytes) -> None:
        """Note that a chunk is not stored."""
        with self._lock:
            _note(self._dropped_at, key, _DROPPED_MEMORY)

    def note_queued(self, key: bytes) -> None:
        """Note that a chunk will be stored after all."""
        with self._lock:
            self._dropped_at.pop(key, None)

    def note_repaired(self, key: bytes) -> None:
        """Note that the bad object of a chunk is replaced."""
        self._repaired.append(key)

    def note_published(self, key: bytes) -> None:
        """Note that a chunk is on the shelf."""
        with self._lock:
            _note(self._published_at, key, _PUBLISHED_MEMORY)

    def follows_dropped(self, chunk: Chunk, seen_at: float) -> bool:
        """Whether the chunk before `chunk` was dropped after `seen`; then `chunk` is as well."""
        if self._kind != FULL:
            return False
        dropped_at = self._dropped_at.get(chunk.parent)
        if dropped_at is None or dropped_at < seen_at - _AGE_SLACK_SECONDS:
            return False
        self.note_dropped(chunk.key)
        return True

    def published_after(self, key: bytes, seen_at: float) -> bool:
        """Whether a chunk was published here after `seen`."""
        published_at = self._published_at.get(key)
        return published_at is not None and published_at >= seen_at

    def take_repaired(self) -> list[bytes]:
        """Return the kind keys whose bad objects were replaced since the last call."""
        noted = self._repaired
        return [kind_key(noted.popleft(), self._kind) for _ in range(len(noted))]

    def forget_published(self) -> None:
        """Forget which chunks were published here, so that they are stored again if missing."""
        with self._lock:
            self._published_at.clear()


def _note(times: OrderedDict[bytes, float], key: bytes, limit: int) -> None:
    times[key] = time.monotonic()
    times.move_to_end(key)
    if len(times) > limit:
        times.popitem(last=False)
