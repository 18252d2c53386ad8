"""What a worker promises to other engines: hand-overs, their markers, and tails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")


from kvshelf.capacity.evictor import Evictor
from kvshelf.format.keys import Chunk
from kvshelf.shelf.shelf import Shelf
from kvshelf.vllm.metadata import (
    StepMetadata,
    StoreOp,
)
from tests.sim.engine_sides import LoneWorker, MakeWorker, store_op

# ------------------------------------------------------------------------- hand-overs


ATTEMPT, OTHER = "a" * 32, "b" * 32


def promised(chunk: Chunk, blocks: Sequence[int] = (1, 2), **options: Any) -> StoreOp:
    return store_op(chunk, blocks, **{"attempt": ATTEMPT, **options})


def gave_up(rig: LoneWorker, *attempts: str) -> list[bool]:
    view = Shelf(rig.backend.inner).view(rig.fmt)
    return view.gave_up(list(attempts or (ATTEMPT,)))


def test_tails_are_looked_for_from_the_first_hand_over_on(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Evictor] = []

    def noted(evictor: Evictor) -> None:
        begun.append(evictor)

    monkeypatch.setattr(Evictor, "hands_over", noted)
    rig = make_worker()
    chunks = rig.chunks(2)
    rig.store(chunks[:1])
    assert not begun
    rig.step(StepMetadata(stores=[promised(chunks[1])]))
    assert len(begun) == 1
    rig.connector.shutdown()


@pytest.mark.slow
@pytest.mark.real
def test_worker_that_is_told_to_end_publishes_what_others_wait_for(tmp_path: Path) -> None:
    """A process of its own, which ends as vLLM's workers do."""
    program = Path(__file__).with_name("promises_child.py")
    child = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "shelf")],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout.splitlines()[-1])
    shelf = tmp_path / "shelf"
    found = {path.name[:64] for path in shelf.rglob("*.safetensors")}
    # Each write takes a while: there was time for some of them, the promised ones first.
    assert set(report["promised"]) <= found
    assert not set(report["ordinary"]) <= found
    assert not list(shelf.rglob("gave-up/*"))
