"""A shelf behind a node server, and how a client opens it.

Objects are pinned where they lie in the server's memory (:mod:`kvshelf.server.memory`); everything
else is a call of the server's storage (:mod:`kvshelf.server.backend`). Above :class:`ServedShelf`
everything is as on any other shelf: deadlines, circuit breakers, lookups, waits, verification.

An object that was deleted from the storage is found until it is gone from the server's memory as
well, as with any tier.

Contracts
---------
* While the server is gone, every call fails at once, so that the circuit breaker opens. When the
  connection is back, the namespaces are registered anew and the breakers try sooner.
* A server that hangs is noticed by the deadlines of :mod:`kvshelf.backends.guard`; the call returns
  when the server answers or its connection ends.
* Any thread may call anything. :meth:`ServedShelf.view` does not block.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from kvshelf.backends.base import Backend
from kvshelf.backends.wrappers import ReadOnlyBackend
from kvshelf.errors import UnavailableStorageError
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.server import messages
from kvshelf.server.backend import ServedBackend
from kvshelf.server.channel import Channel
from kvshelf.server.memory import ServedMemory
from kvshelf.server.segment import Segment
from kvshelf.shelf.view import NamespaceView
from kvshelf.tiers.object_memory import PinningShelf

if TYPE_CHECKING:
    import torch

#: How long the first connection may take.
CONNECT_SECONDS: Final = 3.0
#: Default size of a client's segment.
SEGMENT_BYTES: Final = 256 << 20


class ServedShelf(PinningShelf):
    """A shelf whose storage is a node server.

    Parameters
    ----------
    channel : Channel
        Connected; closed together with the shelf.
    counters : Counters, optional
        As for :class:`~kvshelf.shelf.shelf.Shelf`.
    read_only : bool
        This client changes nothing.
    in_place : bool
        As for :class:`~kvshelf.server.memory.ServedMemory`.
    """

    def __init__(
        self,
        channel: Channel,
        counters: Counters | None = None,
        *,
        read_only: bool = False,
        in_place: bool = True,
    ) -> None:
        served = ServedBackend(channel)
        self._objects = ServedMemory(channel, in_place=in_place)
        backend: Backend = ReadOnlyBackend(served) if read_only else served
        super().__init__(backend, self._objects, counters)
        self._channel = channel
        channel.on_connect(self._connected)

    def view(self, fmt: ObjectFormat) -> NamespaceView:
        """Return the objects of one kind; the server gets the record of their namespace.

        Does not block.
        """
        self._channel.register(fmt.namespace.encoded)
        return super().view(fmt)

    def close(self) -> None:
        """Release expected objects, end the connection. Idempotent."""
        self._objects.close()
        super().close()

    def _connected(self, _: messages.Welcome) -> None:
        for breaker in (self.backend.reads, self.backend.writes):
            breaker.retry_soon()


def connect(url: str, *, segment_bytes: int = 0, segment: Segment | None = None) -> Channel:
    """Return a connected channel to the node server at `url`. May block for some seconds.

    Parameters
    ----------
    url : str
        ``ipc://`` and the path of the server's socket.
    segment_bytes : int
        Most bytes of objects that are being stored at the same time; at least those of the
        largest. The memory is taken as it is used.
    segment : Segment, optional
        That memory. The caller closes it, after the channel.

    Raises
    ------
    ConfigError
        If the URL is none of a server, or its folder is not this user's alone.
    StorageError
        If something else than a server of this user and version is there; if there is none, or it
        does not answer, an UnavailableStorageError.
    """
    channel = Channel(url, segment_bytes=segment_bytes, segment=segment)
    if not channel.wait_connected(CONNECT_SECONDS):
        channel.close()
        raise channel.problem or UnavailableStorageError(
            errno.EAGAIN, "the node server does not answer", url
        )
    return channel


def open_served(
    url: str,
    *,
    segment_bytes: int = SEGMENT_BYTES,
    segment: Segment | None = None,
    read_only: bool = False,
    in_place: bool = True,
    device: torch.device | None = None,
    counters: Counters | None = None,
) -> ServedShelf:
    """Return the shelf behind the node server at `url`. May block for some seconds.

    Parameters
    ----------
    url, segment_bytes, segment
        As for :func:`connect`.
    read_only, in_place, counters
        As for :class:`ServedShelf`.
    device : torch.device, optional
        The GPU of the caches, for which the server's memory is page-locked.

    Raises
    ------
    ConfigError, StorageError
        As for :func:`connect`.
    """
    channel = connect(url, segment_bytes=segment_bytes, segment=segment)
    if device is not None:
        channel.page_lock(device)
    try:
        return ServedShelf(channel, counters, read_only=read_only, in_place=in_place)
    except BaseException:
        channel.close()
        raise
