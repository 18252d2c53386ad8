"""An allocator of memory for KV on its way: host, pinned or device.

Owns the memory behind every pool of buffers: where it comes from, how it is cut into
aligned pieces, and when a piece is free again.

Contracts
---------
* A pool never holds more than its capacity. It takes memory from the system in segments,
  when it needs them, and gives it back when it is closed and nothing of it is in use.
* Every buffer starts at a multiple of the pool's alignment, at least 512 bytes.
* Bytes belong to one allocation until all its views are released; then they are free at
  once, joined with free neighbours. Of free bytes those at the lowest address are handed
  out first, so that memory which was touched before is used again before fresh memory.
* A buffer that is never released is a leak: it is not taken back behind anybody's back,
  since a copy into it may be under way. :meth:`BufferPool.live` lists what is out.
* All methods may be called from any thread; none waits for memory to become free.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import traceback
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from kvshelf.errors import ConfigError, UnsupportedError

logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal["host", "pinned", "device"]

#: Least alignment of buffers in bytes: what direct reads from storage to a GPU ask for.
ALIGNMENT: Final = 512
_HUGE_PAGE: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class Live:
    """One allocation that is not yet free.

    Attributes
    ----------
    nbytes : int
        Bytes it takes, rounded up to the alignment.
    views : int
        How many views of it are not released.
    where : str
        The lines of code that allocated it, where the pool traces them; else empty.
    """

    nbytes: int
    views: int
    where: str


class _Segment:
    """One piece of memory from the system, and its free ranges in order of address."""

    __slots__ = ("base", "close", "ends", "nbytes", "starts", "tensor", "view")

    def __init__(
        self, tensor: Tensor, view: memoryview | None, close: Callable[[], None] | None
    ) -> None:
        self.tensor = tensor
        self.view = view
        self.close = close
        self.base = tensor.data_ptr()
        self.nbytes = tensor.numel()
        self.starts = [0]
        self.ends = [self.nbytes]

    def take(self, nbytes: int) -> int | None:
        """Return the first offset with `nbytes` free bytes behind it, and take them."""
        for i, start in enumerate(self.starts):
            end = self.ends[i]
            if end - start >= nbytes:
                if end - start == nbytes:
                    del self.starts[i], self.ends[i]
                else:
                    self.starts[i] = start + nbytes
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Make a range free, joined with the free ranges beside it."""
        end = start + nbytes
        i = bisect_left(self.starts, start)
        joins_left = i > 0 and self.ends[i - 1] == start
        joins_right = i < len(self.starts) and self.starts[i] == end
        if joins_left and joins_right:
            self.ends[i - 1] = self.ends[i]
            del self.starts[i], self.ends[i]
        elif joins_left:
            self.ends[i - 1] = end
        elif joins_right:
            self.starts[i] = start
        else:
            self.starts.insert(i, start)
            self.ends.insert(i, end)


class _Block:
    """One allocation, shared by its views."""

    __slots__ = ("nbytes", "segment", "start", "views", "where")

    def __init__(self, segment: _Segment, start: int, nbytes: int, where: str) -> None:
        self.segment = segment
        self.start = start
        self.nbytes = nbytes
        self.views = 1
        self.where = where


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

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def released(self) -> bool:
        """Whether this view was released."""
        return self._block is None

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
        """The same bytes, writable, where they are host memory.

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
                f"bytes {offset} … {offset + size} asked for; expected at least one byte of the "
                f"view's {self.nbytes}"
            )
        return self._pool._share(self, self._start + offset, size)

    def release(self) -> None:
        """Give this view back.

        Raises
        ------
        ValueError
            If it was released before: somebody else may own the bytes now.
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
    """Cuts memory of one kind into aligned, reference-counted buffers.

    Parameters
    ----------
    capacity : int
        Most bytes that the pool may hold.
    kind : {"host", "pinned", "device"}
        ``host``: ordinary memory. ``pinned``: host memory that a GPU can copy from and to
        by itself. ``device``: memory of `device`.
    device : torch.device or str, optional
        With kind ``device``: which one.
    segment_bytes : int, optional
        Take memory from the system in pieces of so many bytes. When absent all of the
        capacity is one piece; for ordinary memory that costs nothing before it is touched.
        A buffer is never larger than a segment, unless it has one to itself.
    alignment : int
        Power of two, at least 512: where buffers start, and what sizes are rounded up to.
    trace : bool
        Remember where each buffer was allocated, for :meth:`live`. Costs microseconds each.

    Attributes
    ----------
    capacity, alignment : int
    kind : str

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
    ...     pool.allocated_bytes
    1024
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
        alignment: int = ALIGNMENT,
        trace: bool = False,
    ) -> None:
        if alignment < ALIGNMENT or alignment & (alignment - 1):
            raise ConfigError(
                f"alignment is {alignment}; expected a power of two, at least {ALIGNMENT}"
            )
        if kind not in ("host", "pinned", "device"):
            raise ConfigError(f"kind is {kind!r}; expected host, pinned or device")
        if (kind == "device") != (device is not None):
            raise ConfigError(
                f"kind is {kind!r} and device {device!r}; give a device with kind='device' only"
            )
        if kind == "pinned" and not torch.cuda.is_available():
            raise UnsupportedError("pinned memory needs a CUDA device; use kind='host'")
        self.alignment = alignment
        self.kind: Kind = kind
        self.capacity = capacity // alignment * alignment
        segment = self.capacity if segment_bytes is None else segment_bytes
        self._segment_bytes = -(-segment // alignment) * alignment
        if self.capacity < alignment or self._segment_bytes < alignment:
            raise ConfigError(
                f"capacity is {capacity} and segment_bytes {segment_bytes}; expected at least "
                f"{alignment} bytes each"
            )
        self._device = None if device is None else torch.device(device)
        self._trace = trace
        self._lock = threading.Lock()
        self._segments: list[_Segment] = []
        self._live: dict[int, _Block] = {}
        self._held = 0
        self._allocated = 0
        self._closed = False
        self._short = False

    def __repr__(self) -> str:
        return f"BufferPool({self.kind}, {self._allocated} of {self.capacity} bytes)"

    @property
    def allocated_bytes(self) -> int:
        """Bytes in buffers that are not free, rounded up to the alignment."""
        return self._allocated

    @property
    def held_bytes(self) -> int:
        """Bytes taken from the system so far."""
        return self._held

    def free_ranges(self) -> list[int]:
        """Return the sizes of all free ranges of the memory held, in bytes."""
        with self._lock:
            return [
                end - start
                for segment in self._segments
                for start, end in zip(segment.starts, segment.ends, strict=True)
            ]

    def live(self) -> list[Live]:
        """Return what is not free, oldest first: after all work is done, the leaks."""
        with self._lock:
            return [Live(block.nbytes, block.views, block.where) for block in self._live.values()]

    def allocate(self, nbytes: int) -> Buffer | None:
        """Return a buffer of `nbytes` bytes, whose content is undefined.

        Returns
        -------
        Buffer or None
            None when no free range is large enough and the pool cannot grow, the system
            gives no more memory, or the pool is closed.

        Raises
        ------
        ValueError
            If `nbytes` is less than one.
        """
        if nbytes < 1:
            raise ValueError(f"a buffer of {nbytes} bytes was asked for; expected at least 1")
        size = -(-nbytes // self.alignment) * self.alignment
        where = _caller() if self._trace else ""
        with self._lock:
            if self._closed:
                return None
            for segment in self._segments:
                start = segment.take(size)
                if start is not None:
                    break
            else:
                grown = self._grow(size)
                if grown is None:
                    return None
                segment, start = grown, grown.take(size)
                assert start is not None
            block = _Block(segment, start, size, where)
            self._live[id(block)] = block
            self._allocated += size
        return Buffer(self, block, 0, nbytes)

    def close(self) -> None:
        """Refuse further requests, and give memory back as soon as none of it is in use."""
        with self._lock:
            self._closed = True
            if not self._live:
                self._give_back()

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
            self._allocated -= block.nbytes
            block.segment.give(block.start, block.nbytes)
            if self._closed and not self._live:
                self._give_back()

    def _grow(self, least: int) -> _Segment | None:
        """Take another segment from the system; None when that may or can not be."""
        left = self.capacity - self._held
        if least > left:
            return None
        size = max(least, min(self._segment_bytes, left))
        try:
            # What is made in an engine's step, in inference mode, no other thread may write to.
            with torch.inference_mode(False):
                segment = self._new_segment(size)
        except (OSError, MemoryError, RuntimeError) as error:
            if not self._short:
                self._short = True
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
        if self._device is not None:
            memory = torch.empty(nbytes + self.alignment, dtype=torch.uint8, device=self._device)
            skip = -memory.data_ptr() % self.alignment
            return _Segment(memory[skip : skip + nbytes], None, None)
        view = _map_huge(nbytes)
        tensor = torch.frombuffer(view, dtype=torch.uint8)
        close = _pin(tensor) if self.kind == "pinned" else None
        return _Segment(tensor, view, close)

    def _give_back(self) -> None:
        # Ordinary and device memory go when the last tensor that shows them does.
        for segment in self._segments:
            if segment.close is not None:
                segment.close()
        self._segments.clear()
        self._held = 0


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
    pages = mmap.mmap(-1, nbytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # kernels without transparent huge pages
            pass
    start = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % _HUGE_PAGE
    return memoryview(pages)[start : start + nbytes]


def _pin(tensor: Tensor) -> Callable[[], None]:
    """Pin a tensor's memory where it is; return what undoes that.

    torch's own pinned allocator rounds sizes up to powers of two, which for buffers of
    some gigabytes is much.
    """
    address, runtime = tensor.data_ptr(), torch.cuda.cudart()  # type: ignore[no-untyped-call]
    # 1: pinned for every GPU, not only the current one.
    result = runtime.cudaHostRegister(address, tensor.numel(), 1)
    error = int(getattr(result, "value", result))
    if error:
        # CUDA keeps the error for this thread, and torch would raise it at the engine's next
        # launch. Only such a launch takes it away: torch has no cudaGetLastError.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise RuntimeError(f"cudaHostRegister of {tensor.numel()} bytes failed with error {error}")

    def unpin() -> None:
        runtime.cudaHostUnregister(address)

    return unpin


def _caller() -> str:
    """Return the lines of code that called the pool, innermost last."""
    stack = traceback.extract_stack(limit=8)
    return "".join(traceback.format_list([f for f in stack if f.filename != __file__][-4:]))
