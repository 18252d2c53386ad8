"""Measures how long stores and loads of a chunk of 8 shards hold the GIL, on the emulated device.

``python tests/native/gil_time.py`` prints the median of 1,000 of each: the processor time of the
thread less its time inside the compiled library, which releases the GIL. The chunk is small, so
that the emulation leaves the processor's caches as they are. Not a test.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from kvshelf.kv.caches import LayerCall
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import PagedLayout
from tests.native.emulation import emulation
from tests.native.fake_streams import AtOnce

SHARDS, LAYERS, TOKENS, HEAD_SIZE, TIMES = 8, 32, 2, 8, 1000
Functions = TypeVar("Functions")


class Clock:
    """The processor time of a thread outside of the library."""

    def __init__(self) -> None:
        self.inside = 0

    def wrapped(self, functions: Functions) -> Functions:
        """Return a record of functions, which are measured."""
        changed = {
            field.name: self._wrapped(getattr(functions, field.name))
            for field in dataclasses.fields(functions)  # type: ignore[arg-type]
        }
        return dataclasses.replace(functions, **changed)  # type: ignore[type-var]

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any) -> Any:
            begin = time.thread_time_ns()
            try:
                return function(*arguments)
            finally:
                self.inside += time.thread_time_ns() - begin

        return measured

    def median(self, work: Callable[[], object]) -> float:
        """Return the median time of `work` outside of the library, in microseconds."""
        times = []
        for _ in range(TIMES):
            self.inside = 0
            begin = time.thread_time_ns()
            work()
            times.append((time.thread_time_ns() - begin - self.inside) / 1e3)
        return statistics.median(times)


def main() -> None:
    clock, emulated = Clock(), emulation()
    assert emulated.library.copier is not None
    copier = clock.wrapped(emulated.library.copier)
    emulated.library = dataclasses.replace(emulated.library, copier=copier)
    shape = (8, SHARDS, TOKENS, 2 * HEAD_SIZE)
    caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
    layout = PagedLayout.from_bhnc(caches[0], HEAD_SIZE)
    size = LAYERS * layout.chunk_bytes(TOKENS, 1)
    calls = {
        shard: [LayerCall(caches, layout, 0, size, 1, first_head=shard)] for shard in range(SHARDS)
    }
    slots = torch.arange(TOKENS)
    payloads = [torch.empty(size, dtype=torch.uint8) for _ in range(SHARDS)]
    with emulated.in_use():
        path = DeviceKVCache(calls, streams=AtOnce())

        def store() -> None:
            copied = path.gather(slots, payloads)
            assert copied is not None
            copied.wait()

        def load() -> None:
            path.scatter_chunk(range(SHARDS), slots, payloads, path.fence())

        for name, work in (("store", store), ("load", load)):
            sys.stdout.write(f"{name}: {clock.median(work):.0f} µs\n")
        path.close()


if __name__ == "__main__":
    main()
