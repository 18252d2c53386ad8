"""Rules that all backends share: wrappers, deletions one by one, what an object has to be."""

from __future__ import annotations

import errno
from array import array
from inspect import signature
from unittest.mock import create_autospec

import pytest
import xxhash

from kvshelf.backends.base import (
    Backend,
    DeleteResults,
    Whole,
    WholeReader,
    delete_each,
    is_whole,
)
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.wrappers import ReadOnlyBackend, WrappedBackend
from kvshelf.errors import PermanentStorageError, TransientStorageError
from tests.sim.storage import FaultyStorage


@pytest.mark.parametrize(
    "wrapper", [WrappedBackend, ReadOnlyBackend, GuardedBackend, FaultyStorage]
)
def test_wrapper_overrides_or_forwards_every_method(wrapper: type[WrappedBackend]) -> None:
    for name in vars(Backend):
        if not name.startswith("_"):
            owner = next(kind for kind in wrapper.__mro__ if name in vars(kind))
            assert owner is not Backend, f"{wrapper.__name__} does not forward {name}"


def test_wrapper_that_overrides_nothing_passes_every_call_on() -> None:
    inner = create_autospec(Backend, instance=True, url="memory://x")
    wrapper = WrappedBackend(inner)
    for name, member in vars(Backend).items():
        if isinstance(member, property):
            assert getattr(wrapper, name) is getattr(inner, name)
        elif not name.startswith("_"):
            given = {parameter: object() for parameter in [*signature(member).parameters][1:]}
            called = getattr(inner, name)
            assert getattr(wrapper, name)(**given) is called.return_value
            called.assert_called_once_with(**given)


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
