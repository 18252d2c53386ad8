"""The objects that a worker wants to load, asked for as far as it may lease memory.

Owns what was not asked for yet, in its order, and how many bytes are asked for or leased.

Contracts
---------
* No more than a part of the server's memory is leased at a time, or one object. The end of a lease
  lets the next object be asked for.
* Of an operation that has ended, nothing is asked for any more.

Threads
-------
Any thread may call all methods; none blocks. Arrivals are reported on the channel's thread.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from kvshelf.adapters.operations import Operation
from kvshelf.server.interface import Leased, ServerClient

#: A worker leases this part of the server's arena at a time, and what it has not asked for waits.
_ARENA_SHARE: Final = 8


@dataclass(frozen=True, slots=True)
class WantedObject:
    """An object that an operation loads.

    Attributes
    ----------
    operation : Operation
    name : str
    nbytes : int
    arrived : Callable
        Called with the lease, or why there is none; :meth:`LeaseWindow.give_back` is to follow.
    """

    operation: Operation
    name: str
    nbytes: int
    arrived: Callable[[Future[Leased]], None]


class LeaseWindow:
    """What a worker has leased, and wants to lease next.

    Parameters
    ----------
    client : ServerClient
    """

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._wanted: deque[WantedObject] = deque()
        self._nbytes = 0

    def want(self, objects: Iterable[WantedObject]) -> None:
        """Ask for objects, after those that wait."""
        with self._lock:
            self._wanted.extend(objects)
        self._ask()

    def give_back(self, one: WantedObject) -> None:
        """Ask for the next: the lease of this object has ended, or there is none."""
        with self._lock:
            self._nbytes -= one.nbytes
        self._ask()

    def _ask(self) -> None:
        welcome = self._client.channel.welcome
        most = 0 if welcome is None else welcome.arena_bytes // _ARENA_SHARE
        taken: list[WantedObject] = []
        with self._lock:
            while self._wanted:
                one = self._wanted[0]
                if self._nbytes and self._nbytes + one.nbytes > most:
                    break
                self._wanted.popleft()
                if not one.operation.ended:
                    self._nbytes += one.nbytes
                    taken.append(one)
        for _, of_one in itertools.groupby(taken, key=lambda one: id(one.operation)):
            objects = list(of_one)
            asked = self._client.channel.fetch(
                objects[0].operation.request_id,
                [one.name for one in objects],
                [one.nbytes for one in objects],
            )
            for one, future in zip(objects, asked, strict=True):
                future.add_done_callback(one.arrived)
