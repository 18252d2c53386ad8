"""The stores of a worker: KV from the engine's caches to the node server.

The step thread copies KV into the memory that client and server share; an adapter's thread derives
the keys, hashes the KV, and has the server publish it.

Contracts
---------
* :meth:`Stores.begin` has copied the KV when it returns, or on a device enqueued the copy on the
  caller's current stream. Only KV in host memory whose event has not passed yet is copied later.
* A chunk for which no shared memory is free is not stored.
* In hash mode the server keeps the KV in memory only, and nothing is published.

Threads
-------
:meth:`Stores.begin` and :meth:`Stores.forget` are called by the thread of the worker's step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvshelf.adapters.copies import ChunkCopy
from kvshelf.adapters.names import NamedChunk, name_of, striding_block_hashes
from kvshelf.adapters.transfers import Event, Transfers, Work
from kvshelf.format.keys import Chunk
from kvshelf.kv.caches import PendingCopy
from kvshelf.memory.arena import bytes_at
from kvshelf.server.interface import SegmentPart

#: Requests of which the last chunk is remembered.
_REQUESTS: Final = 4096


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The KV of one chunk on its way into shared memory, a part of it for each shard."""

    copy: ChunkCopy
    objects: list[SegmentPart]
    pending: PendingCopy


class Stores(Transfers):
    """The stores of one worker; the arguments are those of :class:`Transfers`."""

    done = "stored"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        #: Hash mode: the last chunk that each request has stored.
        self._last_hashes: OrderedDict[str, bytes] = OrderedDict()

    def begin(self, work: Work) -> None:
        """Copy the KV, and have it published later."""
        before = self._follow(work)
        event = work.event
        if event is None or _may_copy_after(event, work.caches.device):
            gathered = self._gather(work)
            self._threads.put(lambda: self._publish(work, gathered, before))
        else:
            self._threads.put(lambda: self._publish_after(event, work, before))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget finished requests."""
        for request_id in request_ids:
            self._last_hashes.pop(request_id, None)

    def _follow(self, work: Work) -> bytes | None:
        """Return the last chunk that the request stored before, in hash mode."""
        if not work.op.block_hashes:
            return None
        request_id = work.operation.request_id
        before = self._last_hashes.pop(request_id, None)
        hashes = striding_block_hashes(work.op.block_hashes, self._blocks_in_chunk)
        self._last_hashes[request_id] = hashes[-1]
        if len(self._last_hashes) > _REQUESTS:
            self._last_hashes.popitem(last=False)
        return before

    def _publish_after(self, event: Event, work: Work, before: bytes | None) -> None:
        event.synchronize()
        self._publish(work, self._gather(work), before)

    def _gather(self, work: Work) -> list[_Gathered]:
        """Copy chunks into shared memory, or begin to.

        Each accesses the engine's memory until :meth:`_publish` releases it.
        """
        gathered = []
        for copy in work.copies:
            if not work.operation.acquire():
                break
            objects: list[SegmentPart] = []
            try:
                pending = self._gather_chunk(work, copy, objects)
            except Exception as error:  # noqa: BLE001  it must not end the engine's step
                self._warn(work, error)
                pending = None
            if pending is not None:
                gathered.append(_Gathered(copy, objects, pending))
                continue
            for one in objects:
                one.release()
            for _ in copy.shards:
                work.operation.part_ended(copy.number, False)
            work.operation.release()
        return gathered

    def _gather_chunk(
        self, work: Work, copy: ChunkCopy, objects: list[SegmentPart]
    ) -> PendingCopy | None:
        """Copy one chunk to `objects`, which is filled; None without memory for all of it."""
        header = self._header_bytes(work)
        for shard in copy.shards:
            part = self._client.reserve(header + self._fmt.payload_size(shard))
            if part is None:
                return None
            objects.append(part)
        payloads = [bytes_at(part.view)[header:] for part in objects]
        return work.caches.memory.gather(copy.slots, payloads)

    def _publish(self, work: Work, gathered: Sequence[_Gathered], before: bytes | None) -> None:
        """Hash what was gathered and ask the server to publish it. Adapter's thread."""
        chunks: Sequence[NamedChunk] | None = None
        try:
            chunks = self._chunks(work)
        except Exception as error:  # noqa: BLE001  tokens may be anything
            self._warn(work, error)
        for one in gathered:
            number = one.copy.number
            unsent = deque(zip(one.copy.shards, one.objects, strict=True))
            try:
                try:
                    one.pending.wait()
                finally:
                    work.operation.release()
                while unsent and chunks is not None:
                    parent = chunks[number - 1] if number else before
                    self._send(work, number, chunks[number], parent, *unsent[0])
                    unsent.popleft()
            except Exception as error:  # noqa: BLE001  the other chunks must end as well
                self._warn(work, error)
            for _, part in unsent:
                part.release()
                work.operation.part_ended(number, False)

    def _send(
        self,
        work: Work,
        number: int,
        chunk: NamedChunk,
        parent: NamedChunk | None,
        shard: int,
        part: SegmentPart,
    ) -> None:
        """Ask the server to publish one object, or to keep it."""
        name = name_of(self._fmt, chunk, shard)
        if isinstance(chunk, Chunk):
            self._fmt.seal(part.view, chunk, shard)
            request = self._client.store(name, part)
        else:
            above = name_of(self._fmt, parent, shard) if isinstance(parent, bytes) else ""
            request = self._client.keep(name, part, above)

        def stored(done: Future[None]) -> None:
            part.release()
            error = done.exception()
            if error is not None:
                self._warn(work, error)
            work.operation.part_ended(number, error is None)

        request.add_done_callback(stored)


def _may_copy_after(event: Event, device: torch.device) -> bool:
    """Whether a copy that begins now begins after the event."""
    if device.type == "cpu":
        return event.query()
    torch.cuda.current_stream(device).wait_event(event)  # type: ignore[arg-type]
    return True
