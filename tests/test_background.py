"""Threads that do one piece of work again and again, and what names their work in a profile."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvshelf.background import Background, trace_range
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


def test_ranges_are_made_in_processes_that_use_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        yield
        ended.append(name)

    monkeypatch.setattr(torch.cuda.nvtx, "range", noted)
    for uses, expected in ((False, []), (True, ["inner", "outer"])):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda uses=uses: uses)
        with trace_range("outer"), trace_range("inner"):
            pass
        assert ended == expected


@pytest.mark.real
def test_process_without_torch_stays_so() -> None:
    script = """
import sys
from kvshelf.background import trace_range
with trace_range("a"):
    pass
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
