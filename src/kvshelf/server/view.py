"""A shelf behind a node server: loads read in place, stores from shared memory.

Owns how the objects of one kind are found, lent, read and stored through the server
(:class:`NodeView`). Above :class:`NodeShelf` everything is as on any other shelf: deadlines,
circuit breakers, lookups, waits, verification.

An object that was deleted from the storage is found until it is gone from the server's memory as
well, as with any tier.

Contracts
---------
* The server has verified the objects that it lends. Whether an object is the requested one, its
  parent included, is checked here.
* While the server is gone, every call fails at once, so that the circuit breaker opens. When the
  connection is back, the breakers try sooner.
* A server that hangs is noticed by the deadlines of :mod:`kvshelf.backends.guard`; the call returns
  when the server answers or its connection ends.
* Any thread may call anything. :meth:`NodeShelf.view` does not block.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvshelf.backends import Backend, BytesLike, StatResults, WriteResult
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.wrappers import ReadOnlyBackend
from kvshelf.errors import BadObjectError, ObjectMissingError, UnavailableStorageError
from kvshelf.format.keys import Chunk
from kvshelf.format.objects import ObjectFormat
from kvshelf.memory.arena import copy_bytes
from kvshelf.metrics import Counters
from kvshelf.server.backend import NodeBackend
from kvshelf.server.connection import Loan, NodeClient
from kvshelf.server.protocol import MISSING, Fault
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import FailedRead, Hold, NamespaceView, ObjectRef

if TYPE_CHECKING:
    import torch

#: How long the first connection may take.
CONNECT_SECONDS: Final = 3.0


class NodeView(NamespaceView):
    """The objects of one kind on a storage behind a node server.

    Parameters
    ----------
    backend, fmt, counters
        As for :class:`~kvshelf.shelf.view.NamespaceView`.
    node : NodeBackend
        What `backend` guards.
    in_place : bool
        As for :class:`NodeShelf`.
    """

    def __init__(
        self,
        backend: GuardedBackend,
        fmt: ObjectFormat,
        counters: Counters,
        node: NodeBackend,
        in_place: bool,
    ) -> None:
        super().__init__(backend, fmt, counters)
        self._node = node
        self._in_place = in_place

    def _find_folders(self) -> tuple[str, ...]:
        """Return the folder of the namespace: the server looks into the others."""
        return self._folders

    def _ask(self, names: list[str], sizes: list[int]) -> StatResults:
        return self.backend.probe_by(names, lambda: self._node.find(names, sizes))

    # ------------------------------------------------------------------------- loads

    @property
    def pins(self) -> bool:
        """Whether objects are read in place."""
        return self._in_place or self._node.client.is_page_locked

    def pin_all(
        self, chunks: Sequence[Chunk], shards: Sequence[int], *, is_early: bool = False
    ) -> list[dict[int, Loan]]:
        """Have objects of chunks lent, see :meth:`ShelfView.pin_all`."""
        refs = [ObjectRef(chunk, shard) for chunk in chunks for shard in shards]
        names, sizes = self._names_and_sizes(refs)
        names = [f"{self._folders[0]}/{name}" for name in names]
        count = len(shards)
        begin = time.monotonic()
        outcomes = self.backend.read_by(
            names[0],
            sum(sizes[:count]),
            lambda: self._node.client.fetch(
                names[:count], sizes, is_early=is_early, ahead=names[count:]
            ).result(),
        )
        assert outcomes is not None
        loans = [outcome for outcome in outcomes if isinstance(outcome, Loan)]
        try:
            for name, outcome in zip(names[:count], outcomes, strict=False):
                if isinstance(outcome, Fault):
                    raise outcome.error()
                if outcome == MISSING:
                    raise ObjectMissingError(errno.ENOENT, "there is no such object", name)
            for (chunk, shard), outcome in zip(refs, outcomes, strict=True):
                if isinstance(outcome, Loan):
                    self.fmt.verify(outcome.view, chunk, shard, payload=False)
        except BaseException:
            for loan in loans:
                loan.release()
            raise
        if loans:
            self._counters.observe("read", (time.monotonic() - begin) / len(loans), len(loans))
        by_chunk: list[dict[int, Loan]] = [{} for _ in chunks]
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, Loan):
                by_chunk[number // count][shards[number % count]] = outcome
        return by_chunk

    def load_all(
        self,
        chunk: Chunk,
        shards: Sequence[int],
        buffers: Sequence[memoryview],
        hold: Hold | None = None,
    ) -> FailedRead | None:
        """Copy objects from the server's memory, or by the stream those that it does not lend."""
        shard = shards[0]
        loans: dict[int, Loan] = {}
        try:
            if not self.pins:
                (loans,) = self.pin_all([chunk], shards)
            for shard, buffer in zip(shards, buffers, strict=True):
                if shard in loans:
                    copy_bytes(buffer, loans[shard].view)
                else:
                    self._read(ObjectRef(chunk, shard), buffer)
        except Exception as error:  # noqa: BLE001 - the caller learns of which object it is
            return FailedRead(shard, error)
        finally:
            for loan in loans.values():
                loan.release()
        return None

    # ------------------------------------------------------------------------- stores

    def publish(
        self, ref: ObjectRef, buffer: BytesLike, *, suspect: bool = False, hold: Hold | None = None
    ) -> WriteResult:
        """Have the server publish an object, see :meth:`ShelfView.publish`."""
        size, given = self.size(*ref), memoryview(buffer).nbytes
        if given != size:
            raise ValueError(f"the buffer holds {given} bytes: expected {size}, the object's size")
        begin = time.perf_counter()
        result = self.backend.write(self.name(ref), [buffer], "replace" if suspect else "create")
        self._counters.observe("publish", time.perf_counter() - begin)
        return result

    def describe(self, folder: str) -> None:
        """Do nothing: the server describes a namespace before it stores into it."""

    def set_aside(self, ref: ObjectRef, bad: BadObjectError) -> bool:
        """Do nothing: the server sets aside what it finds bad."""
        return False


class NodeShelf(Shelf):
    """A shelf whose storage is a node server.

    Parameters
    ----------
    client : NodeClient
    counters : Counters, optional
        As for :class:`~kvshelf.shelf.shelf.Shelf`.
    read_only : bool
        This client changes nothing.
    in_place : bool
        Objects are read where they lie. Otherwise they are copied from there, unless the server's
        memory is page-locked (:meth:`NodeClient.page_lock`): then a GPU copies from it.
    is_volatile : bool
        The objects of its namespaces are kept in the server's memory alone.
    closes_client : bool
        Close the connection together with the shelf.
    """

    def __init__(
        self,
        client: NodeClient,
        counters: Counters | None = None,
        *,
        read_only: bool = False,
        in_place: bool = True,
        is_volatile: bool = False,
        closes_client: bool = False,
    ) -> None:
        self._node = NodeBackend(client, closes_client=closes_client)
        backend: Backend = ReadOnlyBackend(self._node) if read_only else self._node
        super().__init__(backend, counters)
        self._read_only = read_only
        self._in_place = in_place
        self._is_volatile = is_volatile
        client.on_connect(self._retry_soon)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the server's memory."""
        welcome = self._node.client.welcome
        return 0 if welcome is None else welcome.memory_bytes

    @property
    def share(self) -> Callable[[Any], None] | None:
        """See :attr:`Shelf.share`."""
        return None if self._read_only else self._node.client.share

    def view(self, fmt: ObjectFormat) -> NamespaceView:
        """Return the objects of one kind; the server gets the record of their namespace.

        Does not block.
        """
        self._node.client.register(fmt.namespace, is_volatile=self._is_volatile)
        return super().view(fmt)

    def _make_view(self, fmt: ObjectFormat) -> NamespaceView:
        return NodeView(self.backend, fmt, self._counters, self._node, self._in_place)

    def _retry_soon(self) -> None:
        for breaker in (self.backend.reads, self.backend.writes):
            breaker.retry_soon()


def open_served(
    client: NodeClient,
    *,
    read_only: bool = False,
    in_place: bool = True,
    device: torch.device | None = None,
    counters: Counters | None = None,
) -> NodeShelf:
    """Return the shelf behind a node server. May block for some seconds.

    Parameters
    ----------
    client : NodeClient
        Closed together with the shelf.
    read_only, in_place, counters
        As for :class:`NodeShelf`.
    device : torch.device, optional
        The GPU of the caches, for which the server's memory is page-locked.

    Raises
    ------
    ConfigError
        If the folder of the socket is not this user's alone.
    StorageError
        If something else than a server of this user and version is there; if there is none, or it
        does not answer, an UnavailableStorageError.
    """
    if not client.wait_connected(CONNECT_SECONDS):
        raise client.problem or UnavailableStorageError(
            errno.EAGAIN, "the node server does not answer", client.url
        )
    if device is not None:
        client.page_lock(device)
    return NodeShelf(client, counters, read_only=read_only, in_place=in_place, closes_client=True)
