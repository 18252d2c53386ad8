"""What a client expects of a node server's memory: asked for ahead, bounded, and given back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest

from kvshelf.backends import Deadlines
from kvshelf.errors import NoSpaceStorageError, UnavailableStorageError
from kvshelf.server.memory import EXPECTED_SECONDS, ServedMemory
from tests.adapters.standin import ScriptedChannel

SIZE = 1000
NAMES = [f"ns/00/00/{number}" for number in range(80)]
#: A client may expect as many objects.
MOST = 8


@pytest.fixture
def channel() -> ScriptedChannel:
    channel = ScriptedChannel(16)
    channel.change_welcome(arena_bytes=8 * MOST * SIZE)
    channel.objects |= dict.fromkeys(NAMES, bytes(SIZE))
    return channel


@pytest.fixture
def memory(channel: ScriptedChannel) -> ServedMemory:
    return ServedMemory(channel)  # type: ignore[arg-type]


def expect(memory: ServedMemory, names: Sequence[str], size: int = SIZE) -> None:
    memory.expect(names, [size] * len(names))


def leased(channel: ScriptedChannel) -> int:
    return sum(not loan.released for loan in channel.loans)


def test_expected_objects_that_nobody_pins_are_given_back_after_their_time(
    channel: ScriptedChannel, memory: ServedMemory
) -> None:
    for _ in range(3):
        expect(memory, NAMES[:20])
        assert leased(channel) == MOST
        time.sleep(0.9 * EXPECTED_SECONDS)
        assert leased(channel) == MOST
        time.sleep(0.2 * EXPECTED_SECONDS)
        assert leased(channel) == 0
    # What was never asked for is forgotten as well.
    channel.fetches.clear()
    expect(memory, NAMES[30:31])
    assert channel.fetches == [NAMES[30:31]]


def test_expected_objects_are_asked_for_once_and_within_the_share_of_the_memory(
    channel: ScriptedChannel, memory: ServedMemory
) -> None:
    for _ in range(2):
        expect(memory, NAMES[:2])
    expect(memory, NAMES[:20])
    assert channel.fetches == [NAMES[:2], NAMES[2:MOST]]
    # The last one comes first, so it is not asked for again when there is room.
    for pinned, name in enumerate((NAMES[19], *NAMES[:19]), 1):
        loan = memory.pin(name, SIZE)
        assert loan is not None and not loan.released
        assert leased(channel) - pinned <= MOST
    assert sorted(name for names in channel.fetches for name in names) == sorted(NAMES[:20])


def test_many_objects_are_expected_with_few_messages(channel: ScriptedChannel) -> None:
    channel.change_welcome(arena_bytes=1 << 24)
    memory = ServedMemory(channel)  # type: ignore[arg-type]
    expect(memory, NAMES)
    assert channel.fetches == [NAMES[:32]]
    for name in NAMES:
        assert memory.pin(name, SIZE) is not None
    assert max(map(len, channel.fetches)) <= 32
    assert len(channel.fetches) < 8


def test_object_expected_in_another_size_is_given_back_when_it_is_pinned(
    channel: ScriptedChannel, memory: ServedMemory
) -> None:
    expect(memory, NAMES[:1], SIZE + 1)
    loan = memory.pin(NAMES[0], SIZE)
    assert channel.loans[0].released
    assert loan is channel.loans[1]


def test_expectations_of_a_lost_server_count_no_more(
    channel: ScriptedChannel, memory: ServedMemory
) -> None:
    channel.holding = ("Fetch",)
    expect(memory, NAMES[:MOST])
    channel.lose()
    channel.holding = ()
    with pytest.raises(UnavailableStorageError):
        memory.pin(NAMES[0], SIZE)
    objects = dict(channel.objects)
    channel.come_back()
    channel.objects |= objects
    assert memory.pin(NAMES[1], SIZE) is channel.loans[0]
    expect(memory, NAMES[20:40])
    assert leased(channel) == 1 + MOST


def test_memory_that_is_closed_gives_back_what_it_expected_and_expects_no_more(
    channel: ScriptedChannel, memory: ServedMemory
) -> None:
    expect(memory, NAMES[:20])
    memory.close()
    time.sleep(0.001)
    assert leased(channel) == 0
    expect(memory, NAMES[20:40])
    assert len(channel.fetches) == 1


class LateAnswer(Future[Any]):
    """An answer that does not come in time."""

    def result(self, timeout: float | None = None) -> Any:
        assert timeout is not None
        self.waited = timeout
        raise TimeoutError


def test_object_for_which_the_server_has_no_memory_is_not_pinned(
    channel: ScriptedChannel, memory: ServedMemory
) -> None:
    """A server whose memory is full is no storage that fails."""
    refusal: Future[Any] = Future()
    refusal.set_exception(NoSpaceStorageError("the server's memory is full"))
    late = LateAnswer()
    for answer in (refusal, late):
        with mock.patch.object(channel, "fetch", return_value=[answer]):
            assert memory.pin(NAMES[0], SIZE) is None
    assert late.cancelled()
    # Later than the server itself would say that its storage is late, and before the guard.
    assert channel.welcome is not None
    facts = channel.welcome.facts
    served = Deadlines(read=facts.read_seconds, bytes_per_second=facts.bytes_per_second)
    own = Deadlines(read=facts.read_seconds + 1.0, bytes_per_second=facts.bytes_per_second)
    assert served.to_read(SIZE) < late.waited < own.to_read(SIZE)


def test_object_above_half_of_the_memory_is_not_asked_for(
    channel: ScriptedChannel, memory: ServedMemory
) -> None:
    half = 4 * MOST * SIZE
    assert memory.pin(NAMES[0], half) is not None
    assert memory.pin(NAMES[0], half + 1) is None
    assert len(channel.fetches) == 1
