"""Which processors an engine leaves to others.

vLLM's CPU backend binds the threads of each worker to processors of its own. Pure look-ups
in ``/proc``, on any thread.
"""

from __future__ import annotations

import os
from pathlib import Path


def free_cpus() -> set[int] | None:
    """Return the processors that the engine may use but no rank of it has bound itself to.

    None where binding is unknown or leaves none: then threads stay where they are.
    """
    try:
        allowed = os.sched_getaffinity(os.getppid())
        free = allowed - os.sched_getaffinity(0)
        for sibling in _children_of(os.getppid()):
            bound = os.sched_getaffinity(sibling)
            if bound < allowed:
                free -= bound
    except (AttributeError, OSError):
        return None
    return free or None


def _children_of(process: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += map(int, children.read_text().split())
        except OSError:
            # The thread has ended meanwhile.
            continue
    return found
