"""Threads that do one piece of work again and again."""

from __future__ import annotations

import threading

import pytest

from kvshelf.background import Background
from tests.support import threads
from tests.support.waiting import PATIENCE


class Work:
    """Counts its calls, and says when the next one is due."""

    def __init__(self, pause: float | None = None) -> None:
        self.calls = threading.Semaphore(0)
        self.pause = pause
        self.thread: Background | None = None
        self.was_current = False

    def __call__(self) -> float | None:
        self.was_current = self.thread is not None and self.thread.is_current
        self.calls.release()
        return self.pause

    def was_called(self) -> bool:
        return self.calls.acquire(timeout=PATIENCE)


def background(work: Work, name: str = "kvshelf-test") -> Background:
    work.thread = Background(name, work)
    return work.thread


def test_nothing_runs_before_it_is_started() -> None:
    work = Work()
    thread = background(work, "kvshelf-not-started")
    assert not thread.running and not threads.named("kvshelf-not-started")
    assert thread.start() and thread.running
    assert work.was_called() and work.was_current and not thread.is_current
    thread.close(PATIENCE)
    assert not threads.named("kvshelf-not-started")


def test_it_is_called_again_when_it_said_and_when_it_is_woken() -> None:
    often = Work(pause=0.0)
    thread = background(often)
    thread.start()
    assert all(often.was_called() for _ in range(3))
    thread.close(PATIENCE)
    seldom = Work()
    thread = background(seldom)
    thread.start()
    assert seldom.was_called()
    thread.wake()
    assert seldom.was_called()
    thread.close(PATIENCE)


def test_a_wake_in_the_middle_of_a_call_is_not_lost() -> None:
    began, goes_on, calls = threading.Event(), threading.Event(), threading.Semaphore(0)

    def step() -> None:
        calls.release()
        began.set()
        assert goes_on.wait(PATIENCE)

    thread = Background("kvshelf-test", step)
    thread.start()
    assert began.wait(PATIENCE)
    thread.wake()
    goes_on.set()
    assert calls.acquire(timeout=PATIENCE) and calls.acquire(timeout=PATIENCE)
    thread.close(PATIENCE)


def test_where_no_thread_can_be_started_the_next_call_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Work()
    thread = background(work)
    with threads.none_can_be_started(monkeypatch, "kvshelf-test"):
        assert not thread.start() and not thread.running
    assert thread.start() and work.was_called()
    thread.close(PATIENCE)


def test_a_closed_one_never_starts() -> None:
    thread = background(Work())
    thread.close()
    assert thread.closed and not thread.start() and not thread.running


def test_it_can_end_itself() -> None:
    ended = threading.Event()

    def step() -> None:
        thread.close(PATIENCE)
        ended.set()

    thread = Background("kvshelf-ends-itself", step)
    thread.start()
    assert ended.wait(PATIENCE)
    thread.close(PATIENCE)
