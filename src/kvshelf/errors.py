"""Error types of kvshelf.

Owns every exception class that kvshelf raises on purpose. Each class is also the
builtin that a Python user would catch for the same trouble, so ``except
FileNotFoundError`` works without knowing kvshelf. This module imports nothing.
"""

from __future__ import annotations


class KVShelfError(Exception):
    """Base class of all errors raised by kvshelf."""


class ConfigError(KVShelfError, ValueError):
    """A configuration value, or a combination of them, cannot be used."""


class UnsupportedError(KVShelfError, NotImplementedError):
    """The engine, model or version is one that kvshelf does not serve."""


class DeviceUnavailableError(KVShelfError, RuntimeError):
    """KV caches on a device are not used: it failed, or the engine sleeps or gave them up."""


class ObjectNameError(KVShelfError, ValueError):
    """A string is not the name of an object of a shelf."""


class StorageError(KVShelfError, OSError):
    """A storage operation failed.

    Attributes
    ----------
    retryable : bool
        True when the same call may succeed later without anybody's help.
    """

    retryable: bool = False


class ObjectMissingError(StorageError, FileNotFoundError):
    """No object has this name."""


class TransientStorageError(StorageError):
    """The storage could not answer now (EIO, ESTALE, a time-out, a short read)."""

    retryable = True


class UnavailableStorageError(TransientStorageError):
    """The storage is given a rest after it failed: nothing was asked of it."""


class PermanentStorageError(StorageError):
    """The storage refused, and will refuse again until somebody changes something."""


class ReadOnlyStorageError(PermanentStorageError, PermissionError):
    """The storage does not take writes (read-only mount, missing permission, or option)."""


class NoSpaceStorageError(PermanentStorageError):
    """The storage has no room (ENOSPC, EDQUOT)."""


class BadObjectError(KVShelfError, ValueError):
    """The bytes of an object are not what its name and namespace demand.

    Subclasses, one for each way an object can be bad, are in
    :mod:`kvshelf.chunkfile`.
    """


class NotRegularError(StorageError, BadObjectError):
    """Something that is not a regular file stands where an object belongs.

    A storage error when a backend meets it, and one of the ways an object can be bad.
    """
