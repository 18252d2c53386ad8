"""``python -m benchmarks.residents``: what the table of a memory tier costs, without any copy.

Prints microseconds for each call, with the table full: a step thread makes these calls.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from kvshelf.memory.arena import Arena
from kvshelf.memory.host_memory import HostMemory

_OBJECTS = 16_384
_OBJECT_BYTES = 1 << 20
_PROMPT = 512
_CALLS = 2000
_ROUNDS = 21


def _filled() -> HostMemory:
    """Return a table of many prompts whose memory is used up."""
    memory = HostMemory(Arena(_OBJECTS * _OBJECT_BYTES, lazy=True))
    for number in range(_OBJECTS):
        _enter(memory, number)
    return memory


def _enter(memory: HostMemory, number: int) -> None:
    parent = _name(number - 1) if number % _PROMPT else None
    slot = memory.reserve(_name(number), _OBJECT_BYTES, parent=parent)
    assert slot is not None
    memory.publish(slot)


def _name(number: int) -> tuple[bytes, str, int, int]:
    return number.to_bytes(32, "little"), "full", 1, 0


def bench() -> dict[str, float]:
    """Return the median microseconds of each call."""
    memory = _filled()
    names = [_name(number) for number in range(_PROMPT)]
    following = iter(range(_OBJECTS, sys.maxsize))

    def pin() -> None:
        slot = memory.pin(names[0])
        assert slot is not None
        memory.unpin(slot)

    calls: dict[str, tuple[Callable[[], object], int]] = {
        "pin and unpin": (pin, _CALLS),
        f"holds, {_PROMPT} names": (lambda: memory.holds(names), _CALLS // 20),
        f"touch, {_PROMPT} names": (lambda: memory.touch(names), _CALLS // 20),
        "stats": (memory.stats, _CALLS),
        "reserve, which evicts, and publish": (lambda: _enter(memory, next(following)), _CALLS),
    }
    return {name: _median(call, count) for name, (call, count) in calls.items()}


def _median(call: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - begin) / count * 1e6)
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    for name, microseconds in bench().items():
        sys.stdout.write(f"{name:36} {microseconds:8.2f} µs\n")


if __name__ == "__main__":
    main()
