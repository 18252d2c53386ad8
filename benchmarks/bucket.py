"""A bucket on this machine with added latency, and the least that a client must do with it.

Owns two clients without kvshelf: obstore, and HTTP with presigned URLs.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import median
from benchmarks.proxy import DelayingProxy
from benchmarks.servers import BUCKET, S3Server

_VALID: Final = timedelta(hours=12)


class Bucket:
    """A bucket with adjustable latency.

    Attributes
    ----------
    folder : Path
        The folder of its objects.
    proxy : DelayingProxy
    """

    def __init__(self, folder: Path, proxy: DelayingProxy) -> None:
        self.folder = folder
        self.proxy = proxy
        self._local = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def options(self) -> dict[str, Any]:
        """Return storage options for the bucket."""
        return S3Server.options(self.proxy.port)

    def store(self) -> Any:
        """Return obstore's client."""
        from obstore.store import S3Store

        options = self.options()
        make: Any = S3Store
        return make(
            BUCKET,
            config={
                "endpoint": options["endpoint_url"],
                "access_key_id": options["key"],
                "secret_access_key": options["secret"],
                "region": "us-east-1",
            },
            client_options={"allow_http": True},
        )

    def signed(self, method: str, names: Sequence[str]) -> list[str]:
        """Return presigned URLs for plain HTTP."""
        import obstore

        urls: Any = obstore.sign(self.store(), method, list(names), _VALID)  # type: ignore[call-overload, unused-ignore]
        return [url.partition(str(self.proxy.port))[2] for url in urls]

    def request(self, method: str, url: str, body: memoryview | None = None) -> Any:
        """Send one request on the calling thread's connection; do not read the response's body."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.proxy.port)
            self._local.connection = connection
            self._connections.append(connection)
        try:
            connection.request(method, url, body)
            answer = connection.getresponse()
        except (http.client.RemoteDisconnected, ConnectionError):
            # The server closes idle connections.
            connection.close()
            connection.request(method, url, body)
            answer = connection.getresponse()
        if answer.status != 200:
            raise OSError(f"{method} was answered {answer.status}: {answer.read()[:300]!r}")
        return answer

    def close(self) -> None:
        """Close all connections, after the threads that use them have ended."""
        for connection in self._connections:
            connection.close()


@contextlib.contextmanager
def bucket(folder: Path) -> Iterator[Bucket]:
    """Serve a bucket from a folder until the context ends.

    Raises
    ------
    MissingServerError
        If rclone or obstore is missing.
    """
    with (
        S3Server(folder) as server,
        DelayingProxy("127.0.0.1", server.port, 0.0) as proxy,
        contextlib.closing(Bucket(server.bucket, proxy)) as place,
    ):
        yield place


class _Raw(ABC):
    """Transfers objects with the client that is fastest on this machine.

    Attributes
    ----------
    client : str
        Name of this client.
    """

    def __init__(
        self,
        place: Bucket,
        method: str,
        names: Sequence[str],
        buffers: Sequence[memoryview],
        threads: int,
    ) -> None:
        self._place = place
        self._names = names
        self._buffers = buffers
        self._urls = place.signed(method, names)
        self._store = place.store()
        self._pool = ThreadPoolExecutor(threads)
        self.client, self._one = _fastest(
            {"http.client": self._by_http, "obstore": self._by_obstore}, self._all
        )

    def run(self) -> None:
        """Transfer all objects."""
        self._all(self._one)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _all(self, one: Callable[[int], object]) -> None:
        list(self._pool.map(one, range(len(self._names))))

    @abstractmethod
    def _by_http(self, number: int) -> None:
        """Transfer one object by plain HTTP."""

    @abstractmethod
    def _by_obstore(self, number: int) -> None:
        """Transfer one object by obstore."""


class RawLoads(_Raw):
    """Reads objects into buffers without verifying them."""

    def __init__(
        self, place: Bucket, names: Sequence[str], buffers: Sequence[memoryview], threads: int
    ) -> None:
        super().__init__(place, "GET", names, buffers, threads)

    def _by_http(self, number: int) -> None:
        answer = self._place.request("GET", self._urls[number])
        view = self._buffers[number]
        done = 0
        while done < len(view):
            count = answer.readinto(view[done:])
            if not count:
                raise OSError(f"{self._names[number]} ended after {done} bytes")
            done += count
        answer.read()

    def _by_obstore(self, number: int) -> None:
        view = self._buffers[number]
        done = 0
        for piece in self._store.get(self._names[number]).stream(min_chunk_size=1 << 20):
            part = memoryview(piece)
            view[done : done + len(part)] = part
            done += len(part)


class RawStores(_Raw):
    """Writes objects."""

    def __init__(self, place: Bucket, buffers: Sequence[memoryview], threads: int) -> None:
        names = [f"raw/{number}" for number in range(len(buffers))]
        super().__init__(place, "PUT", names, buffers, threads)

    def _by_http(self, number: int) -> None:
        self._place.request("PUT", self._urls[number], self._buffers[number]).read()

    def _by_obstore(self, number: int) -> None:
        self._store.put(self._names[number], self._buffers[number], use_multipart=False)


def _fastest(
    clients: dict[str, Callable[[int], object]], work: Callable[[Callable[[int], object]], None]
) -> tuple[str, Callable[[int], object]]:
    """Return name and function of the client that needed the least time."""

    def seconds(name: str) -> float:
        samples = []
        for _ in range(4):
            begin = time.perf_counter()
            work(clients[name])
            samples.append(time.perf_counter() - begin)
        # The first sample includes connecting.
        return median(samples[1:])

    name = min(clients, key=seconds)
    return name, clients[name]
