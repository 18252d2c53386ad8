"""Processes that write to a disk tier: a program for test_tiers.py.

Takes one JSON object as its argument, forks as many writers as that says, and prints a JSON list
with what each of them counted. Each writer copies objects of its own to the tier and uses some of
them again.
"""

from __future__ import annotations

import json
import os
import sys

from kvshelf.capacity import limits
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.metrics import Counters
from kvshelf.shelf.view import ObjectRef
from kvshelf.tiers.disk_tier import DiskTier
from tests.faults.crash_child import CHUNK, make_format
from tests.support.formats import hold_buffer, sealed

FMT = make_format()


def make_chunk(writer: int, number: int) -> Chunk:
    """Return a chunk that no other writer has."""
    start = KeyChain(FMT.namespace.digest, CHUNK, salt=f"{writer} {number}")
    return start.extend(range(CHUNK))[0]


def write(path: str, max_bytes: int, writer: int, objects: int) -> dict[str, float]:
    """Copy objects to the tier, one after the other."""
    counters = Counters()
    limits.WAIT_SECONDS = 60.0  # type: ignore[misc]
    tier = DiskTier(path, max_bytes, counters=counters)
    for number in range(objects):
        chunk = make_chunk(writer, number)
        image = memoryview(sealed(FMT, chunk))
        tier.keep(FMT, ObjectRef(chunk, 0), image, hold_buffer)
        if not tier.drain(60.0):
            raise TimeoutError("the tier does not answer")
        if number % 3 == 0:
            tier.load(FMT, ObjectRef(make_chunk(writer, max(0, number - 2)), 0), image)
    tier.close()
    return counters.snapshot()


def main(path: str, max_bytes: int, writers: int, objects: int) -> None:
    """Fork, wait, report."""
    pipes = []
    for writer in range(writers):
        reading, writing = os.pipe()
        if not os.fork():
            code = 1
            try:
                counts = write(path, max_bytes, writer, objects)
                os.write(writing, json.dumps(counts).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        pipes.append(os.fdopen(reading))
    sys.stdout.write(json.dumps([json.loads(pipe.read() or "null") for pipe in pipes]))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
