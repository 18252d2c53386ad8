"""Clients take turns: what they wait for, in order, one of each client after the other.

However much one client waits for, the next item of another comes after at most one of each.

Not safe for several threads, except ``len``: the owner locks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Turns(Generic[_Item]):
    """A queue of each client that waits for something."""

    def __init__(self) -> None:
        self._queues: OrderedDict[bytes, deque[_Item]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, list(self._queues.values())))

    @property
    def clients(self) -> list[bytes]:
        """Those that wait, the next one first."""
        return list(self._queues)

    def add(self, client: bytes, item: _Item) -> None:
        """Put an item behind the client's others."""
        self._queues.setdefault(client, deque()).append(item)

    def put_back(self, client: bytes, item: _Item) -> None:
        """Put an item before the client's others."""
        self._queues.setdefault(client, deque()).appendleft(item)

    def head(self, client: bytes) -> _Item | None:
        """Return the client's first item; None if it waits for nothing."""
        queue = self._queues.get(client)
        return None if queue is None else queue[0]

    def take(self, client: bytes) -> _Item:
        """Remove the client's first item; its others come after those of all other clients."""
        queue = self._queues.pop(client)
        item = queue.popleft()
        if queue:
            self._queues[client] = queue
        return item

    def remove(self, wanted: Callable[[bytes, _Item], bool]) -> list[_Item]:
        """Remove and return the items of which this holds; the turns stay."""
        removed: list[_Item] = []
        for client, queue in list(self._queues.items()):
            kept: deque[_Item] = deque()
            for item in queue:
                (removed if wanted(client, item) else kept).append(item)
            if kept:
                self._queues[client] = kept
            else:
                del self._queues[client]
        return removed
