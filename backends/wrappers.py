"""Backends that wrap a backend: the base of all wrappers, and a read-only one.

A wrapper is a backend itself and closes the backend that it wraps. This module starts no thread.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from kvshelf.backends.base import (
    Backend,
    BytesLike,
    Checked,
    DeleteResults,
    ObjectInfo,
    Properties,
    Reader,
    Space,
    StatResults,
    Touched,
    Whole,
    WriteMode,
    WriteResult,
    check_name,
)
from kvshelf.backends.notices import Notices
from kvshelf.errors import ReadOnlyStorageError

#: Methods that consist of another one, unless a storage does better, and that other one.
_MADE_OF: Final = {
    "read_into": "open",
    "read_whole": "open",
    "write_marker": "write",
    "delete_all": "delete",
}


class WrappedBackend(Backend):
    """Forwards every call; subclasses override some.

    Nothing goes past a subclass: where it overrides `open`, `write` or `delete`, the methods that
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

    def stat(self, names: Sequence[str]) -> StatResults:
        return self.inner.stat(names)

    def info(self, name: str) -> ObjectInfo | None:
        return self.inner.info(name)

    def open(self, name: str, size: int | None = None) -> Reader:
        return self.inner.open(name, size)

    @property
    def reads_whole(self) -> bool:
        return type(self).read_whole is not Backend.read_whole and self.inner.reads_whole

    def read_whole(
        self,
        start: str,
        text: bytes,
        wholes: Sequence[Whole],
        buffers: Sequence[memoryview],
        seconds: float = math.inf,
    ) -> Checked | None:
        return self.inner.read_whole(start, text, wholes, buffers, seconds)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        return self.inner.read_into(name, buffer, offset)

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        return self.inner.write(name, buffers, mode)

    def write_marker(self, name: str) -> WriteResult:
        return self.inner.write_marker(name)

    def list(
        self,
        prefix: str = "",
        *,
        hidden: bool = False,
        wanted: Callable[[str], bool] | None = None,
        unopened: str | None = None,
        after: str | None = None,
    ) -> Iterator[ObjectInfo]:
        return self.inner.list(prefix, hidden=hidden, wanted=wanted, unopened=unopened, after=after)

    def folders(self, prefix: str = "") -> Sequence[str]:
        return self.inner.folders(prefix)

    def delete(self, name: str) -> bool:
        return self.inner.delete(name)

    def delete_all(self, names: Sequence[str]) -> DeleteResults:
        return self.inner.delete_all(names)

    def quarantine(self, name: str, target: str) -> bool:
        return self.inner.quarantine(name, target)

    def notices(self) -> Notices | None:
        return self.inner.notices()

    def touch(self, name: str) -> Touched:
        return self.inner.touch(name)

    def space(self) -> Space | None:
        return self.inner.space()

    def now(self) -> float | None:
        return self.inner.now()

    def close(self) -> None:
        self.inner.close()


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

    def quarantine(self, name: str, target: str) -> bool:
        raise self._refuse(name)

    def touch(self, name: str) -> Touched:
        """Do nothing."""
        return Touched.REFUSED

    def now(self) -> float | None:
        """Tell nothing: a storage may have to be written to for it."""
        return None
