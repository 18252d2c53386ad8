"""KV in a program's own tensors on a device.

Owns nothing between calls but a stream: :class:`~kvshelf.kv.device.DeviceKVCache` holds buffers for
an engine that copies in every step, while a program passes other tensors with each call.
:mod:`kvshelf.kv.tensor_copier` says how they are copied, and its contracts hold here: gathers read
what the work before them on the calling thread's stream has written, and work after them may
overwrite the tensors. Any thread may call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvshelf.errors import DeviceUnavailableError
from kvshelf.kv.caches import KVCache, LayerCall, PendingCopy, check_slot_count, slot_count
from kvshelf.kv.streams import Streams, streams_of
from kvshelf.kv.tensor_copier import TensorCopier
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
        device = first[0].caches[0].device
        self._copier = TensorCopier(calls, streams_of(device) if streams is None else streams)

    def gather(self, slots: Tensor, payloads: Sequence[Tensor]) -> PendingCopy | None:
        """See :meth:`~kvshelf.kv.caches.KVMemory.gather`."""
        if len(payloads) != len(self._calls):
            raise ValueError(f"{len(payloads)} payloads for {len(self._calls)} shards")
        check_slot_count(slots, self._slots)
        with _translated(), trace_range("kvshelf gather"):
            ended = self._copier.gather(self._calls.values(), slots, payloads)
        return None if ended is None else _Enqueued(ended)

    def fence(self) -> object:
        """See :meth:`~kvshelf.kv.caches.KVCache.fence`."""
        with _translated():
            return self._copier.fence()

    def scatter(self, shard: int, slots: Tensor, payload: Tensor, fence: object = None) -> None:
        """See :meth:`~kvshelf.kv.caches.KVMemory.scatter`."""
        check_slot_count(slots, self._slots)
        with _translated(), trace_range("kvshelf scatter"):
            self._copier.scatter(self._calls[shard], slots, payload, fence)
