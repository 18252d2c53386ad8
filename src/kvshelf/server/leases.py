"""Leases: which client holds which memory of the arena, and until when.

Owns the accounts of leases, and no memory: the caller that grants a lease pins its memory slot,
and unpins the slots that these methods return. A lease of a *lookup* keeps an object in memory
until it is fetched; it ends with its session, or after its time. A lease of a *fetch* belongs to a
client that reads the memory at this moment: nothing but that client, or the end of its connection,
ends it. If its time is over, it is *overdue*: the memory stays, but the client is to learn that it
may no longer trust it.

Contracts
---------
* Every lease that began ends exactly once, and is then returned exactly once.
* A client ends its own leases only. Numbers are never used again.
* The distinct memory that a client holds is bounded.

Threads
-------
Not safe for several threads: the owner locks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvshelf.memory.places import Slot


@dataclass(slots=True)
class _Lease:
    client: bytes
    session: str
    slot: Slot
    fetched: bool
    ends: float


@dataclass(slots=True)
class _Client:
    leases: set[int] = field(default_factory=set)
    #: How many leases name each.
    slots: dict[Slot, int] = field(default_factory=dict)
    nbytes: int = 0
    #: Leases of lookups, by session.
    looked_up: dict[str, dict[Slot, int]] = field(default_factory=dict)


class Leases:
    """The leases of all clients.

    Parameters
    ----------
    seconds : float
        How long a lease lives.
    quota : int
        Most bytes that one client may hold.
    clock : Callable
        A monotonic clock, in seconds.
    """

    def __init__(
        self,
        *,
        seconds: float = 30.0,
        quota: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._quota = quota
        self._clock = clock
        self._last_number = 0
        self._leases: dict[int, _Lease] = {}
        self._clients: dict[bytes, _Client] = {}
        #: Leases whose time is not over; the first one ends first. A dict would find its first
        #: entry ever more slowly when many before it were removed.
        self._running: OrderedDict[int, None] = OrderedDict()
        #: How many fetches, within their time, have each.
        self._readers: dict[Slot, int] = {}

    def grant(
        self, client: bytes, session: str, slot: Slot, *, fetched: bool
    ) -> tuple[int, bool] | None:
        """Lease `slot` to a client, or renew what its lookup has leased.

        Parameters
        ----------
        client : bytes
        session : str
        slot : Slot
        fetched : bool
            The client is about to read the memory. The lease that the session's lookup has of it
            becomes a fetch's.

        Returns
        -------
        tuple of int and bool, or None
            The lease's number, and whether it is a new one: then the caller has to pin `slot`.
            None: the client would hold more than the quota.
        """
        owner = self._clients.get(client)
        if owner is None:
            owner = _Client()
        looked_up = owner.looked_up.get(session, {})
        number = looked_up.get(slot)
        if number is not None:
            lease = self._leases[number]
            self._renew(number, lease)
            if fetched:
                self._forget_lookup(owner, lease)
                self._begin_reading(lease)
            return number, False
        count = owner.slots.get(slot, 0)
        if not count and owner.nbytes + slot.nbytes > self._quota:
            return None
        self._clients[client] = owner
        owner.slots[slot] = count + 1
        owner.nbytes += 0 if count else slot.nbytes
        self._last_number = number = self._last_number + 1
        lease = _Lease(client, session, slot, False, self._clock() + self._seconds)
        self._leases[number] = lease
        self._running[number] = None
        owner.leases.add(number)
        if fetched:
            self._begin_reading(lease)
        else:
            owner.looked_up.setdefault(session, looked_up)[slot] = number
        return number, True

    def holds(self, client: bytes, slot: Slot) -> bool:
        """Whether a client has a lease of this slot."""
        owner = self._clients.get(client)
        return owner is not None and slot in owner.slots

    def nbytes(self, client: bytes) -> int:
        """Return how many bytes a client holds."""
        owner = self._clients.get(client)
        return 0 if owner is None else owner.nbytes

    def release(self, client: bytes, numbers: Iterable[int]) -> list[Slot]:
        """End leases of a client; numbers that are not its leases do nothing.

        Returns
        -------
        list of Slot
            What is to be unpinned: once for each lease that has ended.
        """
        ended = []
        for number in numbers:
            lease = self._leases.get(number)
            if lease is not None and lease.client == client:
                ended.append(self._end(number, lease))
        return ended

    def end_session(self, client: bytes, session: str) -> list[Slot]:
        """End and return the leases of a session's lookups that were not fetched."""
        owner = self._clients.get(client)
        if owner is None:
            return []
        return self.release(client, list(owner.looked_up.get(session, {}).values()))

    def end_lookups(self, client: bytes, session: str, slot: Slot) -> list[Slot]:
        """End the leases of `slot` that other clients' lookups of a session have; return them.

        An engine's scheduler looks up what its workers fetch, each with a connection of its own:
        an object that a worker has fetched need not be kept any more.

        Parameters
        ----------
        client : bytes
            The client that fetches `slot`, in a session of this name.
        session : str
        slot : Slot
        """
        ended = []
        for other, owner in list(self._clients.items()):
            number = owner.looked_up.get(session, {}).get(slot) if other != client else None
            if number is not None:
                ended.append(self._end(number, self._leases[number]))
        return ended

    def end_client(self, client: bytes) -> list[Slot]:
        """End all leases of a client that is gone; return what they named."""
        owner = self._clients.get(client)
        return [] if owner is None else self.release(client, list(owner.leases))

    def expire(self) -> tuple[list[Slot], list[Slot]]:
        """End leases of lookups whose time is over, and find the fetches that are overdue.

        Returns
        -------
        ended : list of Slot
            What is to be unpinned: once for each lease that has ended.
        overdue : list of Slot
            What only overdue fetches hold from now on. Its memory is still in use.
        """
        now = self._clock()
        ended: list[Slot] = []
        overdue: list[Slot] = []
        while self._running:
            number = next(iter(self._running))
            lease = self._leases[number]
            if lease.ends > now:
                break
            if not lease.fetched:
                ended.append(self._end(number, lease))
                continue
            del self._running[number]
            if self._end_reading(lease):
                overdue.append(lease.slot)
        return ended, overdue

    def stats(self) -> tuple[int, int]:
        """Return the number of leases, and the bytes: what two clients hold counts twice."""
        # A copy: the metrics are asked for on another thread.
        return len(self._leases), sum(client.nbytes for client in list(self._clients.values()))

    def _renew(self, number: int, lease: _Lease) -> None:
        lease.ends = self._clock() + self._seconds
        self._running.move_to_end(number)

    def _begin_reading(self, lease: _Lease) -> None:
        lease.fetched = True
        self._readers[lease.slot] = self._readers.get(lease.slot, 0) + 1

    def _end_reading(self, lease: _Lease) -> bool:
        """Count one fetch within its time less; return whether it was the last."""
        left = self._readers.pop(lease.slot) - 1
        if left:
            self._readers[lease.slot] = left
        return not left

    def _forget_lookup(self, owner: _Client, lease: _Lease) -> None:
        looked_up = owner.looked_up[lease.session]
        del looked_up[lease.slot]
        if not looked_up:
            del owner.looked_up[lease.session]

    def _end(self, number: int, lease: _Lease) -> Slot:
        owner = self._clients[lease.client]
        del self._leases[number]
        owner.leases.remove(number)
        running = number in self._running
        self._running.pop(number, None)
        if lease.fetched:
            if running:
                self._end_reading(lease)
        else:
            self._forget_lookup(owner, lease)
        count = owner.slots.pop(lease.slot)
        if count > 1:
            owner.slots[lease.slot] = count - 1
        else:
            owner.nbytes -= lease.slot.nbytes
        if not owner.leases:
            del self._clients[lease.client]
        return lease.slot
