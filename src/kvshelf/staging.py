"""Bounded pool of reused host buffers between paged KV caches and storage.

Owns all payload-sized memory of kvshelf: every object that is read or written passes
through one buffer of this pool. All buffers have one size, are aligned to 4096 bytes
and are handed out most recently used first, since fresh memory costs ten times as
much as the copy into it.

Contracts
---------
* The pool never holds more than its capacity; when it is used up, stores are refused
  at once, loads wait.
* A part of the pool is kept for loads, so that stores which the storage does not
  accept can never keep a load waiting.
* All methods may be called from any thread. :meth:`StagingPool.acquire_for_store` is
  the only one called on an engine's step thread and never waits.
"""

from __future__ import annotations

import mmap
import threading

import torch

from kvshelf.errors import ConfigError

ALIGNMENT = 4096
_SLAB_BYTES = 32 << 20


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

    Raises
    ------
    ConfigError
        If `capacity` is less than four buffers.
    """

    def __init__(self, capacity: int, buffer_bytes: int, *, load_share: float = 0.25) -> None:
        self.buffer_bytes = -(-buffer_bytes // ALIGNMENT) * ALIGNMENT
        self.limit = capacity // self.buffer_bytes
        if self.limit < 4:
            raise ConfigError(
                f"staging_bytes is {capacity}, but one object of this model takes"
                f" {self.buffer_bytes} bytes and staging holds at least 4 of them: set"
                f" staging_bytes to {4 * self.buffer_bytes} or more, or raise `shards`"
            )
        self._store_limit = self.limit - max(1, int(self.limit * load_share))
        self._free: list[StagingBuffer] = []
        self._made = 0
        self._stores = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def in_use(self) -> int:
        """Number of buffers handed out."""
        return self._made - len(self._free)

    @property
    def bytes_held(self) -> int:
        """Bytes of memory that the pool has taken so far."""
        return self._made * self.buffer_bytes

    def acquire_for_store(self) -> StagingBuffer | None:
        """Return a buffer, or None when stores have used up their part. Never waits."""
        with self._changed:
            if self._closed or self._stores >= self._store_limit:
                return None
            buffer = self._take()
            if buffer is not None:
                buffer.for_store = True
                self._stores += 1
            return buffer

    def acquire_for_load(self, timeout: float | None = None) -> StagingBuffer | None:
        """Return a buffer, waiting for one to come back; None at time-out or when closed."""
        with self._changed:
            buffer = None if self._closed else self._take()
            while buffer is None and not self._closed:
                if not self._changed.wait(timeout):
                    return None
                buffer = None if self._closed else self._take()
            return buffer

    def release(self, buffer: StagingBuffer) -> None:
        """Give a buffer back."""
        with self._changed:
            if buffer.for_store:
                buffer.for_store = False
                self._stores -= 1
            self._free.append(buffer)
            self._changed.notify()

    def warm(self, nbytes: int) -> None:
        """Take up to `nbytes` of memory now and touch it, so that no step has to."""
        while True:
            with self._changed:
                if self._closed or self._made >= min(self.limit, nbytes // self.buffer_bytes):
                    return
                fresh = self._grow()
            # Outside the lock: zeroing memory is slow and no one else holds these yet.
            for buffer in fresh:
                buffer.tensor.zero_()
            with self._changed:
                self._free[:0] = fresh
                self._changed.notify_all()

    def close(self) -> None:
        """Refuse all further requests and wake those that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take(self) -> StagingBuffer | None:
        if not self._free and self._made < self.limit:
            self._free.extend(self._grow())
        return self._free.pop() if self._free else None

    def _grow(self) -> list[StagingBuffer]:
        count = min(max(1, _SLAB_BYTES // self.buffer_bytes), self.limit - self._made)
        slab = mmap.mmap(-1, count * self.buffer_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                slab.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # kernels without transparent huge pages
                pass
        self._made += count
        view = memoryview(slab)
        size = self.buffer_bytes
        return [StagingBuffer(view[i * size : (i + 1) * size]) for i in range(count)]
