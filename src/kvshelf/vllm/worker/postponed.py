"""Stores that found no memory, kept until memory is free.

Owns the stores of chunks of full attention, and of tails, that a worker could not gather in the
step that completed them, because the memory for stores or the device's buffers were used up, and
the requests that keep their blocks for them. The blocks of such a chunk hold its KV as long as its
request has them.

Contracts
---------
* A store is gathered only in a step in which the scheduler side says that the request still has
  its blocks: it is part of that step, and was not preempted since the store was planned, or vLLM
  keeps the blocks of a request that ended until :meth:`PostponedStores.take_released` names it.
* Chunks of a request are gathered in order.
* Nothing is kept for longer than its request has blocks, so vLLM's cache bounds how much there is.
* A request that ended is released when nothing of it is left, or at its deadline; the caller drops
  the rest.
* Runs on the worker's step thread.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvshelf.vllm.metadata import Owner, StoreOp


class PostponedStores:
    """The postponed stores of one worker.

    Parameters
    ----------
    longest : float
        Seconds for which a request that ended keeps its blocks.
    clock : Callable
        Returns seconds.
    """

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest = longest
        self._clock = clock
        #: With the time at which each was postponed, in the order of the chunks.
        self._stores: dict[Owner, list[tuple[StoreOp, float]]] = {}
        #: When the blocks of requests that ended are released at the latest.
        self._held: dict[Owner, float] = {}

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._stores

    @property
    def held(self) -> list[Owner]:
        """Requests that ended and keep their blocks."""
        return list(self._held)

    def put(self, op: StoreOp) -> None:
        """Keep a store for a later step."""
        stores = self._stores.setdefault(op.owner, [])
        insort(stores, (op, self._clock()), key=lambda store: store[0].chunk.index)

    def take(self, owners: Iterable[Owner], most: int) -> list[StoreOp]:
        """Take out the first stores of requests, all of requests that ended."""
        now = self._clock()
        taken: list[StoreOp] = []
        for owner in owners:
            stores = self._stores.pop(owner, [])
            count = len(stores) if owner in self._held else max(0, most - len(taken))
            taken += [replace(op, age=op.age + now - since) for op, since in stores[:count]]
            if stores[count:]:
                self._stores[owner] = stores[count:]
        return taken

    def hold(self, owners: Iterable[Owner]) -> None:
        """Note requests that ended and keep their blocks."""
        until = self._clock() + self._longest
        for owner in owners:
            self._held[owner] = until

    def drop(self, owners: Iterable[Owner]) -> list[StoreOp]:
        """Return the stores of requests that have no blocks any more, and forget them."""
        return [op for owner in owners for op, _ in self._stores.pop(owner, [])]

    def drop_all(self) -> list[StoreOp]:
        """Return all stores, and forget them."""
        return self.drop(list(self._stores))

    def drop_late(self) -> list[StoreOp]:
        """Return the stores of requests whose time to keep blocks is up, and forget them."""
        now = self._clock()
        return self.drop(owner for owner, until in self._held.items() if now >= until)

    def take_released(self) -> set[str]:
        """Return, once each, the requests that ended and of which nothing is left."""
        done = [owner for owner in self._held if owner not in self._stores]
        for owner in done:
            del self._held[owner]
        return {request_id for request_id, _ in done}
