"""Maps errors of the operating system: the one table for backends that raise OSError.

Owns the mapping from errno values to the classes of :mod:`kvshelf.errors`. Pure functions.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from kvshelf.errors import (
    NoSpaceStorageError,
    ObjectMissingError,
    PermanentStorageError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
)

_NO_SPACE: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
_READ_ONLY: Final = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))
_TRANSIENT: Final = frozenset(
    (
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EINTR,
        errno.EAGAIN,
        errno.EBUSY,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOLCK,
        errno.EDEADLK,
        errno.ENODEV,
        errno.ENOTCONN,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENETRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EPIPE,
        getattr(errno, "EREMOTEIO", errno.EIO),
    )
)


def storage_error(exc: OSError, what: str, path: str, *, writing: bool = False) -> StorageError:
    """Translate `exc` to a class of :mod:`kvshelf.errors`.

    Parameters
    ----------
    exc : OSError
        Raised by the operating system.
    what : str
        What was being done, for the message: ``"reading"``.
    path : str
        The file or folder concerned.
    writing : bool
        A refused permission then means a read-only shelf.

    Returns
    -------
    StorageError
        To be raised ``from exc``, or returned as an answer.
    """
    if isinstance(exc, StorageError):
        return exc
    code = exc.errno or errno.EIO
    reason = exc.strerror or str(exc) or os.strerror(code)
    text = f"{what} failed: {reason} ({errno.errorcode.get(code, code)})"
    if code == errno.ENOENT:
        return ObjectMissingError(code, text, path)
    if code in _NO_SPACE:
        return NoSpaceStorageError(code, f"{text}; free some space or raise the quota", path)
    if code in _TRANSIENT:
        return TransientStorageError(code, text, path)
    if writing and code in _READ_ONLY:
        hint = "check mount options and permissions, or use the shelf read-only"
        return ReadOnlyStorageError(code, f"{text}; {hint}", path)
    return PermanentStorageError(code, text, path)
