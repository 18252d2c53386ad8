"""What the node server does for its clients: finds, reads once, stores once, and remembers.

Owns the memory tier of the server (the objects in its arena), the reads and stores under way, and
the requests that wait for memory. Messages come from and go to the loop
(:mod:`kvshelf.server.loop`); the shelf is called on threads of its own.

The arena begins with a table of generations (uint64), one for each slot of the tier: a client that
has used the memory of a slot reads from it whether the memory was still the object's.

Objects are named as on the storage, the namespace's folder included. In the tier the slug of that
folder has no meaning, as for :class:`~kvshelf.shelf.view.NamespaceView`. Names that begin with
``hash/`` are no objects of the format: they are in the tier only.

Contracts
---------
* What is in the tier was verified, there, after its last byte was written: objects by the record of
  their namespace and their name, others by the checksum that came with them.
* An object that several clients want is read once; one that several clients store is stored once.
* The shelf decides what is stored: an object that it did not take is not in the tier.
* Memory is reused only when no client has a lease of it. A lease that has expired is no longer
  valid, and its memory still waits until the client gives it back or is gone.
* One client holds at most half of the memory. Requests that find no room wait for it, those of one
  client in their order, and fail after a while.
* A storage that hangs fails the requests that wait for it, and nothing else.

Threads
-------
All methods are called on the loop's thread and never block, except :meth:`Service.drain` and
:meth:`Service.stats`, which any thread may call. Answers are given on the loop's thread too: what
other threads find out goes through `post`.
"""

from __future__ import annotations

import errno
import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

import xxhash

from kvshelf.backends import WriteResult
from kvshelf.backends.base import check_name
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    KVShelfError,
    ObjectMissingError,
    ObjectNameError,
    PermanentStorageError,
    StorageError,
    UnavailableStorageError,
)
from kvshelf.format.invalid import PayloadDamaged, WrongSize
from kvshelf.format.keys import Chunk
from kvshelf.format.names import ParsedName, object_name, parse_path
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.logs import RateLimitedLog
from kvshelf.memory.arena import Arena
from kvshelf.memory.residents import Residents, Slot
from kvshelf.metrics import Counters
from kvshelf.server.appearances import MAX_FOLDERS, Appearances
from kvshelf.server.calls import CHANGES, Calls, facts, found
from kvshelf.server.leases import Leases
from kvshelf.server.messages import (
    Facts,
    Failed,
    Fault,
    Found,
    LookedUp,
    Ready,
    Reply,
    Result,
    Stored,
    WriteMode,
)
from kvshelf.server.workers import Post, Workers
from kvshelf.shelf.tiers import AnyShelf

logger = logging.getLogger(__name__)

#: Takes the reply to a request, on the loop's thread.
Done: TypeAlias = Callable[[Reply], None]
#: Takes outcomes of a fetch: some at once, others as they come.
Each: TypeAlias = "Callable[[list[Ready | Failed]], None]"

#: What a service counts, with the meaning of one unit.
COUNTERS: Final = {
    "lookups": "lookups answered",
    "memory_hits": "objects that clients fetched and that were in memory",
    "joined_fetches": "objects that clients fetched while they were read for others",
    "read_objects": "objects read from the shelf",
    "read_bytes": "bytes of objects read from the shelf",
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
    "bytes": "bytes of memory with objects, rounded up to size classes",
    "capacity_bytes": "bytes of memory for objects",
    "pinned_bytes": "bytes of objects that clients hold, or that are read or stored",
    "wasted_bytes": "bytes lost by rounding sizes up",
    "largest_free_bytes": "bytes of the largest free range of memory",
    "leases": "leases of all clients",
    "leased_bytes": "bytes of objects that clients hold; what two hold counts twice",
    "clients": "clients that have sent a request and are connected",
    "reads": "reads from the shelf under way",
    "stores": "stores under way",
    "waiting": "objects that wait for memory",
}

#: How names begin that are no objects of the format.
HASH: Final = "hash/"
#: Seconds that a lease lives.
LEASE_SECONDS: Final = 30.0
#: Part of the memory that one client may hold.
_CLIENT_SHARE: Final = 2
_ALIGNMENT: Final = 4096
_GENERATION_BYTES: Final = 8
#: Most namespaces that are known at a time; those that were used longest ago are forgotten.
_NAMESPACES: Final = 1024
_RECORD_BYTES: Final = 1 << 20
#: How much of a client's segment is copied at once, with the GIL held.
_COPIED_AT_ONCE: Final = 256 << 10
#: Threads where the storage is near, and most where it is not.
_NEAR_THREADS: Final = 4
_MOST_THREADS: Final = 16


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


@dataclass(eq=False, slots=True)
class _Read:
    """One read for all who want an object."""

    key: str
    slot: Slot
    wants: list[_Want] = field(default_factory=list)
    #: Whether the object was published in the tier.
    published: bool = False


@dataclass(eq=False, slots=True)
class _Store:
    """One object that a client stores, and the stores of it that came meanwhile."""

    client: bytes
    name: str
    key: str
    source: memoryview
    mode: WriteMode
    until: float
    done: Done
    fmt: ObjectFormat | None
    parsed: ParsedName | None
    checksum: int | None
    slot: Slot | None = None
    joined: list[_Store] = field(default_factory=list)


class _Copied:
    """Reads an object from a client's segment."""

    def __init__(self, source: memoryview) -> None:
        self.size = source.nbytes
        self._source = source

    def read_into(self, buffer: memoryview, offset: int) -> int:
        count = min(buffer.nbytes, max(0, self.size - offset))
        for start in range(0, count, _COPIED_AT_ONCE):
            end = min(start + _COPIED_AT_ONCE, count)
            buffer[start:end] = self._source[offset + start : offset + end]
        return count


class Service:
    """The objects of one shelf for the clients of one server.

    Parameters
    ----------
    shelf : Shelf or TieredShelf
        The caller closes it, after the service.
    arena : Arena
        The memory for objects, behind the table of generations.
    post : Callable
        Calls a function on the loop's thread, soon; may be called on any thread.
    tell : Callable
        Called on the loop's thread with a client, a folder that it watches, and names that
        appeared there; no names: anything may have.
    counters : Counters, optional
        Counts stuck threads.
    clock : Callable
        Seconds, for leases and waits.
    lease_seconds : float
        How long a lease lives.
    io_threads : int, optional
        Threads that read objects; half as many write. By default as the storage needs.

    Attributes
    ----------
    slots : int
        Number of generations at the arena's beginning.
    lease_seconds : float

    Raises
    ------
    ConfigError
        If the arena is too small.
    RuntimeError
        If the system allows no thread.
    """

    def __init__(
        self,
        shelf: AnyShelf,
        arena: Arena,
        *,
        post: Post,
        tell: Callable[[bytes, str, Sequence[str]], None],
        counters: Counters | None = None,
        clock: Callable[[], float] = time.monotonic,
        lease_seconds: float = LEASE_SECONDS,
        io_threads: int | None = None,
    ) -> None:
        counters = Counters() if counters is None else counters
        self._shelf = shelf
        self._backend = shelf.backend
        self._clock = clock
        self.lease_seconds = lease_seconds
        self.slots = arena.nbytes // _ALIGNMENT
        table = -(-self.slots * _GENERATION_BYTES // _ALIGNMENT) * _ALIGNMENT
        if arena.nbytes < table + _ALIGNMENT:
            raise ConfigError(f"an arena of {arena.nbytes} bytes holds no object; give it more")
        self._start = table
        self._memory = arena.view[table:]
        self._generations = arena.view[: self.slots * _GENERATION_BYTES].cast("Q")
        self._residents = Residents(
            arena.nbytes - table, alignment=_ALIGNMENT, on_generation=self._set_generation
        )
        self._most = self._residents.capacity // _CLIENT_SHARE
        self._leases: Leases[Slot] = Leases(seconds=lease_seconds, quota=self._most, clock=clock)
        self._clients: set[bytes] = set()
        self._formats: OrderedDict[str, tuple[int, ObjectFormat]] = OrderedDict()
        self._numbers = itertools.count(1)
        #: Bytes that each client waits for in reads.
        self._coming: dict[bytes, int] = {}
        self._reads: dict[str, _Read] = {}
        self._stores: dict[tuple[str, WriteMode], _Store] = {}
        #: Those that found no room: of each client, and stores of all.
        self._waiting: dict[bytes, deque[_Want]] = {}
        self._waiting_stores: deque[_Store] = deque()
        self._changes = 0
        self._draining = False
        self._idle = threading.Condition()
        self._log = RateLimitedLog(logger)
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._calls = Calls(self._backend)
        self._appearances = Appearances(self._backend, lambda *what: post(partial(tell, *what)))
        properties = self._backend.properties
        near = _NEAR_THREADS
        many = min(_MOST_THREADS, properties.concurrency) if properties.high_latency else near
        readers = many if io_threads is None else io_threads
        threads = {
            "fetch": readers,
            "publish": max(1, readers // 2),
            "probe": many,
            "call": near,
        }
        self._workers: dict[str, Workers] = {}
        try:
            for name, count in threads.items():
                self._workers[name] = Workers(
                    f"kvshelf-{name}", count, self._backend, post, counters
                )
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"Service({self._backend.url!r}, {self._residents!r})"

    def _set_generation(self, number: int, generation: int) -> None:
        self._generations[number] = generation

    @property
    def facts(self) -> Facts:
        """What clients may rely on at present."""
        return facts(self._backend)

    # ---------------------------------------------------------------------------------- namespaces

    def register(self, record: bytes) -> int:
        """Take the record of a namespace, so that its objects can be verified.

        Parameters
        ----------
        record : bytes
            The bytes of its ``namespace.json``.

        Returns
        -------
        int
            A number of the namespace; the same each time.

        Raises
        ------
        ConfigError
            If the record is not one, or a namespace of another digest has the same folder.
        """
        if len(record) > _RECORD_BYTES:
            raise ConfigError(f"a namespace record of {len(record)} bytes: at most {_RECORD_BYTES}")
        namespace = Namespace.from_bytes(record)
        tag = namespace.digest.hex()[:16]
        known = self._formats.get(tag)
        if known is None:
            known = self._formats[tag] = next(self._numbers), ObjectFormat(namespace)
            if len(self._formats) > _NAMESPACES:
                self._formats.popitem(last=False)
        elif known[1].namespace != namespace:
            raise ConfigError(
                f"the namespace {namespace.digest.hex()} has the folder of another one,"
                f" {known[1].namespace.digest.hex()}: its objects cannot be told apart"
            )
        return known[0]

    def _format(self, name: str, nbytes: int) -> tuple[ParsedName, ObjectFormat]:
        """Return what an object's name says, and the format of the object.

        Raises
        ------
        ObjectNameError
            If it is not the name of an object.
        UnavailableStorageError
            If the namespace is not registered.
        WrongSize
            If its object does not have so many bytes.
        """
        parsed = parse_path(name)
        if parsed is None:
            raise ObjectNameError(f"{name!r} is not the name of an object of a shelf")
        tag = name[: name.index("/")][-16:]
        known = self._formats.get(tag)
        if known is None:
            raise UnavailableStorageError(
                errno.EAGAIN, "its namespace is not registered with this server", name
            )
        self._formats.move_to_end(tag)
        fmt = known[1].of_name(parsed)
        expected = fmt.object_size(parsed.shard, fmt.named_chunk(parsed).tokens)
        if nbytes != expected:
            raise WrongSize(f"{name}: {nbytes} bytes were given, expected {expected}")
        return parsed, fmt

    # ---------------------------------------------------------------------------- finds and lookups

    def find(self, client: bytes, names: Sequence[str], sizes: Sequence[int], done: Done) -> None:
        """Tell which objects can be loaded, from memory or from the shelf.

        Parameters
        ----------
        client : bytes
        names : Sequence of str
        sizes : Sequence of int
            The bytes that each should have.
        done : Callable
            Gets a :class:`~kvshelf.server.messages.Found`, or a fault.
        """
        self._clients.add(client)
        if len(sizes) != len(names):
            done(Fault.of(ObjectNameError(f"{len(sizes)} sizes for {len(names)} names")))
            return
        here = self._residents.holds(list(map(_key, names)))
        missing = [name for name, held in zip(names, here, strict=True) if not held]
        if not missing:
            done(Found(list(sizes)))
            return

        def answer(outcome: Found | Exception) -> None:
            if isinstance(outcome, Exception):
                done(Fault.of(outcome))
                return
            rest = iter(outcome.answers)
            answers = [size if held else next(rest) for size, held in zip(sizes, here, strict=True)]
            done(Found(answers, outcome.fault))

        self._workers["probe"].submit(lambda: found(self._backend.stat(missing)), answer)

    def lookup(
        self, client: bytes, session: str, chains: Sequence[Sequence[str]], done: Done
    ) -> None:
        """Count the leading chunks of a prompt that can be loaded, and keep them in memory.

        Chunks that only the shelf has are read meanwhile. All are leased until the session ends,
        or for as long as a lease lives. The count ends where the client's share of the memory
        does.

        Parameters
        ----------
        client : bytes
        session : str
        chains : Sequence of Sequence of str
            The names of the objects of each chunk, in the order of the prompt.
        done : Callable
            Gets a :class:`~kvshelf.server.messages.LookedUp`, or a fault.
        """
        self._clients.add(client)
        pinned: list[list[Slot]] = []
        missing: list[list[str]] = []
        for names in chains:
            slots, absent = self._pin_chunk(names)
            pinned.append(slots)
            missing.append(absent)
            if absent and absent[0].startswith(HASH):
                # The shelf has none of them.
                break
        asked = [name for absent in missing for name in absent]
        if not asked:
            self._looked_up(client, session, pinned, [[]] * len(pinned), done)
            return

        def answer(outcome: Found | Exception) -> None:
            there: list[list[tuple[str, int]]] = []
            if isinstance(outcome, Found):
                sizes = iter(outcome.answers)
                there = [[(name, next(sizes)) for name in absent] for absent in missing]
            self._looked_up(client, session, pinned, there, done)

        self._workers["probe"].submit(lambda: found(self._backend.stat(asked)), answer)

    def _pin_chunk(self, names: Sequence[str]) -> tuple[list[Slot], list[str]]:
        slots: list[Slot] = []
        absent: list[str] = []
        for name in names:
            slot = self._residents.pin(_key(name))
            if slot is None:
                absent.append(name)
            else:
                slots.append(slot)
        return slots, absent

    def _looked_up(
        self,
        client: bytes,
        session: str,
        pinned: Sequence[list[Slot]],
        there: Sequence[Sequence[tuple[str, int]]],
        done: Done,
    ) -> None:
        """Lease the leading chunks of which all objects are pinned or on the shelf.

        Parameters
        ----------
        client, session, done
            As for :meth:`lookup`.
        pinned : Sequence of Sequence of Slot
            The objects of each chunk that are in memory.
        there : Sequence of Sequence of (str, int)
            The others, with the sizes that the shelf has them in.
        """
        count = 0
        if client in self._clients:
            while count < len(there) and self._lock(client, session, pinned[count], there[count]):
                count += 1
        for slots in pinned:
            for slot in slots:
                self._residents.unpin(slot)
        until = self._clock() + self.lease_seconds
        wants = [
            _Want(client, session, 0, name, _key(name), size, until, None)
            for chunk in there[:count]
            for name, size in chunk
        ]
        self._begin_all(wants)
        self._counts["lookups"] += 1
        self._resume()
        done(LookedUp(count))

    def _lock(
        self,
        client: bytes,
        session: str,
        slots: list[Slot],
        there: Sequence[tuple[str, int]],
    ) -> bool:
        """Lease the objects of a chunk that are in memory; False if the chunk is no hit.

        Those whose pins are the leases' now are taken out of `slots`.
        """
        for name, size in there:
            try:
                self._format(name, size)
            except (KVShelfError, ValueError):
                return False
        for slot in slots.copy():
            granted = self._leases.grant(client, session, slot, slot.nbytes, fetched=False)
            if granted is None:
                return False
            if granted[1]:
                slots.remove(slot)
        return True

    # ------------------------------------------------------------------------------------- fetches

    def fetch(
        self,
        client: bytes,
        session: str,
        names: Sequence[str],
        sizes: Sequence[int],
        each: Each,
    ) -> None:
        """Lease objects to a client; those that are not in memory are read first.

        Parameters
        ----------
        client : bytes
        session : str
            Locks of a lookup under this name give way to the leases.
        names : Sequence of str
        sizes : Sequence of int
            Bytes of each object.
        each : Callable
            Gets one outcome for each object, in any order and in several calls.
        """
        self._clients.add(client)
        if len(sizes) != len(names):
            error = Fault.of(ObjectNameError(f"{len(sizes)} sizes for {len(names)} names"))
            each([Failed(index, error) for index in range(len(names))])
            return
        until = self._clock() + self.lease_seconds
        outcomes = self._begin_all(
            [
                _Want(client, session, index, name, _key(name), nbytes, until, each)
                for index, (name, nbytes) in enumerate(zip(names, sizes, strict=True))
            ]
        )
        if outcomes:
            each(outcomes)

    def _begin_all(self, wants: Sequence[_Want]) -> list[Ready | Failed]:
        """Begin what one client wants; return the outcomes of what ends at once.

        What finds no room waits, and everything behind it.
        """
        outcomes: list[Ready | Failed] = []
        for number, want in enumerate(wants):
            waiting = self._waiting.get(want.client)
            if waiting or not self._try(want, outcomes):
                self._waiting.setdefault(want.client, deque()).extend(wants[number:])
                break
        return outcomes

    def _try(self, want: _Want, outcomes: list[Ready | Failed]) -> bool:
        """Begin or settle one want; False if it must wait for memory."""
        try:
            return self._begin(want, outcomes)
        except (KVShelfError, ValueError) as error:
            self._counts["failed_fetches"] += 1
            outcomes.append(Failed(want.index, Fault.of(error)))
            return True

    def _begin(self, want: _Want, outcomes: list[Ready | Failed]) -> bool:
        slot = self._residents.pin(want.key)
        if slot is not None:
            if slot.nbytes != want.nbytes:
                self._residents.unpin(slot)
                raise WrongSize(f"{want.name}: it has {slot.nbytes} bytes, not {want.nbytes}")
            if not self._has_room(want) or not self._lease(want, slot, outcomes):
                self._residents.unpin(slot)
                return False
            self._counts["memory_hits"] += 1
            return True
        read = self._reads.get(want.key)
        if read is None:
            if want.name.startswith(HASH):
                raise ObjectMissingError(errno.ENOENT, "it is not in memory", want.name)
            parsed, fmt = self._format(want.name, want.nbytes)
            self._check_fits(want.name, want.nbytes)
            if self._draining:
                raise _draining_error()
            if not self._has_room(want):
                return False
            slot = self._residents.reserve(want.key, want.nbytes)
            if slot is None:
                return False
            read = self._reads[want.key] = _Read(want.key, slot)
            self._submit_read(read, parsed, fmt)
        elif not self._has_room(want):
            return False
        else:
            self._counts["joined_fetches"] += 1
        read.wants.append(want)
        self._coming[want.client] = self._coming.get(want.client, 0) + want.nbytes
        return True

    def _submit_read(self, read: _Read, parsed: ParsedName, fmt: ObjectFormat) -> None:
        view = self._shelf.view(fmt)
        buffer = self._buffer(read.slot)
        self._workers["fetch"].submit(
            lambda: view.on_storage.load_named(parsed, buffer),
            partial(self._was_read, read, parsed, fmt),
            partial(self._read_returned, read),
        )

    def _was_read(
        self, read: _Read, parsed: ParsedName, fmt: ObjectFormat, outcome: Chunk | Exception
    ) -> None:
        if self._reads.get(read.key) is read:
            del self._reads[read.key]
        wants, read.wants = read.wants, []
        for want in wants:
            self._coming[want.client] -= want.nbytes
            if not self._coming[want.client]:
                del self._coming[want.client]
        if isinstance(outcome, Exception):
            self._counts["failed_fetches"] += len(wants)
            fault = Fault.of(outcome)
            for want in wants:
                if want.each is not None:
                    want.each([Failed(want.index, fault)])
            return
        read.published = True
        self._publish(read.slot, parsed, fmt, outcome)
        self._counts["read_objects"] += 1
        self._counts["read_bytes"] += read.slot.nbytes
        for want in wants:
            outcomes: list[Ready | Failed] = []
            if not self._try(want, outcomes):
                self._waiting.setdefault(want.client, deque()).appendleft(want)
            elif want.each is not None and outcomes:
                want.each(outcomes)

    def _read_returned(self, read: _Read, outcome: Chunk | Exception) -> None:
        """End a read. One that was late is of use for whoever asks next."""
        if not read.published:
            if isinstance(outcome, Exception):
                self._residents.abandon(read.slot)
            else:
                self._residents.publish(read.slot)
        self._resume()

    def _publish(self, slot: Slot, parsed: ParsedName, fmt: ObjectFormat, chunk: Chunk) -> None:
        """Let a verified object be found in the tier, behind the chunk before it."""
        if chunk.index:
            parent = Chunk(
                chunk.parent, b"", chunk.index - 1, fmt.chunk_size, False, chunk.salt_group
            )
            folder = str(slot.name).partition("/")[0]
            slot.parent = f"{folder}/{object_name(parent, parsed.shard, fmt.shards, fmt.kind)}"
        self._residents.publish(slot)

    def _has_room(self, want: _Want) -> bool:
        """Whether a client may hold one more object."""
        held = self._leases.nbytes(want.client) + self._coming.get(want.client, 0)
        return held + want.nbytes <= self._most

    def _lease(self, want: _Want, slot: Slot, outcomes: list[Ready | Failed]) -> bool:
        """Turn a pin of a slot into a lease; False if the client holds too much."""
        granted = self._leases.grant(
            want.client, want.session, slot, slot.nbytes, fetched=want.each is not None
        )
        if granted is None:
            return False
        number, new = granted
        if not new:
            self._residents.unpin(slot)
        if want.each is not None:
            place = self._start + slot.offset
            outcomes.append(
                Ready(want.index, place, slot.nbytes, slot.number, slot.generation, number)
            )
        return True

    def _buffer(self, slot: Slot) -> memoryview:
        return self._memory[slot.offset : slot.offset + slot.nbytes]

    def _check_fits(self, name: str, nbytes: int) -> None:
        if nbytes > self._most:
            raise PermanentStorageError(
                f"{name} has {nbytes} bytes; one client may hold {self._most}, half of the server's"
                " memory: give it more"
            )

    # -------------------------------------------------------------------------------------- stores

    def store(
        self,
        client: bytes,
        name: str,
        source: memoryview,
        mode: WriteMode,
        memory_only: bool,
        checksum: int | None,
        done: Done,
    ) -> None:
        """Copy an object into the tier, verify the copy and publish it from there.

        A store of an object that is being stored joins it, and has the same outcome.

        Parameters
        ----------
        client : bytes
        name : str
        source : memoryview
            The object, in the client's segment.
        mode : str
            As for :meth:`kvshelf.backends.base.Backend.write`.
        memory_only : bool
            Do not publish it. Such names begin with ``hash/``, and no others do.
        checksum : int or None
            64-bit xxh3 of an object that is in memory only.
        done : Callable
            Gets a :class:`~kvshelf.server.messages.Stored`, or a fault.
        """
        self._clients.add(client)
        until = self._clock() + self._backend.deadlines.write
        store = _Store(client, name, _key(name), source, mode, until, done, None, None, checksum)
        try:
            if self._draining:
                raise _draining_error()
            if memory_only:
                if not name.startswith(HASH) or checksum is None:
                    raise ObjectNameError(
                        f"{name!r}: an object in memory only has a name that begins with {HASH}, "
                        "and a checksum"
                    )
            else:
                store.parsed, store.fmt = self._format(name, source.nbytes)
            if not source.nbytes:
                raise ObjectNameError(f"{name!r} has no bytes")
            self._check_fits(name, source.nbytes)
        except (KVShelfError, ValueError) as error:
            self._counts["failed_stores"] += 1
            done(Fault.of(error))
            return
        if memory_only and self._residents.holds([store.key])[0]:
            done(Stored("existed"))
            return
        other = self._stores.get((name, mode))
        if other is not None:
            self._counts["joined_stores"] += 1
            other.joined.append(store)
            return
        self._stores[name, mode] = store
        if self._waiting_stores or not self._begin_store(store):
            self._waiting_stores.append(store)

    def _begin_store(self, store: _Store) -> bool:
        """Begin a store; False if it must wait for memory."""
        slot = self._residents.reserve(store.key, store.source.nbytes)
        if slot is None:
            return False
        store.slot = slot
        self._workers["publish"].submit(
            partial(self._copy_and_publish, store, self._buffer(slot)),
            partial(self._stored, store),
            partial(self._store_returned, store, slot),
        )
        return True

    def _copy_and_publish(
        self, store: _Store, buffer: memoryview
    ) -> tuple[WriteResult, Chunk | None, bool]:
        """Store one object, on a thread of its own.

        Returns
        -------
        result : WriteResult
        chunk : Chunk or None
        kept : bool
            Whether the tier may have it: the shelf has it too.
        """
        copied = _Copied(store.source)
        fmt, parsed = store.fmt, store.parsed
        if fmt is None or parsed is None:
            copied.read_into(buffer, 0)
            if xxhash.xxh3_64_intdigest(buffer) != store.checksum:
                raise PayloadDamaged(f"{store.name}: its bytes do not have the given checksum")
            return WriteResult.CREATED, None, True
        chunk = fmt.read_named(copied, parsed, buffer)
        result = self._backend.write(store.name, [buffer], store.mode)
        # What stands there may be something else.
        kept = result is not WriteResult.EXISTED or self._backend.probe(store.name) == buffer.nbytes
        return result, chunk, kept

    def _stored(
        self, store: _Store, outcome: tuple[WriteResult, Chunk | None, bool] | Exception
    ) -> None:
        """Tell the clients that store an object how it ended."""
        joined, store.joined = store.joined, []
        if self._stores.get((store.name, store.mode)) is store:
            del self._stores[store.name, store.mode]
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
        if isinstance(outcome, BadObjectError | _ClientGoneError) and joined:
            # The fault of one client is not that of the others.
            first, first.joined = joined[0], joined[1:]
            self._stores[first.name, first.mode] = first
            if not self._begin_store(first):
                self._waiting_stores.append(first)
        else:
            for other in joined:
                other.done(others)
        with self._idle:
            self._idle.notify_all()

    def _store_returned(
        self,
        store: _Store,
        slot: Slot,
        outcome: tuple[WriteResult, Chunk | None, bool] | Exception,
    ) -> None:
        """Keep what was stored, and tell those who watch its folder."""
        if isinstance(outcome, Exception) or not outcome[2]:
            self._residents.abandon(slot)
        elif outcome[1] is None or store.parsed is None or store.fmt is None:
            self._residents.publish(slot)
        else:
            self._publish(slot, store.parsed, store.fmt, outcome[1])
        if (
            store.parsed is not None
            and not isinstance(outcome, Exception)
            and outcome[0] is not WriteResult.EXISTED
        ):
            self._appearances.published(store.name)
        self._resume()

    # --------------------------------------------------------------------------------------- calls

    def call(
        self, client: bytes, method: str, args: Sequence[Any], data: bytes, done: Done
    ) -> None:
        """Call the shelf's storage for a client, see :mod:`kvshelf.server.calls`.

        Further methods are ``watch`` with a list of folders, whose answer is a list of those that
        were not watched before and one of those that only this server tells of (see
        :class:`~kvshelf.server.appearances.Appearances`), and ``unwatch``.

        Parameters
        ----------
        client : bytes
        method, args, data
            As in :class:`~kvshelf.server.messages.Call`.
        done : Callable
            Gets a :class:`~kvshelf.server.messages.Result`; for ``stat`` a
            :class:`~kvshelf.server.messages.Found`; or a fault.
        """
        self._clients.add(client)
        if method == "unwatch":
            self._appearances.forget(client)
            done(Result(None))
            return
        changes = method in CHANGES
        if changes and self._draining:
            done(Fault.of(_draining_error()))
            return
        self._changes += changes

        def work() -> Any:
            if method == "watch":
                return self._appearances.watch(client, _folders(args))
            return self._calls.perform(client, method, args, data)

        def answer(outcome: Any) -> None:
            if isinstance(outcome, Exception):
                done(Fault.of(outcome))
            else:
                done(outcome if isinstance(outcome, Found) else Result(outcome))

        def returned(outcome: Any) -> None:
            if client not in self._clients:
                self._forget(client)
            if changes:
                self._changes -= 1
                with self._idle:
                    self._idle.notify_all()
            if method in ("delete", "quarantine"):
                self._residents.remove(_key(args[0]))
            elif method in ("write", "write_marker") and not isinstance(outcome, Exception):
                self._appearances.published(args[0])

        pool = "probe" if method in ("stat", "info") else "call"
        self._workers[pool].submit(work, answer, returned)

    # -------------------------------------------------------------------------------------- endings

    def release(self, client: bytes, leases: Sequence[int]) -> None:
        """End leases of a client; numbers that are not its leases do nothing."""
        self._unpin(self._leases.release(client, leases))

    def end_session(self, client: bytes, session: str) -> None:
        """End what lookups of a session have leased, and what waits for memory in its name."""
        queue = self._waiting.get(client)
        if queue is not None:
            ended = [want for want in queue if want.session == session]
            self._waiting[client] = deque(want for want in queue if want.session != session)
            self._fail(ended, UnavailableStorageError(errno.ECANCELED, "its session has ended"))
        self._unpin(self._leases.end_session(client, session))

    def client_gone(self, client: bytes) -> None:
        """Forget a client whose connection has ended, and take back what it held."""
        self._clients.discard(client)
        self._waiting.pop(client, None)
        self._coming.pop(client, None)
        for read in self._reads.values():
            read.wants = [want for want in read.wants if want.client != client]
        for store in list(self._stores.values()):
            store.joined = [other for other in store.joined if other.client != client]
            if store.client == client and store.slot is None:
                self._waiting_stores.remove(store)
                self._stored(store, _ClientGoneError())
        self._forget(client)
        self._unpin(self._leases.end_client(client))

    def _forget(self, client: bytes) -> None:
        self._appearances.forget(client)
        self._calls.forget(client)

    def tick(self) -> None:
        """End what has lasted too long; to be called several times a second."""
        ended, overdue = self._leases.expire()
        for slot in overdue:
            self._counts["overdue_leases"] += 1
            self._residents.expire(slot)
        now = self._clock()
        late = [want for queue in self._waiting.values() for want in queue if want.until <= now]
        if late:
            gone = set(map(id, late))
            for client, queue in self._waiting.items():
                self._waiting[client] = deque(want for want in queue if id(want) not in gone)
            self._fail(late, _no_room_error())
        while self._waiting_stores and self._waiting_stores[0].until <= now:
            self._stored(self._waiting_stores.popleft(), _no_room_error())
        self._unpin(ended)

    def _unpin(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._residents.unpin(slot)
        self._resume()

    def _fail(self, wants: Sequence[_Want], error: StorageError) -> None:
        self._counts["failed_fetches"] += len(wants)
        for want in wants:
            if want.each is not None:
                want.each([Failed(want.index, Fault.of(error))])

    def _resume(self) -> None:
        """Begin what waits for memory, as far as there is room."""
        while self._waiting_stores and self._begin_store(self._waiting_stores[0]):
            self._waiting_stores.popleft()
        clients = list(self._waiting)
        while clients:
            # One of each at a time: a client with many wants is not served before the others.
            clients = [client for client in clients if self._resume_one(client)]

    def _resume_one(self, client: bytes) -> bool:
        """Begin the next want of a client; False if it must wait, or there is none."""
        queue = self._waiting.get(client)
        if not queue:
            self._waiting.pop(client, None)
            return False
        want = queue[0]
        outcomes: list[Ready | Failed] = []
        if not self._try(want, outcomes):
            return False
        queue.popleft()
        # Next time the others come first.
        self._waiting[client] = self._waiting.pop(client)
        if want.each is not None and outcomes:
            want.each(outcomes)
        return True

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
        self._draining = True
        with self._idle:
            self._idle.wait_for(lambda: not self._stores and not self._changes, seconds)
        return len(self._stores) + self._changes

    def stats(self) -> dict[str, float]:
        """Return the counters (:data:`COUNTERS`) and the gauges (:data:`GAUGES`) by name."""
        residents, leases = self._residents.stats(), self._leases.stats()
        return {
            **self._counts,
            "objects": residents.objects,
            "bytes": residents.bytes,
            "capacity_bytes": self._residents.capacity,
            "pinned_bytes": residents.pinned_bytes,
            "wasted_bytes": residents.wasted_bytes,
            "largest_free_bytes": residents.largest_free,
            "evicted_objects": residents.evictions,
            "evicted_bytes": residents.evicted_bytes,
            "leases": leases.leases,
            "leased_bytes": leases.nbytes,
            "clients": len(self._clients),
            "reads": len(self._reads),
            "stores": len(self._stores),
            "waiting": sum(map(len, list(self._waiting.values()))) + len(self._waiting_stores),
        }

    def close(self) -> None:
        """Stop the threads. What was not begun fails."""
        self._appearances.close()
        for workers in self._workers.values():
            workers.close()


class _ClientGoneError(UnavailableStorageError):
    """The client that stores an object is gone."""


def _key(name: str) -> str:
    """Return an object's name in the tier: without the slug of its namespace's folder."""
    folder = name.find("/")
    return name[folder - 16 :] if folder > 16 else name


def _folders(args: Sequence[Any]) -> list[str]:
    if len(args) == 1 and isinstance(args[0], list) and len(args[0]) <= MAX_FOLDERS:
        for folder in args[0]:
            check_name(folder)
        return args[0]
    raise PermanentStorageError(f"watch: expected a list of at most {MAX_FOLDERS} folders")


def _draining_error() -> StorageError:
    return UnavailableStorageError(errno.ESHUTDOWN, "the server is about to stop")


def _no_room_error() -> StorageError:
    return UnavailableStorageError(
        errno.ENOMEM, "the server's memory is full of what its clients use"
    )
