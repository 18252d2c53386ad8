"""Memory of a client that the node server reads, for objects that are being stored.

Owns a range of shared memory, and which parts of it are in use. Safe to call from any
thread.

An engine has memory for chunks in it (:meth:`Segment.take_region`): objects that were gathered
there are stored without a copy. Other objects are copied to parts of their own, for which some
memory is kept.

A forked process does not have the memory: it would write into what its parent stores.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvshelf.memory.arena import Arena
from kvshelf.memory.size_classes import SizeClasses
from kvshelf.pages import address_of

if TYPE_CHECKING:
    import torch


class SegmentPart:
    """A part of a segment.

    Attributes
    ----------
    view : memoryview
        Writable; the bytes of one object.
    offset, nbytes : int
        Where it lies in the segment.
    """

    __slots__ = ("_segment", "nbytes", "offset", "view")

    def __init__(self, segment: Segment, offset: int, nbytes: int, view: memoryview) -> None:
        self._segment: Segment | None = segment
        self.offset = offset
        self.nbytes = nbytes
        self.view = view

    def release(self) -> None:
        """Free the part, which the server may still read. Idempotent."""
        segment, self._segment = self._segment, None
        if segment is not None:
            self.view = memoryview(b"")
            segment.give_back(self.offset)


class Segment:
    """Shared memory of this process, mapped for reading by the server.

    Parameters
    ----------
    nbytes : int
        Memory for objects that are copied here to be stored. It is taken as it is used.
    regions : int
        Further memory, which :meth:`take_region` returns parts of.

    Attributes
    ----------
    nbytes : int
        All of the memory.

    Raises
    ------
    ConfigError
        If the system gives no such memory.
    UnsupportedError
        If the system knows no sealed shared memory.
    """

    def __init__(self, nbytes: int, *, regions: int = 0) -> None:
        self.nbytes = nbytes = nbytes + regions
        self._arena = Arena(nbytes, shared=True, lazy=True)
        self._region_bytes = regions
        base = address_of(self._arena.view)
        self._addresses = range(base, base + nbytes)
        self._lock = threading.Lock()
        self._closed = False
        self._parts = SizeClasses(nbytes, borders=self._arena.borders)

    @property
    def fd(self) -> int | None:
        """The memory's descriptor; None once the segment is closed."""
        return None if self._closed else self._arena.fd

    def page_lock(self, device: torch.device) -> None:
        """Page-lock the memory for copies to and from a GPU, until :meth:`close`.

        All of it is taken now.

        Raises
        ------
        RuntimeError
            If CUDA refuses: the memory stays as it was.
        """
        with self._lock:
            if self.fd is not None:
                self._arena.page_lock(device)

    def reserve(self, nbytes: int) -> SegmentPart | None:
        """Return memory for an object, None if none is free now. Never blocks."""
        return self._reserve(nbytes, self.nbytes)

    def take_region(self, nbytes: int) -> SegmentPart | None:
        """Return memory for chunks, None where it would take that of other objects.

        Never blocks. The memory may be used after :meth:`close`.
        """
        return self._reserve(nbytes, self._region_bytes)

    def _reserve(self, nbytes: int, most: int) -> SegmentPart | None:
        """Return a part if no more than `most` bytes are in use then."""
        with self._lock:
            if self._closed or self._parts.used + self._parts.rounded(nbytes) > most:
                return None
            offset = self._parts.allocate(nbytes)
            if offset is None:
                return None
            return SegmentPart(self, offset, nbytes, self._arena.view[offset : offset + nbytes])

    def offset_of(self, view: memoryview) -> int | None:
        """Return where bytes lie in the segment; None for other memory.

        The caller has the part in which they lie.
        """
        start = address_of(view) - self._addresses.start
        return start if 0 <= start <= len(self._addresses) - view.nbytes else None

    def give_back(self, offset: int) -> None:
        """Free the part at an offset."""
        with self._lock:
            self._parts.free(offset)
            self._free_if_closed()

    def close(self) -> None:
        """Reserve nothing more. The memory is freed together with its last part. Idempotent."""
        with self._lock:
            self._closed = True
            self._free_if_closed()

    def _free_if_closed(self) -> None:
        # A GPU may still copy to a part, which stays page-locked for as long.
        if self._closed and not self._parts.used:
            self._arena.close()
            # Other memory may lie there next.
            self._addresses = range(0)
