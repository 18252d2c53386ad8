"""Host memory from the system: huge pages, how much is free, and memory that is really there.

Owns how memory is mapped, touched and page-locked, for
:mod:`kvshelf.memory.arena`. Importing it needs no torch.

Contracts
---------
* Mapped memory costs nothing before it is touched. :func:`populate` touches it, and raises
  :class:`MemoryError` rather than let the system end a process for want of memory, as far as the
  system says how much is free: Linux lends more than there is.
* Any thread may call all functions. :func:`populate` does not hold the GIL while it touches memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import torch

HUGE_PAGE: Final = 2 << 20
#: Most bytes that are page-locked by one call: NVIDIA's drivers refuse 512 GiB, and on some hosts
#: far less.
LOCKED_AT_ONCE: Final = 64 << 30
#: Bytes that are touched before the free memory is looked at again.
_STEP: Final = 256 << 20
#: ``MADV_POPULATE_WRITE`` of Linux 5.14, which Python has no name for.
_POPULATE_WRITE: Final = 23
_MEMORY: Final = Path("/proc/meminfo")
_OWN_GROUPS: Final = Path("/proc/self/cgroup")
_GROUPS: Final = Path("/sys/fs/cgroup")
#: Flags of ``cudaHostRegister``: for every GPU, not only the current one; and for reading only.
_PORTABLE: Final = 1
_READ_ONLY: Final = 8
#: A limit of cgroup v1 that means that there is none.
_NO_LIMIT: Final = 1 << 62


def map_pages(nbytes: int, *, fd: int | None = None, inherited: bool = True) -> memoryview:
    """Return fresh memory that the kernel backs with huge pages where it has them.

    Parameters
    ----------
    nbytes : int
    fd : int, optional
        Map this file, from its beginning, shared with other processes; private memory when absent.
    inherited : bool
        Processes that are forked from this one have it as well.
    """
    if fd is None:
        # Private, where Python's default is shared: the kernel backs shared memory with huge pages
        # only on request, and without them a first copy into it takes seven times as
        # long. The part that only serves alignment is never touched, so it takes no memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pages = mmap.mmap(-1, nbytes + HUGE_PAGE, flags)
    else:
        pages = mmap.mmap(fd, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Kernels without transparent huge pages refuse it.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    if not inherited and hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)
    start = 0 if fd is not None else -address_of(memoryview(pages)) % HUGE_PAGE
    return memoryview(pages)[start : start + nbytes]


def address_of(view: memoryview) -> int:
    """Return where the bytes of a view lie."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def require_free(nbytes: int) -> None:
    """Raise :class:`MemoryError`, which says how much is free, if less than `nbytes` is."""
    free, limit = free_memory()
    if free < nbytes:
        raise MemoryError(f"{nbytes} bytes have to be free, and {free} are ({limit})")


def populate(view: memoryview) -> None:
    """Touch all pages of mapped memory, so that it is there from now on.

    A sixteenth more must be free, and stays free for everything else. That is looked at again
    and again: other processes may take memory at the same time.

    Raises
    ------
    MemoryError
        If less is free; says how much. What was touched already is given back when the memory is
        unmapped.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    address, end = address_of(view), view.nbytes
    for start in range(0, end, _STEP):
        require_free(end - start + end // 16)
        size = min(_STEP, end - start)
        # Through ctypes, which releases the GIL meanwhile.
        if libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(size), _POPULATE_WRITE):
            error = ctypes.get_errno()
            if error != errno.EINVAL:
                raise MemoryError(f"{os.strerror(error)} when {start} bytes were taken")
            # An older kernel.
            ctypes.memset(address + start, 0, size)


def free_memory() -> tuple[int, str]:
    """Return how many bytes this process can still take, and what says so.

    The least of what the machine has available and what the limits of all control groups leave
    (cgroup v1 and v2). A group's pages of files count as free: the system takes them back.
    """
    return min(_free_by_limit(), default=(_NO_LIMIT, "nothing limits it"))


def memory_limit() -> int:
    """Return how many bytes this process may use.

    The least of what the machine has and the limits of all control groups (cgroup v1 and v2).
    """
    limits = [] if (total := _machine("MemTotal")) is None else [total]
    for folder, limit, _, _ in _group_limits():
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((folder / limit).read_text()))
    return min(limits, default=_NO_LIMIT)


def _machine(name: str) -> int | None:
    """Return a value of the machine's memory, in bytes."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = _MEMORY.read_text().splitlines()
        line = next(line for line in lines if line.startswith(f"{name}:"))
        return int(line.split()[1]) * 1024
    return None


def _free_by_limit() -> Iterator[tuple[int, str]]:
    if (available := _machine("MemAvailable")) is not None:
        yield available, f"MemAvailable of {_MEMORY}"
    for folder in _group_limits():
        yield from _left_in(*folder)


def _group_limits() -> Iterator[tuple[Path, str, str, str]]:
    """Yield the limits of control groups: folder, file, file of what is used, prefix of counts."""
    try:
        groups = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for group in groups:
        number, controllers, path = group.split(":", 2)
        if number == "0" and not controllers:
            for folder in _and_above(_GROUPS, path):
                for limit in ("memory.max", "memory.high"):
                    yield folder, limit, "memory.current", ""
        elif "memory" in controllers.split(","):
            for folder in _and_above(_GROUPS / "memory", path):
                yield folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"


def _and_above(root: Path, path: str) -> Iterator[Path]:
    """Return the folders of a control group and of those above it.

    A container may see its own group at the root, under whatever name it has outside.
    """
    folder = root / path.lstrip("/")
    yield folder
    while folder != root and root in folder.parents:
        folder = folder.parent
        yield folder


def _left_in(folder: Path, limit: str, used: str, prefix: str) -> Iterator[tuple[int, str]]:
    try:
        limit_bytes = int((folder / limit).read_text())
        now = int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or "max"
        return
    if limit_bytes < _NO_LIMIT:
        # Weights that were read from files are in it, often most of what the group uses.
        files = sum(int(stat.get(f"{prefix}{state}_file", 0)) for state in ("active", "inactive"))
        yield limit_bytes - now + files, str(folder / limit)


def lockable(nbytes: int) -> int:
    """Return the size of the pieces in which memory is page-locked, all but the last one.

    A copy between a GPU and memory that lies in two pieces fails.

    Parameters
    ----------
    nbytes : int
        Bytes of the memory.
    """
    pieces = -(-nbytes // max(HUGE_PAGE, LOCKED_AT_ONCE // HUGE_PAGE * HUGE_PAGE))
    return -(-nbytes // (pieces * HUGE_PAGE)) * HUGE_PAGE


def page_lock(view: memoryview, device: torch.device | None = None) -> Callable[[], None]:
    """Page-lock mapped memory for all GPUs; return the function that undoes it.

    It is locked in pieces of :func:`lockable` bytes. torch's own pinned allocator rounds sizes up
    to powers of two, which wastes gigabytes for a large pool.

    Parameters
    ----------
    view : memoryview
        Memory that is mapped for reading only is locked for reading, which not every GPU can.
    device : torch.device, optional
        A GPU with a context. On a new thread device 0 is current, and a call of CUDA would create
        a context there. So the memory may be unlocked on any thread.

    Raises
    ------
    RuntimeError
        If CUDA refuses; no piece stays locked.
    """
    import torch

    on_gpu = device is not None and device.type == "cuda"
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    first, nbytes = address_of(view), view.nbytes
    piece = lockable(nbytes)
    locked: list[int] = []
    flags = _PORTABLE | (_READ_ONLY if view.readonly else 0)

    def current() -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(device) if on_gpu else contextlib.nullcontext()

    def unlock() -> None:
        with current():
            while locked:
                runtime.cudaHostUnregister(locked.pop())

    with current():
        for start in range(0, nbytes, piece):
            size = min(piece, nbytes - start)
            result = runtime.cudaHostRegister(first + start, size, flags)
            error = int(getattr(result, "value", result))
            if not error:
                locked.append(first + start)
                continue
            # CUDA keeps the error for this thread, and torch would raise it at the engine's next
            # launch. Only a launch clears it: torch has no cudaGetLastError.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            unlock()
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            raise RuntimeError(
                f"cudaHostRegister failed after {start} of {nbytes} bytes with error {error}:"
                f" {runtime.cudaGetErrorString(result)}"
                + ("" if limit == resource.RLIM_INFINITY else f"; `ulimit -l` is {limit >> 10}")
            )
    return unlock
