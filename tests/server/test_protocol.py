"""Messages survive their encoding; whatever is no message, or over a limit, is refused."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf import errors
from kvshelf.backends.base import NOT_REGULAR
from kvshelf.format.invalid import Defect
from kvshelf.server import protocol
from kvshelf.server.protocol import (
    Delete,
    EndSession,
    Facts,
    Fault,
    Fetch,
    Find,
    GiveBack,
    Hello,
    Lock,
    MalformedError,
    Message,
    Read,
    Refused,
    Register,
    Reply,
    Stat,
    Store,
    Touch,
    Welcome,
)

REQUESTS = [
    Register(1, b"{}", "slug", True),
    Find(2, ["a/b"]),
    Fetch(3, ["a", "b"], True),
    GiveBack([0, 4096]),
    Store(4, "a/b", 4096, 100, True),
    Read(5, "a"),
    Delete(6, ["a"]),
    Stat(7, []),
    Touch(8, "a", float("inf")),
    Lock("r1", ["a"]),
    EndSession("r1", []),
]
REPLIES: list[Message] = [
    Reply(1),
    Reply(2, [1, protocol.IN_MEMORY, protocol.MISSING, True, Fault("StorageError", "no")]),
    Reply(3, "created"),
    Reply(4, data=b"\0" * 5000),
    Reply(5, fault=Fault("ConfigError", "x")),
    Refused("because"),
]
GREETINGS: list[tuple[Any, Message]] = [
    (protocol.HELLO, Hello(protocol.PROTOCOL, 1 << 30)),
    (protocol.ANSWER, Welcome(1 << 30, 256, Facts("file:///x", "ext4"))),
    (protocol.ANSWER, Refused("because")),
]
ALL: list[tuple[Any, Message]] = [
    *((protocol.REQUESTS, request) for request in REQUESTS),
    *((protocol.REPLIES, reply) for reply in REPLIES),
    *GREETINGS,
]


@settings(max_examples=100)
@given(st.lists(st.sampled_from(ALL), max_size=6), st.integers(1, 40))
def test_messages_survive_their_encoding_however_the_stream_is_cut(
    sent: list[tuple[Any, Message]], piece: int
) -> None:
    stream = b"".join(protocol.frame(message) for _, message in sent)
    received, bodies = bytearray(), list[bytes]()
    for start in range(0, len(stream), piece):
        received += stream[start : start + piece]
        bodies += protocol.take_frames(received)
    assert not received
    decoded = [
        protocol.decode(decoder, body) for (decoder, _), body in zip(sent, bodies, strict=True)
    ]
    assert decoded == [message for _, message in sent]


@pytest.mark.parametrize(
    "body",
    [
        ["no such message"],
        ["read", 1],
        ["read", 1, ""],
        ["read", 1, "a", 2],
        ["find", 1, ["a" * (protocol.MAX_NAME + 1)]],
        ["find", 1, [1]],
        ["find", 1, ["a"] * (protocol.MAX_NAMES + 1)],
        ["lock", "r" * 1000, []],
        ["give back", [-1]],
        ["store", 1, "a", -1, 1],
        ["store", 1, "a", 0, protocol.MAX_MEMORY + 1],
        ["register", 1, b"x" * ((1 << 20) + 1), "slug"],
        ["touch", 1, "a", "now"],
        {"type": "read"},
        "read",
        None,
    ],
    ids=lambda body: str(body)[:40],
)
def test_body_that_is_no_request_is_refused(body: Any) -> None:
    with pytest.raises(MalformedError):
        protocol.decode(protocol.REQUESTS, msgspec.msgpack.encode(body))


def changed_body(request: Message, edits: list[tuple[int, int]], nbytes: int) -> bytes:
    """The body of a request of which some bytes are others, and the last are missing."""
    body = bytearray(protocol.frame(request)[4:])
    for place, value in edits:
        body[place % len(body)] = value
    return bytes(body[:nbytes])


EDITS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 255)), max_size=4)
CHANGED = st.builds(changed_body, st.sampled_from(REQUESTS), EDITS, st.integers(0, 100))


@settings(max_examples=1000)
@given(st.binary(max_size=200) | CHANGED)
def test_bytes_of_any_kind_are_refused_or_a_message(body: bytes) -> None:
    for decoder in (protocol.REQUESTS, protocol.REPLIES, protocol.HELLO, protocol.ANSWER):
        try:
            protocol.decode(decoder, body)
        except MalformedError:
            continue


@pytest.mark.parametrize("count", [2**16, 2**31, 2**32 - 1])
def test_huge_count_in_a_short_message_costs_no_memory(count: int) -> None:
    tracemalloc = pytest.importorskip("tracemalloc")
    array = b"\xdd" + struct.pack(">I", count)
    tracemalloc.start()
    try:
        for body in (array, b"\x93\xa4find\x01" + array, b"\x92\xa9give back" + array):
            with pytest.raises(MalformedError):
                protocol.decode(protocol.REQUESTS, body)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_frame_over_the_limit_is_refused_before_it_is_received() -> None:
    stream = bytearray(struct.pack("<I", protocol.MAX_REQUEST + 1))
    with pytest.raises(MalformedError, match="at most"):
        list(protocol.take_frames(stream, protocol.MAX_REQUEST))


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
    received = Fault.of(error).error()
    assert (type(received), str(received)) == (type(error), str(error))
    assert getattr(received, "defect", None) is getattr(error, "defect", None)


def test_fault_of_an_unknown_class_is_a_storage_error() -> None:
    passing = Fault.of(KeyError("x")).error()
    assert type(passing) is errors.TransientStorageError and "KeyError" in str(passing)
    assert type(Fault("os.system", "x").error()) is errors.StorageError


def test_answers_of_a_probe_survive_their_encoding() -> None:
    error = errors.TransientStorageError("broken")
    sizes = protocol.sizes_of([7, None, NOT_REGULAR, error])
    results = [protocol.stat_result(answer, 9) for answer in [*sizes, protocol.IN_MEMORY]]
    assert results[:3] == [7, None, NOT_REGULAR]
    assert isinstance(results[3], errors.TransientStorageError)
    assert results[4] == 9
    foreign = protocol.stat_result(Fault.of(errors.ConfigError("no")), 9)
    assert isinstance(foreign, errors.TransientStorageError)
