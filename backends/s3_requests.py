"""Requests to an S3 store: the obstore client of a bucket, and an event loop for many at once.

Owns :func:`make_store`, which gives obstore every setting that kvshelf knows, so that obstore takes
none of them from the environment. Owns :class:`RequestLoop`, the event loop of one backend.

The loop runs on one daemon thread, ``kvshelf-s3``, started by the first request. Any thread may
call :meth:`RequestLoop.request`, which blocks. obstore calls the function that renews credentials
on threads of its own.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import timedelta
from typing import Any, Final, TypeVar

from kvshelf.backends.options import mapping_of
from kvshelf.backends.s3_errors import (
    ENDPOINT_HAS_BUCKET,
    NO_CHECKSUMS,
    NO_DELETE_OBJECTS,
    shorten,
)
from kvshelf.backends.s3_settings import CONNECT_SECONDS, READ_SECONDS, Settings
from kvshelf.background import THREAD_LIMIT, try_to_start
from kvshelf.errors import ConfigError, TransientStorageError

_RETRY_SECONDS: Final = 3.0
_RETRIES: Final = 5

T = TypeVar("T")


class RequestLoop:
    """An event loop on a thread of its own.

    Parameters
    ----------
    url : str
        The shelf, for errors.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def request(self, call: Callable[[], Awaitable[T]], seconds: float | None = None) -> T:
        """Await `call` on the loop; return its answer. TimeoutError drops it after `seconds`.

        Raises
        ------
        TransientStorageError
            If no thread could be started.
        """

        async def bounded() -> T:
            return await asyncio.wait_for(call(), seconds)

        loop = self._started()
        return asyncio.run_coroutine_threadsafe(bounded(), loop).result()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = _Loop()
                # A daemon, so that a server which never answers cannot keep the process alive.
                thread = threading.Thread(
                    target=_serve, args=(loop,), name="kvshelf-s3", daemon=True
                )
                if not try_to_start(thread):
                    loop.close()
                    text = f"not tried: no thread could be started, {THREAD_LIMIT}"
                    raise TransientStorageError(errno.EAGAIN, text, self._url)
                self._loop = loop
            return self._loop

    def close(self) -> None:
        """Stop the thread. The next request starts another. Idempotent."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


class _Loop(asyncio.SelectorEventLoop):
    """Takes one result at a time, so that closing the loop waits for threads that deliver one.

    These threads are obstore's. One that is still in Python when the process ends aborts it.
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
        loop.run_until_complete(_cancel_tasks())
    finally:
        loop.close()


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def limits_of(options: Mapping[str, Any]) -> tuple[float, float]:
    """Return the seconds for which a request waits for a connection, and then for an answer."""
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
    """Create obstore's client for the objects of `bucket` below `prefix`.

    obstore begins with each variable ``AWS_*`` that is called like one of its settings. What it is
    given replaces these: a function for keys replaces keys, token and roles, and `client_options`
    all of the connection. Only the checksum cannot be switched off again.

    Raises
    ------
    ConfigError
        If the options cannot be used.
    """
    from obstore.store import S3Store

    connect_seconds, read_seconds = limits_of(options)
    has_bucket = ENDPOINT_HAS_BUCKET in quirks
    endpoint = settings.endpoint if has_bucket else settings.endpoint_of(bucket)
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
        "virtual_hosted_style_request": has_bucket or settings.style == "virtual",
        "region": settings.region,
        "skip_signature": settings.keys is None,
        "request_payer": bool(options.get("requester_pays")),
        "conditional_put": "etag",
        # A store refuses to copy an object onto itself unless something changes.
        "copy_if_not_exists": "header: x-amz-metadata-directive: REPLACE",
        "unsigned_payload": False,
        "s3_express": False,
        "disable_bulk_delete": NO_DELETE_OBJECTS in quirks,
    }
    if checksum and NO_CHECKSUMS not in quirks:
        config["checksum_algorithm"] = "SHA256"
    backoff = {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(seconds=1),
        "base": 2,
    }
    retry_seconds = timedelta(seconds=_RETRY_SECONDS)
    retry = {"max_retries": _RETRIES, "retry_timeout": retry_seconds, "backoff": backoff}
    # Requests that are not signed need no keys.
    provide = settings.keys.provide if settings.keys is not None else dict
    try:
        # S3Store wants typed dictionaries; these values come from users.
        make: Any = S3Store
        return make(
            bucket,
            prefix=prefix or None,
            config=config,
            client_options=client,
            credential_provider=provide,
            retry_config=retry,
        )
    except Exception as exc:
        raise ConfigError(f"s3://{bucket} cannot be opened: {shorten(str(exc))}") from exc
