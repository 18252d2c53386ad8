"""The loads of a worker: KV from the node server's memory to the engine's caches.

An adapter's thread derives the keys and asks for objects; as each arrives in the server's memory, a
thread writes its KV to the blocks, then checks that the memory was the object's until now.

Contracts
---------
* A load writes only to the blocks of its operation, and not after its end.
* How much is leased at a time is decided by :mod:`kvshelf.adapters.lease_window`.

Threads
-------
:meth:`Loads.begin` is called by the thread of the worker's step.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvshelf.adapters.copies import ChunkCopy
from kvshelf.adapters.lease_window import LeaseWindow, WantedObject
from kvshelf.adapters.names import NamedChunk, name_of
from kvshelf.adapters.transfers import Transfers, Work
from kvshelf.errors import DeviceUnavailableError
from kvshelf.format.keys import Chunk
from kvshelf.memory.arena import bytes_at
from kvshelf.server.interface import Leased


@dataclass(frozen=True, slots=True)
class _Object:
    """One object of a load."""

    work: Work
    copy: ChunkCopy
    shard: int
    chunk: NamedChunk
    #: What :meth:`kvshelf.kv.caches.KVCache.fence` returned when the load began.
    fence: object


class Loads(Transfers):
    """The loads of one worker; the arguments are those of :class:`Transfers`."""

    done = "loaded"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._window = LeaseWindow(self._client)

    def begin(self, work: Work) -> None:
        """Load later, behind what the engine's stream has to do now."""
        try:
            # On a device, the engine's work so far may still use the blocks.
            fence = work.caches.memory.fence()
        except DeviceUnavailableError as error:
            self._fail(work, error)
        else:
            self._threads.put(lambda: self._want(work, fence))

    def _fail(self, work: Work, error: BaseException) -> None:
        self._warn(work, error)
        work.operation.expire()

    def _want(self, work: Work, fence: object) -> None:
        """Derive the names of a load, and ask for as many objects as may be leased."""
        try:
            chunks = self._chunks(work)
        except Exception as error:  # noqa: BLE001  tokens may be anything
            self._fail(work, error)
            return
        self._window.want(
            [
                self._wanted(_Object(work, copy, shard, chunks[copy.number], fence))
                for copy in work.copies
                for shard in copy.shards
            ]
        )

    def _wanted(self, one: _Object) -> WantedObject:
        def arrived(future: Future[Leased]) -> None:
            self._threads.put(lambda: self._scatter(one, wanted, future))

        name = name_of(self._fmt, one.chunk, one.shard)
        nbytes = self._header_bytes(one.work) + self._fmt.payload_size(one.shard)
        wanted = WantedObject(one.work.operation, name, nbytes, arrived)
        return wanted

    def _scatter(self, one: _Object, wanted: WantedObject, future: Future[Leased]) -> None:
        """Write one object's KV to its blocks, or note that it did not come. Adapter's thread."""
        operation = one.work.operation
        ok = False
        leased: Leased | None = None
        try:
            leased = future.result()
            if operation.acquire():
                try:
                    ok = leased.view.nbytes == wanted.nbytes and self._copy(one, leased)
                finally:
                    operation.part_ended(one.copy.number, ok)
                    operation.release()
        except Exception as error:  # noqa: BLE001  the chunk has failed, whatever happened
            if leased is None:
                operation.part_ended(one.copy.number, False)
            self._warn(one.work, error)
        finally:
            if leased is not None:
                leased.release()
            self._window.give_back(wanted)

    def _copy(self, one: _Object, leased: Leased) -> bool:
        """Copy the KV of a leased object; return whether it was the object until the end."""
        view = leased.view
        if isinstance(one.chunk, Chunk):
            self._fmt.verify(view, one.chunk, one.shard, payload=False)
        if one.work.event is not None:
            one.work.event.synchronize()
        payload = bytes_at(view)[self._header_bytes(one.work) :]
        one.work.caches.memory.scatter(one.shard, one.copy.slots, payload, one.fence)
        return leased.valid()
