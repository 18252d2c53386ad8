"""The threads that there are, and a limit of them that is reached."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def none_can_be_started(monkeypatch: pytest.MonkeyPatch, *prefixes: str) -> Iterator[None]:
    """Let the system refuse threads whose names begin with one of `prefixes`."""
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name.startswith(prefixes):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_others)
        yield


def named(prefix: str) -> set[threading.Thread]:
    """Return the threads whose names begin like this."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(prefix)}
