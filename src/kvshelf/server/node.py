"""What a node server does for its clients: it finds, fetches, lends and stores objects.

Owns the server's memory, which is a ring of slots (:mod:`kvshelf.memory.ring`) with one object in
each, what is lent of it (:class:`Loans`), and the locks of requests that were looked up. Sockets
are :mod:`kvshelf.server.session`'s.

Contracts
---------
* The server alone writes to its memory. A slot is sealed once its object was verified there, so
  neither a stray write of a client nor a late copy of a GPU changes what other clients read.
* A loan ends when the client gives it back, or when its connection has ended; never by a time.
  Locks, which lend no memory to the client, end by a time too.
* A connection has at most a quarter of the memory on loan, all of them together at most a half, or
  one object. Stores under way take at most a quarter. What finds no room is answered at once with
  ``NO_ROOM``: the client reads the bytes by its stream then.
* An object that several clients want is read once; one that several store is published once.
* The shelf decides what is stored: an object that it did not take is not kept.
* A lock keeps an object in memory for a request until the client ends it, or 30 s have passed. It
  counts as a loan of the connection that looked it up.
* A storage that hangs fails the requests that wait for it, and holds up nothing else.

Threads
-------
All methods run on the loop's thread and none blocks it, but those whose docstring says that they
are for a thread of the :class:`Pool`, and :meth:`Node.stats`, which any thread may call.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvshelf.backends import Touched, WriteResult
from kvshelf.capacity.uses import Uses
from kvshelf.errors import (
    KVShelfError,
    NoSpaceStorageError,
    ObjectMissingError,
    PermanentStorageError,
    UnavailableStorageError,
)
from kvshelf.format.names import parse_path
from kvshelf.memory.arena import Arena
from kvshelf.memory.ring import Ring, Share, Slot
from kvshelf.metrics import Counters
from kvshelf.server.namespaces import NamedObject, Namespaces, memory_name
from kvshelf.server.pool import Pool
from kvshelf.server.protocol import IN_MEMORY, MISSING, NO_ROOM, Facts, Fault, sizes_of
from kvshelf.server.storage import CopyingReader, Storage
from kvshelf.shelf.markers import is_marker
from kvshelf.shelf.shelf import Shelf
from kvshelf.tiers.disk_tier import DiskTier

#: What a node counts, with the meaning of one unit.
COUNTERS: Final = {
    "memory_hits": "objects that clients fetched and that were in memory",
    "joined_fetches": "objects that clients fetched while they were read for others",
    "read_objects": "objects read from the shelf or the disk tier",
    "read_bytes": "bytes of objects read from the shelf or the disk tier",
    "refused_loans": "objects that clients fetched and for which no memory could be lent",
    "streamed_objects": "objects that clients got by their stream",
    "failed_fetches": "objects that clients fetched and did not get",
    "stored_objects": "objects that clients stored",
    "stored_bytes": "bytes of objects that clients stored",
    "joined_stores": "objects that clients stored while others stored them",
    "failed_stores": "objects that clients stored and the server did not take",
    "evicted_objects": "objects evicted from memory",
    "evicted_bytes": "bytes of objects evicted from memory",
}

#: What a node has at present.
GAUGES: Final = {
    "bytes": "bytes of objects that memory keeps",
    "capacity_bytes": "bytes of memory for objects",
    "pinned_bytes": "bytes of objects that clients have on loan, or that are read or stored",
    "lent_bytes": "bytes of objects that clients have on loan",
    "clients": "clients that are connected",
    "reads": "reads of objects under way",
    "stores": "stores of objects under way",
}

#: Seconds after which the locks of a session end, and sessions that one connection may have.
LOCK_SECONDS: Final = 30.0
_SESSIONS: Final = 16384
#: Parts of the memory for the loans of one connection, of all, and for stores and reads.
_LENT_TO_ONE, _LENT, _STORING, _READING = 4, 2, 4, 4
#: Threads on low-latency storage, and the most on others.
_FEW_THREADS: Final = 4
_MOST_THREADS: Final = 24


@dataclass(eq=False, slots=True)
class Loans:
    """What one connection has on loan, and where its own memory lies.

    Attributes
    ----------
    memory : memoryview
        The client's memory, read-only, which the client may change at any time.
    share : Share
    lent : dict of int to (Slot, int)
        By offset: the slot, and how often it is lent.
    sessions : dict
        By the name of a request: its locks by the names of objects in memory.
    """

    memory: memoryview
    share: Share
    lent: dict[int, tuple[Slot, int]] = field(default_factory=dict)
    sessions: dict[str, dict[str, Slot]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Reading:
    """One read for all requests that wait for an object."""

    task: asyncio.Task[Slot] | None = None
    waiting: int = 0


class Node:
    """The objects of one shelf for the clients of one machine.

    Parameters
    ----------
    shelf : Shelf
        The caller closes it, after the node.
    arena : Arena
        The memory for objects.
    disk_tier : DiskTier, optional
        The caller closes it, after the node.
    counters : Counters, optional
        Counts stuck threads and times.
    uses : Uses, optional
        Records what clients use; the caller closes it, before the node.
    on_handover : Callable, optional
        Called when a client has written a tail or a marker, which will have to be deleted.

    Raises
    ------
    ConfigError
        If the disk tier and the shelf have files in common.
    RuntimeError
        If the system allows no thread.
    """

    def __init__(
        self,
        shelf: Shelf,
        arena: Arena,
        *,
        disk_tier: DiskTier | None = None,
        counters: Counters | None = None,
        uses: Uses | None = None,
        on_handover: Callable[[], None] = lambda: None,
    ) -> None:
        counters = Counters() if counters is None else counters
        self._backend = shelf.backend
        self._namespaces = Namespaces()
        self._storage = Storage(shelf, disk_tier, self._namespaces, counters)
        self._uses = uses
        self._on_handover = on_handover
        self._view = arena.view
        self._ring = Ring()
        start = 0
        for border in (*arena.borders, arena.nbytes):
            # A GPU copies no object that lies across a border.
            self._ring.extend(border - start)
            start = border
        capacity = self._ring.capacity
        self._storing = Share(capacity // _STORING)
        self._reading = Share(capacity // _READING)
        self._copied = Share(capacity // _STORING)
        self._lent: Counter[Slot] = Counter()
        self._lent_bytes = 0
        self._clients: set[Loans] = set()
        self._reads: dict[str, _Reading] = {}
        self._stores: dict[str, asyncio.Task[WriteResult]] = {}
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._is_draining = False
        properties = self._backend.properties
        threads = _FEW_THREADS
        if properties.high_latency:
            threads = max(threads, min(_MOST_THREADS, properties.concurrency))
        self._pool = Pool(threads, self._backend, counters)

    @property
    def facts(self) -> Facts:
        """What clients may rely on at present."""
        properties, deadlines = self._backend.properties, self._backend.deadlines
        return Facts(
            self._backend.url,
            properties.filesystem,
            properties.cache_seconds,
            properties.concurrency,
            properties.probe_cost,
            properties.read_only,
            properties.renews,
            properties.shared,
            properties.versions,
            deadlines.probe,
            deadlines.read,
            deadlines.write,
            deadlines.bytes_per_second,
        )

    def register(self, record: bytes, slug: str, is_volatile: bool) -> None:
        """Take the record of a namespace, see :meth:`Namespaces.register`."""
        self._namespaces.register(record, slug, is_volatile=is_volatile)

    # ------------------------------------------------------------------------- connections

    def connect(self, memory: memoryview) -> Loans:
        """Return the loans of a new connection, of which there are none yet."""
        loans = Loans(memory, Share(self._ring.capacity // _LENT_TO_ONE))
        self._clients.add(loans)
        return loans

    def leave(self, loans: Loans) -> None:
        """End all loans and locks of a connection that has ended."""
        self._clients.discard(loans)
        for session in list(loans.sessions):
            self.end_session(loans, session, ())
        for slot, count in loans.lent.values():
            for _ in range(count):
                self._end_loan(loans, slot)
        loans.lent.clear()
        loans.memory = memoryview(b"")

    def give_back(self, loans: Loans, offsets: Sequence[int]) -> None:
        """End loans; an offset at which nothing is lent does nothing."""
        for offset in offsets:
            slot, count = loans.lent.pop(offset, (None, 0))
            if slot is not None:
                if count > 1:
                    loans.lent[offset] = slot, count - 1
                self._end_loan(loans, slot)

    def end_session(self, loans: Loans, session: str, names: Sequence[str]) -> None:
        """End the locks of a session on some objects; on all if there are no names."""
        locks = loans.sessions.get(session, {})
        for name in list(map(memory_name, names)) or list(locks):
            slot = locks.pop(name, None)
            if slot is not None:
                self._end_loan(loans, slot)
        if not locks:
            loans.sessions.pop(session, None)

    def _begin_loan(self, loans: Loans, slot: Slot) -> bool:
        """Count a slot that was just pinned for a connection.

        Returns
        -------
        bool
            False: all loans together have no room for it, and it is unpinned.
        """
        is_new = slot not in self._lent
        if is_new and self._lent and self._lent_bytes + slot.nbytes > self._ring.capacity // _LENT:
            self._ring.release(loans.share, [slot])
            return False
        self._lent[slot] += 1
        self._lent_bytes += slot.nbytes if is_new else 0
        return True

    def _end_loan(self, loans: Loans, slot: Slot) -> None:
        self._lent[slot] -= 1
        if not self._lent[slot]:
            del self._lent[slot]
            self._lent_bytes -= slot.nbytes
        self._ring.release(loans.share, [slot])

    # ------------------------------------------------------------------------- lookups

    async def find(self, loans: Loans, names: Sequence[str]) -> list[int | bool | Fault]:
        """Answer which objects can be loaded, see :class:`kvshelf.server.protocol.Find`."""
        is_here = self._ring.holds(list(map(memory_name, names)))
        answers: list[int | bool | Fault] = [IN_MEMORY if here else MISSING for here in is_here]
        is_volatile = self._namespaces.is_volatile
        # Objects of a volatile namespace are nowhere else.
        unknown = [
            number
            for number, here in enumerate(is_here)
            if not here and not is_volatile(names[number])
        ]
        if unknown:
            on_storage = [names[number] for number in unknown]
            stats = await self._pool.run(loans, lambda: self._storage.find(on_storage))
            for number, answer in zip(unknown, sizes_of(stats), strict=True):
                answers[number] = answer
        return answers

    def lock(self, loans: Loans, session: str, names: Sequence[str]) -> None:
        """Lock objects for a request, see :class:`kvshelf.server.protocol.Lock`."""
        locks = loans.sessions.get(session)
        if locks is None:
            if len(loans.sessions) >= _SESSIONS:
                return
            locks = loans.sessions[session] = {}
            expire_session = partial(self._expire, loans, session, locks)
            asyncio.get_running_loop().call_later(LOCK_SECONDS, expire_session)

        def lock_object(key: str, _: object = None) -> bool:
            if key in locks or loans.sessions.get(session) is not locks:
                return True
            slot = self._ring.find(key, loans.share)
            if slot is not None and self._begin_loan(loans, slot):
                locks[key] = slot
            return slot is not None

        room = loans.share.limit - loans.share.pinned_bytes
        for name in names:
            key = memory_name(name)
            if lock_object(key):
                continue
            with suppress(KVShelfError, ValueError):
                room -= self._namespaces.object(name).size
                if room < 0:
                    # What is read beyond the share would not be locked.
                    break
                reading = self._begin_reading(loans, name, is_early=True)
                if reading.task is not None:
                    reading.task.add_done_callback(partial(lock_object, key))
        if self._uses is not None:
            self._uses.note(self._backend, list(names))

    def _expire(self, loans: Loans, session: str, locks: dict[str, Slot]) -> None:
        """End the locks of a session whose time is over, unless it has begun anew."""
        if loans.sessions.get(session) is locks:
            self.end_session(loans, session, ())

    # ------------------------------------------------------------------------- loads

    async def fetch(
        self, loans: Loans, names: Sequence[str], is_early: bool, ahead: Sequence[str] = ()
    ) -> list[int | bool | Fault]:
        """Lend objects, see :class:`kvshelf.server.protocol.Fetch`."""
        lent_ahead = [self._lend_ahead(loans, name) for name in ahead]
        answers: list[int | bool | Fault | None] = [self._lend(loans, name) for name in names]
        missing = [number for number, answer in enumerate(answers) if answer is None]
        self._counts["memory_hits"] += len(names) - len(missing)
        if missing:
            reads = [self._read_and_lend(loans, names[number], is_early) for number in missing]
            for number, answer in zip(missing, await asyncio.gather(*reads), strict=True):
                answers[number] = answer
        final = [MISSING if answer is None else answer for answer in answers]
        final += lent_ahead
        self._counts["refused_loans"] += final.count(NO_ROOM)
        self._counts["failed_fetches"] += sum(isinstance(answer, Fault) for answer in final)
        return final

    def _lend(self, loans: Loans, name: str) -> int | None:
        """Lend an object that is in memory: return its offset or NO_ROOM; None if it is not."""
        key = memory_name(name)
        slot = self._ring.find(key, loans.share)
        if slot is not None:
            return self._note_loan(loans, slot)
        return NO_ROOM if self._ring.holds([key])[0] else None

    def _lend_ahead(self, loans: Loans, name: str) -> int:
        """Lend an object that is in memory, or begin to read it."""
        answer = self._lend(loans, name)
        if answer is None:
            with suppress(KVShelfError, ValueError):
                self._begin_reading(loans, name, is_early=True)
            return MISSING
        self._counts["memory_hits"] += 1
        return answer

    def _note_loan(self, loans: Loans, slot: Slot) -> int:
        if loans not in self._clients:
            self._ring.release(loans.share, [slot])
            return NO_ROOM
        if not self._begin_loan(loans, slot):
            return NO_ROOM
        _, count = loans.lent.get(slot.offset, (slot, 0))
        loans.lent[slot.offset] = slot, count + 1
        return slot.offset

    async def _read_and_lend(self, loans: Loans, name: str, is_early: bool) -> int | Fault:
        """Read an object, or wait for the read under way, and lend it."""
        try:
            reading = self._begin_reading(loans, name, is_early=is_early)
            assert reading.task is not None
            reading.waiting += 1
            try:
                slot = await asyncio.shield(reading.task)
                if self._ring.pin(slot, loans.share):
                    return self._note_loan(loans, slot)
                return NO_ROOM
            finally:
                reading.waiting -= 1
                self._end_reading(reading)
        except NoSpaceStorageError:
            return NO_ROOM
        except (KVShelfError, ValueError) as error:
            return Fault.of(error)

    def _begin_reading(self, loans: Loans, name: str, *, is_early: bool) -> _Reading:
        """Begin to read an object, unless it is being read.

        Raises
        ------
        KVShelfError
            If the name is not that of an object on the storage, or the server is about to stop.
        """
        key = memory_name(name)
        reading = self._reads.get(key)
        if reading is not None:
            self._counts["joined_fetches"] += 1
            return reading
        named = self._namespaces.object(name)
        if named.is_volatile:
            raise ObjectMissingError(errno.ENOENT, "it is not in memory", name)
        self._check_running()
        reading = self._reads[key] = _Reading()
        reading.task = asyncio.create_task(self._read_into_memory(loans, key, named, is_early))
        reading.task.add_done_callback(lambda _: self._end_reading(reading))
        return reading

    async def _read_into_memory(
        self, loans: Loans, key: str, named: NamedObject, is_early: bool
    ) -> Slot:
        """Read an object; return its slot, pinned until :meth:`_end_reading`."""
        try:
            slot = await self._pool.run(
                loans,
                lambda: self._load(key, named),
                is_early=is_early,
                discard=lambda slot: self._ring.release(self._reading, [slot]),
            )
        finally:
            del self._reads[key]
        self._counts["read_objects"] += 1
        self._counts["read_bytes"] += slot.size
        return slot

    def _end_reading(self, reading: _Reading) -> None:
        """Unpin what was read, when all requests that waited for it have it."""
        task = reading.task
        if task is None or reading.waiting or not task.done():
            return
        reading.task = None
        if task.cancelled() or task.exception() is not None:
            return
        self._ring.release(self._reading, [task.result()])

    def _load(self, key: str, named: NamedObject) -> Slot:
        """Read an object into memory. A thread of the pool."""
        slot = self._ring.claim(key, named.size, self._reading)
        if slot is None:
            raise NoSpaceStorageError(errno.ENOMEM, "the server's memory is in use", named.name)
        if slot.is_sealed:
            return slot
        with ExitStack() as undo:
            undo.callback(self._ring.release, self._reading, [slot])
            undo.callback(self._ring.abandon, slot)
            buffer = self._view[slot.offset : slot.offset + slot.size]
            self._storage.load(named, buffer, partial(self._hold, slot))
            undo.pop_all()
        self._ring.seal(slot, stays=True)
        return slot

    def _hold(self, slot: Slot) -> Callable[[], None] | None:
        """Keep the memory of a slot for the disk tier. A thread of the pool, which holds it."""
        if not self._ring.pin(slot, self._copied):
            return None
        return partial(self._ring.release, self._copied, [slot])

    async def read(self, loans: Loans, name: str) -> bytes:
        """Return the bytes of an object, verified."""
        self._counts["streamed_objects"] += 1
        named = self._namespaces.object(name)
        return await self._pool.run(loans, lambda: self._bytes_of(memory_name(name), named))

    def _bytes_of(self, key: str, named: NamedObject) -> bytes:
        """Return the bytes of an object. A thread of the pool."""
        slot = self._ring.find(key, self._reading)
        if slot is not None:
            try:
                return bytes(self._view[slot.offset : slot.offset + slot.size])
            finally:
                self._ring.release(self._reading, [slot])
        if named.is_volatile:
            raise ObjectMissingError(errno.ENOENT, "it is not in memory", named.name)
        data = bytearray(named.size)
        self._storage.load(named, memoryview(data), lambda: None)
        return bytes(data)

    # ------------------------------------------------------------------------- stores

    async def store(
        self, loans: Loans, name: str, offset: int, nbytes: int, is_suspect: bool
    ) -> str:
        """Copy an object, verify the copy, publish it and keep it in memory."""
        try:
            result = await self._store(loans, name, offset, nbytes, is_suspect)
        except BaseException:
            self._counts["failed_stores"] += 1
            raise
        self._counts["stored_objects"] += 1
        self._counts["stored_bytes"] += nbytes
        parsed = parse_path(name)
        is_handed_over = parsed is None or parsed.tail_tokens is not None
        if is_handed_over and result is not WriteResult.EXISTED:
            self._on_handover()
        return result.value

    async def _store(
        self, loans: Loans, name: str, offset: int, nbytes: int, is_suspect: bool
    ) -> WriteResult:
        key = memory_name(name)
        while (running := self._stores.get(key)) is not None:
            self._counts["joined_stores"] += 1
            # The fault of one client is not that of another.
            with suppress(Exception):
                await asyncio.shield(running)
                return WriteResult.EXISTED
        self._check_running()
        if is_marker(name) and not nbytes:
            work = partial(self._storage.mark, name)
        else:
            named = self._namespaces.object(name, nbytes)
            if offset + nbytes > len(loans.memory):
                raise PermanentStorageError(
                    f"bytes {offset} to {offset + nbytes} of a client's memory of"
                    f" {len(loans.memory)} bytes"
                )
            if named.is_volatile and self._ring.holds([key])[0]:
                return WriteResult.EXISTED
            source = loans.memory[offset : offset + nbytes]
            work = partial(self._copy_and_publish, key, named, source, is_suspect)

        async def publish() -> WriteResult:
            try:
                return await self._pool.run(loans, work)
            finally:
                if self._stores.get(key) is task:
                    del self._stores[key]

        task = self._stores[key] = asyncio.create_task(publish())
        return await asyncio.shield(task)

    def _copy_and_publish(
        self, key: str, named: NamedObject, source: memoryview, is_suspect: bool
    ) -> WriteResult:
        """Store an object. A thread of the pool."""
        slot = self._ring.claim(key, source.nbytes, self._storing)
        with ExitStack() as undo:
            if slot is None:
                # It is published all the same, and not kept.
                buffer = memoryview(bytearray(source.nbytes))
            else:
                undo.callback(self._ring.release, self._storing, [slot])
                undo.callback(self._ring.abandon, slot)
                buffer = self._view[slot.offset : slot.offset + slot.size]
            reader = CopyingReader(source)
            if slot is not None and slot.is_sealed:
                # A sealed slot is never written to: what lies there is published.
                reader, buffer = CopyingReader(buffer), memoryview(bytearray(source.nbytes))
            chunk = named.fmt.read_named(reader, named.parsed, buffer)
            result = WriteResult.CREATED
            if named.is_volatile:
                if slot is None:
                    raise NoSpaceStorageError(errno.ENOMEM, "the server's memory is in use")
            else:
                hold = (lambda: None) if slot is None else partial(self._hold, slot)
                result = self._storage.publish(named, chunk, buffer, is_suspect, hold)
            if slot is not None and not slot.is_sealed:
                self._ring.seal(slot, stays=True)
        return result

    # ------------------------------------------------------------------------- other calls

    async def delete(self, loans: Loans, names: Sequence[str]) -> list[int | bool | Fault]:
        """Delete objects, from memory and from the storage."""
        self._check_running()
        return list(await asyncio.gather(*(self._delete(loans, name) for name in names)))

    async def _delete(self, loans: Loans, name: str) -> bool | Fault:
        try:
            named = self._namespaces.object(name)
            was_here = self._ring.forget(memory_name(name))
            if named.is_volatile:
                return was_here
            return await self._pool.run(loans, lambda: self._storage.delete(named)) or was_here
        except (KVShelfError, ValueError) as error:
            return Fault.of(error)

    async def stat(self, loans: Loans, names: Sequence[str]) -> list[int | bool | Fault]:
        """Probe objects and markers on the storage."""
        return sizes_of(await self._pool.run(loans, lambda: self._storage.stat(names)))

    async def touch(self, loans: Loans, name: str, before: float) -> str:
        """Note that an object was used."""
        if self._uses is not None and parse_path(name) is not None:
            self._uses.note(self._backend, [name])
            return Touched.TOUCHED.value
        touched = await self._pool.run(loans, lambda: self._backend.touch(name, before))
        return touched.value

    # ------------------------------------------------------------------------- the end

    def _check_running(self) -> None:
        if self._is_draining:
            raise UnavailableStorageError(errno.ESHUTDOWN, "the server is about to stop")

    async def drain(self, seconds: float) -> int:
        """Begin nothing more, wait for stores under way; return how many are not over."""
        self._is_draining = True
        stores = list(self._stores.values())
        if not stores:
            return 0
        _, pending = await asyncio.wait(stores, timeout=seconds)
        return len(pending)

    def stats(self) -> dict[str, float]:
        """Return the counters (:data:`COUNTERS`) and the gauges (:data:`GAUGES`) by name."""
        stats = self._ring.stats()
        return {
            **self._counts,
            "evicted_objects": stats.evicted_objects,
            "evicted_bytes": stats.evicted_bytes,
            "bytes": stats.kept_bytes,
            "capacity_bytes": stats.capacity,
            "pinned_bytes": stats.pinned_bytes,
            "lent_bytes": self._lent_bytes,
            "clients": len(self._clients),
            "reads": len(self._reads),
            "stores": len(self._stores),
        }

    def close(self) -> None:
        """Stop the threads. What was not begun fails. Idempotent."""
        self._pool.close()
        self._ring.close()
