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


def test_where_no_thread_can_be_started_the_next_call_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Work()
    thread = background(work)
    with threads.none_can_be_started(monkeypatch, "kvshelf-test"):
        assert not thread.start() and not thread.running
    assert thread.start() and work.was_called()
    thread.close(PATIENCE)
