"""Which processors threads beside an engine may use.

vLLM's CPU backend binds the threads of each worker to processors of its own, and threads that
those start are bound alike. Looks into ``/proc``; blocks on nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path


def spread_out() -> None:
    """Let the calling thread run beside the engine, not only behind it. Best effort.

    From then on it may use the processors that no rank has bound, and those that it could use
    before. It stays where it is where binding is unknown or leaves none free.
    """
    # The rank's own are among them, and the priority is left as it is, because a thread of ours
    # that holds the GIL and is not scheduled stops the rank: Linux has been seen to let one wait
    # for a minute behind busy processors.
    try:
        allowed = os.sched_getaffinity(os.getppid())
        own = os.sched_getaffinity(0)
        free = allowed - own
        for sibling in _children_of(os.getppid()):
            bound = os.sched_getaffinity(sibling)
            if bound < allowed:
                free -= bound
        if free:
            os.sched_setaffinity(0, free | own)
    except (AttributeError, OSError):
        pass


def _children_of(process: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += map(int, children.read_text().split())
        except OSError:
            # The thread has ended meanwhile.
            continue
    return found
