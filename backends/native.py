"""Reading and checking whole files by the compiled library, without the GIL.

Owns the library ``libkvshelf_read.so``: where it is, and how it is called (by ctypes: it needs
neither torch nor apache-tvm-ffi). Its source is ``cuda/src/read_objects.cc``. It does no more than
what works: why a file could not be read, or is not as expected, is found out by reading it again.
Any thread may call it.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import sys
from array import array
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from kvshelf.backends.base import Checked, Whole, check_name

logger = logging.getLogger(__name__)

_LIBRARY_NAME: Final = "libkvshelf_read.so"
#: Seconds that are as good as for ever: CLOCK_MONOTONIC and these fit into 63 bits of nanoseconds.
_LONGEST: Final = 1e9
_RECORDS_KEPT: Final = 4096


@cache
def _library() -> Any:
    """Return the library's function; None if the library is missing or cannot be used."""
    # In an editable install it lies apart from the Python files; the package's path names both.
    for folder in sys.modules["kvshelf"].__path__:
        path = Path(folder) / _LIBRARY_NAME
        if path.is_file():
            try:
                function = ctypes.CDLL(str(path)).kvshelf_read_objects_2
            except (OSError, AttributeError) as error:
                logger.warning("files are read by Python, since %s cannot be used: %s", path, error)
                return None
            function.argtypes = (
                *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_char_p),
                *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_int64),
                ctypes.c_void_p,
            )
            function.restype = None
            return function
    return None


def can_read_files() -> bool:
    """Whether the library is there. The first call loads it."""
    return _library() is not None


def _address(data: bytes) -> int:
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    assert address is not None
    return address


# Its entries keep the objects, and with them the memory that the records point to.
@lru_cache(_RECORDS_KEPT)
def _record(whole: Whole) -> tuple[bytes, int, bytes]:
    """Return an object as struct Whole of cuda/src/read_objects.cc, its size, and what to keep."""
    end = check_name(whole.end).encode()
    first, second, after = whole.first, whole.second, whole.after
    borders, count = whole.borders.buffer_info()
    fields: list[int] = []
    for text in (end, first, second, after):
        fields += (_address(text), len(text))
    return struct.pack("=10q", *fields, borders, count - 1), whole.borders[-1], end


def read_whole_files(
    start: str,
    text: bytes,
    wholes: Sequence[Whole],
    buffers: Sequence[memoryview],
    flags: int,
    seconds: float,
) -> Checked:
    """Read and check files, see :meth:`kvshelf.backends.base.Backend.read_whole`.

    Only where :func:`can_read_files`.

    Parameters
    ----------
    start : str
        Of their absolute paths, in which no link is.
    text, wholes, buffers
        As for that method.
    flags : int
        For opening the files.
    seconds : float
        After so long no further piece is read.

    Raises
    ------
    ValueError
        If a buffer is not a writable one of the object's size.
    """
    count = len(wholes)
    # Kept until the call ends: another thread may have made a record of its own meanwhile, or have
    # had this one dropped.
    records = [_record(expected) for expected in wholes]
    addresses = array("q")
    for (_, size, _), buffer in zip(records, buffers, strict=True):
        if buffer.readonly or not buffer.c_contiguous or buffer.nbytes != size:
            raise ValueError(f"expected a writable contiguous buffer of {size} bytes")
        addresses.append(ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
    # Nanoseconds of reading and of checking, then whether each file is read and as expected.
    results = array("q", bytes(8 * (2 + count)))
    _library()(
        start.encode("utf-8", "surrogateescape"),
        text,
        len(text),
        b"".join([record for record, _, _ in records]),
        addresses.buffer_info()[0],
        count,
        flags,
        int(min(seconds, _LONGEST) * 1e9),
        results.buffer_info()[0],
    )
    reading, checking, *are_read = results
    return Checked([value != 0 for value in are_read], reading / 1e9, checking / 1e9)
