"""Error types of kvshelf.

Owns every exception class that kvshelf raises deliberately, and :func:`printable`,
:func:`size_text` and :func:`short_repr` for their texts. Each class also derives from the builtin
that a Python user would catch for the same problem, so ``except FileNotFoundError`` works without
knowing kvshelf. This module imports nothing of kvshelf.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

__all__ = [
    "BadObjectError",
    "BoundReachedError",
    "ConfigError",
    "DeviceStuckError",
    "DeviceUnavailableError",
    "KVShelfError",
    "NoSpaceStorageError",
    "NotRegularError",
    "ObjectMissingError",
    "ObjectNameError",
    "PermanentStorageError",
    "ProcessLimitError",
    "ReadOnlyStorageError",
    "StorageError",
    "TransientStorageError",
    "UnavailableStorageError",
    "UnsupportedError",
]

#: Longest text of a storage error.
_MOST_CHARACTERS = 2000


class KVShelfError(Exception):
    """Base class of all errors raised by kvshelf.

    Attributes
    ----------
    defect : Enum or None
        In which way an object is invalid: a :class:`kvshelf.format.invalid.Defect`.
    """

    defect: Enum | None = None

    @property
    def kind(self) -> str:
        """What is wrong, in one word: the name of the class, or of an object's defect."""
        return type(self).__name__ if self.defect is None else str(self.defect.value)


class ConfigError(KVShelfError, ValueError):
    """A configuration value, or a combination of them, cannot be used."""


class UnsupportedError(KVShelfError, NotImplementedError):
    """kvshelf does not support the engine, model or version."""


class DeviceUnavailableError(KVShelfError, RuntimeError):
    """KV caches on a device cannot be used: it failed, or the engine sleeps or released them."""


class DeviceStuckError(DeviceUnavailableError):
    """A device did not answer in time: it may still read and write the memory that it was given."""


class ObjectNameError(KVShelfError, ValueError):
    """A string is not the name of a shelf's object."""


class StorageError(KVShelfError, OSError):
    """A storage operation failed.

    Its text may quote what a server answered, so it is one line, printable and not long.

    Attributes
    ----------
    retryable : bool
        True when the same call may succeed later without intervention.
    """

    retryable: bool = False

    def __str__(self) -> str:
        return printable(super().__str__(), _MOST_CHARACTERS)


class ObjectMissingError(StorageError, FileNotFoundError):
    """No object has this name."""


class TransientStorageError(StorageError):
    """The storage could not answer now (EIO, ESTALE, a timeout, a short read)."""

    retryable = True


class UnavailableStorageError(TransientStorageError):
    """No request was sent to the storage: it failed before, or it is not there (unmounted).

    Attributes
    ----------
    reason : str
        The error because of which a circuit breaker opened; empty without one.
    """

    reason: str = ""


class ProcessLimitError(TransientStorageError):
    """The process or its machine, not the storage, has run out of open files or memory."""


class PermanentStorageError(StorageError):
    """The storage refused the call, and will refuse it again until something is changed."""


class ReadOnlyStorageError(PermanentStorageError, PermissionError):
    """The storage does not take writes (read-only mount, missing permission, or option)."""


class NoSpaceStorageError(PermanentStorageError):
    """The storage has no room (ENOSPC, EDQUOT).

    Attributes
    ----------
    short_of : str
        What it has too little of: ``bytes``, ``inodes``, or the bytes or files of a ``quota``.
    """

    short_of: str = "bytes"


class BoundReachedError(PermanentStorageError):
    """A bound of the shelf allows no store now: nothing was sent to the storage."""


class BadObjectError(KVShelfError, ValueError):
    """The bytes of an object are not those that its name and namespace require."""

    def __init__(self, defect: Enum, text: str) -> None:
        super().__init__(text)
        self.defect = defect

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.defect, str(self))


class NotRegularError(StorageError, BadObjectError):
    """Something other than a regular file has the name of an object.

    A storage error when a backend meets it, and one of the ways an object can be invalid.
    """

    def __init__(self, *args: object) -> None:
        OSError.__init__(self, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return OSError.__reduce__(self)  # type: ignore[return-value]


def printable(text: str, most: int | None = None) -> str:
    """Return `text`, which comes from elsewhere, on one line and without control characters.

    Parameters
    ----------
    text : str
    most : int, optional
        Most characters that are returned; a longer text ends with ``...``.
    """
    if most is not None and len(text) > most:
        text = text[: most - 3] + "..."
    if text.isprintable():
        return text
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return shown if most is None else shown[:most]


def size_text(count: int) -> str:
    """Return a number of bytes as readable text."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} PiB"


def short_repr(value: object) -> str:
    """Return at most 200 characters of a value's repr, for messages that show any value."""
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
