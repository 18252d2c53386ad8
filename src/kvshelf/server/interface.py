"""What a client asks of a node server about the objects of one namespace.

Owns :class:`ServerClient`, the interface on which :mod:`kvshelf.adapters` is built: a connection,
its namespace, and five requests.

* A *lookup* counts the leading chunks of a prompt that can be loaded, and leases them in the name
  of a *session*: the server keeps them in memory until they are fetched under that name, the
  session ends, or the time of a lease is over.
* A *fetch* has objects read into the server's memory, if they are not there, and returns each as a
  :class:`~kvshelf.server.connection.Leased` object. Its holder releases it.
* A *store* has an object of the format verified and published. The object lies in memory that
  client and server share, a part of which :meth:`ServerClient.reserve` returns.
* *Keeping* an object leaves it in the server's memory only, under a name that is none of the
  format. It is gone with the server.
* The *end of a session* ends its leases.

Contracts
---------
* No method blocks, except the constructor of shared memory, :meth:`Channel.wait_connected` for the
  time that it is given, and :meth:`ServerClient.close` for a moment.
* While the server is gone, every future fails at once with UnavailableStorageError. A server that
  hangs completes none: callers have deadlines of their own.
* A new server gets the namespace before any request that depends on it.

Threads
-------
Any thread may call all methods. Futures complete on the channel's thread, which their callbacks
must not hold up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, TypeVar

import xxhash

from kvshelf.format.namespace import Namespace
from kvshelf.logs import RateLimitedLog
from kvshelf.server.channel import Channel
from kvshelf.server.connection import Leased
from kvshelf.server.messages import (
    MAX_NAMES,
    MAX_OPEN,
    MAX_REQUEST,
    LookedUp,
    LookUpChunks,
    Store,
    Stored,
    Welcome,
)
from kvshelf.server.requests import answer_to
from kvshelf.server.segment import SegmentPart

if TYPE_CHECKING:
    import torch

__all__ = ["Channel", "Leased", "SegmentPart", "ServerClient", "Welcome"]

logger = logging.getLogger("kvshelf.server.client")

_Answer = TypeVar("_Answer")

_LINES_PER_MINUTE: Final = 10
#: Bytes of a message beside its names, and beside the characters of each name.
_BESIDE_NAMES: Final = 4096
_BESIDE_NAME: Final = 8


class ServerClient:
    """A connection to a node server, for the objects of one namespace.

    Parameters
    ----------
    url : str
        ``ipc://`` and the path of the server's socket.
    segment_bytes : int
        Size of the shared memory for objects to be stored; 0: nothing is stored.
    channel : Channel, optional
        A connection that others use too. Its owner closes it, and chooses its shared memory.

    Attributes
    ----------
    url : str
    channel : Channel
        The connection: objects are fetched there, and sessions end.
    log : RateLimitedLog
        For what fails in the background.

    Raises
    ------
    ConfigError
        If the URL is none of a server, or the system gives no memory.
    """

    def __init__(self, url: str, *, segment_bytes: int = 0, channel: Channel | None = None) -> None:
        self.url = url
        self.log = RateLimitedLog(logger, _LINES_PER_MINUTE)
        self._owns_channel = channel is None
        self.channel = channel or Channel(url, segment_bytes=segment_bytes)

    def register(self, namespace: Namespace) -> None:
        """Use a namespace: the server gets its record now and after each reconnection."""
        self.channel.register(namespace.encoded)

    # ------------------------------------------------------------------------- lookups and loads

    def look_up(self, session: str, chunks: Sequence[Sequence[str]]) -> Future[int]:
        """Count the leading chunks that can be loaded, and lease them to a session.

        Parameters
        ----------
        session : str
        chunks : Sequence of Sequence of str
            The names of all objects of each chunk. As many chunks are asked for as fit into one
            message, which are those of a million tokens or more.
        """
        fitting = _fitting(chunks)
        names = [name for names in fitting for name in names]
        request = LookUpChunks(session, names, list(map(len, fitting)))
        return _answer(self.channel.request(request), LookedUp, lambda found: found.chunks)

    # ------------------------------------------------------------------------- stores

    def reserve(self, nbytes: int) -> SegmentPart | None:
        """Return shared memory for an object; None if none is free now."""
        segment = self.channel.segment
        return None if segment is None else segment.reserve(nbytes)

    def store(self, name: str, part: SegmentPart) -> Future[None]:
        """Have the server verify and publish an object of the format.

        `part` holds it, and stays as it is until the future completes.
        """
        return self._store(Store(name, part.offset, part.nbytes))

    def keep(self, name: str, part: SegmentPart, parent: str = "") -> Future[None]:
        """Have the server keep an object in memory only.

        Parameters
        ----------
        name : str
            ``hash/`` and three components.
        part : SegmentPart
            As for :meth:`store`.
        parent : str
            The object of the chunk before this one, which the server evicts after this one.
        """
        checksum = xxhash.xxh3_64_intdigest(part.view)
        return self._store(
            Store(
                name, part.offset, part.nbytes, memory_only=True, checksum=checksum, parent=parent
            )
        )

    def _store(self, request: Store) -> Future[None]:
        return _answer(self.channel.request(request), Stored, lambda _: None)

    # ------------------------------------------------------------------------- others

    def page_lock(self, device: torch.device) -> None:
        """Page-lock the shared memory for a GPU, the server's in the background.

        Where CUDA refuses that of stores, copies to it end before they return.
        """
        self.channel.page_lock(device)
        segment = self.channel.segment
        if segment is None:
            return
        try:
            segment.page_lock(device)
        except RuntimeError as error:
            self.log.warning(
                "could not pin the memory through which KV is stored (%s); stores wait in their"
                " calls until the KV is there",
                error,
            )

    def close(self) -> None:
        """End the connection, unless it is another's; futures fail. Idempotent."""
        if self._owns_channel:
            self.channel.close()


def _answer(
    request: Future[Any], kind: type[Any], value: Callable[[Any], _Answer]
) -> Future[_Answer]:
    """Return the future of what an answer of this kind says."""
    answer: Future[_Answer] = Future()

    def answered(done: Future[Any]) -> None:
        try:
            answer.set_result(value(answer_to(done, kind)))
        except Exception as error:  # noqa: BLE001  whatever it is, the waiting side gets it
            answer.set_exception(error)

    request.add_done_callback(answered)
    return answer


def _fitting(chunks: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """Return the leading chunks whose names fit into one message."""
    bytes_free, names_free = MAX_REQUEST - _BESIDE_NAMES, MAX_OPEN
    for number, names in enumerate(chunks):
        bytes_free -= sum(len(name) + _BESIDE_NAME for name in names)
        names_free -= len(names)
        if min(bytes_free, names_free) < 0 or number == MAX_NAMES:
            return chunks[:number]
    return chunks
