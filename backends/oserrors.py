"""Maps errors of the operating system: the one table for backends that raise OSError.

Owns the mapping from errno values to the classes of :mod:`kvshelf.errors`. Pure functions.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Final

from kvshelf.errors import (
    NoSpaceStorageError,
    ObjectMissingError,
    PermanentStorageError,
    ProcessLimitError,
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
        errno.ENOBUFS,
        errno.ENOLCK,
        errno.EDEADLK,
        errno.ENODEV,
        errno.ENOTCONN,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENETRESET,
        errno.EHOSTDOWN,
        # A client that Lustre has evicted, until it is connected again.
        errno.ESHUTDOWN,
        errno.EHOSTUNREACH,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EPIPE,
        # Tickets of Kerberos, which are renewed from outside.
        *(
            getattr(errno, name)
            for name in ("EREMOTEIO", "ENOKEY", "EKEYEXPIRED", "EKEYREVOKED", "EKEYREJECTED")
            if hasattr(errno, name)
        ),
    )
)


#: Errors of the process or the machine, whatever the storage, and what to do.
_LIMITS: Final = {
    errno.EMFILE: "this process has too many files open: raise its limit (ulimit -n)",
    errno.ENFILE: "this machine has too many files open: raise fs.file-max",
    errno.ENOMEM: "this process gets no more memory: give it more, or let it use less",
}
#: What to do where a storage is full.
_FULL: Final = {
    "bytes": "free some space or raise the quota",
    "inodes": "no inodes are left (`df -i` shows them): delete files, or give it more inodes",
    "quota": "a quota is reached, whatever room there is: raise it, or delete files",
}
#: How libraries written in Rust say the error of the system.
_RUST: Final = re.compile(r"os error (\d+)|Os \{\s*code: (\d+)")


def is_out_of_files() -> bool:
    """Whether this process, or its machine, can open no more files at this moment."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as exc:
        return exc.errno in (errno.EMFILE, errno.ENFILE)
    return False


def process_limit(exc: BaseException, what: str, path: str) -> ProcessLimitError | None:
    """Return the error if `exc`, or what it came from, is a limit of this process.

    Parameters
    ----------
    exc : BaseException
        Of any library.
    what, path
        As for :func:`storage_error`.
    """
    cause: BaseException | None = exc
    while cause is not None:
        match = _RUST.search(str(cause))
        code = int(match[1] or match[2]) if match else getattr(cause, "errno", None)
        if code in _LIMITS:
            text = f"{what} failed: {os.strerror(code)} ({errno.errorcode[code]}); {_LIMITS[code]}"
            return ProcessLimitError(code, text, path)
        cause = cause.__cause__ or cause.__context__
    return None


def no_space(code: int, text: str, path: str, short_of: str) -> NoSpaceStorageError:
    """Return the error of a storage that is full, and say of what."""
    error = NoSpaceStorageError(code, f"{text}; {_FULL[short_of]}", path)
    error.short_of = short_of
    return error


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
    if code in _LIMITS:
        return ProcessLimitError(code, f"{text}; {_LIMITS[code]}", path)
    if code == errno.ENOENT:
        return ObjectMissingError(code, text, path)
    if code in _NO_SPACE:
        return no_space(code, text, path, "quota" if code == errno.EDQUOT else "bytes")
    if code in _TRANSIENT:
        return TransientStorageError(code, text, path)
    if writing and code in _READ_ONLY:
        hint = "check mount options and permissions, or use the shelf read-only"
        return ReadOnlyStorageError(code, f"{text}; {hint}", path)
    return PermanentStorageError(code, text, path)
