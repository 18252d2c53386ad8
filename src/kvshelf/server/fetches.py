"""Objects that clients fetch: leased to them, and read from the shelf first if not in memory.

Owns the leases of all clients, the reads under way, and the requests that wait for memory.

Contracts
---------
* An object that several clients want is read once. What was read is verified, where it lies.
* Memory is reused only when no client has a lease of it. A lease whose time is over is no longer
  valid, and its memory still waits until the client gives it back or is gone.
* One client holds at most half of the memory. Requests wait while memory is full, those of one
  client in their order, and fail after a while; freed memory is given to each client in turn.
* A read that hangs fails the requests that wait for it. Its memory is not reused before it has
  returned.

Threads
-------
All methods are called on the loop's thread, and none blocks.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

from kvshelf.errors import (
    KVShelfError,
    NoSpaceStorageError,
    ObjectMissingError,
    PermanentStorageError,
    StorageError,
    UnavailableStorageError,
)
from kvshelf.format.keys import Chunk
from kvshelf.memory.host_memory import HostMemory
from kvshelf.memory.places import Slot
from kvshelf.server.leases import Leases
from kvshelf.server.messages import Failed, Fault, Ready
from kvshelf.server.namespaces import HASH, NamedObject, Namespaces, key_of, wrong_size
from kvshelf.server.storage import Storage
from kvshelf.server.turns import Turns
from kvshelf.server.workers import ClientGoneError, Workers

#: Takes outcomes of a fetch: some at once, others as they come.
Each: TypeAlias = "Callable[[list[Ready | Failed]], None]"

#: Why a request that has waited for memory fails.
MEMORY_FULL: Final = "the server's memory is full of what its clients use"

#: Part of the memory that one client may hold.
_CLIENT_SHARE: Final = 2


@dataclass(eq=False, slots=True)
class _Want:
    """One object that one client wants to have leased."""

    client: bytes
    session: str
    index: int
    name: str
    key: str
    nbytes: int
    until: float
    #: None: a lookup's, which only wants the object to be there.
    each: Each | None

    def answer(self, outcomes: list[Ready | Failed]) -> None:
        if self.each is not None and outcomes:
            self.each(outcomes)

    def fail(self, error: KVShelfError | ValueError) -> None:
        self.answer([Failed(self.index, Fault.of(error))])


@dataclass(eq=False, slots=True)
class _SharedRead:
    """One read for all requests that want an object."""

    found: NamedObject
    slot: Slot
    wants: list[_Want] = field(default_factory=list)
    #: Whether its outcome was in time, so that the slot is published or free.
    settled: bool = False
    #: The object was deleted meanwhile.
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Resources:
    """What the fetches and the stores of a server have in common.

    Attributes
    ----------
    memory : HostMemory
    namespaces : Namespaces
    storage : Storage
    clock : Callable
        Seconds.
    counts : dict
        Counts what is done, by the names in :data:`kvshelf.server.service.COUNTERS`.
    freed : Callable
        Called when memory was given back.
    """

    memory: HostMemory
    namespaces: Namespaces
    storage: Storage
    clock: Callable[[], float]
    counts: dict[str, int]
    freed: Callable[[], None]


class Fetches:
    """What clients want in memory.

    Parameters
    ----------
    resources : Resources
    workers : Workers
        The threads that read.
    lease_seconds : float
        How long a lease lives.
    wait_seconds : float
        How long a request waits for memory.

    Attributes
    ----------
    most : int
        Most bytes that one client may hold.
    leases : Leases
    """

    def __init__(
        self, resources: Resources, workers: Workers, *, lease_seconds: float, wait_seconds: float
    ) -> None:
        self._memory = resources.memory
        self._namespaces = resources.namespaces
        self._storage = resources.storage
        self._workers = workers
        self._clock = resources.clock
        self._wait_seconds = wait_seconds
        self._counts = resources.counts
        self._freed = resources.freed
        self.most = self._memory.capacity // _CLIENT_SHARE
        self.leases = Leases(seconds=lease_seconds, quota=self.most, clock=self._clock)
        self._reads: dict[str, _SharedRead] = {}
        #: Bytes that each client waits for in reads.
        self._coming: dict[bytes, int] = {}
        self._waiting: Turns[_Want] = Turns()
        self._closed = False

    @property
    def reads(self) -> int:
        """Reads under way."""
        return len(self._reads)

    @property
    def waiting(self) -> int:
        """Requests for an object that wait for memory."""
        return len(self._waiting)

    def begin(
        self,
        client: bytes,
        session: str,
        names: Sequence[str],
        sizes: Sequence[int],
        each: Each | None,
    ) -> None:
        """Lease objects to a client.

        Parameters
        ----------
        client : bytes
        session : str
        names : Sequence of str
        sizes : Sequence of int
            Bytes of each object.
        each : Callable or None
            Gets one outcome for each object, in any order and in several calls. None: the objects
            are looked up, not fetched.
        """
        until = self._clock() + self._wait_seconds
        wants = [
            _Want(client, session, index, name, key_of(name), nbytes, until, each)
            for index, (name, nbytes) in enumerate(zip(names, sizes, strict=True))
        ]
        outcomes: list[Ready | Failed] = []
        for want in wants:
            # Free memory is given to the oldest request; objects in memory need none.
            if self._must_wait(want) or not self._try(want, outcomes):
                if each is None:
                    # It is only read ahead.
                    break
                self._waiting.add(client, want)
        if each is not None and outcomes:
            each(outcomes)

    def _must_wait(self, want: _Want) -> bool:
        waits = self._waiting.head(want.client) is not None
        return waits and not self._memory.holds([want.key])[0]

    def free(self, client: bytes) -> int:
        """Return how many bytes more a client may hold."""
        return self.most - self.leases.nbytes(client) - self._coming.get(client, 0)

    def added(self, client: bytes, slots: Sequence[Slot]) -> int:
        """Return how many bytes more a client would hold with these."""
        return sum([slot.nbytes for slot in slots if not self.leases.holds(client, slot)])

    def lease(self, client: bytes, session: str, slots: Sequence[Slot]) -> None:
        """Lease what a lookup has found in memory, within the client's share.

        Parameters
        ----------
        client : bytes
        session : str
        slots : Sequence of Slot
            Pinned for the leases; what is not leased, or was before, is unpinned.
        """
        for slot in slots:
            granted = self.leases.grant(client, session, slot, fetched=False)
            if granted is None or not granted[1]:
                self._memory.unpin(slot)

    def check_fits(self, name: str, nbytes: int) -> None:
        """Refuse an object that is too large for one client's share.

        Raises
        ------
        PermanentStorageError
        """
        if nbytes > self.most:
            raise PermanentStorageError(
                f"{name} has {nbytes} bytes; one client may hold {self.most}, half of the server's"
                " memory: give it more"
            )

    def _try(self, want: _Want, outcomes: list[Ready | Failed]) -> bool:
        """Begin or settle one want; False if it must wait for memory."""
        try:
            return self._begin(want, outcomes)
        except (KVShelfError, ValueError) as error:
            self._counts["failed_fetches"] += 1
            outcomes.append(Failed(want.index, Fault.of(error)))
            return True

    def _begin(self, want: _Want, outcomes: list[Ready | Failed]) -> bool:
        slot = self._memory.pin(want.key)
        if slot is not None:
            if slot.nbytes != want.nbytes:
                self._memory.unpin(slot)
                raise wrong_size(want.name, want.nbytes, slot.nbytes)
            return self._lease(want, slot, outcomes)
        fits = self.free(want.client) >= want.nbytes
        read = self._reads.get(want.key)
        if read is not None and read.slot.nbytes != want.nbytes:
            raise wrong_size(want.name, want.nbytes, read.slot.nbytes)
        if read is None:
            if want.name.startswith(HASH):
                raise ObjectMissingError(errno.ENOENT, "it is not in memory", want.name)
            found = self._namespaces.object(want.name, want.nbytes)
            self.check_fits(want.name, want.nbytes)
            if self._closed:
                raise draining()
            slot = self._memory.reserve(want.key, want.nbytes) if fits else None
            if slot is None:
                return False
            read = self._reads[want.key] = _SharedRead(found, slot)
            self._submit(want.client, read)
        elif not fits:
            return False
        else:
            self._counts["joined_fetches"] += 1
        read.wants.append(want)
        self._coming[want.client] = self._coming.get(want.client, 0) + want.nbytes
        return True

    def _lease(self, want: _Want, slot: Slot, outcomes: list[Ready | Failed]) -> bool:
        """Turn a pin of a slot into a lease, or unpin it: False if the client holds too much."""
        fetched = want.each is not None
        granted = self.leases.grant(want.client, want.session, slot, fetched=fetched)
        if granted is None:
            self._memory.unpin(slot)
            return False
        self._counts["memory_hits"] += 1
        number, new = granted
        if not new:
            self._memory.unpin(slot)
        if fetched:
            for other in self.leases.end_lookups(want.client, want.session, slot):
                self._memory.unpin(other)
            place = self._memory.offset(slot)
            outcomes.append(
                Ready(want.index, place, slot.nbytes, slot.number, slot.generation, number)
            )
        return True

    # --------------------------------------------------------------------------------------- reads

    def _submit(self, client: bytes, read: _SharedRead) -> None:
        buffer = self._memory.view(read.slot)
        self._workers.submit(
            client,
            lambda: self._storage.load(read.found, buffer),
            partial(self._was_read, read),
            partial(self._returned, read),
        )

    def _was_read(self, read: _SharedRead, outcome: Chunk | Exception) -> None:
        key = str(read.slot.name)
        if self._reads.get(key) is read:
            del self._reads[key]
        wants, read.wants = read.wants, []
        for want in wants:
            left = self._coming.pop(want.client, 0) - want.nbytes
            if left > 0:
                self._coming[want.client] = left
        if isinstance(outcome, ClientGoneError):
            # Other clients that want it get a new read when the memory is free again, in a moment.
            for want in wants:
                if want.each is not None:
                    self._waiting.put_back(want.client, want)
            return
        if isinstance(outcome, Exception):
            self._counts["failed_fetches"] += len(wants)
            fault = Fault.of(outcome)
            for want in wants:
                want.answer([Failed(want.index, fault)])
            return
        read.settled = True
        self._keep(read, outcome)
        for want in wants:
            outcomes: list[Ready | Failed] = []
            if self._try(want, outcomes):
                want.answer(outcomes)
            elif want.each is not None:
                self._waiting.put_back(want.client, want)
        if read.gone:
            self._memory.forget(key)

    def _returned(self, read: _SharedRead, outcome: Chunk | Exception) -> None:
        """End a read. A late one still serves the next request for the object."""
        if not read.settled:
            if isinstance(outcome, Exception):
                self._memory.abandon(read.slot)
            else:
                self._keep(read, outcome)
                if read.gone:
                    self._memory.forget(read.slot.name)
        self._freed()

    def _keep(self, read: _SharedRead, chunk: Chunk) -> None:
        self._counts["read_objects"] += 1
        self._counts["read_bytes"] += read.slot.nbytes
        read.slot.parent = read.found.key_of_parent(chunk)
        self._memory.publish(read.slot)

    # ------------------------------------------------------------------------------------- endings

    def release(self, client: bytes, leases: Sequence[int]) -> None:
        """End leases of a client; numbers that are not its leases do nothing."""
        self._unpin(self.leases.release(client, leases))

    def end_session(self, client: bytes, session: str) -> None:
        """End the leases of a session's lookups, and its waits for memory."""
        ended = self._waiting.remove(lambda of, want: of == client and want.session == session)
        self._fail(
            ended, UnavailableStorageError(errno.ECANCELED, "its session has ended", session)
        )
        self._unpin(self.leases.end_session(client, session))

    def client_gone(self, client: bytes) -> None:
        """End the leases and the waits of a client."""
        self._waiting.remove(lambda of, _: of == client)
        self._coming.pop(client, None)
        for read in self._reads.values():
            read.wants = [want for want in read.wants if want.client != client]
        self._unpin(self.leases.end_client(client))

    def tick(self) -> None:
        """Expire leases and waits."""
        ended, overdue = self.leases.expire()
        for slot in overdue:
            self._counts["overdue_leases"] += 1
            self._memory.expire(slot)
        now = self._clock()
        late = self._waiting.remove(lambda _, want: want.until <= now)
        # The client has stopped waiting, and the storage is not to blame: no breaker opens.
        self._fail(late, NoSpaceStorageError(errno.ENOMEM, MEMORY_FULL))
        self._unpin(ended)

    def resume(self) -> None:
        """Begin requests that wait for memory, until it is full."""
        clients = self._waiting.clients
        while clients:
            # One of each at a time: a client with many wants is not served before the others.
            clients = [client for client in clients if self._resume_one(client)]

    def forget(self, key: str) -> None:
        """Remove a deleted object from memory, also one that is being read."""
        read = self._reads.get(key)
        if read is not None:
            read.gone = True
        self._memory.forget(key)

    def drain(self) -> None:
        """Begin no more reads."""
        self._closed = True

    def _unpin(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._memory.unpin(slot)
        if slots:
            self._freed()

    def _fail(self, wants: Sequence[_Want], error: StorageError) -> None:
        self._counts["failed_fetches"] += len(wants)
        for want in wants:
            want.fail(error)

    def _resume_one(self, client: bytes) -> bool:
        """Begin the next want of a client; False if it must wait, or there is none."""
        want = self._waiting.head(client)
        outcomes: list[Ready | Failed] = []
        if want is None or not self._try(want, outcomes):
            return False
        self._waiting.take(client)
        want.answer(outcomes)
        return True


def draining() -> StorageError:
    """Return the error for what a server that is about to stop does not begin."""
    return UnavailableStorageError(errno.ESHUTDOWN, "the server is about to stop")
