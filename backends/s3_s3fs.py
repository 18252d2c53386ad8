"""The client of an S3 store that uses the s3fs library.

Owns the requests, which s3fs makes through aiobotocore on fsspec's own event loop and thread. s3fs
itself is left the session: options, credentials, retries, and arguments that belong to every call.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from kvshelf.backends.base import ObjectInfo
from kvshelf.backends.generic import GenericBackend
from kvshelf.backends.s3_client import STREAM_BYTES, Body, Client, RangeError
from kvshelf.backends.s3_clock import time_of
from kvshelf.backends.s3_errors import NO_CREDENTIALS, answer_error, unreachable_hint
from kvshelf.backends.s3_options import CONNECT_SECONDS, READ_SECONDS, endpoint_of, mapping_of
from kvshelf.errors import ConfigError, ProcessLimitError, StorageError, TransientStorageError

#: Class names of errors of a body that ended early.
_CUT: Final = re.compile(r"payload|incompleteread|streaming", re.IGNORECASE)


class S3fsClient(Client):
    """The objects below ``s3://bucket/prefix``.

    Parameters
    ----------
    url : str
    options : Mapping
        Passed to s3fs, with default timeouts.

    Raises
    ------
    ConfigError
        If s3fs is missing, or the options are refused.
    """

    library = "s3fs"

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._endpoint = endpoint_of(options)
        config = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            # Loads verify objects by their own hashes. Checking the store's checksum as well would
            # turn a damaged object into a storage error, and such an object is never repaired.
            "response_checksum_validation": "when_required",
            **mapping_of(options, "config_kwargs"),
        }
        #: Knows how to make a filesystem of options, and what its errors mean.
        self._plain = GenericBackend(url, {**options, "config_kwargs": config})
        self._fs = self._plain._fs
        self._bucket, _, prefix = self._plain._root.partition("/")
        self._prefix = prefix + "/" if prefix else ""

    def error(self, exc: Exception, what: str, name: str, *, writing: bool = False) -> StorageError:
        """Return the typed error for the store's answer, if there was one."""
        path = f"{self._plain.url}/{name}" if name else self._plain.url
        answer = _answer(exc)
        if answer is None:
            if type(exc).__name__ == "NoCredentialsError":
                raise ConfigError(NO_CREDENTIALS) from exc
            error = self._plain._translate(exc, what, name, writing=writing)
            if error is exc or isinstance(error, ProcessLimitError):
                return error
            if _CUT.search(type(exc).__name__):
                return TransientStorageError(errno.EIO, str(error.strerror), path)
            if isinstance(error, TransientStorageError) and "endpoint" in str(exc):
                hint = unreachable_hint(self._endpoint)
                return TransientStorageError(errno.EIO, f"{what} failed: {hint}", path)
            return error
        said = answer.get("Error", {})
        text = self._plain._clean(f"{said.get('Code', '')}: {said.get('Message', '')}")
        shown, at = f"{what} failed: {text}", (self._bucket, self._endpoint)
        found = answer_error(_codes(answer), text, shown, path, *at, writing=writing)
        return found or self._plain._translate(exc, what, name, writing=writing)

    async def _call(self, method: str, name: str | None = None, **arguments: Any) -> Any:
        if name is not None:
            arguments["Key"] = self._prefix + name
        return await self._fs._call_s3(method, Bucket=self._bucket, **arguments)

    def head(self, name: str) -> ObjectInfo:
        """Make a HEAD request."""
        return self._wait(lambda: self._head(name))

    async def _head(self, name: str) -> ObjectInfo:
        found = await self._call("head_object", name)
        return ObjectInfo(name, int(found["ContentLength"]), found["LastModified"].timestamp())

    def get(
        self, name: str, start: int = 0, end: int | None = None, etag: str | None = None
    ) -> Body:
        """Make a GET request."""
        found = self._wait(lambda: self._get(name, start, end, etag))
        body, loop = found["Body"], self._loop()

        def pieces() -> Iterator[memoryview]:
            while piece := self._wait(lambda: _piece(body)):
                yield memoryview(piece)

        return Body(
            _size_of(found),
            found.get("ETag"),
            pieces(),
            lambda: loop.call_soon_threadsafe(body.close),
        )

    async def _get(self, name: str, start: int, end: int | None, etag: str | None) -> Any:
        more = {"IfMatch": etag} if etag else {}
        if end is not None:
            more["Range"] = f"bytes={start}-{end - 1}"
        try:
            found = await self._call("get_object", name, **more)
        except Exception as exc:
            if _codes(_answer(exc)) & {"416", "InvalidRange"}:
                raise RangeError(whole=False) from exc
            raise
        if end is not None and "ContentRange" not in found:
            found["Body"].close()
            raise RangeError(whole=True)
        return found

    async def _part(self, name: str, start: int, end: int) -> tuple[int, Any, Any]:
        found = await self._get(name, start, end, None)
        return _size_of(found), _stream(found["Body"]), found["Body"].close

    def _put(self, name: str, data: Any, *, create: bool) -> None:
        more = {"IfNoneMatch": "*"} if create else {}
        self._wait(lambda: self._call("put_object", name, Body=bytes(data), **more))

    def _codes(self, exc: Exception) -> set[str]:
        return _codes(_answer(exc))

    def delete(self, names: Sequence[str]) -> None:
        """Make a DELETE request, or one that removes many."""
        if len(names) == 1:
            self._wait(lambda: self._call("delete_object", names[0]))
            return
        wanted = [{"Key": self._prefix + name} for name in names]
        found = self._wait(
            lambda: self._call("delete_objects", Delete={"Objects": wanted, "Quiet": True})
        )
        if errors := found.get("Errors"):
            raise _RefusedError(errors[0])

    def _pages(
        self, prefix: str, count: int, after: str | None
    ) -> Callable[[], Awaitable[Sequence[ObjectInfo]]]:
        first = {} if after is None else {"StartAfter": self._prefix + after}
        pages = self._listing(prefix, MaxKeys=count, **first)

        async def following() -> Sequence[ObjectInfo]:
            async for page in pages:
                if found := page.get("Contents"):
                    return [
                        ObjectInfo(
                            row["Key"][len(self._prefix) :],
                            int(row["Size"]),
                            row["LastModified"].timestamp(),
                        )
                        for row in found
                    ]
            return []

        return following

    async def _folders(self, prefix: str) -> Sequence[str]:
        return [
            row["Prefix"].rstrip("/").rpartition("/")[2]
            async for page in self._listing(prefix, Delimiter="/")
            for row in page.get("CommonPrefixes", ())
        ]

    async def _listing(self, prefix: str, **arguments: Any) -> AsyncIterator[Mapping[str, Any]]:
        arguments["Prefix"] = self._prefix + (prefix + "/" if prefix else "")
        while True:
            page = await self._call("list_objects_v2", **arguments)
            yield page
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page.get("NextContinuationToken")

    def check(self, seconds: float) -> None:
        """Make one request: s3fs tries it again for longer than `seconds`."""
        self.now()

    def now(self) -> float | None:
        """Return the time of an answer."""
        found = self._wait(lambda: self._call("list_objects_v2", Prefix=self._prefix, MaxKeys=1))
        return time_of(found["ResponseMetadata"]["HTTPHeaders"].get("date"))

    def _loop(self) -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop = self._fs.loop
        return loop

    def close(self) -> None:
        """Do nothing: s3fs closes its connections itself."""


class _RefusedError(Exception):
    """One object of many was not deleted; with the answer as an error of botocore has it."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(str(error.get("Message")))
        self.response = {"Error": error}


def _answer(exc: Exception) -> Mapping[str, Any] | None:
    answer = getattr(exc.__cause__ or exc, "response", None)
    return answer if isinstance(answer, Mapping) else None


def _codes(answer: Mapping[str, Any] | None) -> set[str]:
    """Return the error code and the status of an answer."""
    if answer is None:
        return set()
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return {str(answer.get("Error", {}).get("Code", "")), str(status)}


def _size_of(found: Mapping[str, Any]) -> int:
    """Return the size of the whole object."""
    whole = str(found.get("ContentRange", "")).rpartition("/")[2]
    return int(whole) if whole.isdigit() else int(found["ContentLength"])


async def _piece(body: Any) -> bytes:
    found = bytearray()
    while len(found) < STREAM_BYTES and (data := await body.read(STREAM_BYTES - len(found))):
        found += data
    return bytes(found)


async def _stream(body: Any) -> AsyncIterator[bytes]:
    while piece := await _piece(body):
        yield piece
