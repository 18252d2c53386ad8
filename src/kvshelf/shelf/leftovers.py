"""Files of a shelf that are no objects, and which of them are kvshelf's.

Owns the names of reserved folders, the rule by which a temporary is one of kvshelf's, and the read
of a namespace's description. Nothing is deleted here.

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
#: Most bytes of a description that are read. Those of real models have some tens of thousands; one
#: of this size, which may be forged, costs a second.
_DESCRIPTION_BYTES: Final = 1 << 20


def read_description(backend: Backend, folder: str) -> bytes:
    """Return the bytes of the description in a namespace folder, whatever they are.

    Raises
    ------
    ValueError
        If it is too large for one.
    StorageError
        If there is none, or it cannot be read.
    """
    with backend.open(f"{folder}/{DESCRIPTION}") as reader:
        if reader.size > _DESCRIPTION_BYTES:
            raise ValueError(f"found {reader.size} bytes, expected a few thousand")
        data = bytearray(reader.size)
        count = reader.read_into(memoryview(data), 0)
    return bytes(data[:count])


def is_written_by_us(name: str) -> bool:
    """Whether kvshelf writes a file of this name, relative to the root, by way of a temporary."""
    first, _, rest = name.partition("/")
    if first == RESERVED:
        return bool(rest)
    if parse_namespace_folder(first) is None:
        return False
    return rest == DESCRIPTION or rest.startswith(f"{RESERVED}/") or parse_path(name) is not None


def is_temporary(name: str) -> bool:
    """Whether a name, relative to the root, is that of a temporary of kvshelf."""
    folder, _, base = name.rpartition("/")
    final = final_name(base)
    return final is not None and is_written_by_us(f"{folder}/{final}")
