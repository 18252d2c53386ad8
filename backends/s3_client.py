"""The objects of a bucket by the obstore library: requests, and the event loop of many at once.

Owns the store that obstore is given (:func:`make_store`), with every setting that kvshelf knows, so
that it takes none of them from the environment, and that is made anew when a request shows that the
store lacks something (:mod:`kvshelf.backends.s3_quirks`). Calls raise what obstore raises, which
:meth:`Client.error` makes a typed error, and FileNotFoundError where there is no such object.

Batches of probes, the parts of an object, and listings run on an event loop in one thread of the
client, started when first needed. Everything else runs on the caller's thread, without the GIL.
obstore calls the function that renews credentials on threads of its own.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import threading
import time
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from datetime import timedelta
from enum import Enum, auto
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

from kvshelf.backends import s3_quirks
from kvshelf.backends.base import ObjectInfo
from kvshelf.backends.options import mapping_of
from kvshelf.backends.s3_errors import (
    ALREADY_THERE,
    codes_of,
    obstore_error,
    refuses_keys,
    shorten,
)
from kvshelf.backends.s3_settings import CONNECT_SECONDS, READ_SECONDS, Settings
from kvshelf.background import THREAD_LIMIT, try_to_start
from kvshelf.errors import ConfigError, StorageError, TransientStorageError
from kvshelf.urls import shown_url

logger = logging.getLogger(__name__)

PROBES_AT_ONCE: Final = 64
#: Most objects that one request removes.
DELETES_AT_ONCE: Final = 1000
#: A body arrives in pieces of about this size.
_STREAM_BYTES: Final = 1 << 20
#: What has no more characters is no key of a store, and a part of many a word.
_SHORT_KEY: Final = 3
_RETRY_SECONDS: Final = 3.0
_RETRIES: Final = 5

T = TypeVar("T")


class Put(Enum):
    """What became of an object that was put."""

    DONE = auto()
    #: There was one already.
    EXISTS = auto()
    #: Another writer is creating the same name.
    CONFLICT = auto()


class RangeError(Exception):
    """A request for a range was not answered with that range.

    Attributes
    ----------
    whole : bool
        It was answered with the whole object: the server knows no ranges.
    """

    def __init__(self, *, whole: bool) -> None:
        super().__init__("the whole object" if whole else "no such range")
        self.whole = whole


class Span(NamedTuple):
    """What is fetched by one request: the bytes of an object from `begin` on, into `buffer`."""

    name: str
    size: int
    begin: int
    buffer: memoryview


class Client:
    """The objects of `bucket` below `prefix`, to which names are relative.

    Parameters
    ----------
    bucket, prefix : str
    options : Mapping
        See :func:`~kvshelf.backends.s3.open_s3`.
    settings : Settings
        What these options mean.

    Attributes
    ----------
    answer_seconds : float
        The client waits for an answer for so many seconds at most.
    versions : bool
        The answer to the last PUT named a version: the bucket keeps what is replaced.

    Raises
    ------
    ConfigError
        If the options cannot be used.
    """

    def __init__(
        self, bucket: str, prefix: str, options: Mapping[str, Any], settings: Settings
    ) -> None:
        self._bucket = bucket
        self._url = f"s3://{bucket}/{prefix}".rstrip("/")
        keys = (str(options.get(name) or "") for name in ("key", "secret", "token"))
        self._secrets = [key for key in keys if len(key) > _SHORT_KEY]
        self._settings = settings
        self.answer_seconds = sum(_limits(options))
        for quirk in options.get("quirks") or ():
            s3_quirks.learn(settings.endpoint, bucket, quirk, math.inf)
        self.versions = False
        self._make = partial(make_store, bucket, prefix, options, settings)
        self._lock = threading.Lock()
        #: The quirks that `_made` was made for; None where it has to be made anew.
        self._made_for: frozenset[str] | None = self.quirks
        self._made = self._make(self._made_for)
        self._running: asyncio.AbstractEventLoop | None = None

    def error(
        self, exc: BaseException, what: str, name: str, *, writing: bool = False
    ) -> StorageError:
        """Return the typed error for an exception of obstore."""
        text = str(exc)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        path = f"{self._url}/{name}" if name else self._url
        settings = self._settings
        if settings.keys is not None and refuses_keys(exc) and settings.keys.reread():
            with self._lock:
                # obstore keeps keys for minutes, and what is made anew asks for them.
                self._made_for = None
        endpoint = None if settings.is_aws else shown_url(settings.endpoint)
        at = self._bucket, endpoint, {row.name: row.source for row in settings.rows}["keys"]
        return obstore_error(exc, text, what, path, at, writing=writing)

    def _adapting(self, call: Callable[[], T], *quirks: str) -> T:
        """Make a call, again where its refusal shows that the store lacks what it needs."""
        # What is known already may have been learned while this call was made.
        left = list(quirks)
        while True:
            try:
                return call()
            except Exception as exc:
                shown = next((quirk for quirk in left if s3_quirks.shows(exc, quirk)), None)
                if shown is None:
                    raise
                left.remove(shown)
                self.learn(shown)

    def learn(self, quirk: str, seconds: float = s3_quirks.LEARNED_SECONDS) -> None:
        """Take note of what the store lacks, and do without it for some time."""
        if quirk not in self.quirks:
            logger.info("%s: %s: %s", self._url, quirk, s3_quirks.QUIRKS[quirk])
            s3_quirks.learn(self._settings.endpoint, self._bucket, quirk, seconds)

    @property
    def quirks(self) -> frozenset[str]:
        """What the store is known to lack."""
        return s3_quirks.quirks_of(self._settings.endpoint, self._bucket)

    @property
    def _store(self) -> Any:
        """What obstore makes requests with, made anew when other quirks are known."""
        quirks = self.quirks
        with self._lock:
            if quirks != self._made_for:
                self._made, self._made_for = self._make(quirks), quirks
            return self._made

    # ------------------------------------------------------------------- on the caller's thread

    def get(self, name: str, size: int) -> Any:
        """Return the bytes of an object of this size; None if it has another."""
        found = self._store.get(name)
        return found.bytes() if int(found.meta["size"]) == size else None

    def put(self, name: str, data: Any, *, create: bool) -> Put:
        """Write an object; `create`: on the condition that there is none, if the store has such."""

        def write() -> None:
            mode = (
                "create" if create and s3_quirks.NO_CONDITIONS not in self.quirks else "overwrite"
            )
            done = self._store.put(name, data, mode=mode, use_multipart=False)
            self.versions = done["version"] not in (None, "null")

        try:
            self._adapting(
                write, *([s3_quirks.NO_CONDITIONS] if create else []), s3_quirks.NO_CHECKSUMS
            )
        except Exception as exc:
            refused = _refused_put(exc) if create else None
            if refused is None:
                raise
            return refused
        return Put.DONE

    def renew(self, name: str) -> bool:
        """Have the store copy an object onto itself, which makes it as young as a new one.

        False: it refused, or another client is writing the object.
        """
        try:
            # Of such a copy alone obstore sends the header that `make_store` names. The copy does
            # replace: the header is no condition.
            self._store.copy(name, name, overwrite=False)
        except Exception as exc:
            if s3_quirks.shows(exc, s3_quirks.NO_SELF_COPY):
                self.learn(s3_quirks.NO_SELF_COPY)
            # Another client may be writing it, and records the use.
            elif _refused_put(exc) is None:
                raise
            return False
        return True

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, whether they are there or not; raise if one of them stays."""
        self._adapting(lambda: self._store.delete(list(names)), s3_quirks.NO_DELETE_OBJECTS)

    # ------------------------------------------------------------------------- on the event loop

    def heads(self, names: Sequence[str]) -> Sequence[ObjectInfo | BaseException]:
        """Probe objects in parallel."""
        free = asyncio.Semaphore(PROBES_AT_ONCE)

        async def head(name: str) -> ObjectInfo:
            async with free:
                if s3_quirks.NO_HEAD_LENGTH not in self.quirks:
                    try:
                        return _info(name, await self._store.head_async(name))
                    except Exception as exc:
                        if not s3_quirks.shows(exc, s3_quirks.NO_HEAD_LENGTH):
                            raise
                        self.learn(s3_quirks.NO_HEAD_LENGTH)
                try:
                    found = await self._store.get_async(name, options={"range": (0, 1)})
                except FileNotFoundError:
                    raise
                except Exception:  # noqa: BLE001 - an empty object has no first byte
                    found = await self._store.get_async(name)
                return _info(name, found.meta)

        async def heads() -> Sequence[ObjectInfo | BaseException]:
            return await asyncio.gather(*map(head, names), return_exceptions=True)

        return self._wait(heads)

    def fill(self, spans: Sequence[Span], seconds: float) -> Sequence[float | BaseException]:
        """Fetch objects, or ranges of them, in parallel; for each the seconds of its body, or why.

        TimeoutError after `seconds`. Nothing is written to a buffer after the call.
        """

        async def fill(span: Span) -> float:
            whole = span.begin == 0 and len(span.buffer) == span.size
            end = span.begin + len(span.buffer)
            options: Any = {} if whole else {"range": (span.begin, end)}
            try:
                found = await self._store.get_async(span.name, options=options)
            except Exception as exc:
                if not whole:
                    _check_range(exc)
                raise
            begin, place = time.monotonic(), 0
            if int(found.meta["size"]) != span.size:
                raise ValueError(f"it has {found.meta['size']} bytes")
            async for piece in found.stream(min_chunk_size=_STREAM_BYTES):
                view = memoryview(piece).cast("B")
                span.buffer[place : place + len(view)] = view
                place += len(view)
            if place != len(span.buffer):
                raise ValueError(f"{place} bytes came")
            return time.monotonic() - begin

        async def fill_all() -> Sequence[float | BaseException]:
            return await asyncio.gather(*map(fill, spans), return_exceptions=True)

        return self._wait(fill_all, None if math.isinf(seconds) else seconds)

    def check(self, seconds: float) -> None:
        """Fail now if every later call would fail; TimeoutError after `seconds`."""
        may = urlsplit(self._settings.endpoint).netloc.startswith(f"{self._bucket}.")
        try:
            next(self.rows("", 1, seconds), None)
        except Exception as exc:
            quirk = s3_quirks.BUCKET_IN_ENDPOINT
            if not may or quirk in self.quirks or not s3_quirks.shows(exc, quirk):
                raise
            # For good: with a path of the bucket every later request would be a miss.
            self.learn(quirk, math.inf)
            try:
                next(self.rows("", 1, seconds), None)
            except Exception:  # noqa: BLE001 - the host is only called like the bucket
                s3_quirks.learn(self._settings.endpoint, self._bucket, quirk, 0.0)
                raise exc from None

    def rows(
        self, prefix: str, count: int, seconds: float, after: str | None = None
    ) -> Iterator[Sequence[ObjectInfo]]:
        """List objects behind `after`, `count` at once; TimeoutError if the next take `seconds`."""
        stream = self._store.list(prefix or None, offset=after, chunk_size=count)

        async def following() -> Sequence[ObjectInfo]:
            rows = await anext(stream, None)
            return [_info(str(row["path"]), row) for row in rows or ()]

        while rows := self._wait(following, seconds):
            yield rows

    def folders(self, prefix: str, seconds: float) -> Sequence[str]:
        """Return the names of the folders in `prefix`; TimeoutError after `seconds`."""

        async def folders() -> Sequence[str]:
            found = await self._store.list_with_delimiter_async(prefix or None)
            return [str(path).rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]

        return self._wait(folders, seconds)

    def _wait(self, call: Callable[[], Awaitable[T]], seconds: float | None = None) -> T:
        """Make a call and return its answer; TimeoutError after `seconds`, and it is dropped."""

        async def bounded() -> T:
            return await asyncio.wait_for(call(), seconds)

        return self._start(bounded()).result()

    def _start(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop())
        except StorageError:
            call.close()
            raise

    def _loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop, or raise StorageError."""
        with self._lock:
            if self._running is None:
                loop = _Loop()
                # A daemon, so that a server which never answers cannot keep the process alive.
                thread = threading.Thread(
                    target=_serve, args=(loop,), name="kvshelf-s3", daemon=True
                )
                if not try_to_start(thread):
                    loop.close()
                    raise TransientStorageError(
                        errno.EAGAIN,
                        f"not tried: no thread could be started, {THREAD_LIMIT}",
                        self._url,
                    )
                self._running = loop
            return self._running

    def close(self) -> None:
        """Stop the event loop's thread. Idempotent."""
        with self._lock:
            loop, self._running = self._running, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


class _Loop(asyncio.SelectorEventLoop):
    """Takes one result at a time, so that to close it is to wait for threads that hand it one.

    They are obstore's. One that is left in Python when the process ends aborts it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._taking = threading.Lock()

    def call_soon_threadsafe(self, *call: Any, **options: Any) -> asyncio.Handle:  # type: ignore[override]
        with self._taking:
            return super().call_soon_threadsafe(*call, **options)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_drop_tasks())
    finally:
        loop.close()


async def _drop_tasks() -> None:
    """Cancel the tasks that are left when the client is closed."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _refused_put(exc: Exception) -> Put | None:
    """Return what the answer to a conditional PUT means; None for an error."""
    codes = codes_of(str(exc)) | ({"412"} if type(exc).__name__ == "AlreadyExistsError" else set())
    # 429: some stores take one write a second for each name.
    if codes & {"409", "429"}:
        return Put.CONFLICT
    return Put.EXISTS if codes & ALREADY_THERE else None


def _check_range(exc: Exception) -> None:
    """Raise RangeError for an answer that is not the range which was asked for."""
    text = str(exc)
    if "range" in text.lower():
        raise RangeError(whole="non-partial" in text) from exc


def _info(name: str, row: Any) -> ObjectInfo:
    size = int(row["size"])
    return ObjectInfo(name, size, row["last_modified"].timestamp(), held=size)


def _limits(options: Mapping[str, Any]) -> tuple[float, float]:
    """Return the seconds for which the client waits for a connection, and then for an answer."""
    limits = mapping_of(options, "config_kwargs")
    return (
        float(limits.get("connect_timeout", CONNECT_SECONDS)),
        float(limits.get("read_timeout", READ_SECONDS)),
    )


def make_store(
    bucket: str,
    prefix: str,
    options: Mapping[str, Any],
    settings: Settings,
    quirks: Collection[str],
) -> Any:
    """Create the store of a bucket for obstore.

    obstore begins with each variable ``AWS_*`` that is called like one of its settings. What it is
    given replaces these: a function for keys replaces keys, token and roles, and `client_options`
    all of the connection. Only the checksum cannot be switched off again.

    Raises
    ------
    ConfigError
        If the options cannot be used.
    """
    from obstore.store import S3Store

    connect_seconds, read_seconds = _limits(options)
    in_endpoint = s3_quirks.BUCKET_IN_ENDPOINT in quirks
    endpoint = settings.endpoint if in_endpoint else settings.endpoint_of(bucket)
    checksum = options.get("checksum", True)
    if not checksum and "AWS_CHECKSUM_ALGORITHM" in os.environ:
        raise ConfigError(
            "storage_options: checksum is false, but AWS_CHECKSUM_ALGORITHM is set: unset it"
        )
    client: dict[str, Any] = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=connect_seconds),
        "read_timeout": timedelta(seconds=read_seconds),
        # Of a whole request. Bodies are read as they arrive; read_timeout bounds each wait.
        "timeout": timedelta(hours=1),
    }
    if settings.verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(settings.verify, (str, os.PathLike)):
        try:
            with open(settings.verify, "rb") as file:
                client["root_certificate"] = file.read()
        except OSError as exc:
            raise ConfigError(
                f"the CA bundle {os.fspath(settings.verify)} cannot be read ({exc.strerror}):"
                " correct client_kwargs.verify in storage_options, or AWS_CA_BUNDLE"
            ) from exc
    config: dict[str, Any] = {
        "aws_endpoint_url_s3": endpoint,
        "virtual_hosted_style_request": in_endpoint or settings.style == "virtual",
        "region": settings.region,
        "skip_signature": settings.keys is None,
        "request_payer": bool(options.get("requester_pays")),
        "conditional_put": "etag",
        # A store refuses to copy an object onto itself unless something changes.
        "copy_if_not_exists": "header: x-amz-metadata-directive: REPLACE",
        "unsigned_payload": False,
        "s3_express": False,
        "disable_bulk_delete": s3_quirks.NO_DELETE_OBJECTS in quirks,
    }
    if checksum and s3_quirks.NO_CHECKSUMS not in quirks:
        config["checksum_algorithm"] = "SHA256"
    try:
        # S3Store wants typed dictionaries; these values come from users.
        make: Any = S3Store
        return make(
            bucket,
            prefix=prefix or None,
            config=config,
            client_options=client,
            # Requests that are not signed need none.
            credential_provider=settings.keys.provide if settings.keys is not None else dict,
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": timedelta(seconds=_RETRY_SECONDS),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=50),
                    "max_backoff": timedelta(seconds=1),
                    "base": 2,
                },
            },
        )
    except Exception as exc:
        raise ConfigError(f"s3://{bucket} cannot be opened: {shorten(str(exc))}") from exc
