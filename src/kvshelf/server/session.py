"""The session socket: which processes may connect to the node server; exchange of memory.

Owns the Unix socket ``<path>.session`` beside the ZMQ socket ``<path>``, the names of both, the
checks of both sides, and the passing of file descriptors. The messages are in
:mod:`kvshelf.server.messages`.

Contracts
---------
* Server and clients belong to one user. Both check the folder (its owner, and that no other user
  may enter it), and each gets the other's user from the system (SO_PEERCRED).
* Memory is taken from the other side only if its size can never change, and for reading only
  (:meth:`kvshelf.memory.arena.Arena.of`).
* Descriptors are closed on exec, and unrequested ones at once.
* One server has a path. Cleaners of ``/tmp`` may delete the lock and the sockets of one that runs:
  a server takes no path where another answers, notices what was deleted
  (:meth:`Listener.in_place`), and removes only what it has made itself.

Threads
-------
Everything may be called from any thread; one thread at a time uses an object.
"""

from __future__ import annotations

import array
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
from kvshelf.server.messages import (
    Hello,
    MalformedError,
    Refused,
    Welcome,
    decode_answer,
    decode_hello,
    encode_greeting,
)

_SCHEME: Final = "ipc://"
_SUFFIX: Final = ".session"
_LOCK_SUFFIX: Final = ".lock"
#: Longest path of a Unix socket, without the byte that ends it.
_MAX_PATH: Final = 107

#: Longest message of a session socket.
_MAX_GREETING: Final = 64 << 10
#: Descriptors that are received with one message; those above the limit close at once.
_MAX_DESCRIPTORS: Final = 4

_UCRED: Final = struct.Struct("3i")


class SessionError(StorageError):
    """The other side of a session socket cannot be trusted, or sent something unexpected."""


def socket_path(url: str) -> str:
    """Return the path of the ZMQ socket that an ``ipc://`` URL names.

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
    most = _MAX_PATH - len(_SUFFIX)
    if len(os.fsencode(path)) > most:
        raise ConfigError(
            f"the path of the server's URL {url!r} has {len(os.fsencode(path))} bytes: the"
            f" system allows {most} for a socket"
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
        found = os.lstat(folder)
    except FileNotFoundError as error:
        raise UnavailableStorageError(f"no node server has run at {path}: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"the folder of the node server's socket cannot be used: {error}"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{folder} is no folder; the node server's socket is in one")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"the folder {folder} belongs to user {found.st_uid}, this process runs as user"
            f" {os.geteuid()}: the node server and its clients run as one user, in a folder of its"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"other users may enter the folder {folder} (mode {stat.S_IMODE(found.st_mode):o}):"
            " the node server's socket needs one of mode 700"
        )


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process that connected, or that listens."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(data)[1])


# ---------------------------------------------------------------------------------- messages


def _send(connection: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    connection.sendmsg([data], passed if descriptors else [])


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return one message, and the descriptors that came with it, for the caller to close.

    Raises
    ------
    SessionError
        If the message is cut off, or there are too many descriptors; all are closed.
    OSError
        As :meth:`socket.socket.recvmsg`.
    """
    space = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, flags, _ = connection.recvmsg(_MAX_GREETING, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            usable = len(content) - len(content) % descriptors.itemsize
            descriptors.frombytes(content[:usable])
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        close_all(descriptors)
        raise SessionError("a greeting is too long, or passes too many descriptors")
    return data, list(descriptors)


def _mapped(fd: int, nbytes: int) -> memoryview:
    """Map memory of the other side; it is mapped as long as a view of it exists."""
    try:
        return Arena.of(fd, nbytes).view
    except ValueError as error:
        raise SessionError(str(error)) from None
    except OSError as error:
        raise SessionError(f"shared memory of {nbytes} bytes cannot be mapped: {error}") from error


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)


# ---------------------------------------------------------------------------------- server


class TakenError(ConfigError):
    """Another server runs at this path."""


class Listener:
    """The server's end: has the path, and takes connections of the same user.

    Parameters
    ----------
    path : str
        Path of the ZMQ socket. Its folder is made if it does not exist.

    Attributes
    ----------
    requests : socket
        Listens at `path`, for ZMQ. The caller that takes it closes it.

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
        lock = path + _LOCK_SUFFIX
        #: What stands for this server, and an open file of each: as long as it is open, no other
        #: file gets its inode.
        self._files: dict[str, int] = {}
        self._sockets: list[socket.socket] = []
        try:
            self._files[lock] = _locked(lock)
            for name in (path, path + _SUFFIX):
                if _answers(name):
                    raise _taken(path)
            # No other server runs here: a server that was killed has left what is there.
            self.requests = self._listen(path, socket.SOCK_STREAM)
            self._socket = self._listen(path + _SUFFIX, socket.SOCK_SEQPACKET)
        except (ConfigError, OSError) as error:
            self.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the node server cannot listen at {path}: {error}") from error

    def _listen(self, path: str, kind: int) -> socket.socket:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listening = socket.socket(socket.AF_UNIX, kind)
        self._sockets.append(listening)
        listening.bind(path)
        self._files[path] = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        listening.setblocking(False)
        listening.listen(128)
        return listening

    def in_place(self) -> bool:
        """Whether lock and sockets are still there, and this server's; False after the end."""
        return bool(self._files) and all(map(self._is_ours, self._files))

    def _is_ours(self, path: str) -> bool:
        try:
            return os.path.samestat(os.lstat(path), os.fstat(self._files[path]))
        except OSError:
            return False

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`accept` has something."""
        return self._socket.fileno()

    def accept(self) -> socket.socket | None:
        """Return the next connection of this user; None if there is none, or it was refused.

        Raises
        ------
        OSError
            If the system has no descriptors left.
        """
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError, InterruptedError):
            return None
        connection.setblocking(False)
        try:
            if peer_user(connection) == os.geteuid():
                return connection
            refuse(connection, "the node server serves processes of its own user only")
        except OSError:
            pass
        connection.close()
        return None

    def close(self) -> None:
        """Stop listening and remove the sockets that are still this server's. Idempotent."""
        for path, fd in self._files.items():
            if not path.endswith(_LOCK_SUFFIX) and self._is_ours(path):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            os.close(fd)
        self._files.clear()
        for listening in self._sockets:
            listening.close()


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
        # A socket of the other type gives EPROTOTYPE, one without a listener ECONNREFUSED.
        return trial.connect_ex(path) not in (errno.ENOENT, errno.ECONNREFUSED)


def receive_hello(connection: socket.socket, most: int) -> tuple[Hello, memoryview] | None:
    """Read what a client says first, and map its segment.

    Parameters
    ----------
    connection : socket
        Not blocking.
    most : int
        Largest segment allowed, in bytes.

    Returns
    -------
    tuple of Hello and memoryview, or None
        None: it has said nothing yet.

    Raises
    ------
    SessionError
        If it is no hello, or its segment cannot be used; what was passed is closed.
    OSError
        If the connection has ended.
    """
    try:
        data, descriptors = _receive(connection)
    except (BlockingIOError, InterruptedError):
        return None
    try:
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the client has gone")
        hello = decode_hello(data)
        if len(descriptors) != (hello.segment_bytes > 0):
            raise SessionError(
                f"{len(descriptors)} descriptors came with a segment of {hello.segment_bytes} bytes"
            )
        if not descriptors:
            return hello, memoryview(b"")
        nbytes = hello.segment_bytes
        if nbytes > most:
            raise SessionError(
                f"shared memory of {nbytes} bytes was offered: at most {most} are taken"
            )
        return hello, _mapped(descriptors[0], nbytes)
    except MalformedError as error:
        raise SessionError(f"a client's first message is no hello: {error}") from None
    finally:
        close_all(descriptors)


def welcome(connection: socket.socket, message: Welcome, arena_fd: int) -> None:
    """Answer a hello, and pass the arena.

    Raises
    ------
    OSError
        If the connection has ended.
    """
    _send(connection, encode_greeting(message), [arena_fd])


def refuse(connection: socket.socket, text: str) -> None:
    """Answer a client with why it gets no session. Best effort."""
    with contextlib.suppress(OSError):
        _send(connection, encode_greeting(Refused(text[:4096])), [])


# ---------------------------------------------------------------------------------- client


def connect(
    path: str, hello: Hello, segment_fd: int | None, seconds: float
) -> tuple[socket.socket, Welcome, memoryview]:
    """Begin a session with the server.

    Parameters
    ----------
    path : str
        Path of the ZMQ socket.
    hello : Hello
    segment_fd : int or None
        The client's segment.
    seconds : float
        How long to wait for the server.

    Returns
    -------
    connection : socket
        Not blocking. Readable when the session has ended.
    message : Welcome
    arena : memoryview
        The server's memory, read-only.

    Raises
    ------
    ConfigError
        If the folder of the socket is not this user's alone.
    UnavailableStorageError
        If no server listens there, or it did not answer in time.
    SessionError
        If the server refused, or its answer cannot be used.
    """
    check_folder(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptors: list[int] = []
    try:
        connection.settimeout(seconds)
        connection.connect(path + _SUFFIX)
        if peer_user(connection) != os.geteuid():
            raise SessionError(f"the server at {path} runs as user {peer_user(connection)}")
        # A server that refuses at once does not wait for this, and its answer comes all the same.
        with contextlib.suppress(BrokenPipeError):
            _send(connection, encode_greeting(hello), [] if segment_fd is None else [segment_fd])
        try:
            data, descriptors = _receive(connection)
        except ConnectionResetError:
            data, descriptors = _receive(connection)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        answer = decode_answer(data)
        if isinstance(answer, Refused):
            raise SessionError(f"the node server at {path} refused this client: {answer.text}")
        if len(descriptors) != 1:
            raise SessionError(f"the node server at {path} passed {len(descriptors)} descriptors")
        arena = _mapped(descriptors[0], answer.arena_bytes)
        if answer.slots * 8 > len(arena):
            raise SessionError(f"{answer.slots} slots in an arena of {len(arena)} bytes")
        connection.setblocking(False)
    except MalformedError as error:
        connection.close()
        raise SessionError(
            f"what listens at {path} is no node server of this version: {error}"
        ) from None
    except SessionError:
        connection.close()
        raise
    except OSError as error:
        connection.close()
        raise UnavailableStorageError(f"no node server answers at {path}: {error}") from error
    finally:
        close_all(descriptors)
    return connection, answer, arena


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side has ended the session, or says more than its greeting."""
    try:
        _, descriptors = _receive(connection)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
    close_all(descriptors)
    return True
