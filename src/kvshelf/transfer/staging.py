"""A bounded pool of reused host buffers between paged KV caches and storage.

Every object that is read or written passes through one buffer of this pool. The pool takes its
memory from an :class:`~kvshelf.memory.arena.Arena` and owns the decision which store or load gets
a buffer, and which one. All buffers have one size, are aligned to 4096 bytes and are handed out
most recently used first, since the first use of fresh memory costs ten times as much as the copy
into it.

Contracts
---------
* The pool never holds more than its capacity, takes memory as buffers are used for the first time,
  and keeps it until it is closed. When all buffers are in use, or the system gives no memory,
  stores are refused at once, and loads wait.
* A part of the pool is reserved for loads, so that stores which the storage does not
  accept can never delay a load.
* Memory for caches on a GPU is page-locked when the pool is made, since locking takes long. Where
  the system refuses, a warning is logged and ordinary memory used.
* Any thread may call all methods. :meth:`StagingPool.acquire_for_store` is the only one
  called on an engine's step thread, and waits only if it is given a timeout.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.memory.arena import Arena
from kvshelf.pages import page_lock

logger = logging.getLogger(__name__)

STAGING_ALIGNMENT = 4096
#: Buffers that are made at once.
_AT_ONCE = 16
_NOTHING = torch.empty(0, dtype=torch.uint8)
#: Part of the buffers that stores never use.
_LOAD_SHARE = 0.25


class Region(Protocol):
    """Memory of another owner, usable until it is released.

    Attributes
    ----------
    view : memoryview
        Writable.
    """

    view: memoryview

    def release(self) -> None:
        """Give the memory back."""


#: Takes host memory of at least so many bytes; None: there is none.
Regions: TypeAlias = Callable[[int], Region | None]


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
    """Return the least capacity of a :class:`StagingPool` whose stores hold some chunks.

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

    __slots__ = ("_part", "_part_at", "_pool", "for_store", "tensor", "view")

    def __init__(self, pool: StagingPool, view: memoryview, tensor: torch.Tensor) -> None:
        self._pool = pool
        self.view = view
        self.tensor = tensor
        self.for_store = False
        self._part = self.tensor
        self._part_at = (0, len(self.view))

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return some of the bytes, as a tensor; quick for those returned last."""
        if self._part_at != (start, stop):
            self._part, self._part_at = self.tensor[start:stop], (start, stop)
        return self._part

    def valid(self) -> bool:
        """Whether nothing else writes to the bytes until :meth:`release`."""
        return True

    def release(self) -> None:
        """Return the buffer to its pool."""
        self._pool.release(self)


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
    device : torch.device, optional
        The GPU on which the caches are: all memory is taken now, near it, and page-locked where
        that is possible.
    regions : Callable, optional
        Takes memory for the buffers: that from which a node server takes what is stored.

    Attributes
    ----------
    buffer_bytes : int
    limit : int
        Buffers of the pool.
    pinned : bool
        Whether the memory is page-locked.

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
        device: torch.device | None = None,
        regions: Regions | None = None,
    ) -> None:
        self._regions = regions
        self.buffer_bytes = -(-buffer_bytes // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
        self.limit = capacity // self.buffer_bytes
        self._store_limit = self.limit - max(1, int(self.limit * _LOAD_SHARE))
        needed = _least_buffers(together)
        if self.limit < needed:
            raise ConfigError(
                f"staging has {capacity} bytes, but a chunk of this model is stored as {together}"
                f" objects of {self.buffer_bytes} bytes, and staging holds at least {needed} of"
                " them: make chunk_size smaller, or give a ChunkCache"
                f" staging_bytes={needed * self.buffer_bytes} or more"
            )
        #: The memory, once it was taken, and what gives it back.
        self._view = memoryview(b"")
        self._tensor = _NOTHING
        self._close: Callable[[], None] | None = None
        self._made = 0
        self._free: list[StagingBuffer] = []
        self._out = 0
        self._stores = 0
        self._closed = False
        self._changed = threading.Condition()
        #: It was logged that there is no memory.
        self._warned = False
        self.pinned = device is not None and self._pin(device)

    def _take_memory(self, device: torch.device | None = None) -> None:
        """Take memory for all buffers, page-locked for a GPU if one is given.

        Raises
        ------
        ConfigError, UnsupportedError, RuntimeError
            If the system gives none, or none that is page-locked.
        """
        # Buffers are not to lie across what is page-locked by itself.
        size = self.buffer_bytes
        nbytes = self.limit * size
        region = None if self._regions is None else self._regions(nbytes)
        with contextlib.ExitStack() as stack:
            if region is None:
                arena = Arena(nbytes, device=device, unit=size, lazy=device is None)
                stack.callback(arena.close)
                view, tensor = arena.view, arena.tensor
            else:
                stack.callback(region.release)
                view = region.view
                # The next user of the memory must not find it page-locked.
                if device is not None:
                    stack.callback(page_lock(view, device, size))
                # vLLM's step runs under inference_mode. Other threads cannot write to tensors that
                # are created there.
                with torch.inference_mode(False):
                    tensor = torch.frombuffer(view, dtype=torch.uint8)
            self._close = stack.pop_all().close
        self._view, self._tensor = view, tensor

    def _pin(self, device: torch.device) -> bool:
        """Take all memory page-locked; False where that is not possible."""
        try:
            if not torch.cuda.is_available():
                raise UnsupportedError("there is no CUDA device")
            self._take_memory(device)
        except (ConfigError, UnsupportedError, RuntimeError) as error:
            logger.warning(
                "could not pin staging memory (%s); copies to and from the GPU will be slower and"
                " will block",
                error,
            )
            return False
        self._free = self._grow(self.limit)
        return True

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
            self._out -= len(buffers)
            self._free += buffers
            self._free_memory()
            # All waiters: the one that is woken first may be a store, which may not have it.
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse all further requests, wake waiting threads, free the memory. Idempotent."""
        with self._changed:
            self._closed = True
            self._free_memory()
            self._changed.notify_all()

    def _free_memory(self) -> None:
        """Free the memory of a closed pool of which nothing is in use."""
        if self._closed and not self._out:
            self._free.clear()
            self._view, self._tensor = memoryview(b""), _NOTHING
            close, self._close = self._close, None
            if close is not None:
                close()

    def _have_free(self, count: int) -> bool:
        while len(self._free) < count:
            fresh = self._grow(_AT_ONCE)
            if not fresh:
                return False
            self._free += fresh
        return True

    def _grow(self, at_once: int) -> list[StagingBuffer]:
        """Return new buffers; none if all exist or the system refuses memory."""
        count = min(at_once, self.limit - self._made)
        if count <= 0:
            return []
        if self._close is None:
            try:
                self._take_memory()
            except ConfigError as error:
                if not self._warned:
                    self._warned = True
                    logger.warning("there is no staging memory: %s", error)
                return []
        view, tensor, size = self._view, self._tensor, self.buffer_bytes
        starts = range(self._made * size, (self._made + count) * size, size)
        self._made += count
        return [
            StagingBuffer(self, view[start : start + size], tensor[start : start + size])
            for start in starts
        ]
