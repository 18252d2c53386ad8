"""KV in a program's own tensors on a device.

Owns nothing between calls but a stream: :class:`~kvshelf.kv.device.DeviceKVCache` holds buffers for
an engine that copies in every step, while a program passes other tensors with each call.

Contracts
---------
* ``gather`` enqueues on the calling thread's current stream: it reads what the work before it has
  written, and work after it may overwrite the tensors. Where staging is not page-locked it also
  waits for the copy.
* ``scatter`` runs on a stream of its own, behind the mark that ``fence`` made on the caller's
  current stream. It returns when the data is in the tensors: any stream may read it then.
* Each copy of a shard allocates a temporary buffer. Without memory for it a gather refuses.
* Any thread may call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvshelf.errors import DeviceUnavailableError
from kvshelf.kv import ops
from kvshelf.kv.caches import KVCache, LayerCall, PendingCopy, check_slot_count, slot_count
from kvshelf.kv.streams import Streams, streams_of
from kvshelf.traces import trace_range


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (DeviceUnavailableError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise DeviceUnavailableError(f"the device failed: {error}") from error


class _Enqueued(PendingCopy):
    """A gather whose end an event marks."""

    def __init__(self, ended: Any) -> None:
        self._ended = ended

    @property
    def ended(self) -> bool:
        """See :meth:`PendingCopy.ended`."""
        with contextlib.suppress(RuntimeError):
            return bool(self._ended.query())
        return False

    def wait(self) -> None:
        with _translated():
            self._ended.synchronize()


class DeviceTensors(KVCache):
    """KV in tensors on a device.

    Parameters
    ----------
    calls : Mapping[int, Sequence[LayerCall]]
        The copy calls of each shard, in the order of the shards. All tensors are on one device.
    streams : Streams, optional
        The device's own when absent.
    """

    def __init__(
        self, calls: Mapping[int, Sequence[LayerCall]], streams: Streams | None = None
    ) -> None:
        self._calls = calls
        first = next(iter(calls.values()))
        self._slots = slot_count(first)
        self._device = first[0].caches[0].device
        self._streams = streams_of(self._device) if streams is None else streams
        self._stream = self._streams.stream(urgent=False)

    def gather(self, slots: Tensor, payloads: Sequence[Tensor]) -> PendingCopy | None:
        """See :meth:`~kvshelf.kv.caches.KVMemory.gather`."""
        if len(payloads) != len(self._calls):
            raise ValueError(f"{len(payloads)} payloads for {len(self._calls)} shards")
        check_slot_count(slots, self._slots)
        streams = self._streams
        with _translated(), streams.here(), trace_range("kvshelf gather"):
            ended = streams.event()
            try:
                for calls, payload in zip(self._calls.values(), payloads, strict=True):
                    packed = self._buffer(payload)
                    self._copy(ops.gather_kv, calls, slots, packed)
                    streams.enqueue(payload.copy_, packed, True)
                ended.record(streams.current())
            except BaseException as error:
                self._settle(ended)
                if isinstance(error, torch.OutOfMemoryError):
                    return None
                raise
        return _Enqueued(ended)

    def fence(self) -> object:
        """See :meth:`~kvshelf.kv.caches.KVCache.fence`."""
        with _translated(), self._streams.here():
            event = self._streams.event()
            event.record(self._streams.current())
            return event

    def scatter(self, shard: int, slots: Tensor, payload: Tensor, fence: object = None) -> None:
        """See :meth:`~kvshelf.kv.caches.KVMemory.scatter`."""
        check_slot_count(slots, self._slots)
        streams = self._streams
        with _translated(), streams.use(self._stream), trace_range("kvshelf scatter"):
            ended = streams.event()
            try:
                packed = self._buffer(payload)
                streams.enqueue(packed.copy_, payload, True)
                if fence is not None:
                    self._stream.wait_event(fence)
                self._copy(ops.scatter_kv, self._calls[shard], slots, packed)
            finally:
                self._settle(ended)

    def _buffer(self, payload: Tensor) -> Tensor:
        return torch.empty(payload.numel(), dtype=torch.uint8, device=self._device)

    def _copy(self, work: Any, calls: Sequence[LayerCall], slots: Tensor, packed: Tensor) -> None:
        for call in calls:
            rows, part = call.rows(slots), packed[call.start : call.end]
            self._streams.enqueue(
                work, call.caches, rows, part, call.layout, call.first_head, call.heads
            )

    def _settle(self, ended: Any) -> None:
        """Wait for what was enqueued on the current stream."""
        ended.record(self._streams.current())
        ended.synchronize()
