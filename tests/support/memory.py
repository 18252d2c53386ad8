"""What the system says of a process's memory, and memory that another process has sealed."""

from __future__ import annotations

import array
import fcntl
import mmap
import os

from kvshelf.memory.pages import address_of

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def resident(view: memoryview) -> int:
    """How many bytes of mapped memory are there, in whole pages."""
    page = mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address_of(view) // page * 8)
        entries = array.array("Q", file.read(view.nbytes // page * 8))
    return sum(entry >> 63 for entry in entries) * page


def sealed_memory(nbytes: int, seals: int = SEALS, flags: int = os.MFD_ALLOW_SEALING) -> int:
    """Make memory of a file descriptor, which cannot be resized any more."""
    fd = os.memfd_create("test", flags)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
