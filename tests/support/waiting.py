"""How long tests wait, and waits for what no event tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from kvshelf.backends import Deadlines

#: Longest that a test waits for what ought to happen at once.
PATIENCE = 60.0
#: Longest that it waits for what is done by processes that share the machine with others.
LONG = 120.0
#: Those of storage for which nobody waits in vain.
PATIENT = Deadlines(PATIENCE, PATIENCE, PATIENCE)


def until(
    condition: Callable[[], bool], what: str = "what is waited for", seconds: float = LONG
) -> None:
    """Wait for what other threads or processes do; raises AssertionError when it takes longer."""
    deadline = time.monotonic() + seconds
    pause = 0.001
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        threading.Event().wait(pause)
        # What takes longer, other processes do, and they need the processor.
        pause = min(1.2 * pause, 0.01)


def while_patient() -> Iterator[None]:
    """Go on for :data:`PATIENCE`: for steps that are made until a thread is done."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        yield
