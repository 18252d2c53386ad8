"""Stores and loads by the compiled library: see cuda/include/kvshelf/copier.h.

Each is one call, without the GIL and without torch's dispatcher. The thread in ``run`` needs no GIL
either, from its start to its end.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NoReturn

from torch import Tensor

from kvshelf.kv.caches import LayerCall
from kvshelf.kv.copier import ChunkCopy, Copier
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.ops import library
from kvshelf.kv.ops.compiled import paged_index
from kvshelf.kv.streams import Streams

_NO_BUFFER = -1
_ALL_SLOTS_GOOD = -1


def native_copier(copy: ChunkCopy, streams: Streams, *, direct: bool) -> NativeCopier | None:
    """Return a copier for caches on a device; None if the library does not support them.

    Parameters
    ----------
    copy : ChunkCopy
    streams : Streams
    direct : bool
        Loads are copies from page-locked payloads into the blocks, without a kernel.
    """
    device = copy.calls[0].caches[0].device
    if device.type not in library.KERNEL_DEVICES or streams.index is None:
        return None
    compiled = library.kernels(device.index)
    functions = None if compiled is None else compiled.copier
    if functions is None:
        return None
    runs = _runs(copy)
    handle = _open(functions, runs, copy, streams, direct=direct)
    return NativeCopier(streams, functions, handle, runs) if handle else None


@dataclass(frozen=True, slots=True)
class _Run:
    """Layers that one launch copies, wherever they lie in a payload.

    Attributes
    ----------
    call : LayerCall
        A call for some of them.
    layout : PagedLayout
    places : list of (list of Tensor, int)
        The cache of each layer, as an element of the caches of its call: an engine that wakes up
        puts other tensors there.
    starts : array of int
        Of each layer in the payload, in bytes.
    """

    call: LayerCall
    layout: PagedLayout
    places: list[tuple[list[Tensor], int]]
    starts: array[int]

    def addresses(self) -> array[int]:
        return array("q", [caches[number].data_ptr() for caches, number in self.places])


def _runs(copy: ChunkCopy) -> list[_Run]:
    """Join the calls that differ only in their layers: states have several parts of each layer.

    Layers that are less aligned stay apart: what is copied together is copied in vectors of one
    width.
    """
    runs: dict[Hashable, _Run] = {}
    for call, layout in zip(copy.calls, copy.layouts, strict=True):
        step = (call.end - call.start) // len(call.caches)
        for number, cache in enumerate(call.caches):
            start = call.start + number * step
            alike = (layout, call.heads, call.first_head, call.parts, call.part, call.first_slot)
            run = runs.setdefault(
                (*alike, call.count, gcd(16, start, cache.data_ptr())),
                _Run(call, layout, [], array("q")),
            )
            run.places.append((call.caches, number))
            run.starts.append(start)
    return list(runs.values())


def _open(
    functions: library.CopierFunctions,
    runs: Sequence[_Run],
    copy: ChunkCopy,
    streams: Streams,
    *,
    direct: bool,
) -> int:
    fields = array("q")
    addresses = [run.addresses() for run in runs]
    for run, of_run in zip(runs, addresses, strict=True):
        call = run.call
        fields.extend(
            paged_index(
                run.layout,
                layers=len(run.places),
                first_head=call.first_head,
                tokens=call.count * call.parts,
                shards=1,
                heads=call.heads,
            )
        )
        fields.extend((of_run.buffer_info()[0], run.starts.buffer_info()[0]))
        fields.extend((call.parts, call.part, call.first_slot))
    return functions.open(
        streams.index or 0,
        fields.buffer_info()[0],
        len(runs),
        copy.payload_bytes,
        copy.shards,
        direct,
        streams.handle(),
    )


class _Fence:
    """An event of the library, which reuses it once this object is gone."""

    __slots__ = ("copier", "event")

    def __init__(self, copier: NativeCopier, event: int) -> None:
        self.copier = copier
        self.event = event

    def __del__(self) -> None:
        self.copier.functions.unfence(self.copier.handle, self.event)


class NativeCopier(Copier):
    """See the module. Made by :func:`native_copier`.

    Parameters
    ----------
    streams : Streams
    functions : library.CopierFunctions
    handle : int
        What ``functions.open`` returned.
    runs : Sequence of _Run
        Those that it was given.

    Attributes
    ----------
    functions : library.CopierFunctions
    handle : int
    """

    def __init__(
        self,
        streams: Streams,
        functions: library.CopierFunctions,
        handle: int,
        runs: Sequence[_Run],
    ) -> None:
        self.functions = functions
        self.handle = handle
        self._runs = runs
        self._streams = streams
        self._buffers: list[Tensor] = []
        #: Payloads of chunks that are not waited for: the library knows their addresses only.
        self._forgotten: list[Sequence[Tensor]] = []
        # Not at the end of the process: the driver may be gone by then.
        weakref.finalize(self, functions.close, handle).atexit = False

    def add_buffer(self, payloads: Tensor, *, for_loads: bool) -> None:
        """See :meth:`Copier.add_buffer`."""
        self._buffers.append(payloads)
        stride = payloads.stride(0)
        self.functions.add_buffer(self.handle, payloads.data_ptr(), stride, for_loads)

    def store(self, copy: ChunkCopy, slots: Tensor, payloads: Sequence[Tensor]) -> int | None:
        """See :meth:`Copier.store`."""
        addresses = array("q", [payload.data_ptr() for payload in payloads])
        chunk = self.functions.store(
            self.handle,
            copy.tokens,
            slots.data_ptr(),
            addresses.buffer_info()[0],
            len(payloads),
            self._streams.handle(),
        )
        if chunk < _NO_BUFFER:
            _refuse(copy, slots)
        return None if chunk == _NO_BUFFER else chunk

    def wait(self, chunk: object) -> None:
        """See :meth:`Copier.wait`."""
        self.functions.wait(self.handle, chunk)

    def forget(self, chunk: object, payloads: Sequence[Tensor]) -> None:
        """See :meth:`Copier.forget`."""
        self._forgotten.append(payloads)
        self.functions.forget(self.handle, chunk)

    def run(self) -> None:
        """See :meth:`Copier.run`."""
        self.functions.run(self.handle)
        # Not in stop(): until here they are copied from.
        self._buffers.clear()

    def drain(self) -> None:
        """See :meth:`Copier.drain`."""
        self.functions.drain(self.handle)
        self._forgotten.clear()

    def stop(self) -> None:
        """See :meth:`Copier.stop`."""
        self.functions.stop(self.handle)

    def load(
        self,
        copy: ChunkCopy,
        first: int,
        slots: Tensor,
        payloads: Sequence[Tensor],
        fence: object | None,
    ) -> None:
        """See :meth:`Copier.load`."""
        addresses = array("q", [payload.data_ptr() for payload in payloads])
        bad = self.functions.load(
            self.handle,
            copy.tokens,
            first,
            slots.data_ptr(),
            addresses.buffer_info()[0],
            len(payloads),
            fence.event if isinstance(fence, _Fence) else 0,
        )
        if bad != _ALL_SLOTS_GOOD:
            _refuse(copy, slots)

    def check(self) -> None:
        """See :meth:`Copier.check`."""
        self.functions.check(self.handle)

    def fence(self) -> _Fence:
        """See :meth:`Copier.fence`."""
        return _Fence(self, self.functions.fence(self.handle, self._streams.handle()))

    def rebind(self) -> None:
        """See :meth:`Copier.rebind`."""
        for number, run in enumerate(self._runs):
            addresses = run.addresses()
            self.functions.bind(self.handle, number, addresses.buffer_info()[0])

    def limit(self, blocks: int) -> None:
        """Let kernels of loads have at most `blocks` blocks; 0: any number.

        Each may have a multiprocessor for itself, so the engine keeps the others.
        """
        self.functions.limit(self.handle, blocks)

    def rate(self, *, of_stores: bool) -> float:
        """Return the bytes per second that one direction carries, as far as it is known."""
        return float(self.functions.rate(self.handle, of_stores))


def _refuse(copy: ChunkCopy, slots: Tensor) -> NoReturn:
    copy.check_slots(slots)
    raise ValueError("slot_mapping was changed by another thread while it was checked")
