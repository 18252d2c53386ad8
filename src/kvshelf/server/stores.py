"""Objects that clients store: copied, verified, published, and kept in memory.

Owns the stores under way, and those that wait for memory.

Contracts
---------
* What is published or kept is a copy that was verified after its last byte was written: a client
  may change its own memory at any time. Objects are verified by the record of their namespace and
  their name, what is in memory only by the checksum that came with it.
* A store of what is being stored joins it, and has its outcome, unless the first client's bytes
  were bad.
* The shelf decides what is stored: an object that it did not take is not kept.
* Stores that wait, for memory or for a thread, begin in turn, one of each client. One that waits
  too long for memory fails with an error that opens no circuit breaker: the storage is not to
  blame.
* A store that hangs fails. Its memory is not reused before it has returned. Stores that have begun
  take at most a quarter of the memory, or one of them has it.

Threads
-------
All methods are called on the loop's thread and none blocks, but :meth:`ClientStores.wait`, which
any other thread may call.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import xxhash

from kvshelf.backends import WriteMode, WriteResult
from kvshelf.errors import (
    BadObjectError,
    BoundReachedError,
    KVShelfError,
    ObjectNameError,
)
from kvshelf.format.invalid import Defect
from kvshelf.format.keys import Chunk
from kvshelf.memory.places import Budget, Slot
from kvshelf.server.fetches import MEMORY_FULL, Fetches, Resources, draining
from kvshelf.server.messages import Fault, Reply, Store, Stored
from kvshelf.server.namespaces import HASH, NamedObject, key_of
from kvshelf.server.storage import Copied
from kvshelf.server.turns import Turns
from kvshelf.server.workers import ClientGoneError, Workers

#: Part of the memory that stores under way may take.
_STORES_SHARE: Final = 4

#: Takes the reply to a request, on the loop's thread.
Done: TypeAlias = Callable[[Reply], None]
#: What a store did: whether it was written, the chunk (None for what is in memory only), and
#: whether it may be kept.
_Outcome: TypeAlias = "tuple[WriteResult, Chunk | None, bool]"


@dataclass(eq=False, slots=True)
class _Store:
    """One object that a client stores, and the stores of it that came meanwhile."""

    client: bytes
    request: Store
    key: str
    source: memoryview
    until: float
    done: Done
    #: None: in memory only.
    found: NamedObject | None = None
    slot: Slot | None = None
    #: The object was deleted meanwhile.
    gone: bool = False
    joined: list[_Store] = field(default_factory=list)

    @property
    def place(self) -> tuple[str, WriteMode]:
        """What it shares with those that it is one with."""
        return self.request.name, self.request.mode


class ClientStores:
    """What clients store.

    Parameters
    ----------
    resources : Resources
    fetches : Fetches
        Knows what fits.
    workers : Workers
        The threads that copy and write.
    wait_seconds : float
        How long a store waits for memory.
    published : Callable
        Called with the name of an object that is on the shelf now.
    """

    def __init__(
        self,
        resources: Resources,
        fetches: Fetches,
        workers: Workers,
        *,
        wait_seconds: float,
        published: Callable[[str], None],
    ) -> None:
        self._memory = resources.memory
        self._namespaces = resources.namespaces
        self._storage = resources.storage
        self._fetches = fetches
        self._workers = workers
        self._clock = resources.clock
        self._seconds = wait_seconds
        self._counts = resources.counts
        self._freed = resources.freed
        self._published = published
        self._running: dict[tuple[str, WriteMode], _Store] = {}
        self._waiting: Turns[_Store] = Turns()
        self._closed = False
        #: Objects that are only written must not evict those that are used.
        self._budget = Budget(self._memory.capacity // _STORES_SHARE)
        self._ended = threading.Condition()

    @property
    def running(self) -> int:
        """Stores under way."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Of these, those that wait for memory."""
        return len(self._waiting)

    def begin(self, client: bytes, request: Store, source: memoryview, done: Done) -> None:
        """Store an object, see :meth:`kvshelf.server.service.Service.store`."""
        until = self._clock() + self._seconds
        store = _Store(client, request, key_of(request.name), source, until, done)
        try:
            self._check(store)
        except (KVShelfError, ValueError) as error:
            self._counts["failed_stores"] += 1
            done(Fault.of(error))
            return
        if request.memory_only and self._memory.holds([store.key])[0]:
            done(Stored("existed"))
            return
        other = self._running.get(store.place)
        if other is not None:
            self._counts["joined_stores"] += 1
            other.joined.append(store)
        else:
            self._enter(store)

    def _check(self, store: _Store) -> None:
        nbytes, request = store.source.nbytes, store.request
        name = request.name
        if self._closed:
            raise draining()
        if not request.memory_only:
            store.found = self._namespaces.object(name, nbytes)
        elif not name.startswith(HASH) or request.checksum is None or not nbytes:
            raise ObjectNameError(
                f"{name!r}, {nbytes} bytes: what is in memory only has bytes, a checksum, and"
                f" a name that begins with {HASH}"
            )
        self._fetches.check_fits(name, nbytes)

    def _enter(self, store: _Store) -> None:
        self._running[store.place] = store
        if self._waiting or not self._start(store):
            self._waiting.add(store.client, store)

    def _start(self, store: _Store) -> bool:
        """Begin a store; False if it must wait for memory."""
        nbytes = store.source.nbytes
        slot = store.slot = self._memory.reserve(store.key, nbytes, owner=self._budget)
        if slot is None:
            return False
        buffer = self._memory.view(slot)
        self._workers.submit(
            store.client,
            lambda: self._copy_and_publish(store, buffer),
            partial(self._end, store),
            partial(self._returned, store, slot),
        )
        return True

    def _copy_and_publish(self, store: _Store, buffer: memoryview) -> _Outcome:
        """Do the work of one store, on a thread of its own."""
        if store.found is not None:
            return self._storage.publish(store.found, store.source, buffer, store.request.mode)
        Copied(store.source).read_into(buffer, 0)
        if xxhash.xxh3_64_intdigest(buffer) != store.request.checksum:
            text = f"{store.request.name}: its bytes do not have the given checksum"
            raise BadObjectError(Defect.PAYLOAD_DAMAGED, text)
        return WriteResult.CREATED, None, True

    def _end(self, store: _Store, outcome: _Outcome | Exception) -> None:
        """Answer the clients that store an object."""
        joined, store.joined = store.joined, []
        if self._running.get(store.place) is store:
            del self._running[store.place]
        reply: Reply
        others: Reply
        if isinstance(outcome, Exception):
            self._counts["failed_stores"] += 1
            reply = others = Fault.of(outcome)
        else:
            self._counts["stored_objects"] += 1
            self._counts["stored_bytes"] += store.source.nbytes
            reply, others = Stored(outcome[0].value), Stored("existed")
        store.done(reply)
        if isinstance(outcome, BadObjectError | ClientGoneError) and joined:
            # The fault of one client is not that of the others.
            first, first.joined = joined[0], joined[1:]
            self._enter(first)
        else:
            for other in joined:
                other.done(others)
        with self._ended:
            self._ended.notify_all()

    def _returned(self, store: _Store, slot: Slot, outcome: _Outcome | Exception) -> None:
        """Keep what was stored."""
        if isinstance(outcome, Exception):
            self._memory.abandon(slot)
        else:
            result, chunk, kept = outcome
            if store.found is not None and chunk is not None:
                slot.parent = store.found.key_of_parent(chunk)
                if result is not WriteResult.EXISTED:
                    self._published(store.request.name)
            elif store.request.parent:
                slot.parent = key_of(store.request.parent)
            if kept and not store.gone:
                self._memory.publish(slot)
            else:
                self._memory.abandon(slot)
        self._freed()

    def client_gone(self, client: bytes) -> None:
        """Forget the stores of a client that were not begun."""
        for store in list(self._running.values()):
            store.joined = [other for other in store.joined if other.client != client]
            if store.client == client and store.slot is None:
                self._end(store, ClientGoneError())
        self._waiting.remove(lambda of, _: of == client)

    def forget(self, name: str) -> None:
        """Do not keep an object that was deleted while it is stored."""
        for store in self._running.values():
            if store.request.name == name:
                store.gone = True

    def tick(self) -> None:
        """Fail stores that have waited too long."""
        now = self._clock()
        for store in self._waiting.remove(lambda _, store: store.until <= now):
            # The storage is not to blame: no breaker opens for it.
            self._end(store, BoundReachedError(errno.ENOMEM, MEMORY_FULL))

    def resume(self) -> None:
        """Begin stores that wait, until memory is full: one of each client in turn."""
        while clients := self._waiting.clients:
            store = self._waiting.head(clients[0])
            if store is None or not self._start(store):
                return
            self._waiting.take(clients[0])

    def drain(self) -> None:
        """Begin nothing more."""
        self._closed = True

    def wait(self, seconds: float) -> int:
        """Wait until nothing is being stored; return the number of stores that are not over."""
        with self._ended:
            self._ended.wait_for(lambda: not self._running, seconds)
        return len(self._running)
