"""An allocator of memory for KV in transit: host, pinned or device.

Owns the memory behind every pool of buffers: its allocation from the system, and its division
into aligned buffers by a :class:`kvshelf.memory.ring.Ring`.

Contracts
---------
* A pool never holds more than its capacity. It allocates memory from the system in segments,
  when it needs them, and frees it once the pool is closed and no buffer is in use. A pool over a
  caller's tensor (:meth:`BufferPool.over`) allocates nothing, and refers to the tensor as long.
* Every buffer starts at a multiple of the pool's alignment, at least 512 bytes.
* Bytes belong to one allocation until all its views are released. Then they are free at once, and
  free neighbours can become one buffer. A buffer takes memory that a buffer of its size released
  lately before other memory. The pool allocates no segment while a free range is large enough.
* A buffer that is never released is a leak. The pool does not reclaim it, since a copy into
  it may be running. :meth:`BufferPool.live` lists the buffers in use.
* Any thread may call all methods; none waits for memory to become free.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from contextlib import ExitStack
from typing import Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.memory.ring import Ring, Share, Slot, rounded
from kvshelf.pages import LOCKED_AT_ONCE, map_pages, page_lock  # noqa: TID251

__all__ = ["BUFFER_ALIGNMENT", "Buffer", "BufferPool", "Kind", "Live"]

logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal["host", "pinned", "device"]

#: Minimum alignment of buffers in bytes: that of direct reads from storage to a GPU.
BUFFER_ALIGNMENT: Final = 512


class Live(NamedTuple):
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


class Buffer:
    """A view of bytes of a :class:`BufferPool`. The bytes are free when all views are released.

    Attributes
    ----------
    nbytes : int
        Bytes of this view.
    """

    __slots__ = ("_pool", "_slot", "_tensor", "nbytes")

    def __init__(self, pool: BufferPool, slot: Slot, tensor: Tensor) -> None:
        self._pool = pool
        self._slot = slot
        #: None once the view is released.
        self._tensor: Tensor | None = tensor
        self.nbytes = tensor.numel()

    def __repr__(self) -> str:
        state = "" if self._tensor is not None else ", released"
        return f"Buffer({self.nbytes} bytes{state})"

    def __len__(self) -> int:
        return self.nbytes

    @property
    def views(self) -> int:
        """How many views of its allocation are not released; 0 once this one is."""
        return 0 if self._tensor is None else self._pool._views.get(self._slot, 0)

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
        if self._tensor is None:
            raise ValueError(
                f"this buffer of {self.nbytes} bytes was released and its memory may be in use "
                "elsewhere; use share() to keep a view of your own"
            )
        return self._tensor

    @property
    def view(self) -> memoryview:
        """The same bytes, writable, if they are host memory.

        Raises
        ------
        ValueError
            If the view was released, or the bytes are on a device.
        """
        tensor = self.tensor
        if self._pool.kind == "device":
            raise ValueError(
                f"this buffer lies on {tensor.device}; only host and pinned buffers have a "
                "memoryview: use its tensor"
            )
        return tensor.numpy().data

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
        with self._pool._lock:
            tensor = self.tensor[offset : offset + size]
            self._pool._views[self._slot] += 1
        return Buffer(self._pool, self._slot, tensor)

    def release(self) -> None:
        """Release this view.

        Raises
        ------
        ValueError
            If it was released before: the bytes may belong to another buffer now.
        """
        pool, slot = self._pool, self._slot
        with pool._lock:
            _ = self.tensor  # raises if the view was released
            self._tensor = None
            pool._views[slot] -= 1
            if not pool._views[slot]:
                del pool._views[slot]
                pool._ring.release(pool._share, [slot])


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
        self._segment_bytes = rounded(segment, alignment)
        if self.capacity < alignment or self._segment_bytes < alignment:
            raise ConfigError(
                f"capacity is {capacity} and segment_bytes {segment_bytes}; expected at least "
                f"{alignment} bytes each"
            )
        self._device = None if device is None else torch.device(device)
        self._lock = threading.Lock()
        #: Bytes that the pool may still allocate from the system.
        self._growth = self.capacity
        #: First offset in the ring, and memory of each segment.
        self._segments: list[tuple[int, Tensor]] = []
        #: Frees the memory.
        self._end = ExitStack()
        self._end.callback(self._segments.clear)
        # A method of the pool would keep a pool that nobody refers to until a garbage collection.
        self._ring = Ring(self._end.close, alignment=alignment)
        self._share = Share(0)
        #: How many views of each allocation are not released, oldest first.
        self._views: dict[Slot, int] = {}
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
        pool = cls(memory.numel(), alignment=alignment)
        if tensor.device.type != "cpu":
            pool.kind = "device"
        elif torch.cuda.is_available() and tensor.is_pinned():
            pool.kind = "pinned"
        pool._add_segment(memory, pool.capacity)
        return pool

    def __repr__(self) -> str:
        used = self._ring.stats().pinned_bytes
        return f"BufferPool({self.kind}, {used} of {self.capacity} bytes)"

    def live(self) -> list[Live]:
        """Return the allocations in use, oldest first: after all work is done, the leaks."""
        with self._lock:
            return [Live(slot.nbytes, views) for slot, views in self._views.items()]

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
        with self._lock:
            while (slot := self._ring.claim(None, nbytes, self._share, looks=1 << 62)) is None:
                if not self._grow(rounded(nbytes, self.alignment)):
                    return None
            self._views[slot] = 1
            index = bisect_right(self._segments, slot.offset, key=lambda segment: segment[0])
            first, memory = self._segments[index - 1]
        start = slot.offset - first
        return Buffer(self, slot, memory[start : start + nbytes])

    def close(self) -> None:
        """Refuse further requests, and free the memory as soon as none of it is in use."""
        with self._lock:
            self._growth = 0
            self._ring.close()

    # ----------------------------------------------------------------- inside

    def _grow(self, least: int) -> bool:
        """Allocate a segment. False at the capacity, or if the system gives no more memory."""
        if least > self._growth:
            return False
        size = max(least, min(self._segment_bytes, self._growth))
        try:
            # vLLM's step runs under inference_mode. Other threads cannot write to tensors that
            # are created there, so leave it while allocating.
            with torch.inference_mode(False):
                self._add_segment(self._allocate_memory(size), size)
        except (OSError, MemoryError, RuntimeError) as error:
            if not self.problem:
                self.problem = str(error)
                logger.warning(
                    "a pool of %s memory stays at %d bytes, the system gives no more: %s",
                    self.kind,
                    self._ring.capacity,
                    error,
                )
            return False
        return True

    def _allocate_memory(self, nbytes: int) -> Tensor:
        if self.kind == "device":
            memory = torch.empty(nbytes + self.alignment, dtype=torch.uint8, device=self._device)
            return memory[-memory.data_ptr() % self.alignment :]
        # After a fork, the first process that writes to a page gets a copy of it. A GPU would
        # continue with the page that it knows, and this process would use the other one.
        view = map_pages(nbytes, inherited=self.kind == "host")
        if self.kind == "pinned":
            self._end.callback(page_lock(view, self._device))
        return torch.frombuffer(view, dtype=torch.uint8)

    def _add_segment(self, memory: Tensor, nbytes: int) -> None:
        self._segments.append((self._ring.capacity, memory))
        self._ring.extend(nbytes)
        # By this limit the ring refuses more than the free bytes without looking at its slots.
        self._share.limit += nbytes
        self._growth -= nbytes
