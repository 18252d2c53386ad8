"""A worker that is told to end while stores for another engine, and others, are queued.

Run as a program with a shelf's directory: it queues stores on a slow storage, sends itself SIGTERM,
and ends as vLLM's worker processes do, whose handler raises SystemExit. Prints the keys of the
promised and of the other chunks, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from kvshelf.shelf.shelf import Shelf
from kvshelf.tiers import runtime
from kvshelf.vllm.metadata import StepMetadata, StoreOp
from tests.sim.engine_sides import LoneWorker
from tests.sim.storage import Fault, FaultyStorage, posix

#: Each write takes so long; there are more than the end has time for.
WRITE_SECONDS = 0.1
PROMISED, ORDINARY = 4, 40


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main(folder: str) -> None:
    """Run the worker."""
    signal.signal(signal.SIGTERM, _end)
    backend = FaultyStorage(posix(Path(folder)))
    runtime.open_shelf = lambda url, **_: Shelf(backend)  # type: ignore[assignment]
    rig = LoneWorker(backend, drain_seconds=3.0)
    try:
        backend.add(Fault("write", "*.safetensors", wait=WRITE_SECONDS))
        chunks = [rig.chunks(1, seed)[0] for seed in range(ORDINARY + PROMISED)]
        ops = [
            StoreOp(
                chunk,
                ([1, 2],),
                repair=False,
                age=0.0,
                attempt="" if place < ORDINARY else f"{place:032x}",
            )
            for place, chunk in enumerate(chunks)
        ]
        # The ordinary ones are queued first.
        rig.step(StepMetadata(stores=ops[:ORDINARY]))
        rig.step(StepMetadata(stores=ops[ORDINARY:]))
        keys = [chunk.key.hex() for chunk in chunks]
        report = {"ordinary": keys[:ORDINARY], "promised": keys[ORDINARY:]}
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    finally:
        rig.connector.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
