"""Messages survive their encoding; whatever is no message, or over a limit, is refused."""

from __future__ import annotations

import struct
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf import errors
from kvshelf.format.invalid import Defect
from kvshelf.server import messages
from kvshelf.server.interface import ServerClient
from kvshelf.server.messages import (
    Call,
    Done,
    EndSession,
    Facts,
    Failed,
    Fault,
    Fetch,
    Fetched,
    Find,
    FoundSizes,
    Hello,
    LookedUp,
    LookUpChunks,
    MalformedError,
    Ping,
    Ready,
    Refused,
    Register,
    Release,
    Reply,
    Request,
    Result,
    Store,
    Stored,
    Welcome,
)

TOKEN = bytes(range(16))
REQUESTS: list[Request] = [
    Ping(),
    Register(b"{}"),
    Find(["a/b"], []),
    LookUpChunks("r1", ["a", "b", "c"], [2, 1]),
    Fetch("r1", ["a", "b"], [1, 2]),
    Release([1, 2**64 - 1]),
    EndSession("r1"),
    Store("a/b", 4096, 100, "replace", True, 2**64 - 1),
    Call("set_aside", ["folder", 3, 1.5, None, True, ["a"]], b"bytes"),
]
REPLIES: list[Reply] = [
    Done(),
    FoundSizes([1, messages.MISSING], Fault("StorageError", "no")),
    LookedUp(512),
    Fetched([Ready(0, 4096, 100, 7, 2**63, 9), Failed(1, Fault("BadObjectError", "bad"))]),
    Stored("created"),
    Result([1, "a", None]),
    Fault("ConfigError", "x"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_requests_survive_their_encoding(request_: Request) -> None:
    frame = memoryview(messages.encode_request(TOKEN, 2**64 - 1, request_))
    assert messages.read_request_head(frame) == (TOKEN, 2**64 - 1)
    assert messages.decode_request(frame) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda r: type(r).__name__)
def test_replies_survive_their_encoding(reply: Reply) -> None:
    assert messages.decode_reply(memoryview(messages.encode_reply(5, reply))) == (5, reply)


@pytest.mark.parametrize(
    ("chunks", "objects", "length", "asked"),
    [(4096, 8, 100, 4096), (8192, 1, 100, 8192), (9000, 1, 100, 8192), (400, 100, 1, 327)],
)
def test_lookup_of_long_prompt_asks_for_what_fits_into_one_message(
    chunks: int, objects: int, length: int, asked: int
) -> None:
    requests: list[LookUpChunks] = []
    channel = SimpleNamespace(request=lambda request: requests.append(request) or Future())
    client = ServerClient("ipc://x", channel=cast(Any, channel))
    client.look_up("r", [["a" * length] * objects] * chunks)
    [request] = requests
    frame = memoryview(messages.encode_request(TOKEN, 1, request))
    assert messages.decode_request(frame) == request
    assert request.chains == [["a" * length] * objects] * asked


def test_greetings_survive_their_encoding() -> None:
    hello = Hello(messages.PROTOCOL, TOKEN, 1 << 30)
    assert messages.decode_hello(messages.encode_greeting(hello)) == hello
    for answer in (
        Welcome(TOKEN, 1 << 30, 100, 30.0, 256, Facts("file:///x", "ext4")),
        Refused("because"),
    ):
        assert messages.decode_answer(messages.encode_greeting(answer)) == answer


@pytest.mark.parametrize(
    "body",
    [
        ["no such message"],
        ["ping", 1],
        ["find", ["a" * (messages.MAX_NAME + 1)], []],
        ["find", [""], []],
        ["find", [1], []],
        ["find", ["a"], [-1]],
        ["find", ["a"], [1 << 60]],
        ["find", ["a"] * (messages.MAX_NAMES + 1), []],
        ["lookup", "r" * 1000, [], []],
        # Two million names: to read them would take a tenth of a second.
        ["lookup", "r", [["a"] * messages.MAX_NAMES] * 245],
        ["lookup", "r", ["a"] * (messages.MAX_OPEN + 1), [1]],
        ["store", "a", -1, 1],
        ["store", "a", 0, 1, "append"],
        ["store", "a", 0, 1, "create", False, -1],
        ["store", "a", 0, 1, "create", False, "checksum"],
        ["call", "os.system", ["x"]],
        ["call", "list", [{"a": 1}]],
        ["call", "list", [b"x"]],
        ["call", "list", [0] * 17],
        ["call", "write", ["x"], b"x" * (messages.MAX_INLINE + 1)],
        {"type": "ping"},
        "ping",
        None,
    ],
    ids=lambda body: str(body)[:40],
)
def test_what_is_no_request_is_refused(body: Any) -> None:
    frame = TOKEN + bytes(8) + msgspec.msgpack.encode(body)
    with pytest.raises(MalformedError):
        messages.decode_request(memoryview(frame))


def changed_frame(request: Request, edits: list[tuple[int, int]], most_bytes: int) -> bytes:
    """A request of which some bytes behind its head are others, and the last are missing."""
    frame = bytearray(messages.encode_request(TOKEN, 1, request))
    for place, value in edits:
        frame[24 + place % (len(frame) - 24)] = value
    return bytes(frame[: 24 + most_bytes])


EDITS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 255)), max_size=4)
CHANGED_FRAMES = st.builds(changed_frame, st.sampled_from(REQUESTS), EDITS, st.integers(0, 100))


@settings(max_examples=1000)
@given(st.binary(max_size=200) | CHANGED_FRAMES)
def test_bytes_of_any_kind_are_refused_or_a_message(data: bytes) -> None:
    frame = memoryview(data)
    for decode in (messages.read_request_head, messages.decode_request, messages.decode_reply):
        try:
            decode(frame)
        except MalformedError:
            continue
    for greeting in (messages.decode_hello, messages.decode_answer):
        try:
            greeting(data)
        except MalformedError:
            continue


@pytest.mark.parametrize("count", [2**16, 2**31, 2**32 - 1])
def test_huge_count_in_a_short_message_costs_no_memory(count: int) -> None:
    tracemalloc = pytest.importorskip("tracemalloc")
    array = b"\xdd" + struct.pack(">I", count)
    tracemalloc.start()
    try:
        for body in (array, b"\x93\xa4find" + array, b"\x93\xa6lookup\xa1r\x91" + array):
            with pytest.raises(MalformedError):
                messages.decode_request(memoryview(TOKEN + bytes(8) + body))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_requests_over_the_limit_are_not_sent() -> None:
    names = ["x" * messages.MAX_NAME] * messages.MAX_NAMES
    with pytest.raises(ValueError, match="at most"):
        messages.encode_request(TOKEN, 1, Find(names * 2, []))


def test_reply_over_the_limit_becomes_a_fault() -> None:
    frame = messages.encode_reply(7, Result(b"x" * (messages.MAX_REPLY + 1)))
    number, reply = messages.decode_reply(memoryview(frame))
    assert number == 7
    assert isinstance(reply, Fault)


@pytest.mark.parametrize(
    "error",
    [
        errors.ObjectMissingError("gone"),
        errors.NoSpaceStorageError("full"),
        errors.UnavailableStorageError("open"),
        errors.ConfigError("no"),
        errors.BadObjectError(Defect.WRONG_SIZE, "longer"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_class_and_text(error: Exception) -> None:
    found = Fault.of(error).error()
    assert (type(found), str(found)) == (type(error), str(error))
    assert found.defect is getattr(error, "defect", None)


def test_fault_of_an_unknown_class_is_a_storage_error() -> None:
    passing = Fault.of(KeyError("x")).error()
    assert type(passing) is errors.TransientStorageError and "KeyError" in str(passing)
    assert type(Fault("os.system", "x").error()) is errors.StorageError
