"""An allocator of memory for KV in transit: host, pinned or device.

Owns the memory behind every pool of buffers: its allocation from the system, its division into
aligned buffers, and the record of which parts are free.

Contracts
---------
* A pool never holds more than its capacity. It allocates memory from the system in segments,
  when it needs them, and frees it once the pool is closed and no buffer is in use. A pool over a
  caller's tensor (:meth:`BufferPool.over`) allocates nothing, and refers to the tensor as long.
* Every buffer starts at a multiple of the pool's alignment, at least 512 bytes.
* Bytes belong to one allocation until all its views are released; then they are free at
  once, merged with free neighbours. The free range at the lowest address is used
  first, so that memory which was touched before is used again before fresh memory.
* A buffer that is never released is a leak. The pool does not reclaim it, since a copy into
  it may be running. :meth:`BufferPool.live` lists the buffers in use.
* Any thread may call all methods; none waits for memory to become free.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.pages import (
    LOCKED_AT_ONCE,
    map_pages,  # noqa: TID251
    page_lock,
)

__all__ = ["BUFFER_ALIGNMENT", "Buffer", "BufferPool", "Kind", "Live"]

logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal["host", "pinned", "device"]

#: Minimum alignment of buffers in bytes: that of direct reads from storage to a GPU.
BUFFER_ALIGNMENT: Final = 512


@dataclass(frozen=True, slots=True)
class Live:
    """One allocation that is not yet free.

    Attributes
    ----------
    nbytes : int
        Bytes it takes, rounded up to the alignment.
    views : int
        How many views of it are not released.
    """

    nbytes: int
    views: int


class _Segment:
    """One piece of memory from the system, and its free ranges in order of address."""

    def __init__(
        self,
        tensor: Tensor,
        view: memoryview | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.tensor = tensor
        self.view = view
        self.close = close
        #: Start and end of each.
        self._free = [(0, tensor.numel())]

    def allocate(self, nbytes: int) -> int | None:
        """Allocate `nbytes` in the first free range that holds them; return their offset."""
        for i, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                self._free[i : i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def free(self, start: int, nbytes: int) -> None:
        """Free a range, and merge it with the free ranges beside it."""
        end = start + nbytes
        i = bisect_left(self._free, (start, end))
        if i < len(self._free) and self._free[i][0] == end:
            _, end = self._free.pop(i)
        if i > 0 and self._free[i - 1][1] == start:
            i -= 1
            start, _ = self._free.pop(i)
        self._free.insert(i, (start, end))


@dataclass(eq=False, slots=True)
class _Block:
    """One allocation, shared by its views."""

    segment: _Segment
    start: int
    nbytes: int
    views: int = 1


class Buffer:
    """A view of bytes of a :class:`BufferPool`. The bytes are free when all views are released.

    Attributes
    ----------
    nbytes : int
        Bytes of this view.
    """

    __slots__ = ("_block", "_pool", "_start", "_tensor", "_view", "nbytes")

    def __init__(self, pool: BufferPool, block: _Block, start: int, nbytes: int) -> None:
        self._pool = pool
        self._block: _Block | None = block
        self._start = start
        self.nbytes = nbytes
        self._tensor: Tensor | None = None
        self._view: memoryview | None = None

    def __repr__(self) -> str:
        state = "" if self._block is not None else ", released"
        return f"Buffer({self.nbytes} bytes{state})"

    def __len__(self) -> int:
        return self.nbytes

    @property
    def views(self) -> int:
        """How many views of its allocation are not released; 0 once this one is."""
        block = self._block
        return 0 if block is None else block.views

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def tensor(self) -> Tensor:
        """The bytes as a uint8 tensor of shape ``[nbytes]``.

        Raises
        ------
        ValueError
            If the view was released.
        """
        block = self._alive()
        if self._tensor is None:
            start = block.start + self._start
            self._tensor = block.segment.tensor[start : start + self.nbytes]
        return self._tensor

    @property
    def view(self) -> memoryview:
        """The same bytes, writable, if they are host memory.

        Raises
        ------
        ValueError
            If the view was released, or the bytes are on a device.
        """
        block = self._alive()
        if self._view is None:
            if block.segment.view is None:
                raise ValueError(
                    f"this buffer lies on {block.segment.tensor.device}; only host and pinned "
                    "buffers have a memoryview: use its tensor"
                )
            start = block.start + self._start
            self._view = block.segment.view[start : start + self.nbytes]
        return self._view

    def share(self, offset: int = 0, nbytes: int | None = None) -> Buffer:
        """Return another view of the same bytes, or of a part of them.

        Parameters
        ----------
        offset : int
            First byte, counted from the start of this view.
        nbytes : int, optional
            Bytes; up to the end of this view when absent.

        Raises
        ------
        ValueError
            If this view was released, or the part is not inside it.
        """
        size = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or size < 1 or offset + size > self.nbytes:
            raise ValueError(
                f"bytes {offset} … {offset + size} were requested; expected at least one byte of "
                f"the view's {self.nbytes}"
            )
        return self._pool._share(self, self._start + offset, size)

    def release(self) -> None:
        """Release this view.

        Raises
        ------
        ValueError
            If it was released before: the bytes may belong to another buffer now.
        """
        self._pool._release(self)

    def _alive(self) -> _Block:
        if self._block is None:
            raise ValueError(
                f"this buffer of {self.nbytes} bytes was released and its memory may be in use "
                "elsewhere; use share() to keep a view of your own"
            )
        return self._block


class BufferPool:
    """Divides memory of one kind into aligned, reference-counted buffers.

    Parameters
    ----------
    capacity : int
        Upper limit of the bytes that the pool holds.
    kind : {"host", "pinned", "device"}
        ``host``: ordinary memory. ``pinned``: page-locked host memory, which a GPU copies from
        and to without the CPU. ``device``: memory of `device`.
    device : torch.device or str, optional
        With kind ``device``: which one. With kind ``pinned``: the GPU on whose memory
        node the memory should lie.
    segment_bytes : int, optional
        Allocate memory from the system in segments of so many bytes. When absent the whole
        capacity is one segment; ordinary memory costs nothing before it is touched. Segments of
        page-locked memory are never larger than one call of CUDA locks.
        A buffer is never larger than a segment, unless it has one to itself.
    alignment : int
        Power of two, at least 512: buffers start at its multiples, and their sizes are
        rounded up to them.

    Attributes
    ----------
    capacity : int
        As above, rounded down to a multiple of the alignment.
    alignment : int
        As above.
    kind : str
        As above.
    problem : str
        Why the system refused memory; empty until then.

    Raises
    ------
    ConfigError
        If the parameters contradict themselves.
    UnsupportedError
        If the kind needs a GPU and there is none.

    Examples
    --------
    >>> pool = BufferPool(1 << 20)
    >>> with pool.allocate(1000) as buffer:
    ...     _ = buffer.tensor.fill_(7)
    ...     pool.live()
    [Live(nbytes=1024, views=1)]
    >>> pool.live()
    []
    """

    def __init__(
        self,
        capacity: int,
        *,
        kind: Kind = "host",
        device: torch.device | str | None = None,
        segment_bytes: int | None = None,
        alignment: int = BUFFER_ALIGNMENT,
    ) -> None:
        if alignment < BUFFER_ALIGNMENT or alignment & (alignment - 1):
            raise ConfigError(
                f"alignment is {alignment}; expected a power of two, at least {BUFFER_ALIGNMENT}"
            )
        if kind not in ("host", "pinned", "device"):
            raise ConfigError(f"kind is {kind!r}; expected host, pinned or device")
        if kind != "pinned" and (kind == "device") != (device is not None):
            raise ConfigError(
                f"kind is {kind!r} and device {device!r}; give a device with kind='device', or"
                " 'pinned', only"
            )
        if kind == "pinned" and not torch.cuda.is_available():
            raise UnsupportedError("pinned memory needs a CUDA device; use kind='host'")
        self.alignment = alignment
        self.kind: Kind = kind
        self.capacity = capacity // alignment * alignment
        segment = self.capacity if segment_bytes is None else segment_bytes
        if kind == "pinned":
            segment = min(segment, LOCKED_AT_ONCE)
        self._segment_bytes = -(-segment // alignment) * alignment
        if self.capacity < alignment or self._segment_bytes < alignment:
            raise ConfigError(
                f"capacity is {capacity} and segment_bytes {segment_bytes}; expected at least "
                f"{alignment} bytes each"
            )
        self._device = None if device is None else torch.device(device)
        self._lock = threading.Lock()
        self._segments: list[_Segment] = []
        self._live: dict[int, _Block] = {}
        self._held = 0
        self._closed = False
        self.problem = ""

    @classmethod
    def over(cls, tensor: Tensor, *, alignment: int = BUFFER_ALIGNMENT) -> BufferPool:
        """Return a pool that divides a caller's tensor.

        Nothing else may use the tensor while buffers of the pool are in use.

        Parameters
        ----------
        tensor : Tensor
            Contiguous, of any dtype and device.
        alignment : int
            As for the constructor. Bytes before the first multiple are left out.

        Raises
        ------
        ConfigError
            If the tensor is not contiguous, or has less than `alignment` bytes from there.

        Examples
        --------
        >>> memory = torch.zeros(1 << 20, dtype=torch.uint8)
        >>> with BufferPool.over(memory).allocate(1000) as buffer:
        ...     _ = buffer.tensor.fill_(7)
        >>> int(memory.sum())
        7000
        """
        if not tensor.is_contiguous():
            raise ConfigError(
                f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} was"
                " given; expected a contiguous one"
            )
        with torch.inference_mode(False):
            memory = tensor.detach().view(-1).view(torch.uint8)
            memory = memory[-memory.data_ptr() % alignment :] if alignment > 0 else memory
        on_host = tensor.device.type == "cpu"
        pool = cls(memory.numel(), alignment=alignment)
        if not on_host:
            pool.kind = "device"
        elif torch.cuda.is_available() and tensor.is_pinned():
            pool.kind = "pinned"
        view = memory.numpy().data if on_host else None
        pool._segments.append(_Segment(memory[: pool.capacity], view))
        pool._held = pool.capacity
        return pool

    def __repr__(self) -> str:
        used = sum(entry.nbytes for entry in self.live())
        return f"BufferPool({self.kind}, {used} of {self.capacity} bytes)"

    def live(self) -> list[Live]:
        """Return the allocations in use, oldest first: after all work is done, the leaks."""
        with self._lock:
            return [Live(block.nbytes, block.views) for block in self._live.values()]

    def allocate(self, nbytes: int) -> Buffer | None:
        """Return a buffer of `nbytes` bytes, whose content is undefined.

        Returns
        -------
        Buffer or None
            None if no free range is large enough and the pool cannot grow, the system
            gives no more memory, or the pool is closed.

        Raises
        ------
        ValueError
            If `nbytes` is less than one.
        """
        if nbytes < 1:
            raise ValueError(f"a buffer of {nbytes} bytes was requested; expected at least 1")
        size = -(-nbytes // self.alignment) * self.alignment
        with self._lock:
            if self._closed:
                return None
            for segment in self._segments:
                start = segment.allocate(size)
                if start is not None:
                    break
            else:
                grown = self._grow(size)
                if grown is None:
                    return None
                segment, start = grown, grown.allocate(size)
                assert start is not None
            block = _Block(segment, start, size)
            self._live[id(block)] = block
        return Buffer(self, block, 0, nbytes)

    def close(self) -> None:
        """Refuse further requests, and free the memory as soon as none of it is in use."""
        with self._lock:
            self._closed = True
            if not self._live:
                self._free_segments()

    # ----------------------------------------------------------------- inside

    def _share(self, buffer: Buffer, start: int, nbytes: int) -> Buffer:
        with self._lock:
            block = buffer._alive()
            block.views += 1
        return Buffer(self, block, start, nbytes)

    def _release(self, buffer: Buffer) -> None:
        with self._lock:
            block = buffer._alive()
            buffer._block = buffer._tensor = buffer._view = None
            block.views -= 1
            if block.views:
                return
            del self._live[id(block)]
            block.segment.free(block.start, block.nbytes)
            if self._closed and not self._live:
                self._free_segments()

    def _grow(self, least: int) -> _Segment | None:
        """Allocate a segment; None at the capacity, or if the system gives no more memory."""
        left = self.capacity - self._held
        if least > left:
            return None
        size = max(least, min(self._segment_bytes, left))
        try:
            # vLLM's step runs under inference_mode. Other threads cannot write to tensors that
            # are created there, so leave it while allocating.
            with torch.inference_mode(False):
                segment = self._new_segment(size)
        except (OSError, MemoryError, RuntimeError) as error:
            if not self.problem:
                self.problem = str(error)
                logger.warning(
                    "a pool of %s memory stays at %d bytes, the system gives no more: %s",
                    self.kind,
                    self._held,
                    error,
                )
            return None
        self._held += size
        self._segments.append(segment)
        return segment

    def _new_segment(self, nbytes: int) -> _Segment:
        if self.kind == "device":
            memory = torch.empty(nbytes + self.alignment, dtype=torch.uint8, device=self._device)
            skip = -memory.data_ptr() % self.alignment
            return _Segment(memory[skip : skip + nbytes])
        if self.kind == "host":
            view = map_pages(nbytes)
            return _Segment(torch.frombuffer(view, dtype=torch.uint8), view)
        return _pinned_segment(nbytes, self._device)

    def _free_segments(self) -> None:
        # Ordinary and device memory is freed with the last tensor that refers to it.
        for segment in self._segments:
            if segment.close is not None:
                segment.close()
        self._segments.clear()
        self._held = 0


def _pinned_segment(nbytes: int, device: torch.device | None) -> _Segment:
    # After a fork, the first process that writes to a page gets a copy of it. A GPU would continue
    # with the page that it knows, and this process would use the other one.
    view = map_pages(nbytes, inherited=False)
    tensor = torch.frombuffer(view, dtype=torch.uint8)
    return _Segment(tensor, view, page_lock(view, device))
