"""The storage of a node server, as its clients call it.

Owns which calls of a backend a client can make: probes, reads, stores, deletions and uses of the
objects of its namespaces. The server does the rest itself: it lists, repairs and sets aside.

Contracts
---------
* While the server is gone, every call fails at once with UnavailableStorageError.
* Any thread may call anything.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvshelf.backends.base import (
    Backend,
    BytesLike,
    Deadlines,
    DeleteResults,
    ObjectInfo,
    Properties,
    Reader,
    Space,
    StatResults,
    Touched,
    WholeReader,
    WriteMode,
    WriteResult,
    check_name,
)
from kvshelf.errors import PermanentStorageError, StorageError, TransientStorageError
from kvshelf.server import protocol
from kvshelf.server.connection import NodeClient
from kvshelf.server.protocol import Facts, Fault

#: Seconds for one message to the server and its answer. A probe of many names takes little longer.
_MESSAGE_SECONDS: Final = 150e-6
#: Threads of a client where the server's storage has low latency.
_LOW_LATENCY_CONCURRENCY: Final = 2
#: Seconds by which deadlines of a client are later than those of the server.
_LATER: Final = 1.0


class NodeBackend(Backend):
    """A storage that a node server calls.

    Parameters
    ----------
    client : NodeClient
    closes_client : bool
        Close the connection together with the backend.
    """

    def __init__(self, client: NodeClient, *, closes_client: bool = False) -> None:
        self.url = client.url
        self.client = client
        self._closes_client = closes_client

    def __repr__(self) -> str:
        return f"NodeBackend({self.url!r})"

    @property
    def properties(self) -> Properties:
        """Those of the server's storage; a probe takes a message at least."""
        welcome = self.client.welcome
        facts = Facts(self.url, "a storage") if welcome is None else welcome.facts
        has_low_latency = facts.probe_cost < _MESSAGE_SECONDS
        return Properties(
            filesystem=f"{facts.filesystem} through a node server",
            cache_seconds=facts.cache_seconds,
            concurrency=_LOW_LATENCY_CONCURRENCY if has_low_latency else facts.concurrency,
            deletes_at_once=protocol.MAX_NAMES,
            probe_cost=max(_MESSAGE_SECONDS, facts.probe_cost),
            read_only=facts.read_only,
            renews=facts.renews,
            shared=facts.shared,
            versions=facts.versions,
            # The server says itself that its storage is late, if it can.
            deadlines=Deadlines(
                probe=facts.probe_seconds + _LATER,
                read=facts.read_seconds + _LATER,
                write=facts.write_seconds + _LATER,
                bytes_per_second=facts.bytes_per_second,
            ),
        )

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe the storage, past the server's memory."""
        for name in names:
            check_name(name)
        answers = self._ask_by_parts(protocol.Stat, names)
        return [protocol.stat_result(answer, 0) for answer in answers]

    def find(self, names: Sequence[str], sizes: Sequence[int]) -> StatResults:
        """Probe objects that are to be loaded, in the server's memory and on the storage.

        Parameters
        ----------
        names : Sequence of str
        sizes : Sequence of int
            Bytes that each object should have.
        """
        answers = self._ask_by_parts(protocol.Find, names)
        return list(map(protocol.stat_result, answers, sizes))

    def _ask_by_parts(self, make: Any, names: Sequence[str]) -> list[int | bool | Fault]:
        """Ask about names, in several messages where one is too short for them."""
        parts = [
            list(names[start : start + protocol.MAX_NAMES])
            for start in range(0, len(names), protocol.MAX_NAMES)
        ]
        requests = [self.client.request(make, part) for part in parts]
        try:
            return [answer for request in requests for answer in request.result()]
        except StorageError as error:
            return [Fault.of(error)] * len(names)

    @property
    def reads_whole(self) -> bool:
        """True: a message asks for all objects of a chunk (:mod:`kvshelf.server.view`)."""
        return True

    def open(self, name: str) -> Reader:
        """Open an object, whose bytes come by the stream."""
        data: bytes = self.client.request(protocol.Read, check_name(name)).result()
        return WholeReader(len(data), lambda: data)

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        """Have the server publish an object that lies in shared memory, or a marker.

        In mode ``replace`` the server verifies what stands in its place.
        """
        check_name(name)
        offset = nbytes = 0
        if buffers:
            (buffer,) = buffers
            view = memoryview(buffer).cast("B")
            offset, nbytes = self.client.offset_of(view), view.nbytes
        stored = self.client.request(protocol.Store, name, offset, nbytes, mode == "replace")
        return WriteResult(stored.result())

    def delete(self, names: Sequence[str]) -> DeleteResults:
        """Delete objects, from the storage and from the server's memory."""
        results: DeleteResults = []
        for answer in self._ask_by_parts(protocol.Delete, [check_name(name) for name in names]):
            if not isinstance(answer, Fault):
                results.append(bool(answer))
                continue
            error = answer.error()
            if not isinstance(error, StorageError):
                error = TransientStorageError(answer.text)
            results.append(error)
        return results

    def touch(self, name: str, before: float = math.inf) -> Touched:
        """Record a use, with the rights of the server."""
        request = self.client.request(protocol.Touch, check_name(name), before)
        return Touched(request.result())

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Return no folders, if the server answers: clients never list."""
        self.client.request(protocol.Stat, []).result()
        return []

    def list(
        self,
        prefix: str = "",
        *,
        hidden: bool = False,
        start: str | None = None,
        end: str | None = None,
        flat: bool = False,
    ) -> Iterator[ObjectInfo]:
        """Refuse: clients never list."""
        raise self._refusal("lists nothing")

    def info(self, name: str) -> ObjectInfo | None:
        """Refuse: the server alone decides by times."""
        raise self._refusal("tells no times")

    def set_aside(self, name: str) -> bool:
        """Refuse: the server sets aside what it finds bad."""
        raise self._refusal("renames nothing")

    def space(self) -> Space | None:
        """Return None: the server keeps the bounds."""
        return None

    def close(self) -> None:
        """End the connection, if it is this backend's. Idempotent."""
        if self._closes_client:
            self.client.close()

    def _refusal(self, text: str) -> PermanentStorageError:
        return PermanentStorageError(
            errno.EOPNOTSUPP,
            f"a node server {text} for its clients: use the shelf's own path",
            self.url,
        )
