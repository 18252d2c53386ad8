"""Who has the path of a node server, and the first message of each side.

Owns the Unix socket at the path, the lock beside it, and the checks of both sides: the folder, the
other process's user, and the memory that the other process passes.

Contracts
---------
* Server and clients belong to one user. Both check the folder (its owner, and that no other user
  may enter it), and each gets the other's user from the system (SO_PEERCRED).
* Memory is taken from the other side only if its size can never change, and for reading only
  (:meth:`kvshelf.memory.arena.Arena.of`).
* Descriptors are closed on exec, and unrequested ones at once.
* One server has a path. Cleaners of ``/tmp`` may delete the lock and the socket of one that runs: a
  server takes no path where another answers, notices what was deleted (:meth:`Listener.in_place`),
  and removes only what it has made itself.

Threads
-------
Everything may be called from any thread; one thread at a time uses an object.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Sequence
from typing import Final

from kvshelf.errors import ConfigError, StorageError, UnavailableStorageError
from kvshelf.memory.arena import Arena
from kvshelf.server.protocol import MAX_GREETING, MalformedError, take_frames

_SCHEME: Final = "ipc://"
_LOCK_SUFFIX: Final = ".lock"
#: Longest path of a Unix socket, without the byte that ends it.
_MAX_PATH: Final = 107
#: Descriptors that are received with a greeting; those above the limit close at once.
_MAX_DESCRIPTORS: Final = 4
_UCRED: Final = struct.Struct("3i")


class SessionError(StorageError):
    """The other side of a connection cannot be trusted, or sent something unexpected."""


class TakenError(ConfigError):
    """Another server runs at this path."""


def socket_path(url: str) -> str:
    """Return the path of the socket that an ``ipc://`` URL names.

    Raises
    ------
    ConfigError
        If it is no such URL, or the path is not absolute or too long.
    """
    path = url.removeprefix(_SCHEME)
    if path == url or not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ConfigError(
            f"the server's URL is {url!r}: expected ipc:///absolute/path, a socket in a folder"
            " that only its user can enter"
        )
    nbytes = len(os.fsencode(path))
    if nbytes > _MAX_PATH:
        raise ConfigError(
            f"the path of the server's URL {url!r} has {nbytes} bytes: the system allows"
            f" {_MAX_PATH} for a socket"
        )
    return path


def check_folder(path: str) -> None:
    """Check that only this user can put a socket at `path`, or connect to one.

    Raises
    ------
    ConfigError
        If others own the folder or may enter it.
    UnavailableStorageError
        If it does not exist: the server makes it.
    """
    folder = os.path.dirname(path)
    try:
        status = os.lstat(folder)
    except FileNotFoundError as error:
        raise UnavailableStorageError(f"no node server has run at {path}: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"the folder of the node server's socket cannot be used: {error}"
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{folder} is no folder; the node server's socket is in one")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"the folder {folder} belongs to user {status.st_uid}, this process runs as user"
            f" {os.geteuid()}: the node server and its clients run as one user, in a folder of its"
        )
    if status.st_mode & 0o077:
        raise ConfigError(
            f"other users may enter the folder {folder} (mode {stat.S_IMODE(status.st_mode):o}):"
            " the node server's socket needs one of mode 700"
        )


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process that connected, or that listens."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(data)[1])


class Greeting:
    """The first message of the other side, as far as it was received.

    The descriptors that came with it are closed by :meth:`close`.
    """

    def __init__(self) -> None:
        self._received = bytearray()
        self._descriptors: list[int] = []

    def receive(self, connection: socket.socket) -> bytes | None:
        """Receive more; return the body of the message once it is whole.

        Raises
        ------
        SessionError
            If it is too long, more follows it, or too many descriptors came with it.
        OSError
            If the connection failed or has ended.
        """
        data, descriptors, flags, _ = socket.recv_fds(
            connection, MAX_GREETING, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        self._descriptors += descriptors
        self._received += data
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the other side closed the connection")
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > _MAX_DESCRIPTORS:
            raise SessionError("a greeting passes too many descriptors")
        try:
            bodies = list(take_frames(self._received, MAX_GREETING))
        except MalformedError as error:
            raise SessionError(f"a greeting is too long: {error}") from None
        if len(bodies) > 1 or (bodies and self._received):
            raise SessionError("more than a greeting was sent")
        return bodies[0] if bodies else None

    def map(self, nbytes: int) -> memoryview:
        """Map the memory that was passed, read-only; it is mapped as long as a view of it exists.

        Parameters
        ----------
        nbytes : int
            Its size, as the message states it. 0: none was to be passed.

        Raises
        ------
        SessionError
            If it cannot be used.
        """
        if len(self._descriptors) != (nbytes > 0):
            raise SessionError(
                f"{len(self._descriptors)} descriptors came with a memory of {nbytes} bytes"
            )
        if not nbytes:
            return memoryview(b"")
        try:
            return Arena.of(self._descriptors[0], nbytes).view
        except ValueError as error:
            raise SessionError(str(error)) from None
        except OSError as error:
            text = f"shared memory of {nbytes} bytes cannot be mapped: {error}"
            raise SessionError(text) from error

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def send_greeting(connection: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    """Send the first message of this side, and descriptors with it."""
    if descriptors:
        sent = socket.send_fds(connection, [data], descriptors)
        data = data[sent:]
    if data:
        connection.sendall(data)


class Listener:
    """The server's end: has the path, and takes connections.

    Parameters
    ----------
    path : str
        Its folder is made if it does not exist.

    Attributes
    ----------
    socket : socket
        Listens at `path`; not blocking.

    Raises
    ------
    TakenError
        If another server runs there.
    ConfigError
        If the folder is not this user's alone, or the system allows no socket there.
    UnavailableStorageError
        If the folder cannot be made.
    """

    def __init__(self, path: str) -> None:
        folder = os.path.dirname(path)
        with contextlib.suppress(FileExistsError, OSError):
            os.makedirs(os.path.dirname(folder), exist_ok=True)
            os.mkdir(folder, 0o700)
        check_folder(path)
        self._path, lock = path, path + _LOCK_SUFFIX
        #: What stands for this server, and an open file of each: as long as it is open, no other
        #: file gets its inode.
        self._files: dict[str, int] = {}
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        try:
            self._files[lock] = _locked(lock)
            if _answers(path):
                raise _taken(path)
            # No other server runs here: a server that was killed has left what is there.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self.socket.bind(path)
            self._files[path] = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            self.socket.listen(128)
        except (ConfigError, OSError) as error:
            self.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the node server cannot listen at {path}: {error}") from error

    def in_place(self) -> bool:
        """Whether lock and socket are still there, and this server's; False after the end."""
        return bool(self._files) and all(map(self._is_ours, self._files))

    def _is_ours(self, path: str) -> bool:
        try:
            return os.path.samestat(os.lstat(path), os.fstat(self._files[path]))
        except OSError:
            return False

    def close(self) -> None:
        """Stop listening and remove the socket if it is still this server's. Idempotent."""
        if self._path in self._files and self._is_ours(self._path):
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        while self._files:
            os.close(self._files.popitem()[1])
        self.socket.close()


def _locked(path: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise _taken(path.removesuffix(_LOCK_SUFFIX)) from error
    return fd


def _taken(path: str) -> TakenError:
    return TakenError(f"a node server runs already at {path}: stop it, or use another socket")


def _answers(path: str) -> bool:
    """Whether a process listens at a path, also one that is stopped or has a full queue."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)
        # A socket of another type gives EPROTOTYPE, one without a listener ECONNREFUSED.
        return trial.connect_ex(path) not in (errno.ENOENT, errno.ECONNREFUSED)
