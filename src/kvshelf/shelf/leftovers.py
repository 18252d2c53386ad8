"""Files of a shelf that are no objects, and which of them are kvshelf's.

Owns the names of reserved folders, the rule by which a temporary is one of kvshelf's, and how a
small file is read. Nothing is deleted here.

Any thread may call all functions. Those that read block on the storage.
"""

from __future__ import annotations

from typing import Final

from kvshelf.backends import Backend
from kvshelf.backends.base import final_name
from kvshelf.format.names import DESCRIPTION, parse_namespace_folder, parse_path

#: The reserved folder, at the root and in each namespace folder.
RESERVED: Final = ".kvshelf"
#: The file that says that a directory is a disk tier.
TIER: Final = f"{RESERVED}/tier"


def read_small(backend: Backend, name: str, most: int) -> bytes:
    """Return the bytes of a file, whatever they are.

    Raises
    ------
    ValueError
        If there are more than `most`.
    StorageError
        If there is no such file, or it cannot be read.
    """
    with backend.open(name) as reader:
        if reader.size > most:
            raise ValueError(f"it has {reader.size} bytes; expected at most {most}")
        data = bytearray(reader.size)
        count = reader.read_into(memoryview(data), 0)
    return bytes(data[:count])


def is_written_by_us(name: str) -> bool:
    """Whether kvshelf writes a file of this name, relative to the root, by way of a temporary."""
    first, _, inner = name.partition("/")
    if first == RESERVED:
        return bool(inner)
    if parse_namespace_folder(first) is None:
        return False
    return inner == DESCRIPTION or inner.startswith(f"{RESERVED}/") or parse_path(name) is not None


def is_temporary(name: str) -> bool:
    """Whether a name, relative to the root, is that of a temporary of kvshelf."""
    folder, _, base = name.rpartition("/")
    final = final_name(base)
    return final is not None and is_written_by_us(f"{folder}/{final}")
