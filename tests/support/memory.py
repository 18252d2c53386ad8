"""What the system says of a process's memory."""

from __future__ import annotations

import array
import mmap

from kvshelf.pages import address_of


def resident(view: memoryview) -> int:
    """How many bytes of mapped memory are there, in whole pages."""
    page = mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address_of(view) // page * 8)
        entries = array.array("Q", file.read(view.nbytes // page * 8))
    return sum(entry >> 63 for entry in entries) * page
