"""One session with a node server: its sockets, its requests, its memory, and what is leased of it.

Owns what ends with a session, or outlives it only as long as somebody uses its memory. Who connects
again is :mod:`kvshelf.server.channel`, whose lock guards what is changed here.

Contracts
---------
* Leased memory stays mapped until it is released, also when its server is gone.
* A lease whose :class:`Leased` is not referenced any more is given back.
* Where the server's memory is page-locked for a GPU, it stays so until no part of it is in use.

Threads
-------
Any thread may release what is leased; the thread of the channel gives it back. Page-locking takes a
tenth of a second for each gigabyte: one thread for each connection, ``kvshelf-lock``, does it, and
undoes it at the end.
"""

from __future__ import annotations

import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import zmq

from kvshelf.pages import page_lock
from kvshelf.server.messages import Ready, Welcome

if TYPE_CHECKING:
    import torch


class Waiting:
    """A request that waits for its answer, or a fetch that waits for the rest of its objects.

    Parameters
    ----------
    futures : Sequence of Future
        One, or of a fetch one for each object.
    fetch : bool
    """

    __slots__ = ("fetch", "futures", "left", "nbytes")

    def __init__(self, futures: Sequence[Future[Any]], *, fetch: bool = False) -> None:
        self.fetch = fetch
        self.futures: list[Future[Any] | None] = list(futures)
        self.left = len(futures)
        self.nbytes = 0

    def take(self, index: int) -> Future[Any] | None:
        """Return the future of what has no outcome yet."""
        if not 0 <= index < len(self.futures):
            return None
        future, self.futures[index] = self.futures[index], None
        if future is not None:
            self.left -= 1
        return future

    def fail(self, error: Callable[[], Exception]) -> None:
        """Fail all futures that have no outcome yet."""
        for future in self.futures:
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(error())


@dataclass(eq=False)
class Connection:
    """One session with a server, from the greeting until nothing refers to it."""

    session: socket.socket
    welcome: Welcome
    arena: memoryview
    sender: zmq.Socket[bytes]
    receiver: zmq.Socket[bytes]
    #: Has the channel's thread look at `released`.
    wake: Callable[[], None]
    waiting: dict[int, Waiting] = field(default_factory=dict)
    #: Answers that are waited for, and bytes of their requests.
    open: int = 0
    open_bytes: int = 0
    released: deque[int] = field(default_factory=deque)
    #: Whether the channel's thread looks at `released` soon by itself.
    collecting: bool = False
    #: Whether other threads may send requests.
    ready: bool = False
    #: Nothing is sent any more.
    lost: bool = False
    #: This is a copy in a forked process.
    foreign: bool = False
    #: Whether a GPU can copy from the arena by itself.
    locked: bool = False

    def __post_init__(self) -> None:
        self.generations = self.arena[: 8 * self.welcome.slots].cast("Q")

    def lock(self, device: torch.device, on_error: Callable[[RuntimeError], None]) -> None:
        """Page-lock the arena in the background, for as long as anything refers to this."""
        gone = threading.Event()
        weakref.finalize(self, gone.set).atexit = False
        arguments = weakref.ref(self), self.arena, device, gone, on_error
        threading.Thread(
            target=_keep_locked, args=arguments, name="kvshelf-lock", daemon=True
        ).start()

    def forget(self, number: int, waiting: Waiting, answers: int) -> None:
        """Wait for the answers of a request no more."""
        del self.waiting[number]
        self.open -= answers
        self.open_bytes -= waiting.nbytes


def _keep_locked(
    of: weakref.ref[Connection],
    arena: memoryview,
    device: torch.device,
    gone: threading.Event,
    on_error: Callable[[RuntimeError], None],
) -> None:
    """Page-lock an arena for a connection, and unlock it when that is gone."""
    try:
        unlock = page_lock(arena, device)
    except RuntimeError as error:
        on_error(error)
        return
    if (connection := of()) is not None:
        connection.locked = True
        del connection
    gone.wait()
    unlock()


class Leased:
    """An object in the server's memory, lent to this process.

    Attributes
    ----------
    view : memoryview
        The whole object, header included; read-only. Empty after :meth:`release`.
    """

    __slots__ = ("_connection", "_generation", "_lease", "_slot", "view")

    def __init__(self, connection: Connection, ready: Ready) -> None:
        self._connection = connection
        self._slot = ready.slot
        self._generation = ready.generation
        self._lease: int | None = ready.lease
        self.view = connection.arena[ready.offset : ready.offset + ready.nbytes]

    def valid(self) -> bool:
        """Whether `view` was the object until now; False once the lease was over."""
        connection = self._connection
        return connection.generations[self._slot] == self._generation and not connection.foreign

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self.view = memoryview(b"")
            connection = self._connection
            if not connection.lost:
                connection.released.append(lease)
                if not connection.collecting:
                    connection.wake()

    def __del__(self) -> None:
        try:
            self.release()
        except (AttributeError, TypeError):  # half made, or the interpreter ends
            pass
