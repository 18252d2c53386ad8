"""Rules that all backends share: deletions one by one, ages, what an object has to be."""

from __future__ import annotations

import errno
import time
from array import array

import pytest
import xxhash

from kvshelf.backends.base import (
    NEVER_OLD,
    DeleteResults,
    Whole,
    WholeReader,
    delete_each,
    is_whole,
    time_for_ages,
)
from kvshelf.errors import PermanentStorageError, TransientStorageError


@pytest.mark.parametrize(
    ("outcomes", "tried"),
    [("down down down there", 3), ("down down there down down there", 6), ("refused " * 5, 5)],
)
def test_deletions_one_by_one_end_where_the_storage_may_be_down(outcomes: str, tried: int) -> None:
    errors = {"down": TransientStorageError(errno.EIO, "down")}
    errors["refused"] = PermanentStorageError(errno.EACCES, "refused")
    names = [f"{number}/{outcome}" for number, outcome in enumerate(outcomes.split())]
    calls: list[str] = []

    def delete(name: str) -> bool:
        calls.append(name)
        if (outcome := name.partition("/")[2]) in errors:
            raise errors[outcome]
        return True

    answers: DeleteResults = [errors.get(outcome, True) for outcome in outcomes.split()]
    answers[tried:] = answers[tried - 1 : tried] * (len(names) - tried)
    assert delete_each(names, delete) == answers
    assert calls == names[:tried]


@pytest.mark.parametrize(
    ("ahead", "by"),
    [
        *((-4000.0, "nobody"), (-3600.0, "storage"), (-10.0, "storage")),
        *((10.0, "machine"), (3600.0, "machine"), (4000.0, "nobody")),
    ],
)
def test_ages_go_by_the_clock_that_is_behind_unless_an_hour_lies_between(
    ahead: float, by: str
) -> None:
    own = time.time()
    expected = {"storage": own + ahead, "machine": own, "nobody": NEVER_OLD}
    assert time_for_ages(own + ahead, "memory://x") == pytest.approx(expected[by], abs=5.0)


def test_object_is_whole_only_with_spaces_up_to_its_first_part() -> None:
    part = bytes(range(250))
    whole = Whole("x", b"first", b"second", b"after", array("q", (80, 80 + len(part))))
    header = b"firsttextsecond" + xxhash.xxh3_128_hexdigest(part).encode() + b"after"
    assert is_whole(whole, b"text", memoryview(header.ljust(80) + part))
    assert not is_whole(whole, b"text", memoryview(header.ljust(80, b"x") + part))
    assert not is_whole(whole, b"other", memoryview(header.ljust(80) + part))


def test_whole_reader_fetches_once_and_fills_no_more_than_there_is() -> None:
    fetched: list[int] = []
    with WholeReader(3, lambda: fetched.append(1) or b"abc") as reader:  # type: ignore[func-returns-value]
        buffer = bytearray(b"....")
        assert reader.read_into(memoryview(buffer), 1) == 2
        assert buffer == b"bc.."
        assert reader.read_into(memoryview(buffer), 3) == 0
    assert fetched == [1]
