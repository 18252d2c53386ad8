from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.transfer.shared_work import SharedWork


def test_without_help_the_caller_does_all() -> None:
    done: list[int] = []
    work = SharedWork(range(5), done.append, 1)
    assert work.wants_help
    work.finish()
    assert done == [0, 1, 2, 3, 4]
    assert not work.wants_help


@given(parts=st.integers(0, 20), helpers=st.integers(0, 3), threads=st.integers(0, 4))
def test_each_part_is_done_once(parts: int, helpers: int, threads: int) -> None:
    done: list[int] = []
    work = SharedWork(range(parts), done.append, helpers)
    helping = [threading.Thread(target=work.help) for _ in range(threads)]
    for thread in helping:
        thread.start()
    work.finish()
    assert sorted(done) == list(range(parts))
    for thread in helping:
        thread.join()


def test_the_caller_waits_for_a_part_that_another_thread_does() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def do(part: int) -> None:
        if part == 0:
            begun.set()
            assert go_on.wait(60)
            done.set()
        else:
            go_on.set()

    work = SharedWork([0, 1], do, 1)
    helper = threading.Thread(target=work.help)
    helper.start()
    assert begun.wait(60)
    work.finish()
    assert done.is_set()
    helper.join()


def test_no_more_help_than_wanted() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def do(part: int) -> None:
        begun.set()
        assert go_on.wait(60)

    work = SharedWork(range(3), do, 1)
    helper = threading.Thread(target=work.help)
    helper.start()
    assert begun.wait(60)
    assert not work.wants_help
    work.help()
    go_on.set()
    work.finish()
    helper.join()


def test_an_error_ends_the_work_and_reaches_the_caller() -> None:
    done: list[int] = []

    def do(part: int) -> None:
        if part == 1:
            raise ValueError("part 1")
        done.append(part)

    work = SharedWork(range(9), do, 1)
    work.help()
    with pytest.raises(ValueError, match="part 1"):
        work.finish()
    assert done == [0]
