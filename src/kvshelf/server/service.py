"""What the node server does for its clients, as the loop calls it.

Puts the parts together: memory (:mod:`kvshelf.memory.host_memory`), what clients fetch
(:mod:`kvshelf.server.fetches`) and store (:mod:`kvshelf.server.stores`), and calls that
the storage answers (:mod:`kvshelf.server.calls`). Owns finds, lookups and the names of what is
counted.

Contracts
---------
* Objects in memory were verified there, by the server.
* A storage that hangs fails the requests that wait for it, and holds up nothing else.
* Each `done` is called once, and each `each` with one outcome for every object in all, at once or
  later. What a method raises becomes a fault for its client.
* `client` is the id of a session; :meth:`Service.client_gone` is the last call with it.
* Objects that a lookup finds, and objects that a client reports as used, are used: the server
  records both (:mod:`kvshelf.capacity.uses`). But of tails a client decides when the access time is
  set.

Threads
-------
All methods are called on the loop's thread and never block, except :meth:`Service.drain`,
:meth:`Service.stats` and :attr:`Service.facts`, which any thread may use. Answers are given on the
loop's thread too: other threads hand their results over through `post`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

from kvshelf.backends import Touched
from kvshelf.capacity.uses import Uses
from kvshelf.errors import KVShelfError, ObjectNameError
from kvshelf.format.names import parse_path
from kvshelf.memory.arena import Arena
from kvshelf.memory.host_memory import HostMemory
from kvshelf.memory.places import Slot
from kvshelf.metrics import Counters
from kvshelf.server.calls import CHANGES, Calls, facts, found
from kvshelf.server.fetches import Each, Fetches, Resources, draining
from kvshelf.server.messages import (
    UNKNOWN,
    Call,
    Facts,
    Fault,
    Fetch,
    Find,
    FoundSizes,
    LookedUp,
    LookUpChunks,
    Result,
    Store,
)
from kvshelf.server.namespaces import HASH, NamedObject, Namespaces, key_of
from kvshelf.server.storage import Storage
from kvshelf.server.stores import ClientStores, Done
from kvshelf.server.workers import Post, Workers
from kvshelf.shelf.shelf import Shelf
from kvshelf.tiers.disk_tier import DiskTier

#: What a service counts, with the meaning of one unit.
COUNTERS: Final = {
    "lookups": "lookups answered",
    "memory_hits": "objects that clients fetched and that were in memory",
    "joined_fetches": "objects that clients fetched while they were read for others",
    "read_objects": "objects read from the shelf or the disk tier",
    "read_bytes": "bytes of objects read from the shelf or the disk tier",
    "failed_fetches": "objects that clients fetched and did not get",
    "stored_objects": "objects that clients stored",
    "stored_bytes": "bytes of objects that clients stored",
    "joined_stores": "objects that clients stored while others stored them",
    "failed_stores": "objects that clients stored and the server did not take",
    "overdue_leases": "objects that clients held for longer than a lease lives",
    "evicted_objects": "objects evicted from memory",
    "evicted_bytes": "bytes of objects evicted from memory",
}

#: What a service has at present.
GAUGES: Final = {
    "objects": "objects in memory",
    "bytes": "bytes of objects in memory",
    "capacity_bytes": "bytes of memory for objects",
    "pinned_bytes": "bytes of objects that clients hold, or that are read or stored",
    "wasted_bytes": "bytes of memory lost by rounding sizes up",
    "largest_free_bytes": "bytes of the largest free range of memory",
    "leases": "leases of all clients",
    "leased_bytes": "bytes of objects that clients hold; what two hold counts twice",
    "clients": "clients that are connected",
    "reads": "reads of objects under way",
    "stores": "stores of objects under way",
    "waiting": "objects that wait for memory",
}

#: Seconds that a lease lives.
LEASE_SECONDS: Final = 30.0
#: Part of the storage's deadlines for which a request waits for memory.
_WAIT_SHARE: Final = 0.8
#: The client of the server's own work, for turns.
_OWN: Final = b""
#: Threads of each kind on low-latency storage, and the most on others.
_FEW_THREADS: Final = 4
_MOST_THREADS: Final = 16


class Service:
    """The objects of one shelf for the clients of one server.

    Parameters
    ----------
    shelf : Shelf
        The caller closes it, after the service.
    arena : Arena
        The memory for objects, and for a table of generations before them.
    post : Callable
        Calls a function on the loop's thread, soon; may be called on any thread.
    disk_tier : DiskTier, optional
        The caller closes it, after the service.
    counters : Counters, optional
        Counts stuck threads.
    clock : Callable
        Seconds, for leases and waits.
    lease_seconds : float
        How long a lease lives.
    uses : Uses, optional
        Records what clients use; the caller closes it, before the service. When absent, nothing
        is recorded but what clients set themselves.
    hands_over : Callable, optional
        Called when a client has written a tail or a marker, which will have to be deleted.

    Attributes
    ----------
    slots : int
        Number of generations at the arena's beginning.
    lease_seconds : float

    Raises
    ------
    ConfigError
        If the arena is too small, or the disk tier and the shelf have files in common.
    RuntimeError
        If the system allows no thread.
    """

    def __init__(
        self,
        shelf: Shelf,
        arena: Arena,
        *,
        post: Post,
        disk_tier: DiskTier | None = None,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.monotonic,
        lease_seconds: float = LEASE_SECONDS,
        uses: Uses | None = None,
        hands_over: Callable[[], None] | None = None,
    ) -> None:
        counters = Counters() if counters is None else counters
        memory = self._memory = HostMemory.with_generations(arena)
        storage = Storage(shelf, disk_tier, counters)
        self.slots = memory.table_slots
        self.lease_seconds = lease_seconds
        self._backend = shelf.backend
        self._storage = storage
        self._uses = uses
        self._hands_over = hands_over
        self._clients: set[bytes] = set()
        self._namespaces = Namespaces()
        self._calls = Calls(self._backend)
        self._counts = dict.fromkeys(COUNTERS, 0)
        #: Calls under way that change the storage.
        self._changes = 0
        self._changed = threading.Condition()
        self._draining = False
        self._workers: dict[str, Workers] = {}
        properties = self._backend.properties
        concurrent = min(_MOST_THREADS, properties.concurrency)
        many = max(_FEW_THREADS, concurrent) if properties.high_latency else _FEW_THREADS
        threads = {
            "fetch": many,
            "publish": many // 2,
            "probe": many,
            "call": _FEW_THREADS,
        }
        try:
            for name, count in threads.items():
                self._workers[name] = Workers(
                    f"kvshelf-{name}", count, self._backend, post, counters
                )
        except BaseException:
            self.close()
            raise
        shared = Resources(memory, self._namespaces, storage, clock, self._counts, self._resume)
        self._fetches = Fetches(
            shared,
            self._workers["fetch"],
            lease_seconds=lease_seconds,
            # A client waits about as long as for the storage itself.
            wait_seconds=_WAIT_SHARE * self._backend.deadlines.read,
        )
        self._stores = ClientStores(
            shared,
            self._fetches,
            self._workers["publish"],
            wait_seconds=_WAIT_SHARE * self._backend.deadlines.write,
            published=self._published,
        )

    def __repr__(self) -> str:
        return f"Service({self._backend.url!r}, {self._memory!r})"

    @property
    def facts(self) -> Facts:
        """What clients may rely on at present."""
        return facts(self._backend)

    def register(self, record: bytes) -> None:
        """Take the record of a namespace, so that its objects can be verified.

        See :meth:`kvshelf.server.namespaces.Namespaces.register`.
        """
        self._namespaces.register(record)

    # ---------------------------------------------------------------------------- finds and lookups

    def find(self, client: bytes, request: Find, done: Done) -> None:
        """Answer which objects can be loaded, from memory or from the shelf.

        Parameters
        ----------
        client : bytes
        request : Find
        done : Callable
            Gets a :class:`~kvshelf.server.messages.FoundSizes`, or a fault.

        Raises
        ------
        ObjectNameError
            If there is not one size for each name.
        """
        self._clients.add(client)
        names, sizes = request.names, request.sizes
        if len(sizes) != len(names):
            raise ObjectNameError(f"{len(sizes)} sizes for {len(names)} names; expected as many")
        here = self._memory.sizes(list(map(key_of, names)))
        missing = [name for name, size in zip(names, here, strict=True) if size is None]
        if not missing:
            done(FoundSizes([size for size in here if size is not None]))
            return

        def answer(outcome: FoundSizes | Exception) -> None:
            if isinstance(outcome, Exception):
                done(Fault.of(outcome))
                return
            rest = iter(outcome.answers)
            answers = [next(rest) if size is None else size for size in here]
            done(FoundSizes(answers, outcome.fault))

        self._probe(client, missing, answer)

    def _probe(
        self, client: bytes, names: Sequence[str], answer: Callable[[FoundSizes | Exception], None]
    ) -> None:
        objects: list[NamedObject | None] = [None] * len(names)
        if self._storage.has_tier:
            objects = [self._known(name) for name in names]
        self._workers["probe"].submit(
            client, lambda: found(self._storage.find(names, objects)), answer
        )

    def _known(self, name: str, nbytes: int | None = None) -> NamedObject | None:
        try:
            return self._namespaces.object(name, nbytes)
        except (KVShelfError, ValueError):
            return None

    def lookup(self, client: bytes, request: LookUpChunks, done: Done) -> None:
        """Count the leading chunks of a prompt that can be loaded, and keep them in memory.

        Chunks that are only on the shelf are read meanwhile. All are leased until the session ends,
        or for as long as a lease lives. The count ends where the client's share of the memory
        does.

        Parameters
        ----------
        client : bytes
        request : LookUpChunks
        done : Callable
            Gets a :class:`~kvshelf.server.messages.LookedUp`.
        """
        self._clients.add(client)
        chains = request.chains
        found_here = self._memory.pin_all([key_of(name) for names in chains for name in names])
        here = [slot for slot in found_here if slot is not None]
        if len(here) == len(found_here) and self._fetches.free(client) >= sum(
            [slot.nbytes for slot in here]
        ):
            # The usual case, quickly.
            self._take(client, request.session, chains, here, [], done)
            return
        pinned: list[list[Slot]] = []
        missing: list[list[str]] = []
        end = 0
        for names in chains:
            begin, end = end, end + len(names)
            places = found_here[begin:end]
            slots = [slot for slot in places if slot is not None]
            absent: list[str] = []
            if len(slots) < len(names):
                absent = [name for name, slot in zip(names, places, strict=True) if slot is None]
            pinned.append(slots)
            if len(missing) == len(pinned) - 1 and not (absent and absent[0].startswith(HASH)):
                # Objects in memory only are not on the shelf: the count ends there.
                missing.append(absent)
        asked = [name for absent in missing for name in absent]
        if not asked:
            self._looked_up(client, request, pinned, [[]] * len(missing), done)
            return

        def answer(outcome: FoundSizes | Exception) -> None:
            # Where the shelf fails, objects in memory count.
            sizes = iter(
                outcome.answers if isinstance(outcome, FoundSizes) else [UNKNOWN] * len(asked)
            )
            there = [[(name, next(sizes)) for name in absent] for absent in missing]
            self._looked_up(client, request, pinned, there, done)

        self._probe(client, asked, answer)

    def _looked_up(
        self,
        client: bytes,
        request: LookUpChunks,
        pinned: Sequence[list[Slot]],
        there: Sequence[Sequence[tuple[str, int]]],
        done: Done,
    ) -> None:
        """Lease the leading chunks of which all objects are pinned or on the shelf.

        Parameters
        ----------
        client, request, done
            As for :meth:`lookup`.
        pinned : Sequence of list of Slot
            The objects of each chunk that are in memory.
        there : Sequence of Sequence of (str, int)
            The others, with the sizes that the shelf has them in.
        """
        count = 0
        left = self._fetches.free(client) if client in self._clients else -1
        while count < len(there):
            others = there[count]
            left -= self._fetches.added(client, pinned[count])
            left -= sum([size for _, size in others])
            if left < 0 or (others and not all(self._known(*other) for other in others)):
                break
            count += 1
        for slots in pinned[count:]:
            for slot in slots:
                self._memory.unpin(slot)
        slots = [slot for slots in pinned[:count] for slot in slots]
        asked = [other for chunk in there[:count] for other in chunk]
        self._take(client, request.session, request.chains[:count], slots, asked, done)

    def _take(
        self,
        client: bytes,
        session: str,
        found: Sequence[Sequence[str]],
        slots: Sequence[Slot],
        others: Sequence[tuple[str, int]],
        done: Done,
    ) -> None:
        """Answer a lookup, lease what is in memory, and read the others."""
        # All is pinned: the answer need not wait for the leases.
        done(LookedUp(len(found)))
        self._fetches.lease(client, session, slots)
        if others:
            names, sizes = zip(*others, strict=True)
            self._fetches.begin(client, session, names, sizes, None)
        self._counts["lookups"] += 1
        self._note(list(chain.from_iterable(found)))
        self._resume()

    # ---------------------------------------------------------------------------------------- uses

    def _published(self, name: str) -> None:
        """Note that tails and markers will have to be deleted."""
        parsed = parse_path(name)
        if self._hands_over is not None and (parsed is None or parsed.tail_tokens is not None):
            self._hands_over()

    def _note(self, names: Sequence[str]) -> None:
        if self._uses is not None:
            self._uses.note(self._backend, names)

    # -------------------------------------------------------------------------- fetches and stores

    def fetch(self, client: bytes, request: Fetch, each: Each) -> None:
        """Lease objects to a client; those that are not in memory are read first.

        Parameters
        ----------
        client : bytes
        request : Fetch
            With as many sizes as names.
        each : Callable
            Gets one outcome for each object, in any order and in several calls.
        """
        self._clients.add(client)
        self._fetches.begin(client, request.session, request.names, request.sizes, each)

    def store(self, client: bytes, request: Store, source: memoryview, done: Done) -> None:
        """Copy an object into memory, verify the copy and publish it from there.

        A store of an object that is being stored joins it, and has the same outcome.

        Parameters
        ----------
        client : bytes
        request : Store
        source : memoryview
            The object, in the client's segment, which may change it at any time.
        done : Callable
            Gets a :class:`~kvshelf.server.messages.Stored`, or a fault.
        """
        self._clients.add(client)
        self._stores.begin(client, request, source, done)

    # --------------------------------------------------------------------------------------- calls

    def call(self, client: bytes, request: Call, done: Done) -> None:
        """Call the shelf's storage for a client, see :mod:`kvshelf.server.calls`.

        Parameters
        ----------
        client : bytes
        request : Call
        done : Callable
            Gets a :class:`~kvshelf.server.messages.Result`; for ``stat`` a
            :class:`~kvshelf.server.messages.FoundSizes`; or a fault.
        """
        self._clients.add(client)
        method, args = request.method, request.args
        if method == "touch" and self._uses is not None and _is_object(args):
            self._note([str(args[0])])
            done(Result(Touched.TOUCHED.value))
            return
        changes = method in CHANGES
        if changes and self._draining:
            done(Fault.of(draining()))
            return
        self._changes += changes

        def work() -> Any:
            return self._calls.perform(client, method, args, request.data)

        def answer(outcome: Any) -> None:
            if isinstance(outcome, Exception):
                done(Fault.of(outcome))
            else:
                done(outcome if isinstance(outcome, FoundSizes) else Result(outcome))

        def returned(outcome: Any) -> None:
            if client not in self._clients:
                self._calls.forget(client)
            if method in ("delete", "set_aside") and args and isinstance(args[0], str):
                self._stores.forget(args[0])
                self._fetches.forget(key_of(args[0]))
                gone = self._known(args[0])
                if gone is not None and self._storage.has_tier:
                    forget = partial(self._storage.forget, gone)
                    self._workers["call"].submit(_OWN, forget, lambda _: None)
            elif method == "write" and not isinstance(outcome, Exception):
                self._published(str(args[0]))
            if changes:
                with self._changed:
                    self._changes -= 1
                    self._changed.notify_all()

        pool = "probe" if method in ("stat", "info") else "call"
        self._workers[pool].submit(client, work, answer, returned)

    # -------------------------------------------------------------------------------------- endings

    def release(self, client: bytes, leases: Sequence[int]) -> None:
        """End leases of a client; numbers that are not its leases do nothing."""
        self._fetches.release(client, leases)

    def end_session(self, client: bytes, session: str) -> None:
        """End the leases of a session's lookups, and its waits for memory."""
        self._fetches.end_session(client, session)

    def client_gone(self, client: bytes) -> None:
        """Forget a client whose connection has ended, and end its leases."""
        self._clients.discard(client)
        self._stores.client_gone(client)
        self._fetches.client_gone(client)
        for workers in self._workers.values():
            workers.forget(client)
        self._calls.forget(client)

    def tick(self) -> None:
        """Expire leases and waits; to be called several times a second."""
        self._stores.tick()
        self._fetches.tick()

    def _resume(self) -> None:
        """Give free memory to the stores and reads that wait for it."""
        self._stores.resume()
        self._fetches.resume()

    # ----------------------------------------------------------------------------------- any thread

    def drain(self, seconds: float) -> int:
        """Begin nothing more, and wait until what clients store is published.

        Parameters
        ----------
        seconds : float
            Longest time.

        Returns
        -------
        int
            Number of stores and other changes that are not over.
        """
        deadline = time.monotonic() + seconds
        self._draining = True
        self._fetches.drain()
        self._stores.drain()
        left = self._stores.wait(seconds)
        with self._changed:
            self._changed.wait_for(lambda: not self._changes, max(0.0, deadline - time.monotonic()))
        return left + self._changes

    def stats(self) -> dict[str, float]:
        """Return the counters (:data:`COUNTERS`) and the gauges (:data:`GAUGES`) by name."""
        memory, (leases, leased_bytes) = self._memory.stats(), self._fetches.leases.stats()
        return {
            **self._counts,
            "objects": memory.objects,
            "bytes": memory.bytes,
            "capacity_bytes": self._memory.capacity,
            "pinned_bytes": memory.pinned_bytes,
            "wasted_bytes": memory.wasted_bytes,
            "largest_free_bytes": memory.largest_free,
            "evicted_objects": memory.evictions,
            "evicted_bytes": memory.evicted_bytes,
            "leases": leases,
            "leased_bytes": leased_bytes,
            "clients": len(self._clients),
            "reads": self._fetches.reads,
            "stores": self._stores.running,
            "waiting": self._fetches.waiting + self._stores.waiting,
        }

    def close(self) -> None:
        """Stop the threads. What was not begun fails. Idempotent."""
        for workers in self._workers.values():
            workers.close()


def _is_object(args: Sequence[Any]) -> bool:
    return len(args) == 2 and parse_path(str(args[0])) is not None
