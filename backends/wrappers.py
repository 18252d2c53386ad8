"""Backends that wrap a backend: the base of all wrappers, and a read-only one.

A wrapper is a backend itself and closes the backend that it wraps. This module starts no thread.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

from kvshelf.backends.base import (
    Backend,
    BytesLike,
    Properties,
    Touched,
    WriteMode,
    WriteResult,
    check_name,
)
from kvshelf.errors import ReadOnlyStorageError

#: Methods that consist of another one, unless a storage does better, and that other one.
_MADE_OF: Final = {
    "read_into": "open",
    "read_whole": "open",
    "write_marker": "write",
    "delete_all": "delete",
}


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

    No call bypasses a subclass: where it overrides `open`, `write` or `delete`, the methods that
    consist of that one by default consist of its own, such as `read_into` of its `open`, unless it
    overrides them as well.

    Parameters
    ----------
    inner : Backend
        Closed together with the wrapper.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        for name, part in _MADE_OF.items():
            if part in own and name not in own:
                setattr(cls, name, getattr(Backend, name))

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
        return type(self).read_whole is not Backend.read_whole and self.inner.reads_whole

    stat = _forwarded(Backend.stat)
    info = _forwarded(Backend.info)
    open = _forwarded(Backend.open)
    read_whole = _forwarded(Backend.read_whole)
    read_into = _forwarded(Backend.read_into)
    write = _forwarded(Backend.write)
    write_marker = _forwarded(Backend.write_marker)
    list = _forwarded(Backend.list)
    folders = _forwarded(Backend.folders)
    delete = _forwarded(Backend.delete)
    delete_all = _forwarded(Backend.delete_all)
    set_aside = _forwarded(Backend.set_aside)
    notices = _forwarded(Backend.notices)
    touch = _forwarded(Backend.touch)
    space = _forwarded(Backend.space)
    now = _forwarded(Backend.now)
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

    def delete(self, name: str) -> bool:
        raise self._refuse(name)

    def set_aside(self, name: str) -> bool:
        raise self._refuse(name)

    def touch(self, name: str) -> Touched:
        """Do nothing."""
        return Touched.REFUSED

    def now(self) -> float | None:
        """Return None: a storage may have to be written to for its time."""
        return None
