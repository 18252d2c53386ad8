"""The client of an S3 store that uses the obstore library.

Owns the way from s3fs's options to obstore: where credentials, region and endpoint come from, and
the timeouts and retries of a request.

Batches of probes, the parts of an object, and listings run on an event loop in one thread of the
client, started when first needed. Everything else runs on the caller's thread, without the GIL.
obstore calls the function that renews credentials on threads of its own.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from kvshelf.backends.base import ObjectInfo
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.s3_client import STREAM_BYTES, Body, Client, RangeError
from kvshelf.backends.s3_clock import Clock
from kvshelf.backends.s3_errors import NO_CREDENTIALS, codes_of, obstore_error, shorten
from kvshelf.backends.s3_options import (
    CONNECT_SECONDS,
    READ_SECONDS,
    endpoint_of,
    is_installed,
    mapping_of,
    verify_of,
)
from kvshelf.background import THREAD_LIMIT, try_to_start
from kvshelf.errors import ConfigError, StorageError, TransientStorageError

_RETRY_SECONDS: Final = 3.0
_RETRIES: Final = 5
_REFRESH: Final = timedelta(minutes=5)


class ObstoreClient(Client):
    """The objects of `bucket` below `prefix`.

    Parameters
    ----------
    bucket, prefix : str
    options : Mapping
        See :func:`~kvshelf.backends.s3.open_s3`.
    checksum : bool
        Send a SHA-256 of each object.

    Raises
    ------
    ConfigError
        If the options cannot be used, or there are no credentials.
    """

    library = "obstore"

    def __init__(
        self, bucket: str, prefix: str, options: Mapping[str, Any], *, checksum: bool
    ) -> None:
        self._bucket = bucket
        self._url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._secrets = [
            str(options[name]) for name in ("key", "secret", "token") if options.get(name)
        ]
        self._endpoint = endpoint_of(options)
        self._store = _make_store(bucket, prefix, options, self._endpoint, checksum)
        config = self._store.config
        server = config.get("endpoint") or f"https://s3.{config['region']}.amazonaws.com"
        self._clock = Clock(server, options)
        self._lock = threading.Lock()
        self._running: asyncio.AbstractEventLoop | None = None

    def error(self, exc: Exception, what: str, name: str, *, writing: bool = False) -> StorageError:
        """Return the typed error for an exception of obstore."""
        text = str(exc)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return obstore_error(
            exc,
            text,
            what,
            f"{self._url}/{name}" if name else self._url,
            bucket=self._bucket,
            endpoint=self._endpoint,
            writing=writing,
        )

    def head(self, name: str) -> ObjectInfo:
        """Make a HEAD request."""
        return _info(name, self._store.head(name))

    async def _head(self, name: str) -> ObjectInfo:
        return _info(name, await self._store.head_async(name))

    def get(
        self, name: str, start: int = 0, end: int | None = None, etag: str | None = None
    ) -> Body:
        """Make a GET request."""
        options: dict[str, Any] = {"if_match": etag} if etag else {}
        if end is not None:
            options["range"] = (start, end)
        try:
            found = self._store.get(name, options=options)
        except Exception as exc:
            if end is not None:
                _check_range(exc)
            raise
        return Body(int(found.meta["size"]), found.meta.get("e_tag"), _pieces(found), _nothing)

    async def _part(self, name: str, start: int, end: int) -> tuple[int, Any, Any]:
        try:
            found = await self._store.get_async(name, options={"range": (start, end)})
        except Exception as exc:
            _check_range(exc)
            raise
        return int(found.meta["size"]), found.stream(min_chunk_size=STREAM_BYTES), _nothing

    def _put(self, name: str, data: Any, *, create: bool) -> None:
        mode = "create" if create else "overwrite"
        self._store.put(name, data, mode=mode, use_multipart=False)

    def _codes(self, exc: Exception) -> set[str]:
        meant = {"AlreadyExistsError": "412", "NotSupportedError": "501"}
        return codes_of(str(exc)) | {meant.get(type(exc).__name__, "")}

    def delete(self, names: Sequence[str]) -> None:
        """Make a DeleteObjects request for each thousand."""
        self._store.delete(list(names))

    def _pages(
        self, prefix: str, count: int, after: str | None
    ) -> Callable[[], Awaitable[Sequence[ObjectInfo]]]:
        stream = self._store.list(prefix or None, offset=after, chunk_size=count)

        async def following() -> Sequence[ObjectInfo]:
            rows = await anext(stream, None)
            return [_info(str(row["path"]), row) for row in rows or ()]

        return following

    async def _folders(self, prefix: str) -> Sequence[str]:
        found = await self._store.list_with_delimiter_async(prefix or None)
        return [str(path).rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]

    def now(self) -> float | None:
        """Ask without credentials: obstore does not show the headers of an answer."""
        try:
            return self._clock.now()
        except OSError as exc:
            raise storage_error(exc, "asking for the time", self._url) from exc

    def _loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._running is None:
                loop = asyncio.new_event_loop()
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
        """Stop the event loop's thread."""
        with self._lock:
            loop, self._running = self._running, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


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


def _nothing() -> None:
    """Do nothing: dropping a body closes its connection."""


def _pieces(found: Any) -> Iterator[memoryview]:
    for piece in found.stream(min_chunk_size=STREAM_BYTES):
        yield memoryview(piece).cast("B")


def _check_range(exc: Exception) -> None:
    """Raise RangeError for an answer that is not the range which was asked for."""
    text = str(exc)
    if "range" in text.lower():
        raise RangeError(whole="non-partial" in text) from exc


def _info(name: str, row: Any) -> ObjectInfo:
    return ObjectInfo(name, int(row["size"]), row["last_modified"].timestamp())


def _make_store(
    bucket: str, prefix: str, options: Mapping[str, Any], endpoint: str | None, checksum: bool
) -> Any:
    """Create the obstore client of a bucket.

    Raises
    ------
    ConfigError
        If the options cannot be used, or there are no credentials.
    """
    try:
        from obstore.store import S3Store
    except ImportError as exc:
        raise ConfigError("s3:// needs obstore or s3fs: pip install 'kvshelf[s3]'") from exc

    client_kwargs = mapping_of(options, "client_kwargs")
    config_kwargs = mapping_of(options, "config_kwargs")
    config: dict[str, Any] = {}
    client: dict[str, Any] = {
        "connect_timeout": timedelta(
            seconds=float(config_kwargs.get("connect_timeout", CONNECT_SECONDS))
        ),
        "read_timeout": timedelta(seconds=float(config_kwargs.get("read_timeout", READ_SECONDS))),
        # Of a whole request. Bodies are read as they arrive; read_timeout bounds each wait.
        "timeout": timedelta(hours=1),
    }
    if endpoint is not None:
        config["endpoint"] = endpoint
        client["allow_http"] = endpoint.startswith("http://")
    style = mapping_of(config_kwargs, "s3").get("addressing_style", "auto")
    if style not in ("auto", "path", "virtual"):
        raise ConfigError(
            f"storage_options: addressing_style is {style!r}; expected auto, path or virtual"
        )
    if style == "virtual":
        config["virtual_hosted_style_request"] = True
        if endpoint is not None:
            scheme, _, host = endpoint.partition("://")
            config["endpoint"] = f"{scheme}://{bucket}.{host}"
    verify = verify_of(client_kwargs)
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(verify, (str, os.PathLike)):
        try:
            with open(verify, "rb") as file:
                client["root_certificate"] = file.read()
        except OSError as exc:
            raise ConfigError(
                f"the CA bundle {os.fspath(verify)} cannot be read ({exc.strerror}): correct"
                " client_kwargs.verify in storage_options, or AWS_CA_BUNDLE"
            ) from exc
    if checksum:
        config["checksum_algorithm"] = "SHA256"
    if options.get("requester_pays"):
        config["request_payer"] = True
    session = _botocore_session(options.get("profile"))
    config["region"] = (
        client_kwargs.get("region_name")
        or config_kwargs.get("region_name")
        or os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
        or (session.get_config_variable("region") if session is not None else None)
        or "us-east-1"
    )
    provider = None
    if options.get("anon") or config_kwargs.get("signature_version") == "unsigned":
        config["skip_signature"] = True
    elif options.get("key") or options.get("secret"):
        if not (options.get("key") and options.get("secret")):
            raise ConfigError("storage_options: key and secret belong together; found one of them")
        config["access_key_id"] = options["key"]
        config["secret_access_key"] = options["secret"]
        if options.get("token"):
            config["session_token"] = options["token"]
    elif session is not None:
        provider = _credentials(session)
    try:
        # S3Store wants typed dictionaries; these values come from users.
        make: Any = S3Store
        return make(
            bucket,
            prefix=prefix or None,
            config=config,
            client_options=client,
            credential_provider=provider,
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


def _botocore_session(profile: Any) -> Any:
    """Return a botocore session, for configuration files, roles and single sign-on; or None."""
    if not is_installed("botocore"):
        if profile:
            raise ConfigError("storage_options: profile needs botocore: pip install botocore")
        return None
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    try:
        session = Session(profile=profile)
        # Raises if the profile does not exist.
        session.get_scoped_config()
    except BotoCoreError as exc:
        raise ConfigError(f"AWS configuration: {exc}") from exc
    return session


def _credentials(session: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that returns current credentials from botocore's chain."""
    from botocore.exceptions import BotoCoreError

    try:
        found = session.get_credentials()
    except BotoCoreError as exc:
        # The last provider of the chain asks the instance metadata service, over the network.
        raise ConfigError(f"{NO_CREDENTIALS} ({type(exc).__name__})") from exc
    if found is None:
        raise ConfigError(NO_CREDENTIALS)

    def provide() -> dict[str, Any]:
        now = found.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + _REFRESH,
        }

    return provide
