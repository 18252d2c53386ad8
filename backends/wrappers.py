"""Backends that wrap a backend: the base of all wrappers, and a read-only one.

A wrapper is a backend itself and closes the backend that it wraps. This module starts no thread.
"""

from __future__ import annotations

import errno
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from kvshelf.backends.base import (
    Backend,
    BytesLike,
    DeleteResults,
    Properties,
    Touched,
    WriteMode,
    WriteResult,
    check_name,
)
from kvshelf.errors import ReadOnlyStorageError

_F = TypeVar("_F", bound=Callable[..., Any])


def _forwarded(method: _F) -> _F:
    """Return a wrapper's method that calls the one of the wrapped backend."""
    name = method.__name__

    # Not its attributes: it may be abstract.
    @functools.wraps(method, updated=())
    def forward(self: WrappedBackend, *args: Any, **options: Any) -> Any:
        return getattr(self.inner, name)(*args, **options)

    return cast(_F, forward)


class WrappedBackend(Backend):
    """Forwards every call; subclasses override some.

    Parameters
    ----------
    inner : Backend
        Closed together with the wrapper.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.url = inner.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @property
    def properties(self) -> Properties:
        return self.inner.properties

    @property
    def reads_whole(self) -> bool:
        return self.inner.reads_whole

    stat = _forwarded(Backend.stat)
    info = _forwarded(Backend.info)
    open = _forwarded(Backend.open)
    read_whole = _forwarded(Backend.read_whole)
    write = _forwarded(Backend.write)
    list = _forwarded(Backend.list)
    folders = _forwarded(Backend.folders)
    delete = _forwarded(Backend.delete)
    set_aside = _forwarded(Backend.set_aside)
    touch = _forwarded(Backend.touch)
    space = _forwarded(Backend.space)
    close = _forwarded(Backend.close)


class ReadOnlyBackend(WrappedBackend):
    """Refuses every change with :class:`~kvshelf.errors.ReadOnlyStorageError`."""

    @property
    def properties(self) -> Properties:
        """The properties of the wrapped backend, with `read_only`."""
        return replace(self.inner.properties, read_only=True)

    def _refuse(self, name: str) -> ReadOnlyStorageError:
        return ReadOnlyStorageError(
            errno.EROFS, "the shelf was opened read-only", f"{self.url}/{check_name(name)}"
        )

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        raise self._refuse(name)

    def delete(self, names: Sequence[str]) -> DeleteResults:
        return [self._refuse(name) for name in names]

    def set_aside(self, name: str) -> bool:
        raise self._refuse(name)

    def touch(self, name: str, before: float = math.inf) -> Touched:
        """Do nothing."""
        return Touched.REFUSED
