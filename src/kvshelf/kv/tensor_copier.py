"""Stores and loads on devices for which the compiled library has no kernels.

Each is carried out at once, by :mod:`kvshelf.kv.ops` and torch's copies, over temporary tensors on
the device. Nothing is paced: the engine's stream carries the copies of a store to the host
itself, so they lengthen its steps.

Contracts
---------
* :meth:`TensorCopier.gather` enqueues on the calling thread's current stream, and also waits for
  the copy where the payloads are not page-locked. Without memory for a temporary tensor it refuses.
* :meth:`TensorCopier.scatter` runs on a stream of its own, and returns when the data is in the
  tensors: any stream may read it then.
* Any thread may call. Errors of the device are RuntimeErrors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvshelf.kv import ops
from kvshelf.kv.caches import TAILS_KEPT, LayerCall, tail_calls
from kvshelf.kv.copier import ChunkCopy, Copier
from kvshelf.kv.streams import Streams


@dataclass(eq=False, frozen=True, slots=True)
class _Gathered:
    """A chunk on its way to the host."""

    ended: Any  # event
    payloads: Sequence[Tensor]


class TensorCopier(Copier):
    """See the module.

    Parameters
    ----------
    calls : Mapping[int, Sequence[LayerCall]]
        The copy calls of each shard, in the order of the shards. All tensors are on one device.
    streams : Streams
    """

    def __init__(self, calls: Mapping[int, Sequence[LayerCall]], streams: Streams) -> None:
        first = next(iter(calls.values()))
        self._device = first[0].caches[0].device
        self._whole = list(calls.values())
        self._of_tail = functools.lru_cache(TAILS_KEPT)(
            lambda tokens: [tail_calls(of_shard, tokens) for of_shard in calls.values()]
        )
        self._streams = streams
        self._stream = streams.stream(urgent=True)
        #: Chunks that were not waited for yet. Sets need no lock.
        self._under_way: set[_Gathered] = set()

    # ------------------------------------------------------------- single copies

    def gather(
        self, calls: Iterable[Sequence[LayerCall]], slots: Tensor, payloads: Sequence[Tensor]
    ) -> Any | None:
        """Enqueue the gather of a chunk's shards; return an event behind it.

        Parameters
        ----------
        calls : Iterable[Sequence[LayerCall]]
            Of each shard.
        slots, payloads
            As for :meth:`store`.

        Returns
        -------
        Any or None
            None if there is no memory for it.
        """
        streams = self._streams
        with streams.here():
            ended = streams.event()
            try:
                for of_shard, payload in zip(calls, payloads, strict=True):
                    packed = self._buffer(payload)
                    self._copy(ops.gather_kv, of_shard, slots, packed)
                    streams.enqueue(payload.copy_, packed, True)
                ended.record(streams.current())
            except BaseException as error:
                self._settle(ended)
                if isinstance(error, torch.OutOfMemoryError):
                    return None
                raise
        return ended

    def scatter(
        self, calls: Sequence[LayerCall], slots: Tensor, payload: Tensor, fence: Any
    ) -> None:
        """Scatter one shard behind a fence, and wait for it."""
        streams = self._streams
        with streams.use(self._stream):
            ended = streams.event()
            try:
                packed = self._buffer(payload)
                streams.enqueue(packed.copy_, payload, True)
                if fence is not None:
                    self._stream.wait_event(fence)
                self._copy(ops.scatter_kv, calls, slots, packed)
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

    # ------------------------------------------------------------- as a copier of caches

    def add_buffer(self, payloads: Tensor, *, for_loads: bool) -> None:
        """See :meth:`Copier.add_buffer`: none is used."""

    def run(self) -> None:
        """See :meth:`Copier.run`: there is nothing to do."""

    def stop(self) -> None:
        """See :meth:`Copier.stop`."""

    def rebind(self) -> None:
        """See :meth:`Copier.rebind`: every call reads the addresses."""

    def store(self, copy: ChunkCopy, slots: Tensor, payloads: Sequence[Tensor]) -> object | None:
        """See :meth:`Copier.store`."""
        copy.check_slots(slots)
        ended = self.gather(self._calls(copy), slots, payloads)
        if ended is None:
            return None
        chunk = _Gathered(ended, payloads)
        self._under_way.add(chunk)
        return chunk

    def wait(self, chunk: object) -> None:
        """See :meth:`Copier.wait`."""
        assert isinstance(chunk, _Gathered)
        try:
            chunk.ended.synchronize()
        finally:
            self._under_way.discard(chunk)

    def forget(self, chunk: object, payloads: Sequence[Tensor]) -> None:
        """See :meth:`Copier.forget`: they are kept until :meth:`drain`."""

    def drain(self) -> None:
        """See :meth:`Copier.drain`."""
        for chunk in list(self._under_way):
            # A device that cannot be waited for does no work any more.
            with contextlib.suppress(RuntimeError):
                self.wait(chunk)

    def load(
        self,
        copy: ChunkCopy,
        first: int,
        slots: Tensor,
        payloads: Sequence[Tensor],
        fence: object | None,
    ) -> None:
        """See :meth:`Copier.load`."""
        copy.check_slots(slots)
        calls = self._calls(copy)[first : first + len(payloads)]
        for of_shard, payload in zip(calls, payloads, strict=True):
            self.scatter(of_shard, slots, payload, fence)

    def check(self) -> None:
        """See :meth:`Copier.check`."""
        with self._streams.here():
            self._streams.event().query()

    def fence(self) -> object:
        """See :meth:`Copier.fence`."""
        with self._streams.here():
            event = self._streams.event()
            event.record(self._streams.current())
            return event

    def _calls(self, copy: ChunkCopy) -> Sequence[Sequence[LayerCall]]:
        return self._whole if copy.calls is self._whole[0] else self._of_tail(copy.tokens)
