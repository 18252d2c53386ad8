"""The messages between a node server and its clients, and how they lie in a stream.

A client has one Unix stream (``SOCK_STREAM``). Each message is a frame: its length (4 bytes,
little-endian) and a body in MessagePack. The client begins with :class:`Hello`, with which comes
the file descriptor of its memory, if it has any; the server answers :class:`Welcome`, with the
descriptor of its own memory, or :class:`Refused`. Then the client sends requests, and the server
answers each by one :class:`Reply` with the number of the request:

======================  ============================================================================
request                 value of the reply
======================  ============================================================================
:class:`Register`       None
:class:`Find`           for each name a size, :data:`IN_MEMORY`, or why there is none
:class:`Fetch`          for each name an offset in the server's memory, :data:`NO_ROOM`, or a fault
:class:`GiveBack`       there is no reply
:class:`Store`          a value of :class:`kvshelf.backends.base.WriteResult`
:class:`Read`           the bytes of an object
:class:`Delete`         for each name whether there was an object, or a fault
:class:`Stat`           as for :class:`Find`, from the storage alone
:class:`Touch`          a value of :class:`kvshelf.backends.base.Touched`
:class:`Lock`           there is no reply
:class:`EndSession`     there is no reply
======================  ============================================================================

Contracts
---------
* The decoder refuses what does not have the form or is over a limit. Nothing is unpickled.
* A change that an older peer would not understand changes :data:`PROTOCOL`.
* Any thread may call everything.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec

from kvshelf import errors
from kvshelf.backends.base import NOT_REGULAR, StatResult, StatResults
from kvshelf.format.invalid import Defect

#: Version of the protocol. Server and client must have the same.
PROTOCOL: Final = 10
#: Longest request, and names in it.
MAX_REQUEST: Final = 4 << 20
MAX_NAMES: Final = 8192
MAX_NAME: Final = 512
#: Longest greeting.
MAX_GREETING: Final = 64 << 10
#: Largest memory of a client: only what it writes to takes memory.
MAX_MEMORY: Final = 1 << 46

#: Answers that are no sizes: in the server's memory, missing, no regular file.
IN_MEMORY, MISSING, IRREGULAR = -1, -2, -3
#: The answer to a fetch where no memory may be lent now.
NO_ROOM: Final = -1

_LENGTH: Final = struct.Struct("<I")

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Names: TypeAlias = Annotated[list[Name], msgspec.Meta(max_length=MAX_NAMES)]
SessionName: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMORY)]


class MalformedError(ValueError):
    """A frame is no message of the protocol."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A message: an array of its type's name and its fields."""


class Fault(Message, frozen=True, tag="fault"):
    """An error, by the name of its class and its text.

    Attributes
    ----------
    kind : str
        Name of a class of :mod:`kvshelf.errors`, or of a :class:`kvshelf.format.invalid.Defect`.
    text : str
    """

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """Return the fault for an error; an error that is not kvshelf's becomes a transient one."""
        defects = [error.kind] if isinstance(error, errors.KVShelfError) else []
        for kind in (*defects, *(base.__name__ for base in type(error).__mro__)):
            if kind in _ERRORS or kind in _DEFECTS:
                return cls(kind, str(error)[:4096])
        text = f"the node server failed: {type(error).__name__}: {error}"
        return cls("TransientStorageError", text[:4096])

    def error(self) -> errors.KVShelfError:
        """Return the error as its own class, or a :class:`StorageError` if it is not known."""
        if self.kind in _DEFECTS:
            return errors.BadObjectError(Defect(self.kind), self.text)
        return _ERRORS.get(self.kind, errors.StorageError)(self.text)


_DEFECTS: Final = {defect.value for defect in Defect}
_ERRORS: Final = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.KVShelfError)
}
# It needs a defect.
del _ERRORS["BadObjectError"]


# ------------------------------------------------------------------------------- greetings


class Hello(Message, frozen=True, tag="hello"):
    """The first message of a client.

    Attributes
    ----------
    protocol : int
        :data:`PROTOCOL` of the client.
    memory_bytes : int
        Size of its memory, whose descriptor comes with the message. 0: it stores nothing.
    """

    protocol: int
    memory_bytes: Bytes


class Facts(Message, frozen=True):
    """Properties of the server's storage: fields of :class:`kvshelf.backends.base.Properties`.

    Attributes
    ----------
    url : str
        The storage's URL, without secrets.
    """

    url: str
    filesystem: str
    cache_seconds: float = 0.0
    concurrency: int = 8
    probe_cost: float = 10e-6
    read_only: bool = False
    renews: bool = False
    shared: bool = False
    versions: bool = False
    probe_seconds: float = 1.0
    read_seconds: float = 5.0
    write_seconds: float = 5.0
    bytes_per_second: float = 50e6


class Welcome(Message, frozen=True, tag="welcome"):
    """The server's answer to hello; the descriptor of its memory comes with it.

    Attributes
    ----------
    memory_bytes : int
        Size of the server's memory.
    chunk_size : int
        Tokens of a chunk, for clients that have no configuration of their own.
    facts : Facts
    """

    memory_bytes: Bytes
    chunk_size: int
    facts: Facts


class Refused(Message, frozen=True, tag="refused"):
    """The server serves this client no further: why."""

    text: str


# ------------------------------------------------------------------------------- requests


class Register(Message, frozen=True, tag="register"):
    """Register a namespace.

    Attributes
    ----------
    record : bytes
        The bytes of its ``namespace.json``.
    slug : str
        Readable beginning of its folder's name.
    is_volatile : bool
        Its objects are kept in the server's memory alone, and never published.
    """

    number: int
    record: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    slug: SessionName
    is_volatile: bool = False


class Find(Message, frozen=True, tag="find"):
    """Ask which objects can be loaded, from the server's memory or the storage."""

    number: int
    names: Names


class Fetch(Message, frozen=True, tag="fetch"):
    """Ask for objects in the server's memory, on loan until they are given back.

    Attributes
    ----------
    is_early : bool
        No request waits for them yet.
    ahead : list of str
        Objects that are asked for next. Those that are in memory now are lent with the others;
        the server begins to read the rest, and answers :data:`MISSING`.
    """

    number: int
    names: Names
    is_early: bool = False
    ahead: Names = []


class GiveBack(Message, frozen=True, tag="give back"):
    """End loans: each by the offset that the server answered."""

    offsets: Annotated[list[Bytes], msgspec.Meta(max_length=MAX_NAMES)]


class Store(Message, frozen=True, tag="store"):
    """Publish an object, or a marker of a hand-over, which has no bytes.

    Attributes
    ----------
    offset, nbytes : int
        Where its bytes are in the client's memory. They stay there until the reply.
    is_suspect : bool
        What is on the storage may be bad, see :meth:`kvshelf.shelf.view.ShelfView.publish`.
    """

    number: int
    name: Name
    offset: Bytes
    nbytes: Bytes
    is_suspect: bool = False


class Read(Message, frozen=True, tag="read"):
    """Ask for the bytes of an object, which the server has verified."""

    number: int
    name: Name


class Delete(Message, frozen=True, tag="delete"):
    """Delete objects, from the storage and the server's memory."""

    number: int
    names: Names


class Stat(Message, frozen=True, tag="stat"):
    """Probe objects and markers on the storage, past the server's memory."""

    number: int
    names: Names


class Touch(Message, frozen=True, tag="touch"):
    """Note that an object was used.

    Attributes
    ----------
    before : float
        As for :meth:`kvshelf.backends.base.Backend.touch`.
    """

    number: int
    name: Name
    before: float


class Lock(Message, frozen=True, tag="lock"):
    """Keep objects in memory for a request, read those that are not there, and count all as used.

    Attributes
    ----------
    session : str
        The request's name.
    """

    session: SessionName
    names: Names


class EndSession(Message, frozen=True, tag="end"):
    """End the locks of a request on some objects; on all of them if there are no names."""

    session: SessionName
    names: Names


Request: TypeAlias = (
    Register | Find | Fetch | GiveBack | Store | Read | Delete | Stat | Touch | Lock | EndSession
)


class Reply(Message, frozen=True, tag="reply"):
    """The answer to a request.

    Attributes
    ----------
    value
        What the request asks for, or None: it is `data`.
    data : bytes
    fault : Fault or None
        Why there is no answer.
    """

    number: int
    value: None | str | list[int | bool | Fault] = None
    data: bytes = b""
    fault: Fault | None = None


# ------------------------------------------------------------------------------- frames

_Decoded = TypeVar("_Decoded")

_encode: Final = msgspec.msgpack.Encoder().encode
REQUESTS: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
REPLIES: Final[msgspec.msgpack.Decoder[Reply | Refused]] = msgspec.msgpack.Decoder(Reply | Refused)
HELLO: Final = msgspec.msgpack.Decoder(Hello)
ANSWER: Final[msgspec.msgpack.Decoder[Welcome | Refused]] = msgspec.msgpack.Decoder(
    Welcome | Refused
)


def frame(message: Message) -> bytes:
    """Return the frame of a message."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


def decode(decoder: msgspec.msgpack.Decoder[_Decoded], body: bytes | bytearray) -> _Decoded:
    """Return the message in the body of a frame; raise MalformedError if there is none."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(str(error)) from None


def take_frames(stream: bytearray, limit: int = 1 << 32) -> Iterator[bytes]:
    """Remove whole frames from the beginning of received bytes, and yield their bodies.

    Raises
    ------
    MalformedError
        If a frame has more than `limit` bytes.
    """
    while len(stream) >= _LENGTH.size:
        (nbytes,) = _LENGTH.unpack_from(stream)
        if nbytes > limit:
            raise MalformedError(f"a message of {nbytes} bytes: expected at most {limit}")
        end = _LENGTH.size + nbytes
        if len(stream) < end:
            return
        body = bytes(memoryview(stream)[_LENGTH.size : end])
        del stream[:end]
        yield body


def sizes_of(answers: StatResults) -> list[int | bool | Fault]:
    """Return the answers of a probe as the value of a reply."""
    sizes: list[int | bool | Fault] = []
    for answer in answers:
        if isinstance(answer, errors.StorageError):
            sizes.append(Fault.of(answer))
        elif answer is None:
            sizes.append(MISSING)
        else:
            sizes.append(IRREGULAR if answer is NOT_REGULAR else answer)
    return sizes


def stat_result(answer: int | bool | Fault, size: int) -> StatResult:
    """Return what an answer says about an object that should have so many bytes."""
    if isinstance(answer, Fault):
        error = answer.error()
        if isinstance(error, errors.StorageError):
            return error
        return errors.TransientStorageError(answer.text)
    if answer == IN_MEMORY:
        return size
    if answer == MISSING:
        return None
    return NOT_REGULAR if answer == IRREGULAR else answer
