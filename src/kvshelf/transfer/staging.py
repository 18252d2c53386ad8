"""A bounded pool of reused host buffers between paged KV caches and storage.

Every object that is read or written passes through one buffer of this pool. The pool takes its
memory from a :class:`~kvshelf.buffers.BufferPool` and owns the decision which store or load
gets a buffer, and which one. All buffers have one size, are aligned to 4096 bytes and
are handed out most recently used first, since the first use of fresh memory costs ten times
as much as the copy into it.

Contracts
---------
* The pool never holds more than its capacity, and keeps its memory until it is closed.
  When all buffers are in use, or the system gives no more memory, stores are refused at
  once, and loads wait.
* A part of the pool is reserved for loads, so that stores which the storage does not
  accept can never delay a load.
* Memory for caches on a GPU is page-locked and allocated when the pool is made, since locking
  takes long. Where the system refuses, a warning is logged and ordinary memory used.
* Any thread may call all methods. :meth:`StagingPool.acquire_for_store` is the only one
  called on an engine's step thread, and waits only if it is given a timeout.
"""

from __future__ import annotations

import logging
import threading
import time

import torch

from kvshelf.buffers import Buffer, BufferPool, Kind, Lender
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.pages import lockable

logger = logging.getLogger(__name__)

STAGING_ALIGNMENT = 4096
_SLAB_BYTES = 32 << 20
#: Buffers that are made at once, at most: a slab may have thousands of small ones.
_AT_ONCE = 16
#: Part of the buffers that stores never use.
_LOAD_SHARE = 0.25


def _least_buffers(together: int) -> int:
    """Return how many buffers hold one store and, beside it, the share of loads."""
    needed = max(4, together + 1)
    while needed - max(1, int(needed * _LOAD_SHARE)) < together:
        needed += 1
    return needed


def least_bytes(buffer_bytes: int, together: int, chunks: int = 1) -> int:
    """Return the least capacity of a :class:`StagingPool` that holds some chunks at once.

    Parameters
    ----------
    buffer_bytes, together : int
        As for the pool.
    chunks : int
    """
    buffer = -(-buffer_bytes // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
    return max(_least_buffers(together), chunks * together) * buffer


def bytes_for_stores(buffer_bytes: int, together: int, chunks: int) -> int:
    """Return the least capacity of a :class:`StagingPool` whose stores have room for some chunks.

    Parameters
    ----------
    buffer_bytes, together : int
        As for the pool.
    chunks : int
    """
    buffer = -(-buffer_bytes // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
    return _least_buffers(chunks * together) * buffer


class StagingBuffer:
    """One buffer of a :class:`StagingPool`.

    Attributes
    ----------
    view : memoryview
        The bytes, writable.
    tensor : torch.Tensor
        The same bytes as a uint8 tensor of shape ``[nbytes]``.
    """

    __slots__ = ("_buffer", "_part", "_part_at", "for_store", "tensor", "view")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.view = buffer.view
        self.tensor = buffer.tensor
        self.for_store = False
        self._part = self.tensor
        self._part_at = (0, len(self.view))

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return some of the bytes, as a tensor; quick for those that were asked for last."""
        if self._part_at != (start, stop):
            self._part, self._part_at = self.tensor[start:stop], (start, stop)
        return self._part

    def _release(self) -> None:
        self._buffer.release()


class StagingPool:
    """Pool of equal buffers in host memory.

    Parameters
    ----------
    capacity : int
        Upper limit of the bytes that the pool holds.
    buffer_bytes : int
        Size of one buffer: the largest object of the namespace.
    together : int
        Buffers that one store takes at once: the shards of a chunk.
    pinned : bool
        Allocate all memory now, page-locked where that is possible: for caches on a GPU.
    device : torch.device, optional
        The GPU near which page-locked memory should lie.
    lender : Callable, optional
        Lends memory for the buffers: that from which a node server takes what is stored.

    Raises
    ------
    ConfigError
        If `capacity` does not hold one store and, beside it, the share of loads.
    """

    def __init__(
        self,
        capacity: int,
        buffer_bytes: int,
        *,
        together: int = 1,
        pinned: bool = False,
        device: torch.device | None = None,
        lender: Lender | None = None,
    ) -> None:
        self._device = device
        self._lender = lender
        self.buffer_bytes = -(-buffer_bytes // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
        self.limit = capacity // self.buffer_bytes
        self._store_limit = self.limit - max(1, int(self.limit * _LOAD_SHARE))
        needed = _least_buffers(together)
        if self.limit < needed:
            raise ConfigError(
                f"staging_bytes is {capacity}, but a chunk of this model is stored as {together}"
                f" objects of {self.buffer_bytes} bytes, and staging holds at least {needed} of"
                f" them: set staging_bytes to {needed * self.buffer_bytes} or more, or make"
                " chunk_size smaller"
            )
        self._slab = max(1, _SLAB_BYTES // self.buffer_bytes)
        self._made = 0
        self._pool = self._make_pool("host")
        self._free: list[StagingBuffer] = []
        if pinned:
            self._pin()
        self._out = 0
        self._stores = 0
        self._closed = False
        self._changed = threading.Condition()

    def _make_pool(self, kind: Kind) -> BufferPool:
        size, capacity = self.buffer_bytes, self.limit * self.buffer_bytes
        return BufferPool(
            capacity,
            kind=kind,
            device=self._device if kind == "pinned" else None,
            segment_bytes=self._slab * size if kind == "host" else lockable(capacity, size),
            alignment=STAGING_ALIGNMENT,
            lender=self._lender,
        )

    def _pin(self) -> None:
        """Allocate all memory page-locked, or leave the pool as it is."""
        ordinary = self._pool
        try:
            self._pool = self._make_pool("pinned")
        except UnsupportedError as error:
            problem = str(error)
        else:
            self._free = self._grow(self.limit, self.limit)
            if self._made == self.limit:
                ordinary.close()
                return
            problem = self._pool.problem
            self._free_memory()
            self._pool.close()
            self._pool, self._made = ordinary, 0
        logger.warning(
            "could not pin staging memory (%s); copies to and from the GPU will be slower and will"
            " block",
            problem,
        )

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""
        return self._pool.kind == "pinned"

    @property
    def for_stores(self) -> int:
        """Number of buffers that stores may have at once."""
        return self._store_limit

    @property
    def for_loads(self) -> int:
        """Number of buffers that stores leave to loads at any time."""
        return self.limit - self._store_limit

    @property
    def in_use(self) -> int:
        """Number of buffers in use."""
        return self._out

    def acquire_for_store(self, count: int = 1, timeout: float = 0.0) -> list[StagingBuffer] | None:
        """Return `count` buffers, or None when stores use all of their part.

        Parameters
        ----------
        count : int
            At most as many as one store takes at once.
        timeout : float
            Seconds to wait for buffers to be released.
        """
        deadline = time.monotonic() + timeout if timeout > 0 else 0.0
        with self._changed:
            while not self._closed:
                if self._stores + count <= self._store_limit and self._have_free(count):
                    buffers = [self._free.pop() for _ in range(count)]
                    for buffer in buffers:
                        buffer.for_store = True
                    self._stores += count
                    self._out += count
                    return buffers
                left = deadline - time.monotonic() if deadline else 0.0
                if left <= 0:
                    return None
                self._changed.wait(left)
            return None

    def acquire_for_load(
        self, count: int = 1, timeout: float | None = None
    ) -> list[StagingBuffer] | None:
        """Return `count` buffers, waiting for them to be released; None at timeout or when closed.

        Parameters
        ----------
        count : int
            More than :attr:`for_loads` may never be free together.
        timeout : float, optional
            Seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._closed:
                if self._have_free(count):
                    self._out += count
                    return [self._free.pop() for _ in range(count)]
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)
            return None

    def release(self, *buffers: StagingBuffer) -> None:
        """Return buffers to the pool."""
        with self._changed:
            for buffer in buffers:
                if buffer.for_store:
                    buffer.for_store = False
                    self._stores -= 1
                self._out -= 1
                if self._closed:
                    buffer._release()
                else:
                    self._free.append(buffer)
            # All waiters: the one that is woken first may be a store, which may not have it.
            self._changed.notify_all()

    def warm(self, nbytes: int) -> None:
        """Allocate up to `nbytes` of memory now and touch it, so that no step has to.

        At most half of the pool: buffers that are being warmed cannot be used.
        """
        target = min(self.limit // 2, nbytes // self.buffer_bytes)
        while True:
            with self._changed:
                fresh = [] if self._closed else self._grow(target)
            if not fresh:
                return
            # Outside the lock: zeroing memory is slow, and no other thread has these yet.
            for buffer in fresh:
                buffer.tensor.zero_()
            self._keep(fresh)

    def close(self) -> None:
        """Refuse all further requests, wake waiting threads, free the memory. Idempotent."""
        with self._changed:
            self._closed = True
            self._free_memory()
            self._pool.close()
            self._changed.notify_all()

    def _keep(self, fresh: list[StagingBuffer]) -> None:
        with self._changed:
            self._free[:0] = fresh
            if self._closed:
                self._free_memory()
            self._changed.notify_all()

    def _free_memory(self) -> None:
        for buffer in self._free:
            buffer._release()
        self._free.clear()

    def _have_free(self, count: int) -> bool:
        while len(self._free) < count:
            fresh = self._grow(self.limit)
            if not fresh:
                return False
            self._free += fresh
        return True

    def _grow(self, most: int, at_once: int = _AT_ONCE) -> list[StagingBuffer]:
        """Return new buffers; none if `most` exist or the system refuses memory."""
        fresh = []
        for _ in range(min(at_once, most - self._made)):
            buffer = self._pool.allocate(self.buffer_bytes)
            if buffer is None:
                break
            fresh.append(StagingBuffer(buffer))
        self._made += len(fresh)
        return fresh
