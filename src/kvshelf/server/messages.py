"""The messages between the node server and its clients.

Owns their types, their limits and their encoding. The protocol has two connections for each client:

* The *session*, a Unix socket (:mod:`kvshelf.server.session`). The client says :class:`Hello`, the
  server answers :class:`Welcome` or :class:`Refused`, and each passes the file descriptor of its
  shared memory. There are no other messages. The end of the connection is the end of the session.
* ZMQ, DEALER to ROUTER, on ``ipc://``. Replies go to the routing id that is the client's id.
  Requests come from there, or from that id with :data:`SENDER` behind it: a client may send and
  receive on different threads, and thus through different sockets.

A request is one frame: token (16 bytes), number (8 bytes, little-endian), body. A reply is one
frame: number, body. Bodies are MessagePack. Each request gets one reply, with its number:

========================  ===========================================
request                   reply
========================  ===========================================
:class:`Ping`             :class:`Done`
:class:`Register`         :class:`Done`
:class:`Find`             :class:`FoundSizes`
:class:`LookUpChunks`     :class:`LookedUp`
:class:`Fetch`            :class:`Fetched`, once or several times: one outcome for each object
:class:`Store`            :class:`Stored`
:class:`Call`             :class:`Result`
:class:`Release`          none
:class:`EndSession`       none
========================  ===========================================

Every request may be answered by a :class:`Fault`.

Contracts
---------
* Whatever does not have the form or is over a limit is refused by the decoder, before anything
  else sees it. Nothing is unpickled.
* A change that an older peer would not understand changes :data:`PROTOCOL`.

Threads
-------
Everything is safe to call from any thread.
"""

from __future__ import annotations

import struct
from itertools import islice
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, cast

import msgspec

from kvshelf import errors
from kvshelf.backends.base import WriteMode
from kvshelf.format.invalid import Defect

#: Version of the protocol. Server and client must have the same.
PROTOCOL: Final = 9

#: Bytes of a client's id and of a session's token; both are random.
ID_BYTES: Final = 16
TOKEN_BYTES: Final = 16
#: What the routing id of a socket that only sends has behind the client's id.
SENDER: Final = b">"

#: Largest request and reply, and the most bytes of an object inside one.
MAX_REQUEST: Final = 4 << 20
MAX_REPLY: Final = 8 << 20
MAX_INLINE: Final = 1 << 20
#: Largest segment of a client. It takes memory as the client uses it.
MAX_SEGMENT: Final = 32 << 30

#: Most names in one request; the sender splits longer lists.
MAX_NAMES: Final = 8192
MAX_NAME: Final = 512
#: Most answers that one client may wait for: one for each request, for each object of a fetch; and
#: most bytes of its requests that wait for them. A server that lets them become so many hangs.
MAX_OPEN: Final = 4 * MAX_NAMES
MAX_OPEN_BYTES: Final = 64 << 20

_MAX_BYTES: Final = 1 << 48

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Names: TypeAlias = Annotated[list[Name], msgspec.Meta(max_length=MAX_NAMES)]
Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MAX_BYTES)]
#: Sizes in bytes, one for each name.
Sizes: TypeAlias = Annotated[list[Bytes], msgspec.Meta(max_length=MAX_NAMES)]
SessionName: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
U64: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Leases: TypeAlias = Annotated[list[U64], msgspec.Meta(max_length=MAX_NAMES)]

StoreResult: TypeAlias = Literal["created", "existed", "replaced"]

Method: TypeAlias = Literal[
    "delete",
    "entries",
    "folders",
    "info",
    "list",
    "read",
    "set_aside",
    "space",
    "stat",
    "touch",
    "write",
]
Argument: TypeAlias = (
    bool | int | float | Annotated[str, msgspec.Meta(max_length=4096)] | Names | None
)

#: Answers of :class:`FoundSizes` that are no sizes.
MISSING: Final = -1
NOT_REGULAR: Final = -2
UNKNOWN: Final = -3


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
        """Return the fault for an error; other errors than kvshelf's become transient ones."""
        own = [error.kind] if isinstance(error, errors.KVShelfError) else []
        for kind in (*own, *(base.__name__ for base in type(error).__mro__)):
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


# ------------------------------------------------------------------------------- session


class Hello(Message, frozen=True, tag="hello"):
    """The first message of a client; the segment's file descriptor comes with it.

    Attributes
    ----------
    protocol : int
        :data:`PROTOCOL` of the client.
    client : bytes
        The id that the client has drawn for this session.
    segment_bytes : int
        Size of the client's segment: a memfd, sealed against changes of its size. 0: none.
    """

    protocol: int
    client: Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    segment_bytes: Bytes


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
    sets_aside: bool = False
    renews: bool = False
    shared: bool = False
    versions: bool = False
    probe_seconds: float = 1.0
    read_seconds: float = 5.0
    write_seconds: float = 5.0
    bytes_per_second: float = 50e6


class Welcome(Message, frozen=True, tag="welcome"):
    """The server's answer to hello; the file descriptor of its arena comes with it.

    Attributes
    ----------
    token : bytes
        Every request of this session begins with it.
    arena_bytes : int
        Size of the arena.
    slots : int
        The arena begins with this many generations (uint64, native byte order), one for each slot.
    lease_seconds : float
        How long a lease lives.
    chunk_size : int
        Tokens of a chunk, for clients that have no configuration of their own.
    facts : Facts
    """

    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    arena_bytes: Bytes
    slots: Bytes
    lease_seconds: float
    chunk_size: int
    facts: Facts


class Refused(Message, frozen=True, tag="refused"):
    """The server takes no session with this client."""

    text: str


# ------------------------------------------------------------------------------- requests


class Ping(Message, frozen=True, tag="ping"):
    """Ask for a sign of life."""


class Register(Message, frozen=True, tag="register"):
    """Register a namespace, by the bytes of its ``namespace.json``."""

    record: Annotated[bytes, msgspec.Meta(max_length=MAX_INLINE)]


class Find(Message, frozen=True, tag="find"):
    """Ask which objects exist, in the memory tier or on the shelf.

    Attributes
    ----------
    names : list of str
        With the namespace's folder, as on the storage.
    sizes : list of int
        Expected sizes in bytes; empty: not known.
    """

    names: Names
    sizes: Sizes


class LookUpChunks(Message, frozen=True, tag="lookup"):
    """Ask how many leading chunks exist; lease them until the session ends, or for a while.

    Attributes
    ----------
    session : str
        A name of the client's choice: a request's id.
    names : list of str
        The objects of all chunks, in the order of the prompt: one list has one bound.
    counts : list of int
        How many of them each chunk has.
    """

    session: SessionName
    names: Annotated[list[Name], msgspec.Meta(max_length=MAX_OPEN)]
    counts: Sizes

    @property
    def chains(self) -> list[list[str]]:
        """The objects of each chunk."""
        names = iter(self.names)
        return [list(islice(names, count)) for count in self.counts]


class Fetch(Message, frozen=True, tag="fetch"):
    """Ask for objects in the arena, leased to the client until it releases them.

    Attributes
    ----------
    session : str
        The session of an earlier lookup, of this client or another one: its leases of these objects
        end. Or a new one.
    names : list of str
    sizes : list of int
        Size of each object in bytes.
    """

    session: SessionName
    names: Names
    sizes: Sizes


class Release(Message, frozen=True, tag="release"):
    """End leases: the client has stopped using their memory."""

    leases: Leases


class EndSession(Message, frozen=True, tag="end"):
    """End the leases of lookups under this name."""

    session: SessionName


class Store(Message, frozen=True, tag="store"):
    """Publish an object whose bytes lie in the client's segment.

    Attributes
    ----------
    name : str
    offset, nbytes : int
        Where the bytes are, in the segment. They stay there until the reply.
    mode : str
        As in :meth:`kvshelf.backends.base.Backend.write`.
    memory_only : bool
        Keep the object in the memory tier only. Its name is no name of an object of the format.
    checksum : int or None
        64-bit xxh3 of the bytes, for objects that carry no hash of their own.
    parent : str
        Name of the object before it in its prompt, for objects that do not say so themselves:
        memory keeps the beginnings of prompts longest. Empty: not known.
    """

    name: Name
    offset: Bytes
    nbytes: Bytes
    mode: WriteMode = "create"
    memory_only: bool = False
    checksum: U64 | None = None
    parent: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""


class Call(Message, frozen=True, tag="call"):
    """Call a method of the server's backend.

    Attributes
    ----------
    method : str
    args : list
        As the method of :class:`kvshelf.backends.base.Backend` takes them, without bytes.
    data : bytes
        What is to be written.
    """

    method: Method
    args: Annotated[list[Argument], msgspec.Meta(max_length=16)]
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_INLINE)] = b""


Request: TypeAlias = (
    Ping | Register | Find | LookUpChunks | Fetch | Release | EndSession | Store | Call
)

# ------------------------------------------------------------------------------- replies


class Done(Message, frozen=True, tag="done"):
    """The request had no other answer."""


class FoundSizes(Message, frozen=True, tag="found"):
    """Which objects exist.

    Attributes
    ----------
    answers : list of int
        For each name the size in bytes, or :data:`MISSING`, :data:`NOT_REGULAR` or
        :data:`UNKNOWN`.
    fault : Fault or None
        Why answers are unknown: the first such error.
    """

    answers: list[int]
    fault: Fault | None = None


class LookedUp(Message, frozen=True, tag="looked up"):
    """The number of leading chunks that exist and are leased."""

    chunks: int


class Ready(Message, frozen=True, tag="ready"):
    """One object of a :class:`Fetch` lies in the arena.

    Attributes
    ----------
    index : int
        Its index in the request.
    offset, nbytes : int
        Where it lies: bytes from the arena's beginning.
    slot, generation : int
        The object's bytes are unchanged as long as `slot` has this generation.
    lease : int
        What to release.
    """

    index: int
    offset: int
    nbytes: int
    slot: int
    generation: int
    lease: int


class Failed(Message, frozen=True, tag="failed"):
    """One object of a :class:`Fetch` could not be leased."""

    index: int
    fault: Fault


class Fetched(Message, frozen=True, tag="fetched"):
    """Some outcomes of a :class:`Fetch`. Others may follow, until each object has one."""

    outcomes: list[Ready | Failed]


class Stored(Message, frozen=True, tag="stored"):
    """An object exists now; `result` is a value of :class:`kvshelf.backends.base.WriteResult`."""

    result: StoreResult


class Result(Message, frozen=True, tag="result"):
    """What a :class:`Call` returned."""

    value: Any


Reply: TypeAlias = Done | FoundSizes | LookedUp | Fetched | Stored | Result | Fault

# ------------------------------------------------------------------------------- frames

_REQUEST_HEAD: Final = struct.Struct(f"<{TOKEN_BYTES}sQ")
_REPLY_HEAD: Final = struct.Struct("<Q")

_Decoded = TypeVar("_Decoded")

_encode: Final = msgspec.msgpack.Encoder().encode
_requests: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
_replies: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)
_greetings: Final = msgspec.msgpack.Decoder(Hello)
_answers: Final[msgspec.msgpack.Decoder[Welcome | Refused]] = msgspec.msgpack.Decoder(
    Welcome | Refused
)


class MalformedError(ValueError):
    """A frame is no message of the protocol."""


def _decode(decoder: msgspec.msgpack.Decoder[_Decoded], data: bytes | memoryview) -> _Decoded:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(str(error)) from None


def encode_request(token: bytes, number: int, request: Request) -> bytes:
    """Return the frame of a request.

    Raises
    ------
    ValueError
        If the frame would be longer than :data:`MAX_REQUEST`.
    """
    frame = _REQUEST_HEAD.pack(token, number) + _encode(request)
    if len(frame) > MAX_REQUEST:
        raise ValueError(
            f"a {type(request).__name__} of {len(frame)} bytes: at most {MAX_REQUEST} can be sent"
        )
    return frame


def read_request_head(frame: memoryview) -> tuple[bytes, int]:
    """Return token and number of a request.

    Raises
    ------
    MalformedError
        If the frame is too short.
    """
    if len(frame) < _REQUEST_HEAD.size:
        raise MalformedError(f"a request of {len(frame)} bytes")
    return cast("tuple[bytes, int]", _REQUEST_HEAD.unpack_from(frame))


def decode_request(frame: memoryview) -> Request:
    """Return the request in a frame.

    Raises
    ------
    MalformedError
        If it is no request, or over a limit.
    """
    return _decode(_requests, frame[_REQUEST_HEAD.size :])


def encode_reply(number: int, reply: Reply) -> bytes:
    """Return the frame of a reply, of a :class:`Fault` if it would be over :data:`MAX_REPLY`."""
    frame = _REPLY_HEAD.pack(number) + _encode(reply)
    if len(frame) > MAX_REPLY:
        text = f"the answer has {len(frame)} bytes: at most {MAX_REPLY} can be sent"
        return _REPLY_HEAD.pack(number) + _encode(Fault("PermanentStorageError", text))
    return frame


def decode_reply(frame: memoryview) -> tuple[int, Reply]:
    """Return number and reply.

    Raises
    ------
    MalformedError
        If the frame is no reply.
    """
    if len(frame) < _REPLY_HEAD.size:
        raise MalformedError(f"a reply of {len(frame)} bytes")
    return _REPLY_HEAD.unpack_from(frame)[0], _decode(_replies, frame[_REPLY_HEAD.size :])


def encode_greeting(message: Hello | Welcome | Refused) -> bytes:
    """Return the bytes of a message of the session socket."""
    return _encode(message)


def decode_hello(data: bytes) -> Hello:
    """Return a client's first message.

    Raises
    ------
    MalformedError
        If it is no hello.
    """
    return _decode(_greetings, data)


def decode_answer(data: bytes) -> Welcome | Refused:
    """Return the server's answer to a hello.

    Raises
    ------
    MalformedError
        If it is neither a welcome nor a refusal.
    """
    return _decode(_answers, data)
