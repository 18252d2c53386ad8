"""The kinds of storage that a shelf can be on.

Owns the choice of a backend for a URL. A path, ``file://`` or ``local://`` gives
:class:`~kvshelf.backends.posix.PosixBackend`, ``s3://``
:class:`~kvshelf.backends.s3.S3Backend`, and any other URL an fsspec filesystem behind
:class:`~kvshelf.backends.generic.GenericBackend`. Each is imported when first needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvshelf.backends.base import (
    NOT_REGULAR,
    Backend,
    BytesLike,
    Checked,
    Deadlines,
    NotRegular,
    ObjectInfo,
    Properties,
    Reader,
    Space,
    StatResult,
    StatResults,
    Touched,
    Whole,
    WriteMode,
    WriteResult,
)
from kvshelf.errors import ConfigError
from kvshelf.urls import check_shelf, directory_of

__all__ = [
    "NOT_REGULAR",
    "Backend",
    "BytesLike",
    "Checked",
    "Deadlines",
    "NotRegular",
    "ObjectInfo",
    "Properties",
    "Reader",
    "Space",
    "StatResult",
    "StatResults",
    "Touched",
    "Whole",
    "WriteMode",
    "WriteResult",
    "open_backend",
]


def open_backend(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    read_only: bool = False,
    keep_atime: bool = False,
) -> Backend:
    """Open the storage at `url`.

    Parameters
    ----------
    url : str or os.PathLike
        A directory (``~`` is expanded, a relative path starts at the working directory)
        or a URL such as ``file:///mnt/kv``, ``s3://bucket/prefix``, ``memory://name``.
    storage_options : Mapping, optional
        Of buckets, see :func:`~kvshelf.backends.s3.open_s3`; of directories ``create`` and
        ``fsync``, see :class:`~kvshelf.backends.posix.PosixBackend`. Passed to the fsspec
        filesystem of any other URL.
    read_only : bool
        Refuse every change.
    keep_atime : bool
        Reads are not uses: they leave the access times of files alone, where that is possible.

    Raises
    ------
    ConfigError
        If the URL or the options cannot be used, or a package for its protocol is missing.
    StorageError
        If the storage could not be opened.
    """
    text = os.fspath(url)
    if not text.strip():
        raise ConfigError(f"{url!r} is not a shelf: expected a directory or a URL")
    check_shelf(text)
    options = dict(storage_options or {})
    directory = directory_of(text)
    if directory is not None:
        from kvshelf.backends.options import check_names
        from kvshelf.backends.posix import PosixBackend

        check_names(options, ("create", "fsync"))
        create, fsync = options.get("create", True), options.get("fsync", False)
        if not isinstance(create, bool) or not isinstance(fsync, bool):
            raise ConfigError("storage_options: create and fsync are true or false")
        return PosixBackend(
            directory, read_only=read_only, create=create, fsync=fsync, keep_atime=keep_atime
        )

    from kvshelf.backends.wrappers import ReadOnlyBackend

    backend: Backend
    if text.partition("://")[0].lower() in ("s3", "s3a"):
        from kvshelf.backends.s3 import open_s3

        backend = open_s3(text, options)
    else:
        from kvshelf.backends.generic import GenericBackend

        backend = GenericBackend(text, options)
    return ReadOnlyBackend(backend) if read_only else backend
