"""The CPU affinity of kvshelf's threads inside an engine.

Owns :func:`widen_cpu_affinity`. vLLM's CPU backend binds the threads of each worker to processors
of its own, and the threads that those start inherit the binding. Reads ``/proc``; blocks on
nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path


def widen_cpu_affinity() -> None:
    """Let the calling thread also use the processors to which no rank is bound. Best effort.

    The affinity stays as it is if the ranks' bindings are unknown or leave no processor free.
    """
    # The thread keeps the rank's own processors and its priority: a thread that holds the GIL and
    # is not scheduled stops the rank, and Linux has been seen to let one wait for a minute behind
    # busy processors.
    try:
        allowed = os.sched_getaffinity(os.getppid())
        processors = os.sched_getaffinity(0)
        free = allowed - processors
        for sibling in _children_of(os.getppid()):
            bound = os.sched_getaffinity(sibling)
            if bound < allowed:
                free -= bound
        if free:
            os.sched_setaffinity(0, free | processors)
    except (AttributeError, OSError):
        pass


def _children_of(process: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += map(int, children.read_text().split())
        except OSError:
            # The thread has ended.
            continue
    return found
