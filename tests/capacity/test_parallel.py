"""Work on many items at once: its order, its errors, and what an interrupt leaves."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvshelf.capacity.parallel import in_parallel


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_all_is_done_once(threads: int) -> None:
    caller = threading.get_ident()
    found = list(in_parallel(lambda item: (2 * item, threading.get_ident()), range(3000), threads))
    assert sorted((item, twice) for item, (twice, _) in found) == [(n, 2 * n) for n in range(3000)]
    assert all((thread == caller) == (threads == 0) for _, (_, thread) in found)


@pytest.mark.parametrize("threads", [0, 4])
def test_first_error_ends_all(threads: int) -> None:
    stop = threading.Event()

    def work(item: int) -> None:
        if item == 5:
            raise KeyError("five")

    def items() -> Iterator[int]:
        yield 1
        raise KeyError("no more")

    with pytest.raises(KeyError, match="five"):
        for _ in in_parallel(work, itertools.count() if threads else range(9), threads, stop):
            pass
    assert stop.is_set() == (threads > 0)
    with pytest.raises(KeyError, match="no more"):
        list(in_parallel(str, items(), threads))


@pytest.mark.parametrize("left", [GeneratorExit, KeyboardInterrupt])
def test_who_leaves_waits_for_what_is_in_progress_and_the_rest_is_dropped(
    left: type[BaseException],
) -> None:
    stop, queued, in_progress = threading.Event(), threading.Event(), threading.Barrier(3)
    begun, ended = [], []

    def work(item: int) -> None:
        begun.append(item)
        queued.wait(20)
        if item:
            in_progress.wait(20)
            stop.wait(20)
        ended.append(item)

    def items() -> Iterator[int]:
        yield from range(100)
        queued.set()
        if left is KeyboardInterrupt:
            in_progress.wait(20)
            raise KeyboardInterrupt

    with closing(in_parallel(work, items(), 2, stop)) as results:
        if left is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                list(results)
        else:
            next(results)
            in_progress.wait(20)
    assert stop.is_set()
    assert sorted(begun) == sorted(ended) == [0, 1, 2]
