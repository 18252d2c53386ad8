"""Objects on any filesystem of fsspec: memory, Google Cloud, Azure, SFTP and others.

Owns the translation between the differing behaviour of fsspec's filesystems and the backend
interface.

Contracts
---------
* Object stores publish with one put, which is atomic. On other filesystems an object is written to
  a temporary name and moved; whether that is atomic depends on the filesystem. A torn object fails
  verification when it is loaded.
* ``create`` probes before it writes, so two concurrent writers may both get CREATED, unless the
  filesystem and the store behind it have a put that does not replace. Equal names hold equal bytes,
  so the second write does no harm.
* An object is read whole, in one request. If its size has changed, it was replaced in the meantime:
  a retryable error, never a mixture of two versions.
* After a lost SSH connection, the next call connects again.
* The filesystem's own listing cache is off, so existence is never answered from it.
* Neither ``url``, ``repr`` nor messages show secrets of the URL or of the options.

fsspec is imported when the first backend is made. Several threads may call methods if the
filesystem itself allows it; asynchronous filesystems run on fsspec's own thread.
"""

from __future__ import annotations

import asyncio
import errno
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from kvshelf.backends.base import (
    BEYOND_NAMES,
    NOT_REGULAR,
    Backend,
    BytesLike,
    Deadlines,
    DeleteResults,
    ObjectInfo,
    Properties,
    Reader,
    StatResult,
    StatResults,
    WholeReader,
    WriteMode,
    WriteResult,
    check_folder,
    check_name,
    delete_each,
    endless_listing,
    is_name,
    probe,
    temporary_name,
)
from kvshelf.backends.options import check_names, parameters_of
from kvshelf.backends.oserrors import process_limit, storage_error
from kvshelf.errors import (
    ConfigError,
    NotRegularError,
    ObjectMissingError,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
    printable,
)
from kvshelf.urls import shown_url

#: Protocols whose put of a whole object is atomic.
_ATOMIC_PUT: Final = frozenset(
    ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "obs", "tos", "r2", "memory")
)
#: What to install for a protocol.
_PACKAGES: Final = {
    "sftp": "sshfs",
    "ssh": "sshfs",
}
#: What to do about a protocol for which fsspec has no filesystem.
_REMEDIES: Final = dict.fromkeys(
    ("nfs", "nfs4", "cephfs", "lustre", "cifs"), "mount it, and give its directory"
) | dict.fromkeys(("minio", "ceph"), "give s3:// with the storage option endpoint_url")
#: URLs of LMCache, for which fsspec has no filesystem.
_LMCACHE: Final = frozenset(
    ("fs", "infinistore", "lm", "mooncakestore", "redis", "redis-sentinel", "rediss", "valkey")
)
#: Protocols that keep one connection, which can be lost.
_SSH: Final = frozenset(("sftp", "ssh"))
#: Seconds to establish a connection, and seconds between keep-alive messages.
_SSH_OPTIONS: Final = {"connect_timeout": 10, "keepalive_interval": 15}
#: Seconds for the listing of one folder, which asynchronous filesystems collect in memory, and for
#: that of a folder of which only the folders inside are wanted.
_LISTING_SECONDS: Final = 60.0
_FOLDERS_SECONDS: Final = 10.0
_PROBES_AT_ONCE: Final = 64
#: Most characters of an answer of the filesystem that are shown.
_SHOWN_CHARACTERS: Final = 500

_SECRET_OPTION: Final = re.compile(
    r"key|secret|token|passw|passphrase|credential|sas|connection_string|auth|sign", re.IGNORECASE
)
#: What errors without a number are, by the names of their classes and of those these derive from.
_CODES: Final = (
    (re.compile(r"FileNotFoundError"), errno.ENOENT),
    (re.compile(r"PermissionError|SFTPPermissionDenied"), errno.EACCES),
    (
        re.compile(
            r"timeout|timedout|connect|disconnect|endpoint|throttl|slowdown|unavailable|sftpfailure"
            r"|channelopen|OSError",
            re.IGNORECASE,
        ),
        errno.EIO,
    ),
)
#: Class names of errors after which an SSH connection has to be replaced.
_LOST: Final = re.compile(r"connection|disconnect|channelopen|brokenpipe", re.IGNORECASE)


class GenericBackend(Backend):
    """Objects below a URL of an fsspec filesystem.

    Parameters
    ----------
    url : str
        Such as ``memory://name`` or ``gs://bucket/prefix``.
    storage_options : Mapping, optional
        Passed to the filesystem.

    Raises
    ------
    ConfigError
        If the protocol is unknown, its package missing, or the options are refused.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        options = dict(storage_options or {})
        parts = urlsplit(url)
        protocol = parts.scheme.lower()
        hidden = _secrets(options) | {parts.password or "", parts.query}
        hidden |= {field.partition("=")[2] for field in parts.query.split("&")}
        hidden |= {unquote(secret) for secret in hidden}
        hidden |= {quote(secret, safe="") for secret in hidden}
        self._secrets = sorted(filter(None, hidden), key=len, reverse=True)
        self.url = shown_url(url)
        self._protocol = protocol
        self._lock = threading.Lock()
        self._lost = False
        if protocol in _SSH:
            options = {**_SSH_OPTIONS, **options}
        self._connect_again = partial(self._connect, url, protocol, options)
        self._connected, root = self._connect_again()
        self._root = root.rstrip("/")
        self._atomic_put = protocol in _ATOMIC_PUT
        put = getattr(self._connected, "_pipe_file", self._connected.pipe_file)
        #: Whether there is a put that does not replace; False once a store has refused it.
        self._puts_new = self._atomic_put and "mode" in parameters_of(put)[0]
        remote = protocol not in ("memory", "file", "local")
        from fsspec.asyn import AsyncFileSystem

        fs = self._connected
        self._asynchronous = isinstance(fs, AsyncFileSystem) and not fs.asynchronous
        self._properties = Properties(
            filesystem=protocol,
            concurrency=32 if remote else 8,
            probe_cost=20e-3 if remote else 50e-6,
            temporaries=not self._atomic_put,
            # Includes the time to open a connection and the client library's own retries.
            deadlines=Deadlines(probe=5.0, read=15.0, write=15.0) if remote else Deadlines(),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _connect(self, url: str, protocol: str, options: dict[str, Any]) -> tuple[Any, str]:
        try:
            import fsspec
            from fsspec.dircache import DirCache
        except ImportError as exc:
            raise ConfigError(f"{self.url} needs fsspec: pip install fsspec") from exc
        try:
            names, takes_others = parameters_of(fsspec.get_filesystem_class(protocol).__init__)
            check_names(options, names, others=takes_others)
            # A separate instance, so that switching off its listing cache affects no other user.
            fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
        except ImportError as exc:
            package = _PACKAGES.get(protocol)
            hint = f"pip install {package}" if package else self._clean(str(exc))
            raise ConfigError(
                f"{self.url}: a package for {protocol}:// is missing: {hint}"
            ) from exc
        except (ValueError, TypeError, KeyError) as exc:
            hint = f" ({_REMEDIES[protocol]})" if protocol in _REMEDIES else ""
            if protocol in _LMCACHE:
                hint = (
                    f" ({protocol}:// is a URL of LMCache: docs/which-store.md says what to use"
                    " in its place, such as a directory or s3://)"
                )
            text = f"{self.url} cannot be opened: {self._clean(str(exc))}{hint}"
            raise ConfigError(text) from exc
        except Exception as exc:
            raise self._translate(exc, "opening the shelf", "") from exc
        if hasattr(fs, "dircache"):
            fs.dircache = DirCache(use_listings_cache=False)
        if protocol in _SSH and not getattr(fs, "async_impl", False):
            raise ConfigError(
                f"{self.url}: fsspec's own SFTP client mixes up the answers to concurrent threads:"
                f" pip install {_PACKAGES[protocol]}"
            )
        return fs, str(root)

    @property
    def _fs(self) -> Any:
        """The filesystem, reconnected if the connection was lost."""
        if self._lost:
            with self._lock:
                if self._lost:
                    self._connected = self._connect_again()[0]
                    self._lost = False
        return self._connected

    @property
    def properties(self) -> Properties:
        """What callers may rely on; never changes."""
        return self._properties

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    # ------------------------------------------------------------------------------------ errors

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return printable(text, _SHOWN_CHARACTERS)

    def _translate(
        self, exc: Exception, what: str, name: str, *, writing: bool = False
    ) -> StorageError:
        """Return the typed error for an exception of the filesystem."""
        if isinstance(exc, StorageError):
            return exc
        if self._protocol in _SSH and _LOST.search(type(exc).__name__):
            self._lost = True
        path = f"{self.url}/{name}" if name else self.url
        limit = process_limit(exc, what, path)
        if limit is not None:
            return limit
        text = self._clean(str(exc)) or type(exc).__name__
        if isinstance(exc, (IsADirectoryError, NotADirectoryError)):
            return NotRegularError(exc.errno or errno.EISDIR, f"{what} failed: {text}", path)
        names = " ".join(kind.__name__ for kind in type(exc).__mro__)
        code = getattr(exc, "errno", None) if isinstance(exc, OSError) else None
        code = code or next((code for kind, code in _CODES if kind.search(names)), None)
        if code is None:
            return PermanentStorageError(errno.EIO, f"{what} failed: {text}", path)
        return storage_error(OSError(code, text), what, path, writing=writing)

    # ------------------------------------------------------------------------------------ probes

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe many names, in parallel if the filesystem is asynchronous."""
        for name in names:
            check_name(name)
        from fsspec.asyn import sync

        try:
            fs = self._fs
        except StorageError as exc:
            return [exc] * len(names)
        if not self._asynchronous:
            return [self._answer(name, self._look(name)) for name in names]
        answers = sync(fs.loop, self._look_all, fs, [self._path(name) for name in names])
        return [self._answer(name, result) for name, result in zip(names, answers, strict=True)]

    async def _look_all(self, fs: Any, paths: Sequence[str]) -> Sequence[Any]:
        free = asyncio.Semaphore(_PROBES_AT_ONCE)

        async def look(path: str) -> Any:
            async with free:
                return await fs._info(path)

        return await asyncio.gather(*map(look, paths), return_exceptions=True)

    def _look(self, name: str) -> Any:
        try:
            return self._fs.info(self._path(name))
        except Exception as exc:  # noqa: BLE001
            return exc

    def _answer(self, name: str, found: Any) -> StatResult:
        if isinstance(found, FileNotFoundError):
            return None
        if isinstance(found, Exception):
            return self._translate(found, "probing", name)
        if isinstance(found, BaseException):
            raise found
        if not _is_file(found):
            return NOT_REGULAR
        size = found.get("size")
        if size is None:
            return PermanentStorageError(
                errno.EIO, "probing failed: the filesystem does not report sizes", self.url
            )
        return int(size)

    def info(self, name: str) -> ObjectInfo | None:
        """Size and times of one object."""
        entry = self._look(check_name(name))
        answer = self._answer(name, entry)
        if answer is None:
            return None
        if isinstance(answer, StorageError):
            raise answer
        return _object_info(name, entry)

    # ------------------------------------------------------------------------------------- reads

    def open(self, name: str) -> Reader:
        """Probe one object; the first read fetches it."""
        answer = probe(self, name)
        if answer is None:
            raise ObjectMissingError(
                errno.ENOENT, "opening failed: no such object", f"{self.url}/{name}"
            )
        if not isinstance(answer, int):
            raise self._not_regular(name)
        return WholeReader(answer, lambda: self._fetch(name, answer))

    def _not_regular(self, name: str) -> NotRegularError:
        text = "found a folder or link where an object (a regular file) was expected"
        return NotRegularError(errno.EISDIR, text, f"{self.url}/{name}")

    def _fetch(self, name: str, size: int) -> bytes:
        try:
            # One more byte detects an object that has grown.
            data = bytes(self._fs.cat_file(self._path(name), start=0, end=size + 1))
        except Exception as exc:
            raise self._translate(exc, "reading", name) from exc
        if len(data) != size:
            raise TransientStorageError(
                errno.ESTALE,
                f"reading failed: found {len(data)} bytes, expected {size}: the object was"
                " replaced meanwhile",
                f"{self.url}/{name}",
            )
        return data

    # ------------------------------------------------------------------------------------ writes

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish with one put, or with a temporary name and a move."""
        answer = probe(self, name)
        if answer is not None and mode == "create":
            return WriteResult.EXISTED
        data = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
        path = self._path(name)
        try:
            if answer is NOT_REGULAR:
                if self._fs.info(path).get("type") == "directory":
                    raise self._not_regular(name)
                # A move could follow the link.
                self._fs.rm_file(path)
            if self._atomic_put:
                self._put(path, data, create=mode == "create")
            else:
                self._move_into_place(path, data)
        except Exception as exc:
            # Another writer was faster, or the answer to our own first try was lost.
            if self._puts_new and mode == "create" and isinstance(self.stat([name])[0], int):
                return WriteResult.EXISTED
            error = self._translate(exc, "writing", name, writing=True)
            if isinstance(error, ObjectMissingError):
                error = TransientStorageError(errno.EIO, str(error.strerror), error.filename)
            raise error from exc
        return WriteResult.CREATED if answer is None else WriteResult.REPLACED

    def _put(self, path: str, data: bytes, *, create: bool) -> None:
        if create and self._puts_new:
            try:
                self._fs.pipe_file(path, data, mode="create")
                return
            except OSError as exc:
                if exc.errno != errno.ENOSYS:
                    raise
                self._puts_new = False
        self._fs.pipe_file(path, data)

    def _move_into_place(self, path: str, data: bytes) -> None:
        folder, _, base = path.rpartition("/")
        temporary = f"{folder}/{temporary_name(base)}"
        try:
            self._write_temporary(temporary, data)
            size = self._fs.info(temporary).get("size")
            if size != len(data):
                raise TransientStorageError(
                    errno.EIO,
                    f"the storage has {size} of {len(data)} bytes written; nothing was published",
                    self.url,
                )
            self._fs.mv(temporary, path)
        except BaseException:
            try:
                self._fs.rm_file(temporary)
            except Exception:  # noqa: BLE001, S110
                pass  # it may not exist; the first error is the one to report
            raise

    def _write_temporary(self, path: str, data: bytes) -> None:
        try:
            self._fs.pipe_file(path, data)
        except FileNotFoundError:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, data)

    # ---------------------------------------------------------------------------------- listings

    def list(
        self,
        prefix: str = "",
        *,
        hidden: bool = False,
        start: str | None = None,
        end: str | None = None,
        flat: bool = False,
    ) -> Iterator[ObjectInfo]:
        """Stream all objects below `prefix`, with one listing per folder."""
        first, last = start or "", end or BEYOND_NAMES
        pending = [check_folder(prefix)]
        while pending:
            for name, entry in self._entries(pending.pop(), _LISTING_SECONDS, hidden):
                base = name.rpartition("/")[2]
                if not first <= base <= last:
                    continue
                if _is_folder(entry):
                    pending += [] if flat else [name]
                elif _is_file(entry):
                    yield _object_info(name, entry)
            first, last = "", BEYOND_NAMES

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders directly below `prefix`."""
        return sorted(
            name.rpartition("/")[2]
            for name, entry in self._entries(check_folder(prefix), _FOLDERS_SECONDS)
            if _is_folder(entry)
        )

    def _ls(self, path: str, seconds: float) -> Sequence[Any]:
        fs = self._fs
        if not self._asynchronous:
            return list(fs.ls(path, detail=True))
        from fsspec.asyn import sync

        try:
            return list(sync(fs.loop, fs._ls, path, detail=True, timeout=seconds))
        except TimeoutError as exc:
            # Clients give up an answer that does not come before the time for a whole listing.
            if not self._atomic_put or seconds < _LISTING_SECONDS:
                raise
            raise PermanentStorageError(
                errno.EOVERFLOW, f"listing failed: {endless_listing(seconds)}", self.url
            ) from exc

    def _entries(
        self, folder: str, seconds: float, hidden: bool = False
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        path = self._path(folder)
        try:
            entries = self._ls(path, seconds)
        except FileNotFoundError:
            return
        except Exception as exc:
            raise self._translate(exc, "listing", folder) from exc
        start = path.strip("/")
        for entry in entries:
            full = str(entry.get("name", "")).strip("/")
            base = full.rpartition("/")[2]
            # Object stores also list the marker of the folder itself.
            if is_name(base) and full != start and (hidden or base[0] != "."):
                yield (f"{folder}/{base}" if folder else base), entry

    # ------------------------------------------------------------------------------ other changes

    def delete(self, names: Sequence[str]) -> DeleteResults:
        """Remove objects one by one."""
        return delete_each(names, self._delete)

    def _delete(self, name: str) -> bool:
        answer = probe(self, name)
        if answer is None:
            return False
        path = self._path(name)
        try:
            if answer is NOT_REGULAR and self._fs.info(path).get("type") == "directory":
                raise self._not_regular(name)
            self._fs.rm_file(path)
        except FileNotFoundError:
            return False
        except Exception as exc:
            raise self._translate(exc, "deleting", name, writing=True) from exc
        return True

    def close(self) -> None:
        """Do nothing: fsspec's filesystems close their connections themselves."""


# --------------------------------------------------------------------------------------- helpers


def _secrets(options: Mapping[str, Any]) -> set[str]:
    """Return the values of options that must not be shown."""
    secrets: set[str] = set()
    for key, value in options.items():
        if isinstance(value, Mapping):
            secrets |= _secrets(value)
        elif isinstance(value, str) and len(value) >= 4 and _SECRET_OPTION.search(str(key)):
            secrets.add(value)
    return secrets


def _is_folder(found: Mapping[str, Any]) -> bool:
    return found.get("type") == "directory" and not found.get("islink")


def _is_file(found: Mapping[str, Any]) -> bool:
    return found.get("type") == "file" and not found.get("islink")


def _object_info(name: str, found: Mapping[str, Any]) -> ObjectInfo:
    mtime = 0.0
    for key in ("mtime", "LastModified", "last_modified", "modified", "updated", "created"):
        value = found.get(key)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
            except ValueError:
                continue
        if isinstance(value, datetime):
            value = value.timestamp()
        if isinstance(value, (int, float)):
            mtime = float(value)
            break
    size = int(found.get("size") or 0)
    return ObjectInfo(name, size, mtime, held=size)
