"""Work on many objects: what is tried again, and what ends it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvshelf.cli.copy import CopyReport
from kvshelf.cli.progress import Display, Work
from kvshelf.errors import NoSpaceStorageError, TransientStorageError


def work(pauses: tuple[float, ...]) -> Work[CopyReport]:
    return Work(CopyReport(), Display("copying"), pauses)


def failing(times: dict[str, int], error: Exception) -> Callable[[str], Callable[[], None]]:
    """Make calls that fail so often, by name."""

    def make(name: str) -> Callable[[], None]:
        def call() -> None:
            if times.get(name, 0):
                times[name] -= 1
                raise error

        return call

    return make


def test_trouble_that_passes_is_waited_for_and_what_remains_is_the_item_s() -> None:
    error = TransientStorageError(5, "EIO")
    attempts = work((0.0, 0.0))
    calls = failing({"a": 2, "b": 3, "c": 3, "d": 3}, error)
    assert attempts.attempt(calls("a")) is None
    assert attempts.attempt(calls("b")) is error
    assert attempts.attempt(calls("fine")) is None
    assert attempts.attempt(calls("c")) is error
    # Nothing has succeeded between two items.
    with pytest.raises(TransientStorageError):
        attempts.attempt(calls("d"))


def test_storage_that_never_answers_or_is_full_ends_the_work() -> None:
    for error in (TransientStorageError(5, "EIO"), NoSpaceStorageError(28, "full")):
        with pytest.raises(type(error)):
            work(()).attempt(failing({"a": 9}, error)("a"))


def test_nothing_is_retried_after_the_end() -> None:
    attempts = work((60.0,))
    attempts.stop.set()
    times = {"a": 9}
    assert attempts.attempt(failing(times, TransientStorageError(5, "EIO"))("a")) is None
    assert times == {"a": 8}
