"""Backends around a backend: read-only, counting, and faults on order.

Owns what can be added to any storage without knowing it. A wrapper is a backend itself and
closes what it wraps. :class:`CountingBackend` and :class:`FaultyBackend` serve tests and
experiments; both may be shared by threads, and no thread is started here.
"""

from __future__ import annotations

import errno
import fnmatch
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvshelf.backends.base import (
    Backend,
    Buffer,
    ObjectInfo,
    Properties,
    Reader,
    StatResults,
    WriteMode,
    WriteResult,
    check_name,
)

from kvshelf.errors import ReadOnlyStorageError, StorageError


class WrappedBackend(Backend):
    """Passes everything on; subclasses change what they are about.

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
        """Those of the wrapped backend."""
        return self.inner.properties

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe many names at once."""
        return self.inner.stat(names)

    def info(self, name: str) -> ObjectInfo | None:
        """Size and times of one object."""
        return self.inner.info(name)

    def open(self, name: str) -> Reader:
        """Open one object for reading."""
        return self.inner.open(name)

    def open_large(self, name: str, size: int) -> Reader:
        """Open one large object for reading."""
        return self.inner.open_large(name, size)

    def write(
        self, name: str, buffers: Sequence[Buffer], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish one object."""
        return self.inner.write(name, buffers, mode)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Stream the objects below a folder."""
        return self.inner.list(prefix)

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders directly below `prefix`."""
        return self.inner.folders(prefix)

    def delete(self, name: str) -> bool:
        """Remove one object."""
        return self.inner.delete(name)

    def set_aside(self, name: str, target: str) -> bool:
        """Move whatever stands at `name`."""
        return self.inner.set_aside(name, target)

    def trim(self, folder: str, max_count: int, max_bytes: int) -> None:
        """Bound what was set aside."""
        self.inner.trim(folder, max_count, max_bytes)

    def sweep(self, folder: str, older_than: float, is_ours: Callable[[str], bool]) -> int:
        """Remove old temporaries."""
        return self.inner.sweep(folder, older_than, is_ours)

    def touch(self, name: str) -> None:
        """Note a use of an object."""
        self.inner.touch(name)

    def close(self) -> None:
        """Close the wrapped backend."""
        self.inner.close()


class ReadOnlyBackend(WrappedBackend):
    """Refuses every change with :class:`~kvshelf.errors.ReadOnlyStorageError`."""

    @property
    def properties(self) -> Properties:
        """Those of the wrapped backend, with `read_only`."""
        return replace(self.inner.properties, read_only=True)

    def _refuse(self, name: str) -> ReadOnlyStorageError:
        return ReadOnlyStorageError(
            errno.EROFS, "the shelf was opened read-only", f"{self.url}/{check_name(name)}"
        )

    def write(
        self, name: str, buffers: Sequence[Buffer], mode: WriteMode = "create"
    ) -> WriteResult:
        """Refuse."""
        raise self._refuse(name)

    def delete(self, name: str) -> bool:
        """Refuse."""
        raise self._refuse(name)

    def set_aside(self, name: str, target: str) -> bool:
        """Refuse."""
        raise self._refuse(name)

    def trim(self, folder: str, max_count: int, max_bytes: int) -> None:
        """Do nothing."""

    def sweep(self, folder: str, older_than: float, is_ours: Callable[[str], bool]) -> int:
        """Do nothing."""
        return 0

    def touch(self, name: str) -> None:
        """Do nothing."""


class CountingBackend(WrappedBackend):
    """Counts calls.

    Attributes
    ----------
    counts : collections.Counter
        Calls by operation (``stat``, ``open``, ``read``, ``write``, …); ``stat_names`` counts
        the names probed, ``read_bytes`` and ``write_bytes`` what was moved.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def _count(self, operation: str, amount: int = 1) -> None:
        with self._lock:
            self.counts[operation] += amount

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe and count."""
        self._count("stat")
        self._count("stat_names", len(names))
        return self.inner.stat(names)

    def info(self, name: str) -> ObjectInfo | None:
        """Look and count."""
        self._count("info")
        return self.inner.info(name)

    def open(self, name: str) -> Reader:
        """Open and count."""
        self._count("open")
        return _HookedReader(self.inner.open(name), after=self._read)

    def open_large(self, name: str, size: int) -> Reader:
        """Open and count."""
        self._count("open")
        return _HookedReader(self.inner.open_large(name, size), after=self._read)

    def _read(self, part: memoryview) -> int:
        self._count("read")
        self._count("read_bytes", len(part))
        return len(part)

    def write(
        self, name: str, buffers: Sequence[Buffer], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish and count."""
        self._count("write")
        self._count("write_bytes", sum(memoryview(buffer).nbytes for buffer in buffers))
        return self.inner.write(name, buffers, mode)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List and count."""
        self._count("list")
        return self.inner.list(prefix)

    def folders(self, prefix: str = "") -> Sequence[str]:
        """List and count."""
        self._count("folders")
        return self.inner.folders(prefix)

    def delete(self, name: str) -> bool:
        """Delete and count."""
        self._count("delete")
        return self.inner.delete(name)

    def set_aside(self, name: str, target: str) -> bool:
        """Move and count."""
        self._count("set_aside")
        return self.inner.set_aside(name, target)

    def sweep(self, folder: str, older_than: float, is_ours: Callable[[str], bool]) -> int:
        """Sweep and count."""
        self._count("sweep")
        return self.inner.sweep(folder, older_than, is_ours)

    def touch(self, name: str) -> None:
        """Touch and count."""
        self._count("touch")
        self.inner.touch(name)


@dataclass(slots=True)
class Fault:
    """Trouble that a :class:`FaultyBackend` makes.

    What is given happens in this order: wait, raise, damage.

    Attributes
    ----------
    operation : str
        ``stat``, ``info``, ``open``, ``read``, ``write``, ``publish`` (when a write is done, but
        has not been answered), ``list``, ``folders``, ``delete``, ``set_aside``, ``sweep``,
        ``touch``, or ``*``.
    pattern : str
        Names it concerns, as for :mod:`fnmatch`.
    wait : threading.Event or float, optional
        Block until the event is set, or for so many seconds.
    error : exception or callable that returns one, optional
        Raised; a :class:`~kvshelf.errors.StorageError` of ``stat`` is the answer for the name.
    damage : callable, optional
        Changes a bytearray in place: of what a ``read`` read, or of what a ``write`` gets.
        May shorten both (a short read), or lengthen what is written.
    times : int, optional
        So often, then never again; None: always.
    """

    operation: str
    pattern: str = "*"
    wait: threading.Event | float | None = None
    error: BaseException | Callable[[], BaseException] | None = None
    damage: Callable[[bytearray], object] | None = None
    times: int | None = None


class FaultyBackend(WrappedBackend):
    """Makes the trouble it is told to make, see :class:`Fault`."""

    def __init__(self, inner: Backend, *faults: Fault) -> None:
        super().__init__(inner)
        self._faults: list[Fault] = [*faults]
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> Fault:
        """Make this trouble from now on."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Make no more trouble."""
        with self._lock:
            self._faults.clear()

    def _meet(self, operation: str, name: str) -> Sequence[Callable[[bytearray], object]]:
        damages: list[Callable[[bytearray], object]] = []
        with self._lock:
            met = [
                fault
                for fault in self._faults
                if fault.operation in (operation, "*")
                and fnmatch.fnmatchcase(name, fault.pattern)
                and fault.times != 0
            ]
            for fault in met:
                if fault.times is not None:
                    fault.times -= 1
        for fault in met:
            if isinstance(fault.wait, threading.Event):
                fault.wait.wait()
            elif fault.wait is not None:
                threading.Event().wait(fault.wait)
            if isinstance(fault.error, BaseException):
                raise fault.error
            if fault.error is not None:
                raise fault.error()
            if fault.damage is not None:
                damages.append(fault.damage)
        return damages

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe, with faults."""
        answers: StatResults = []
        for name in names:
            try:
                self._meet("stat", name)
            except StorageError as exc:
                answers.append(exc)
            else:
                answers.extend(self.inner.stat([name]))
        return answers

    def info(self, name: str) -> ObjectInfo | None:
        """Look, with faults."""
        self._meet("info", name)
        return self.inner.info(name)

    def open(self, name: str) -> Reader:
        """Open, with faults now and at every read."""
        self._meet("open", name)
        return _HookedReader(self.inner.open(name), after=lambda part: self._read(name, part))

    def open_large(self, name: str, size: int) -> Reader:
        """Open, with faults now and at every read."""
        self._meet("open", name)
        reader = self.inner.open_large(name, size)
        return _HookedReader(reader, after=lambda part: self._read(name, part))

    def _read(self, name: str, part: memoryview) -> int:
        damages = self._meet("read", name)
        if not damages:
            return len(part)
        data = bytearray(part)
        for damage in damages:
            damage(data)
        part[: len(data)] = data
        return len(data)

    def write(
        self, name: str, buffers: Sequence[Buffer], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish, with faults."""
        damages = self._meet("write", name)
        if damages:
            data = bytearray().join(memoryview(buffer).cast("B") for buffer in buffers)
            for damage in damages:
                damage(data)
            buffers = [data]
        result = self.inner.write(name, buffers, mode)
        self._meet("publish", name)
        return result

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List, with faults before each entry."""
        for info in self.inner.list(prefix):
            self._meet("list", info.name)
            yield info

    def folders(self, prefix: str = "") -> Sequence[str]:
        """List, with faults."""
        self._meet("folders", prefix)
        return self.inner.folders(prefix)

    def delete(self, name: str) -> bool:
        """Delete, with faults."""
        self._meet("delete", name)
        return self.inner.delete(name)

    def set_aside(self, name: str, target: str) -> bool:
        """Move, with faults."""
        self._meet("set_aside", name)
        return self.inner.set_aside(name, target)

    def sweep(self, folder: str, older_than: float, is_ours: Callable[[str], bool]) -> int:
        """Sweep, with faults."""
        self._meet("sweep", folder)
        return self.inner.sweep(folder, older_than, is_ours)

    def touch(self, name: str) -> None:
        """Touch, with faults."""
        self._meet("touch", name)
        self.inner.touch(name)


class _HookedReader(Reader):
    def __init__(self, inner: Reader, *, after: Callable[[memoryview], int]) -> None:
        self._inner = inner
        self._after = after
        self.size = inner.size

    def read_into(self, buffer: memoryview, offset: int) -> int:
        count = self._inner.read_into(buffer, offset)
        return self._after(buffer.cast("B")[:count])

    def close(self) -> None:
        self._inner.close()
