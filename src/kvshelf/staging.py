"""Bounded pool of reused host buffers between paged KV caches and storage.

Owns all payload-sized memory of kvshelf: every object that is read or written passes
through one buffer of this pool. All buffers have one size, are aligned to 4096 bytes
and are handed out most recently used first, since fresh memory costs ten times as
much as the copy into it.

Contracts
---------
* The pool never holds more than its capacity; when it is used up, or the system gives
  no more memory, stores are refused at once, loads wait.
* A part of the pool is kept for loads, so that stores which the storage does not
  accept can never keep a load waiting.
* All methods may be called from any thread. :meth:`StagingPool.acquire_for_store` is
  the only one called on an engine's step thread and never waits.
* With a `lock`, for caches on a GPU, memory is page-locked. That takes long, so only
  :meth:`StagingPool.warm` adds memory then. Where the system refuses, a warning is logged
  once and the memory is used as it is. It is unlocked when the pool is closed and all
  buffers are back.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

import torch

from kvshelf.errors import ConfigError

logger = logging.getLogger(__name__)

ALIGNMENT = 4096
_SLAB_BYTES = 32 << 20
_HUGE_PAGE = 2 << 20

#: Locks the pages of memory given by address and size in bytes; returns what unlocks them, or
#: None where that is refused.
PageLock: TypeAlias = Callable[[int, int], Callable[[], None] | None]


class StagingBuffer:
    """One buffer of a :class:`StagingPool`.

    Attributes
    ----------
    view : memoryview
        The bytes, writable.
    tensor : torch.Tensor
        The same bytes as a uint8 tensor of shape ``[nbytes]``.
    """

    __slots__ = ("for_store", "tensor", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.tensor = torch.frombuffer(view, dtype=torch.uint8)
        self.for_store = False


class StagingPool:
    """Pool of equal buffers in host memory.

    Parameters
    ----------
    capacity : int
        Most bytes that the pool may ever hold.
    buffer_bytes : int
        Size of one buffer: the largest object of the namespace.
    load_share : float
        Part of the buffers that stores may not take.
    together : int
        Buffers that one store takes at once: the shards of a chunk.
    lock : PageLock, optional
        Locks the pages of all memory. :meth:`warm` must be called then.

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
        load_share: float = 0.25,
        together: int = 1,
        lock: PageLock | None = None,
    ) -> None:
        self.buffer_bytes = -(-buffer_bytes // ALIGNMENT) * ALIGNMENT
        self.limit = capacity // self.buffer_bytes
        self._store_limit = self.limit - max(1, int(self.limit * load_share))
        needed = max(4, together + 1)
        while needed - max(1, int(needed * load_share)) < together:
            needed += 1
        if self.limit < needed:
            raise ConfigError(
                f"staging_bytes is {capacity}, but a chunk of this model is stored as {together}"
                f" objects of {self.buffer_bytes} bytes, and staging holds at least {needed} of"
                f" them: set staging_bytes to {needed * self.buffer_bytes} or more, or make"
                " chunk_size smaller"
            )
        self._free: list[StagingBuffer] = []
        self._made = 0
        self._out = 0
        self._stores = 0
        self._closed = False
        self._short = False
        self._refused = False
        self._lock_pages = lock
        self._unlock: list[Callable[[], None]] = []
        self._changed = threading.Condition()

    @property
    def in_use(self) -> int:
        """Number of buffers handed out."""
        return self._out

    @property
    def bytes_held(self) -> int:
        """Bytes of memory that the pool has taken so far."""
        return self._made * self.buffer_bytes

    def acquire_for_store(self, count: int = 1) -> list[StagingBuffer] | None:
        """Return `count` buffers, or None when stores have used up their part. Never waits."""
        with self._changed:
            if self._closed or self._stores + count > self._store_limit:
                return None
            while len(self._free) < count:
                if not self._grow_free():
                    return None
            buffers = [self._free.pop() for _ in range(count)]
            for buffer in buffers:
                buffer.for_store = True
            self._stores += count
            self._out += count
            return buffers

    def acquire_for_load(self, timeout: float | None = None) -> StagingBuffer | None:
        """Return a buffer, waiting for one to come back; None at time-out or when closed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._closed:
                if self._free or self._grow_free():
                    self._out += 1
                    return self._free.pop()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)
            return None

    def release(self, buffer: StagingBuffer) -> None:
        """Give a buffer back."""
        with self._changed:
            if buffer.for_store:
                buffer.for_store = False
                self._stores -= 1
            self._out -= 1
            self._free.append(buffer)
            self._unlock_unused()
            self._changed.notify()

    def warm(self, nbytes: int) -> None:
        """Take up to `nbytes` of memory now and touch it, so that no step has to.

        At most half of the pool: what is being warmed cannot be handed out. With a page
        lock up to all of it, since nothing else adds memory then.
        """
        most = self.limit // 2 if self._lock_pages is None else self.limit
        target = min(most, nbytes // self.buffer_bytes)
        while True:
            with self._changed:
                fresh = [] if self._closed else self._grow(target)
            if not fresh:
                return
            # Outside the lock: zeroing memory is slow and no one else holds these yet.
            for buffer in fresh:
                buffer.tensor.zero_()
            unlock = self._locked(fresh)
            with self._changed:
                if unlock is not None:
                    self._unlock.append(unlock)
                self._free[:0] = fresh
                self._unlock_unused()
                self._changed.notify_all()

    def close(self) -> None:
        """Refuse all further requests and wake those that wait."""
        with self._changed:
            self._closed = True
            self._unlock_unused()
            self._changed.notify_all()

    def _unlock_unused(self) -> None:
        if self._closed and not self._out:
            while self._unlock:
                self._unlock.pop()()

    def _locked(self, fresh: list[StagingBuffer]) -> Callable[[], None] | None:
        """Lock the pages of buffers that lie beside each other."""
        if self._lock_pages is None:
            return None
        unlock = self._lock_pages(fresh[0].tensor.data_ptr(), len(fresh) * self.buffer_bytes)
        if unlock is None and not self._refused:
            self._refused = True
            logger.warning(
                "staging is not page-locked, the system refuses (see ulimit -l): copies to and"
                " from the GPU take longer and hold up those who wait for them"
            )
        return unlock

    def _grow_free(self) -> bool:
        if self._lock_pages is not None:
            return False
        fresh = self._grow(self.limit)
        self._free += fresh
        return bool(fresh)

    def _grow(self, most: int) -> list[StagingBuffer]:
        """Return new buffers, none when there are `most` or the system refuses memory."""
        count = min(max(1, _SLAB_BYTES // self.buffer_bytes), most - self._made)
        if count <= 0:
            return []
        size = self.buffer_bytes
        try:
            view = _map_huge(count * size)
        except (OSError, MemoryError) as error:
            if not self._short:
                self._short = True
                logger.warning(
                    "staging stays at %d bytes, the system gives no more: %s",
                    self.bytes_held,
                    error,
                )
            return []
        self._made += count
        return [StagingBuffer(view[i * size : (i + 1) * size]) for i in range(count)]


def _map_huge(nbytes: int) -> memoryview:
    """Return fresh memory that the kernel backs with huge pages where it has them.

    Raises
    ------
    OSError
        If the system gives no more memory.
    """
    # Private, where Python's default is shared: kernels give shared memory no huge pages unless
    # mounted so, and then a first copy into it takes seven times as long. The part that only
    # serves alignment is never touched, so it takes no memory.
    slab = mmap.mmap(-1, nbytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            slab.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # kernels without transparent huge pages
            pass
    start = -ctypes.addressof(ctypes.c_char.from_buffer(slab)) % _HUGE_PAGE
    return memoryview(slab)[start : start + nbytes]
