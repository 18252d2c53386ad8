"""Objects of a shelf that lie in memory of another process, such as a node server.

Owns what a shelf asks of such a memory (:class:`ObjectMemory`), and the view of a namespace whose
objects are looked for there and read in place (:class:`PinningView`, :class:`PinningShelf`).

Contracts
---------
* Lookups find what is in the memory or on the storage; stores ask the storage alone.
* The owner of the memory has verified the objects in it. Whether an object is the requested one,
  its parent included, is checked here.
* Calls of the memory have the deadlines and the circuit breaker of the storage behind it.
* Any thread may call anything but an engine's step thread, which calls :meth:`PinningView.expect`.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Sequence
from typing import Protocol

from kvshelf.backends import Backend, Deadlines, StatResults
from kvshelf.backends.guard import GuardedBackend
from kvshelf.errors import BadObjectError, ObjectMissingError, TransientStorageError
from kvshelf.format.keys import Chunk
from kvshelf.format.objects import ObjectFormat
from kvshelf.memory.arena import copy_bytes
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import FailedRead, Hold, NamespaceView, ObjectRef, Pinned


class ObjectMemory(Protocol):
    """Memory in which objects of a storage lie, by their names on the storage."""

    @property
    def pins(self) -> bool:
        """Whether objects are read in place; otherwise they are copied from there."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds when it is full."""

    def find(self, names: Sequence[str], sizes: Sequence[int]) -> StatResults:
        """Probe objects that are to be loaded, in the memory and on the storage.

        Answers as :meth:`kvshelf.backends.Backend.stat`.

        Parameters
        ----------
        names : Sequence of str
        sizes : Sequence of int
            The bytes that each object should have.
        """

    def expect(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Note that these objects are about to be loaded, in this order.

        Never blocks and never raises. Objects that are expected need not be loaded.
        """

    def pin(self, name: str, size: int) -> Pinned | None:
        """Return one object where it lies; may block until it is there.

        Returns
        -------
        Pinned or None
            None: no memory is free for it now. The storage may have it all the same.

        Raises
        ------
        BadObjectError
            If the owner of the memory found the object bad.
        ObjectMissingError, NotRegularError, StorageError
            As for :meth:`kvshelf.backends.Backend.open`.
        """


class PinningView(NamespaceView):
    """The objects of one kind on a storage behind a memory.

    Parameters
    ----------
    backend, fmt, counters
        As for :class:`~kvshelf.shelf.view.NamespaceView`.
    memory : ObjectMemory
    """

    def __init__(
        self,
        backend: GuardedBackend,
        fmt: ObjectFormat,
        counters: Counters,
        memory: ObjectMemory,
    ) -> None:
        super().__init__(backend, fmt, counters)
        self._memory = memory

    def _ask(self, names: list[str], sizes: list[int]) -> StatResults:
        return self.backend.probe_by(names, lambda: self._memory.find(names, sizes))

    def expect(self, chunks: Sequence[Chunk], shards: Sequence[int]) -> None:
        """Announce to the memory what is about to be loaded, see :meth:`ShelfView.expect`."""
        if not (self.available and self.pins):
            return
        names, sizes = self._names_and_sizes(
            [ObjectRef(chunk, shard) for chunk in chunks for shard in shards]
        )
        # Not looked for here, since that may block. Nearly all namespaces have one folder.
        start = self._folders[0] + "/"
        self._memory.expect([start + name for name in names], sizes)

    @property
    def pins(self) -> bool:
        """Whether objects are read in place."""
        return self._memory.pins

    def pin(self, ref: ObjectRef) -> Pinned | None:
        """Pin one object in the memory, see :meth:`ShelfView.pin`."""
        return self._pin(ref) if self.pins else None

    def load_all(
        self,
        chunk: Chunk,
        shards: Sequence[int],
        buffers: Sequence[memoryview],
        hold: Hold | None = None,
    ) -> FailedRead | None:
        """Load objects: from the memory where they are not read in place, else past it."""
        if self.pins:
            return super().load_all(chunk, shards, buffers)
        unread: dict[int, memoryview] = {}
        for shard, buffer in zip(shards, buffers, strict=True):
            try:
                if not self._copy(ObjectRef(chunk, shard), buffer):
                    unread[shard] = buffer
            except Exception as error:  # noqa: BLE001 - the caller learns of which object it is
                return FailedRead(shard, error)
        return super().load_all(chunk, tuple(unread), tuple(unread.values())) if unread else None

    def _copy(self, ref: ObjectRef, buffer: memoryview) -> bool:
        pinned = self._pin(ref)
        if pinned is None:
            return False
        try:
            copy_bytes(buffer, pinned.view)
            if not pinned.valid():
                text, name = "the memory was taken back while it was read", self._base(ref)
                raise TransientStorageError(errno.ESTALE, text, f"{self.backend.url}/{name}")
        finally:
            pinned.release()
        return True

    def _pin(self, ref: ObjectRef) -> Pinned | None:
        size, base, begin = self.size(*ref), self._base(ref), time.monotonic()
        *others, last = self._find_folders()
        try:
            for folder in others:
                with contextlib.suppress(ObjectMissingError):
                    pinned = self._pin_named(f"{folder}/{base}", size)
                    break
            else:
                pinned = self._pin_named(f"{last}/{base}", size)
        except BadObjectError as bad:
            self.set_aside(ref, bad)
            raise
        if pinned is None:
            return None
        with contextlib.ExitStack() as undo:
            undo.callback(pinned.release)
            try:
                self.fmt.verify(pinned.view, *ref, payload=False)
            except BadObjectError as error:
                # The object on the storage is read and verified as any other.
                self._log.warning("bytes in memory are not those of %s: %s", base, error)
                return None
            undo.pop_all()
        self._counters.observe("read", time.monotonic() - begin)
        return pinned

    def _pin_named(self, name: str, size: int) -> Pinned | None:
        return self.backend.read_by(name, size, lambda: self._memory.pin(name, size))


class PinningShelf(Shelf):
    """A shelf on a storage behind a memory.

    Parameters
    ----------
    backend, counters, deadlines
        As for :class:`~kvshelf.shelf.shelf.Shelf`.
    memory : ObjectMemory
    """

    def __init__(
        self,
        backend: Backend,
        memory: ObjectMemory,
        counters: Counters | None = None,
        *,
        deadlines: Deadlines | None = None,
    ) -> None:
        super().__init__(backend, counters, deadlines=deadlines)
        self.memory = memory

    @property
    def memory_bytes(self) -> int:
        """Bytes of the memory in front of the storage."""
        return self.memory.nbytes

    def _make_view(self, fmt: ObjectFormat) -> NamespaceView:
        return PinningView(self.backend, fmt, self._counters, self.memory)
