"""Threads that do one piece of work again and again."""

from __future__ import annotations

import threading

import pytest

from kvshelf.background import Background
from tests.support import threads
from tests.support.waiting import PATIENCE


def test_where_no_thread_can_be_started_the_next_call_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = threading.Event()
    thread = Background("kvshelf-test", called.set)
    with threads.none_can_be_started(monkeypatch, "kvshelf-test"):
        assert not thread.start() and not thread.running
    assert thread.start() and called.wait(PATIENCE)
    thread.close(PATIENCE)
