"""Which processors threads beside an engine may use.

vLLM's CPU backend binds the threads of each worker to processors of its own. Pure look-ups
in ``/proc``, on any thread.
"""

from __future__ import annotations

import os
from pathlib import Path


def usable_cpus() -> set[int] | None:
    """Return the processors for threads of ours: those that no rank has bound, and this rank's.

    None where binding is unknown or leaves none free: then threads stay where they are. The
    rank's own are among them because a thread of ours that holds the GIL stops the rank: it can
    then run where the rank does not, however busy others keep the free ones.
    """
    try:
        allowed = os.sched_getaffinity(os.getppid())
        own = os.sched_getaffinity(0)
        free = allowed - own
        for sibling in _children_of(os.getppid()):
            bound = os.sched_getaffinity(sibling)
            if bound < allowed:
                free -= bound
    except (AttributeError, OSError):
        return None
    return free | own if free else None


def _children_of(process: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += map(int, children.read_text().split())
        except OSError:
            # The thread has ended meanwhile.
            continue
    return found
